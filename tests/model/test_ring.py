"""Ring attention against plain attention in fp64: forward, backward, masks, and what every rank has to do."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megastable.model import ring
from megastable.model.kernels import FULL, AttentionScores
from megastable.model.ring import ChunkProduct, list_products, ring_attention
from megastable.parallel.layout import cut_ranges, find_own_tokens
from megastable.parallel.topology import ContextParallel
from tests.distributed import run_ranks
from tests.model.test_blocked import plain

B, CHUNK, D = 2, 3, 8  # a sample has 2 x ranks chunks
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2**-7}


class Case(NamedTuple):
    heads: tuple[int, int]  # of queries, and of keys and values
    scores: AttentionScores = FULL
    documents: bool = False
    fused: bool = True
    dtype: torch.dtype = torch.float64


CASES = {
    "flash": Case((4, 2)),
    "flash, fp32": Case((4, 2), dtype=torch.float32),
    "flash, bf16": Case((4, 2), dtype=torch.bfloat16),
    "heads that no number of ranks divides, scale": Case((5, 1), AttentionScores(scale=0.7)),
    "written out": Case((6, 3), fused=False),
    "written out, fp32": Case((4, 4), fused=False, dtype=torch.float32),
    "window shorter than a chunk": Case((3, 3), AttentionScores(window=2)),
    "window over chunks": Case((4, 2), AttentionScores(window=5)),
    "cap": Case((4, 2), AttentionScores(cap=1.5)),
    "documents": Case((4, 2), documents=True),
    "all of it, fp32": Case((4, 2), AttentionScores(0.6, 2.0, 7), documents=True, dtype=torch.float32),
}


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dy: Tensor
    segments: Tensor | None


def inputs_of(case: Case, ranks: int) -> Inputs:
    g, length = torch.Generator().manual_seed(3), 2 * ranks * CHUNK
    heads = (case.heads[0], case.heads[1], case.heads[1], case.heads[0])
    tensors = [torch.randn(length, B, n, D, generator=g, dtype=torch.float64) for n in heads]
    segments = (torch.rand(B, length, generator=g) < 0.3).cumsum(1).int() if case.documents else None
    return Inputs(*(x.to(case.dtype).permute(1, 2, 0, 3) for x in tensors), segments)


def select_tokens(x: Tensor, ranks: int, rank: int) -> Tensor:
    own = find_own_tokens(x.shape[2], ranks, rank, True)
    return torch.cat([x[:, :, tokens.start : tokens.stop] for tokens in own], 2)


def attend_in_ring(names: list[str], parts: int) -> dict[str, Any]:
    """y, the gradients of q, k and v, and the largest logits, of this rank's tokens. parts: scores at a time."""
    import torch.distributed as dist

    ring.ELEMENTS = parts
    ranks, rank = dist.get_world_size(), dist.get_rank()
    cp, results = ContextParallel(dist.group.WORLD, ranks, rank, True), {}
    for name in names:
        case = CASES[name]
        given = inputs_of(case, ranks)
        q, k, v = (select_tokens(x, ranks, rank).requires_grad_() for x in given[:3])
        highest = torch.full((case.heads[0],), -torch.inf)
        options = {"cp": cp, "fused": case.fused, "highest": highest}
        y = ring_attention(q, k, v, given.segments, case.scores, **options)
        gradients = torch.autograd.grad(y, (q, k, v), select_tokens(given.dy, ranks, rank))
        results[name] = [y.detach(), *gradients, highest]
    return results


