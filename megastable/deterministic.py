"""`run.deterministic`: on a GPU, the same step on the same weights gives the same bits again.

Without it some kernels add up in any order: cuDNN's and the memory-efficient attention's gradients, atomic sums, NCCL's
reductions inside of switches. It holds for the same GPUs, versions and layout, not for others. It costs speed:
attention goes from cuDNN's kernels to FlashAttention's deterministic backward pass, and NCCL loses NVLS and CollNet.
"""

from __future__ import annotations

import os

import torch

from megastable.errors import ConfigError

# Read once, by libraries that CUDA's start loads. NVIDIA, cuBLAS documentation, "Results reproducibility"; Megatron-LM
# asks for the same in --deterministic-mode. Ring and Tree sum in an order that the topology gives.
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
ENVIRONMENT = {CUBLAS: ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "NCCL_ALGO": "Ring,Tree"}
WORKSPACES = (":4096:8", ":16:8")


def prepare() -> None:
    """Everything that it takes, before CUDA starts. Raises ConfigError where the environment says the contrary."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if os.environ[CUBLAS] not in WORKSPACES:
        raise ConfigError(
            f"run.deterministic=true and {CUBLAS}={os.environ[CUBLAS]}: cuBLAS repeats itself only with one of "
            f"{' or '.join(WORKSPACES)}; unset the variable"
        )
    if os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] != "0":
        raise ConfigError(
            f"run.deterministic=true and NVTE_ALLOW_NONDETERMINISTIC_ALGO="
            f"{os.environ['NVTE_ALLOW_NONDETERMINISTIC_ALGO']}: unset the variable"
        )
    switch(True)


def switch(on: bool) -> None:
    """Torch's part, which may change at any time; compiled code is compiled anew."""
    # Not warn_only: torch then takes attention kernels that do not repeat themselves.
    torch.use_deterministic_algorithms(on)
    torch.backends.cudnn.deterministic = on
    torch.backends.cudnn.benchmark = False
    # It would fill every new tensor with NaN first. Nothing here reads memory that was not written.
    torch.utils.deterministic.fill_uninitialized_memory = not on  # type: ignore[attr-defined]
