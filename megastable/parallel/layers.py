"""Linear layers and embedding, split over the tensor group (Megatron-LM, arXiv:1909.08053 section 3).

Weights are created empty: `model/init.py` fills them with the same whole tensor under every layout.
Activations are [s, b, h], sequence first; with sequence parallelism [s / tensor, b, h] between the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megastable.base.products import linear, linear_of_parameter
from megastable.parallel.deferred_gradients import multiply_deferring
from megastable.parallel.mappings import leave_tensor_region
from megastable.parallel.overlapped import enter_and_multiply, multiply_and_leave
from megastable.parallel.sharding import Placement, set_placement
from megastable.parallel.topology import TensorParallel

Product = Callable[[Tensor, Tensor], Tensor]  # x [..., in], w [out, in] -> [..., out]; FP8 replaces it


class ColumnParallelLinear(nn.Module):
    """y = x W^T, W [out, in] split along out. `sections`: sizes of fused outputs, split one by one.

    Input [s, b, in] (or its sequence shard), output [s, b, out / tensor]. With more than one rank the `product` takes
    the input as it is, and enters the tensor-parallel region itself.
    """

    def __init__(self, inputs: int, sections: Sequence[int], tp: TensorParallel, name: str) -> None:
        super().__init__()
        self.tp = tp
        self.product: Product = partial(enter_and_multiply, tp=tp) if tp.size > 1 else linear
        self.weight = nn.Parameter(torch.empty(sum(sections) // tp.size, inputs))
        set_placement(self.weight, Placement(f"{name}.weight", 0, tuple(sections)), tp.size)

    def stay_inside(self) -> None:
        """Take an input that is in the tensor-parallel region already."""
        self.tp, self.product = TensorParallel(), linear

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight)


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

    def stay_inside(self) -> None:
        """Leave the partial sums to the caller, in the tensor-parallel region."""
        self.tp = TensorParallel()

    def forward(self, x: Tensor) -> Tensor:
        # What replaces the product, as FP8 and traces do, multiplies the whole.
        if self.tp.chunks > 1 and self.product in (linear, linear_of_parameter, multiply_deferring):
            return multiply_and_leave(x, self.weight, self.tp)
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