def join_tokens(parts: list[Tensor]) -> Tensor:
    """The whole [b, heads, s, d] of the parts of all ranks."""
    length = sum(part.shape[2] for part in parts)
    own = [find_own_tokens(length, len(parts), rank, True) for rank in range(len(parts))]
    order = torch.tensor([place for ranges in own for tokens in ranges for place in tokens]).argsort()
    return torch.cat(parts, 2)[:, :, order]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ring_attention_is_attention(ranks: int) -> None:
    names = list(CASES) if ranks == 3 else [*list(CASES)[:4], "all of it, fp32"]
    found = run_ranks(ranks, attend_in_ring, names, 20)
    for name in names:
        case = CASES[name]
        given = inputs_of(case, ranks)
        q, k, v = (x.double().requires_grad_() for x in given[:3])
        length = q.shape[2]
        places = torch.arange(length)
        distance = places[:, None] - places
        mask = (distance >= 0) & (distance < (case.scores.window or length))
        if given.segments is not None:
            mask = (mask & (given.segments[:, :, None] == given.segments[:, None]))[:, None]
        y = plain(q, k, v, mask, case.scores)
        wanted = [y.detach(), *torch.autograd.grad(y, (q, k, v), given.dy.double())]
        for what, exact, parts in zip(
            "y q k v".split(), wanted, zip(*(rank[name] for rank in found), strict=False)
        ):
            got = join_tokens(list(parts))
            assert got.dtype == case.dtype
            error = (got.double() - exact).abs().max() / exact.abs().max()
            assert error <= BOUNDS[case.dtype], f"{name}: {what} is off by {error:.2e}"
        logits = q.detach() @ k.detach().repeat_interleave(case.heads[0] // case.heads[1], 1).mT
        logits = (logits * case.scores.score_factor(D)).masked_fill(~mask, -torch.inf)
        highest = torch.stack([rank[name][-1] for rank in found]).amax(0)
        torch.testing.assert_close(
            highest, logits.amax((0, 2, 3)).float(), rtol=1e-2 if "bf16" in name else 1e-5, atol=0
        )


def twice_and_compiled(names: list[str]) -> bool:
    """Whether a ring gives the same bits again, and in a compiled graph, forward and backward."""
    import torch.distributed as dist

    first, again = (attend_in_ring(names, ring.ELEMENTS) for _ in range(2))
    plain_ring, compiled = (
        ring.ring_attention,
        torch.compile(ring_attention, backend="aot_eager", fullgraph=True),
    )
    globals()["ring_attention"] = compiled
    in_graph = attend_in_ring(names, ring.ELEMENTS)
    globals()["ring_attention"] = plain_ring
    dist.barrier()
    return all(
        torch.equal(one, other)
        for name in names for others in (again, in_graph) for one, other in zip(first[name], others[name], strict=True)
    )  # fmt: skip


@pytest.mark.slow
def test_ring_attention_has_the_same_bits_again_and_compiled() -> None:
    assert run_ranks(2, twice_and_compiled, ["flash, fp32", "all of it, fp32"]) == [True, True]


def test_the_kernel_of_gpus_takes_these_arguments() -> None:
    """By torch's own description of its shapes: nothing is computed."""
    with FakeTensorMode():
        q, k, v = (torch.empty(B, heads, 16, 64, dtype=torch.bfloat16, device="cuda") for heads in (8, 2, 2))
        y, lse = ring._flash(q, k, v, True, 0.125)
        assert (y.shape, y.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, q.shape[:3], torch.float32)
        gradients = ring._flash_backward(y, q, k, v, y, lse, True, 0.125)
        assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]


def test_all_ranks_have_the_same_work_in_every_round() -> None:
    """Pairs of chunks, of which those on the diagonal are a half: two a round. All that a mask leaves, once."""
    for ranks in (2, 3, 4, 8):
        length, pairs = 2 * ranks, set()
        for rank, source in itertools.product(range(ranks), repeat=2):
            products = list_products(length, ranks, rank, source)
            assert sum(0.5 if product.causal else 1 for product in products) == 2
            pairs |= {(product.first_query, product.first_key) for product in products}
        assert pairs == {(query, key) for query in range(length) for key in range(query + 1)}


def test_products_beyond_the_window_are_left_out_and_those_it_cuts_are_marked() -> None:
    # 8 tokens, chunks of 2: rank 0 has 0, 1, 6, 7, rank 1 has 2 to 5.
    assert list_products(8, 2, 0, 1, window=3) == [ChunkProduct(1, 1, 6, 4, False, True)]
    assert list_products(8, 2, 0, 1, window=4) == [
        ChunkProduct(1, 1, 6, 4, False, False), ChunkProduct(1, 0, 6, 2, False, True)
    ]  # fmt: skip
    assert list_products(8, 2, 0, 1, window=6) == [
        ChunkProduct(1, 1, 6, 4, False, False), ChunkProduct(1, 0, 6, 2, False, False)
    ]  # fmt: skip
    assert list_products(8, 2, 1, 0, window=2) == [ChunkProduct(0, 0, 2, 0, False, True)]
    own = list_products(8, 2, 0, 0, window=1)
    assert own == [ChunkProduct(0, 0, 0, 0, True, True), ChunkProduct(1, 1, 6, 6, True, True)]


def test_every_token_has_one_rank_and_shards_of_a_rank_are_its_tokens_in_order() -> None:
    assert find_own_tokens(12, 3, 1, True) == (range(2, 4), range(8, 10))
    assert find_own_tokens(12, 3, 1, False) == (range(4, 8),)
    for in_ring in (False, True):
        own_ranges = [find_own_tokens(12, 3, rank, in_ring) for rank in range(3)]
        tokens = [token for ranges in own_ranges for part in ranges for token in part]
        assert sorted(tokens) == list(range(12))
    own = find_own_tokens(24, 2, 1, True)
    assert [cut_ranges(own, 4 * i, 4 * i + 4) for i in range(3)] == [
        (range(6, 10),), (range(10, 12), range(12, 14)), (range(14, 18),)
    ]  # fmt: skip
