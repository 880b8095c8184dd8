"""`run.deterministic`: on a GPU, the same step on the same weights gives the same bits again.

Without it some kernels add up in any order: cuDNN's and the memory-efficient attention's gradients, atomic sums, NCCL's
reductions inside of switches. It holds for the same GPUs, versions and layout, not for others. It costs speed:
attention goes from cuDNN's kernels to FlashAttention's deterministic backward pass, and NCCL loses NVLS and CollNet.
"""

from __future__ import annotations

import os

import torch

from megastable.base.errors import ConfigError

# Read once, by libraries that CUDA's start loads. NVIDIA, cuBLAS documentation, "Results reproducibility"; Megatron-LM
# asks for the same in --deterministic-mode. Ring and Tree sum in an order that the topology gives.
CUBLAS, NCCL = "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"
ENVIRONMENT = {CUBLAS: ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", NCCL: "Ring,Tree"}
WORKSPACES = {":4096:8", ":16:8"}
ALGORITHMS = {"ring", "tree"}


def prepare() -> None:
    """Set everything it needs, before CUDA starts. Raises ConfigError if the environment conflicts."""
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
    """Whether a variable of `ENVIRONMENT` may have this value."""
    if name == CUBLAS:
        return value in WORKSPACES
    # One list for all collectives; lists by function ("allreduce:tree") and exclusions ("^nvls") leave others open.
    return set(value.lower().split(",")) <= ALGORITHMS if name == NCCL else value == ENVIRONMENT[name]


def switch(on: bool) -> None:
    """Torch's part, which may change at any time; compiled code is compiled anew."""
    # Not warn_only: torch then takes attention kernels that do not repeat themselves.
    torch.use_deterministic_algorithms(on)
    torch.backends.cudnn.deterministic = on
    torch.backends.cudnn.benchmark = False
    # It would fill every new tensor with NaN first. Nothing here reads memory that was not written.
    torch.utils.deterministic.fill_uninitialized_memory = not on  # type: ignore[attr-defined]
