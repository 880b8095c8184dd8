"""Linear layers and embedding, split over the tensor group (Megatron-LM, arXiv:1909.08053 section 3).

Weights are created empty: `model/init.py` fills them, the same whole tensor under every layout.
Activations are [s, b, h], sequence first; with sequence parallelism [s / tensor, b, h] between the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megastable.parallel.mappings import enter, leave
from megastable.parallel.sharding import Placement, place
from megastable.parallel.topology import TensorParallel

Product = Callable[[Tensor, Tensor], Tensor]  # x [..., in], w [out, in] -> [..., out]; another one in FP8


class _SavesParameter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return F.linear(x, w)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        dx = rows.mm(w).view(x.shape) if ctx.needs_input_grad[0] else None
        dw = rows.t().mm(x.reshape(-1, x.shape[-1])) if ctx.needs_input_grad[1] else None
        return dx, dw


def linear_of_parameter(x: Tensor, w: Tensor) -> Tensor:
    """`F.linear`, bit for bit, for weights that ZeRO 3 gathers: w is saved for the backward pass as the Parameter that
    it is. F.linear saves a view, which keeps the gathered weight in memory from the forward to the backward pass."""
    y: Tensor = _SavesParameter.apply(x, w)
    return y


class ColumnParallelLinear(nn.Module):
    """y = x W^T, W [out, in] split along out. `sections`: sizes of fused outputs, split one by one.

    Input [s, b, in] (or its sequence shard), output [s, b, out / tensor].
    """

    def __init__(self, inputs: int, sections: Sequence[int], tp: TensorParallel, name: str) -> None:
        super().__init__()
        self.tp = tp
        self.product: Product = F.linear
        self.weight = nn.Parameter(torch.empty(sum(sections) // tp.size, inputs))
        place(self.weight, Placement(f"{name}.weight", 0, tuple(sections)), tp.size)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(enter(x, self.tp), self.weight)


class RowParallelLinear(nn.Module):
    """y = x W^T, W [out, in] split along in. Input [s, b, in / tensor], output [s, b, out] (or its sequence shard)."""

    def __init__(self, inputs: int, outputs: int, tp: TensorParallel, name: str) -> None:
        super().__init__()
        self.tp = tp
        self.product: Product = F.linear
        self.weight = nn.Parameter(torch.empty(outputs, inputs // tp.size))
        place(self.weight, Placement(f"{name}.weight", 1, (inputs,)), tp.size)

    def forward(self, x: Tensor) -> Tensor:
        return leave(self.product(x, self.weight), self.tp)


class VocabParallelEmbedding(nn.Module):
    """Token embedding, W [vocabulary, hidden] split along the vocabulary. Tokens [b, s] -> [s, b, hidden]."""

    def __init__(self, vocabulary: int, hidden: int, tp: TensorParallel, name: str) -> None:
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(vocabulary // tp.size, hidden))
        place(self.weight, Placement(f"{name}.weight", 0, (vocabulary,)), tp.size)

    def forward(self, tokens: Tensor) -> Tensor:
        ids = tokens.t()
        if self.tp.size == 1:
            return F.embedding(ids, self.weight)
        rows = self.weight.shape[0]
        local = ids - self.tp.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        x = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return leave(x.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.tp)
