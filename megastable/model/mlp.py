"""SwiGLU (Shazeer, arXiv:2002.05202): down(silu(gate x) * up x), gate and up fused into one product."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megastable.config.tree import ModelConfig
from megastable.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megastable.parallel.topology import TensorParallel


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2 f] -> [..., f]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


class MLP(nn.Module):
    """x [s, b, hidden] (or its sequence shard) -> the same shape."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, name: str, recompute_core: bool) -> None:
        super().__init__()
        f = config.ffn_width
        self.recompute_core = recompute_core
        self.activation = swiglu  # or a compiled version; see `Block.in_pieces`
        self.gate_up = ColumnParallelLinear(config.hidden, (f, f), tp, f"{name}.gate_up")
        self.down = RowParallelLinear(f, config.hidden, tp, f"{name}.down")

    def forward(self, x: Tensor) -> Tensor:
        gate_up = self.gate_up(x)
        if self.recompute_core and torch.is_grad_enabled():
            # No dropout anywhere: there is no random state to save and restore.
            return self.down(
                checkpoint(self.activation, gate_up, use_reentrant=False, preserve_rng_state=False)
            )
        return self.down(self.activation(gate_up))
