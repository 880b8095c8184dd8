"""What makes a step repeat bit for bit: torch's deterministic kernels (`run.deterministic`), and numbers that are
scattered alike on any device.

By default some kernels sum in an arbitrary order: the gradients of cuDNN and memory-efficient attention, atomic adds,
NCCL's in-switch reductions. The guarantee holds for the same GPUs, versions and layout only, and it costs speed:
attention moves from cuDNN's kernels to FlashAttention's deterministic backward, and NCCL loses NVLS and CollNet.

Numbers are scattered by the finalizer of splitmix64 (Steele et al., doi:10.1145/2660193.2660195): every bit of the
result depends on every bit of the input, and different inputs have different results.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from megastable.base.errors import ConfigError

# Libraries read these once, when CUDA starts. NVIDIA, cuBLAS documentation, "Results reproducibility"; Megatron-LM
# requires the same in --deterministic-mode. Ring and Tree sum in an order fixed by the topology.
CUBLAS, NCCL = "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"
ENVIRONMENT = {CUBLAS: ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", NCCL: "Ring,Tree"}
WORKSPACES = {":4096:8", ":16:8"}
ALGORITHMS = {"ring", "tree"}


def prepare_determinism() -> None:
    """Set all variables and switches before CUDA starts. Raises ConfigError if the environment conflicts."""
    for name, value in ENVIRONMENT.items():
        given = os.environ.setdefault(name, value)
        if not _repeats(name, given):
            raise ConfigError(
                f"run.deterministic=true and {name}={given}: a step would not repeat bit for bit; unset the variable, "
                f"or set it to {value}"
            )
    switch_determinism(True)


def is_exact(deterministic: bool, device: torch.device) -> bool:
    """Whether a repeated step gives the same bits on sound hardware. deterministic: `run.deterministic`."""
    return deterministic or device.type == "cpu"


def _repeats(name: str, value: str) -> bool:
    """Whether this value of an `ENVIRONMENT` variable keeps steps reproducible."""
    if name == CUBLAS:
        return value in WORKSPACES
    # One list for all collectives; per-function lists ("allreduce:tree") and exclusions ("^nvls") leave others open.
    return set(value.lower().split(",")) <= ALGORITHMS if name == NCCL else value == ENVIRONMENT[name]


def switch_determinism(on: bool) -> None:
    """Torch's own switches, which may change at any time; compiled code is recompiled."""
    # Not warn_only: torch would then keep nondeterministic attention kernels.
    torch.use_deterministic_algorithms(on)
    torch.backends.cudnn.deterministic = on
    torch.backends.cudnn.benchmark = False
    # It would fill every new tensor with NaN first. Nothing here reads uninitialised memory.
    torch.utils.deterministic.fill_uninitialized_memory = not on  # type: ignore[attr-defined]


GOLDEN = 0x9E3779B97F4A7C15  # the step between inputs: odd, and far from any regular pattern
FACTORS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def mix_tensor(x: Tensor) -> Tensor:
    """x: int64, changed in place and returned. Products of int64 wrap around, as unsigned ones do."""
    for shift, factor in FACTORS:
        x ^= unsigned_shift(x, shift)
        x *= to_signed(factor)
    x ^= unsigned_shift(x, 31)
    return x


def mix_number(number: int) -> int:
    """The same of one number, modulo 2^64: unsigned, below 2^64."""
    number %= 2**64
    for shift, factor in FACTORS:
        number = (number ^ (number >> shift)) * factor % 2**64
    return number ^ (number >> 31)


def random_sequence(key: int, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Numbers `start` to `start + count` of the generator with this key: int64 [count]."""
    x = torch.arange(start + 1, start + count + 1, dtype=torch.int64, device=device)
    x *= to_signed(GOLDEN)
    x += to_signed(key % 2**64)
    return mix_tensor(x)


def unsigned_shift(x: Tensor, bits: int) -> Tensor:
    """x >> bits, of int64 that stand for unsigned numbers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def to_signed(number: int) -> int:
    """The int64 that has the bits of an unsigned number below 2^64."""
    return number - (1 << 64) if number >= 1 << 63 else number
