"""SwiGLU (Shazeer, arXiv:2002.05202): down(silu(gate x) * up x), gate and up fused into one product; or GeGLU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megastable.config.model import ModelConfig
from megastable.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megastable.parallel.topology import TensorParallel


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2 f] -> [..., f]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def gated(gate_up: Tensor, gelu: bool, clamp: float | None) -> Tensor:
    """As `swiglu`, with GELU (tanh) in place of SiLU, and with the gate at most `clamp` and up within ± `clamp`."""
    gate, up = gate_up.chunk(2, -1)
    if clamp is not None:
        clamp = min(clamp, torch.finfo(gate_up.dtype).max)  # fp16 ends early
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up


def activation_of(config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """gate and up [..., 2 f] -> [..., f]."""
    if config.activation == "silu" and config.swiglu_clamp is None:
        return swiglu
    return partial(gated, gelu=config.activation == "gelu", clamp=config.swiglu_clamp)


class MLP(nn.Module):
    """x [s, b, hidden] (or its sequence shard) -> the same shape."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, name: str, recompute_core: bool) -> None:
        super().__init__()
        f = config.ffn_width
        self.recompute_core = recompute_core
        self.activation = activation_of(config)
        self.fast: Callable[[Tensor], Tensor] | None = None  # its compiled version; see `Block.in_pieces`
        self.plain = False  # whether the compiled version is left aside
        self.gate_up = ColumnParallelLinear(config.hidden, (f, f), tp, f"{name}.gate_up")
        self.down = RowParallelLinear(f, config.hidden, tp, f"{name}.down")

    def forward(self, x: Tensor) -> Tensor:
        gate_up, activation = self.gate_up(x), self.activation
        if self.fast is not None and not self.plain:
            activation = self.fast
        if self.recompute_core and torch.is_grad_enabled():
            # No random numbers in here: there is no state to save and restore.
            return self.down(checkpoint(activation, gate_up, use_reentrant=False, preserve_rng_state=False))
        return self.down(activation(gate_up))
