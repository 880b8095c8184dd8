"""A description of what is measured, and of the machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from megastable.config.tree import RunConfig
from megastable.model.flops import parameters


def machine(device: torch.device) -> dict[str, Any]:
    """Hardware and software of a measurement."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else name_processor(),
        "kind": device.type,
        "threads": torch.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepspeed": importlib.metadata.version("deepspeed"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def name_processor() -> str:
    """The name of this machine's processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def describe_run(config: RunConfig) -> dict[str, Any]:
    """The model, the batch and the precision of a measurement."""
    c = config
    return {
        "parameters": parameters(c.model),
        "vocabulary": c.model.vocab_size,
        "sequence_length": c.model.sequence_length,
        "micro_batch": c.train.micro_batch,
        "global_batch": c.train.global_batch,
        "tokens": c.train.global_batch * c.model.sequence_length,
        "precision": c.precision.kind,
        "fp8": c.precision.fp8.recipe if c.precision.fp8 else None,
        "zero": c.parallel.zero,
        "recompute": c.parallel.recompute,
        "moments": c.optimizer.moments,
        "clip": c.optimizer.clip,
    }
