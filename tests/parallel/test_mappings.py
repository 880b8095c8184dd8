"""The collectives inside of the model: every number where it belongs, forward and backward, compiled or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megastable.parallel.mappings import (
    enter_tensor_region,
    leave_tensor_region,
    share_weight,
    sum_over_group,
    to_heads,
    to_tokens,
)
from megastable.parallel.topology import WHOLE, ContextParallel, TensorParallel
from tests.distributed import run_ranks

S, B, D = 8, 2, 4
HEADS = [(4, 4), (4, 2), (8, 1), (12, 6), (12, 4)]  # of queries, and of keys and values


def whole(q: int, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of what comes out, the same on every rank: fp64 [s, b, heads, d]."""
    g = torch.Generator().manual_seed(q + k)
    return tuple(torch.randn(S, B, n, D, generator=g, dtype=torch.float64) for n in (q, k, k, q))  # type: ignore[return-value]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:

    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3)


def exchange(size: int) -> list[dict[str, Any]]:
    """What one rank of `size` sees of each of `HEADS`."""
    import torch.distributed as dist

    cp, rank = ContextParallel(dist.group.WORLD, size), dist.get_rank()
    found = []
    for heads in HEADS:
        *qkv, grad = whole(*heads)
        mine = [x.chunk(size)[rank].clone().requires_grad_() for x in qkv]
        q, k, v = to_heads(mine[0], mine[1], mine[2], cp)
        y = to_tokens(attend(q, k, v), cp)
        y.backward(grad.chunk(size)[rank])
        with torch.no_grad():
            back = to_tokens(to_heads(mine[0], mine[1], mine[2], cp)[0], cp)
        found.append(
            {
                "heads": [t.detach() for t in (q, k, v)], "y": y.detach(), "back": torch.equal(back, mine[0]),
                "grads": [t.grad for t in mine],
            }
        )  # fmt: skip
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_to_heads_and_back_attention_over_a_group_is_attention(size: int) -> None:
    ranks = run_ranks(size, exchange, size)
    for index, (n, kv) in enumerate(HEADS):
        *qkv, grad = whole(n, kv)
        leaves = [x.requires_grad_() for x in qkv]
        y = attend(*leaves)
        y.backward(grad)
        found = [rank[index] for rank in ranks]
        groups = n // kv
        for rank, part in enumerate(found):
            assert part["back"]
            first, count = rank * n // size, n // size
            q, k, v = part["heads"]
            assert torch.equal(q, leaves[0][:, :, first : first + count])
            # Every query head has the key and value that it had.
            served = [k[:, :, i // (count // k.shape[2])] for i in range(count)], leaves[1].detach()
            for i, key in enumerate(served[0]):
                assert torch.equal(key, served[1][:, :, (first + i) // groups])
            assert v.shape == k.shape and k.shape[2] <= count
        torch.testing.assert_close(torch.cat([p["y"] for p in found]), y.detach())
        for i, leaf in enumerate(leaves):
            torch.testing.assert_close(torch.cat([p["grads"][i] for p in found]), leaf.grad)


def test_to_heads_alone_touches_nothing() -> None:
    q, k, v, y = whole(4, 2)
    assert all(a is b for a, b in zip(to_heads(q, k, v, WHOLE), (q, k, v), strict=True))
    assert to_tokens(y, WHOLE) is y


MAPPINGS = [enter_tensor_region, leave_tensor_region, share_weight, sum_over_group]


def gradients(mapping: Callable[[Tensor, TensorParallel], Tensor], tp: TensorParallel, compiled: bool) -> Any:
    """y of `mapping` between a product and a square, and the gradients of x [s, b, d] and of the product's weight."""
    g = torch.Generator().manual_seed(tp.rank)
    x, weight = (torch.randn(*shape, generator=g).requires_grad_() for shape in ((S, B, D), (D, D)))

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return mapping(x @ weight, tp).square()

    y = (torch.compile(run, backend="eager", fullgraph=True) if compiled else run)(x, weight)
    y.sum().backward()
    return y.detach(), x.grad, weight.grad


def written_and_compiled() -> list[tuple[Any, Any]]:
    """Of each of MAPPINGS, without and with sequence parallelism; on a rank of two."""
    import torch.distributed as dist

    tps = [TensorParallel(dist.group.WORLD, dist.get_rank(), 2, sequence) for sequence in (False, True)]
    found = []
    for mapping in MAPPINGS:
        torch._dynamo.reset()
        found += [(gradients(mapping, tp, False), gradients(mapping, tp, True)) for tp in tps]
    return found


@pytest.mark.slow
def test_mappings_have_the_same_gradients_compiled() -> None:
    for rank in run_ranks(2, written_and_compiled):
        assert len(rank) == 2 * len(MAPPINGS)
        for written, compiled in rank:
            assert all(bool(t.any()) for t in written)
            torch.testing.assert_close(compiled, written)
