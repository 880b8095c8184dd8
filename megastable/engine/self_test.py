"""A self-test of products with known answers, in the shapes of the model: a chip that always computes one column wrong
shows here at once, and nobody else's result is needed to know whose fault it is.

The numbers are integers so small that every sum is exact in the dtype, in any order of summation; the answers are
computed in fp64, by numpy. A longer test: `preflight --burn-in`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from megastable.base import products
from megastable.config.model import ModelConfig

TERMS = {
    torch.bfloat16: 256,
    torch.float16: 1024,
    torch.float32: 1 << 20,
}  # of +-1, whose sum the dtype holds
ROWS = 64
ROUNDS = 2


@torch.no_grad()
def wrong_product(model: ModelConfig, tensor: int, dtype: torch.dtype, device: torch.device) -> str:
    """Which product of this device is wrong, and where: a phrase; "" if none is. tensor: ranks that share a matrix."""
    for width, height in _shapes(model, tensor):
        x, weight, answer = _case(width, height, dtype)
        placed = x.to(device, dtype), weight.to(device, dtype)
        for _ in range(ROUNDS):
            for name, got in _products(*placed):
                if (wrong := got.cpu() != answer).any():
                    columns = wrong.any(0).nonzero().flatten().tolist()
                    where = f"column {columns[0]}" if len(columns) == 1 else f"{len(columns)} columns"
                    kind = str(dtype).removeprefix("torch.")
                    shapes = f"[{ROWS}, {width}] x [{width}, {height}]"
                    return f"a product with a known answer, {kind} {name} {shapes}, is wrong in {where}"
    return ""


def _products(x: Tensor, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield "linear", F.linear(x, weight)
    yield "matmul", products.mm(x, weight.t())


def _shapes(model: ModelConfig, tensor: int) -> list[tuple[int, int]]:
    """(input width, output width) of a block's products on one rank."""
    heads, ffn = model.heads * model.head_width // tensor, model.ffn_width // tensor
    return [(model.hidden, heads), (heads, model.hidden), (model.hidden, ffn), (ffn, model.hidden)]


@cache
def _case(width: int, height: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x [ROWS, width], weight [height, width], int8, and their product as `dtype`."""
    draw = torch.Generator().manual_seed(width * 31 + height)
    x, weight = (
        torch.randint(0, 2, size, generator=draw) * 2 - 1 for size in ((ROWS, width), (height, width))
    )
    x[:, torch.randperm(width, generator=draw)[TERMS[dtype] :]] = 0
    # By other kernels than those that are tested; all sums are exact in fp64.
    answer = torch.from_numpy(x.double().numpy() @ weight.double().numpy().T)
    return x.to(torch.int8), weight.to(torch.int8), answer.to(dtype)
