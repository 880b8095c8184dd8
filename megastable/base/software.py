"""Names what a process computes with: versions and device, for the record of a run."""

from __future__ import annotations

import platform
from importlib import metadata

import torch

from megastable import __version__

PACKAGES = ("torch", "deepspeed", "transformer-engine", "flash-attn", "liger-kernel", "triton", "numpy")


def software(device: torch.device) -> dict[str, str]:
    """Versions by name, as far as installed, and the device."""
    found = {"megastable": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if device.type == "cuda":
        found |= {
            "cuda": str(torch.version.cuda or torch.version.hip),
            "device": torch.cuda.get_device_name(device),
        }
        if torch.version.cuda and isinstance(nccl := torch.cuda.nccl.version(), tuple):
            found["nccl"] = ".".join(map(str, nccl))
    else:
        found["device"] = device.type
    return found | {"system": f"{platform.system()} {platform.machine()}"}
