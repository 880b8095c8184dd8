"""Linear layers and embedding, split over the tensor group (Megatron-LM, arXiv:1909.08053 section 3).

Weights are created empty: `model/init.py` fills them with the same whole tensor under every layout.
Activations are [s, b, h], sequence first; with sequence parallelism [s / tensor, b, h] between the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megastable.base.products import differentiate_product, linear, multiply_rows
from megastable.parallel.mappings import (
    enter_tensor_region,
    gather_again,
    gather_sequence,
    leave_tensor_region,
    scatter_sequence,
)
from megastable.parallel.sharding import Placement, set_placement
from megastable.parallel.topology import TensorParallel

Product = Callable[[Tensor, Tensor], Tensor]  # x [..., in], w [out, in] -> [..., out]; FP8 replaces it


class _ShardProduct(torch.autograd.Function):
    """x of the whole sequence, times w; saves this rank's shard of x (Korthikanti et al., arXiv:2205.05198, section
    4.2.2) and the weight as the Parameter itself, as `products.linear_of_parameter` does."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, w: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        ctx.save_for_backward(shard, w)
        return multiply_rows(gather_sequence(shard, tp), w)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        shard, w = ctx.saved_tensors
        whole_input = gather_again(shard, gradient, ctx.tp)
        dx, dw = differentiate_product(gradient, whole_input, w, ctx.needs_input_grad)
        return None if dx is None else scatter_sequence(dx, ctx.tp), dw, None


def multiply_shard(shard: Tensor, w: Tensor, tp: TensorParallel) -> Tensor:
    """`linear` of `enter_tensor_region`, bit for bit: shard [s / tensor, b, in], w [out, in] -> [s, b, out]. Of the
    gathered tensor nothing is kept for the backward pass, which gathers again."""
    y: Tensor = _ShardProduct.apply(shard, w, tp)
    return y


class ColumnParallelLinear(nn.Module):
    """y = x W^T, W [out, in] split along out. `sections`: sizes of fused outputs, split one by one.

    Input [s, b, in] (or its sequence shard), output [s, b, out / tensor]. With `tp.gathers_again` the `product` takes
    the shard.
    """

    def __init__(self, inputs: int, sections: Sequence[int], tp: TensorParallel, name: str) -> None:
        super().__init__()
        self.tp = tp
        self.product: Product = partial(multiply_shard, tp=tp) if tp.gathers_again else linear
        self.weight = nn.Parameter(torch.empty(sum(sections) // tp.size, inputs))
        set_placement(self.weight, Placement(f"{name}.weight", 0, tuple(sections)), tp.size)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x if self.tp.gathers_again else enter_tensor_region(x, self.tp), self.weight)


class ColumnParallelBias(nn.Module):
    """x [s, b, out / tensor] + bias, split like the weight of the `ColumnParallelLinear` called `name`.

    A module of its own, so that a replacement of that layer (FP8) need not handle it.
    """

    def __init__(self, sections: Sequence[int], tp: TensorParallel, name: str) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(sum(sections) // tp.size))
        set_placement(self.bias, Placement(f"{name}.bias", 0, tuple(sections)), tp.size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class RowParallelLinear(nn.Module):
    """y = x W^T, W [out, in] split along in. Input [s, b, in / tensor], output [s, b, out] (or its sequence shard)."""

    def __init__(self, inputs: int, outputs: int, tp: TensorParallel, name: str) -> None:
        super().__init__()
        self.tp = tp
        self.product: Product = linear
        self.weight = nn.Parameter(torch.empty(outputs, inputs // tp.size))
        set_placement(self.weight, Placement(f"{name}.weight", 1, (inputs,)), tp.size)

    def forward(self, x: Tensor) -> Tensor:
        return leave_tensor_region(self.product(x, self.weight), self.tp)


class VocabParallelEmbedding(nn.Module):
    """Token embedding, W [vocabulary, hidden] split along the vocabulary. Tokens [b, s] -> [s, b, hidden]."""

    def __init__(self, vocabulary: int, hidden: int, tp: TensorParallel, name: str) -> None:
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(vocabulary // tp.size, hidden))
        set_placement(self.weight, Placement(f"{name}.weight", 0, (vocabulary,)), tp.size)

    def forward(self, tokens: Tensor) -> Tensor:
        token_ids = tokens.t()
        if self.tp.size == 1:
            return F.embedding(token_ids, self.weight)
        shard_rows = self.weight.shape[0]
        local_ids = token_ids - self.tp.rank * shard_rows
        is_elsewhere = (local_ids < 0) | (local_ids >= shard_rows)
        x = F.embedding(local_ids.masked_fill(is_elsewhere, 0), self.weight)
        return leave_tensor_region(x.masked_fill(is_elsewhere.unsqueeze(-1), 0.0), self.tp)
