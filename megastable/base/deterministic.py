"""Make GPU steps bit-reproducible (`run.deterministic`): the same step on the same weights gives the same bits.

By default some kernels sum in an arbitrary order: the gradients of cuDNN and memory-efficient attention, atomic adds,
NCCL's in-switch reductions. The guarantee holds for the same GPUs, versions and layout only, and it costs speed:
attention moves from cuDNN's kernels to FlashAttention's deterministic backward, and NCCL loses NVLS and CollNet.
"""

from __future__ import annotations

import os

import torch

from megastable.base.errors import ConfigError

# Libraries read these once, when CUDA starts. NVIDIA, cuBLAS documentation, "Results reproducibility"; Megatron-LM
# requires the same in --deterministic-mode. Ring and Tree sum in an order fixed by the topology.
CUBLAS, NCCL = "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"
ENVIRONMENT = {CUBLAS: ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", NCCL: "Ring,Tree"}
WORKSPACES = {":4096:8", ":16:8"}
ALGORITHMS = {"ring", "tree"}


def prepare() -> None:
    """Set all variables and switches before CUDA starts. Raises ConfigError if the environment conflicts."""
    for name, value in ENVIRONMENT.items():
        given = os.environ.setdefault(name, value)
        if not _repeats(name, given):
            raise ConfigError(
                f"run.deterministic=true and {name}={given}: a step would not repeat bit for bit; unset the variable, "
                f"or set it to {value}"
            )
    switch(True)


def exact(deterministic: bool, device: torch.device) -> bool:
    """Whether a repeated step gives the same bits on sound hardware. deterministic: `run.deterministic`."""
    return deterministic or device.type == "cpu"


def _repeats(name: str, value: str) -> bool:
    """Whether this value of an `ENVIRONMENT` variable keeps steps reproducible."""
    if name == CUBLAS:
        return value in WORKSPACES
    # One list for all collectives; per-function lists ("allreduce:tree") and exclusions ("^nvls") leave others open.
    return set(value.lower().split(",")) <= ALGORITHMS if name == NCCL else value == ENVIRONMENT[name]


def switch(on: bool) -> None:
    """Torch's own switches, which may change at any time; compiled code is recompiled."""
    # Not warn_only: torch would then keep nondeterministic attention kernels.
    torch.use_deterministic_algorithms(on)
    torch.backends.cudnn.deterministic = on
    torch.backends.cudnn.benchmark = False
    # It would fill every new tensor with NaN first. Nothing here reads uninitialised memory.
    torch.utils.deterministic.fill_uninitialized_memory = not on  # type: ignore[attr-defined]
