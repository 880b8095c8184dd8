"""Matrices in pieces on several ranks: which rank gets which, and what comes back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megastable.optim.muon import Exchange, orthogonalize_matrix
from megastable.optim.ownership import (
    Matrix,
    MatrixPiece,
    Round,
    assign_owners,
    is_orthogonalized,
    plan_rounds,
    split_in_matrices,
)
from megastable.parallel.sharding import Fragment, Placement, cut_shard
from tests.distributed import run_ranks
from tests.tiers import examples

SHAPES = {
    "embedding.weight": (Placement("embedding.weight", 0, (32,)), (32, 8)),
    "blocks.0.attention.qkv.weight": (Placement("blocks.0.attention.qkv.weight", 0, (12, 6, 6)), (24, 8)),
    "blocks.0.attention.qkv.bias": (Placement("blocks.0.attention.qkv.bias", 0, (12, 6, 6)), (24,)),
    "blocks.0.attention.out.weight": (Placement("blocks.0.attention.out.weight", 1, (12,)), (8, 12)),
    "blocks.0.router.weight": (Placement("blocks.0.router.weight"), (4, 8)),
    "blocks.0.mlp.gate_up.weight": (Placement("blocks.0.mlp.gate_up.weight", 0, (18, 18)), (36, 8)),
    "blocks.0.mlp.down.weight": (Placement("blocks.0.mlp.down.weight", 1, (18,)), (8, 18)),
    "head.weight": (Placement("head.weight", 0, (32,)), (32, 8)),
}


def flattened(data: int, tensor: int, cut: bool) -> list[list[Fragment]]:
    """Every rank's fragments in one buffer. cut: each parameter among the data ranks, as ZeRO 3 does; otherwise the
    buffer of all of them, as ZeRO 1 and 2 do."""
    held: list[list[Fragment]] = []
    for rank in range(data * tensor):
        d, t = divmod(rank, tensor)
        fragments, offset = [], 0
        shards = {n: cut_shard(torch.empty(shape), p, t, tensor).shape for n, (p, shape) in SHAPES.items()}
        total = sum(s.numel() for s in shards.values())
        each = -(-total // data)
        for name, (placement, _) in SHAPES.items():
            n = shards[name].numel()
            part = -(-n // data)
            begin, end = (
                (d * part, min(n, (d + 1) * part)) if cut else (d * each - offset, (d + 1) * each - offset)
            )
            begin, end = max(begin, 0), min(end, n)
            if begin < end:
                at = sum(f.numel for f in fragments)
                counted = placement.dim is not None or t == 0
                fragments.append(
                    Fragment(
                        name=name, dim=placement.dim, sections=placement.sections, shape=tuple(shards[name]),
                        group=0, offset=at, start=begin, numel=end - begin, counted=counted,
                    )
                )  # fmt: skip
            offset += n
        held.append(fragments)
    return held


def test_fused_weights_are_several_matrices() -> None:
    found = {
        name: split_in_matrices(*SHAPES[name])
        for name, (_, shape) in SHAPES.items()
        if is_orthogonalized(name, shape)
    }
    assert {name: [(m.row, m.column, m.rows, m.columns) for m in of] for name, of in found.items()} == {
        "blocks.0.attention.qkv.weight": [(0, 0, 12, 8), (12, 0, 6, 8), (18, 0, 6, 8)],
        "blocks.0.attention.out.weight": [(0, 0, 8, 12)],
        "blocks.0.router.weight": [(0, 0, 4, 8)],
        "blocks.0.mlp.gate_up.weight": [(0, 0, 18, 8), (18, 0, 18, 8)],
        "blocks.0.mlp.down.weight": [(0, 0, 8, 18)],
    }


@pytest.mark.parametrize("lost", [0, -1])
def test_a_missing_piece_is_refused(lost: int) -> None:
    held = flattened(3, 1, cut=False)
    matrix = [f for rank in held for f in rank if f.name == "blocks.0.mlp.gate_up.weight"][lost]
    held = [[f for f in rank if f is not matrix] for rank in held]
    with pytest.raises(ValueError, match="exactly once"):
        plan_rounds(held, tensor=1)


@settings(max_examples=examples(60), deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=30),
    ranks=st.integers(1, 6), seed=st.integers(0, 99),
)  # fmt: skip
def test_no_owner_gets_more_than_its_share_and_one_matrix(
    sizes: list[tuple[int, int]], ranks: int, seed: int
) -> None:
    held = torch.randint(0, ranks, (len(sizes),), generator=torch.Generator().manual_seed(seed)).tolist()
    pieces = {}
    for i, (rows, columns) in enumerate(sizes):
        matrix = Matrix(f"blocks.{i}.w", None, 0, 0, rows, columns)
        pieces[matrix] = (MatrixPiece(held[i], matrix, 0, 0, 0, matrix.numel, counted=True),)
    found = assign_owners(pieces, ranks)
    assert found.keys() == pieces.keys()
    work = [sum(m.flops for m in pieces if found[m] == rank) for rank in range(ranks)]
    assert max(work) <= sum(work) / ranks + max(m.flops for m in pieces)


def test_a_matrix_stays_where_it_lies_if_that_is_fair() -> None:
    alike = [Matrix(f"blocks.{i}.w", None, 0, 0, 8, 8) for i in range(6)]
    holders = [2, 0, 1, 2, 1, 0]
    pieces = {m: (MatrixPiece(r, m, 0, 0, 0, 64, counted=True),) for r, m in zip(holders, alike, strict=True)}
    assert list(assign_owners(pieces, 3).values()) == holders
    crowded = {m: (MatrixPiece(0, m, 0, 0, 0, 64, counted=True),) for m in alike}
    assert sorted(assign_owners(crowded, 3).values()) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("cut", [False, True])
def test_rounds_are_bounded(cut: bool) -> None:
    held = flattened(2, 2, cut)
    limit = max(m.numel for r in plan_rounds(held, 2) for of in r.matrices for m in of)
    rounds = plan_rounds(held, 2, limit)
    assert len(rounds) > 1
    assert (
        max(r.count_given(rank, back=b) for r in rounds for rank in range(4) for b in (False, True)) <= limit
    )
    alone, everything = plan_rounds(held, 2, 1), plan_rounds(held, 2)
    assert len(everything) == 1 and all(sum(map(len, r.matrices)) == 1 for r in alone)
    for of in (rounds, alone):
        assert sum(r.count_given(k, back=True) for r in of for k in range(4)) == sum(
            r.count_given(k, back=True) for r in everything for k in range(4)
        )


def values() -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=drawn) for name, (_, shape) in SHAPES.items()}


def exchanged(data: int, tensor: int) -> list[dict[str, Any]]:
    """One rank's results of both ways to cut, in one round and in many: by (cut, limit, dtype) its fragments with their
    new values."""
    import torch.distributed as dist

    rank, found = dist.get_rank(), []
    for cut, limit, dtype in (
        (False, 1 << 20, torch.float32), (True, 1, torch.float32), (False, 100, torch.bfloat16),
    ):  # fmt: skip
        held = flattened(data, tensor, cut)
        whole = values()
        buffer = torch.cat(
            [
                cut_shard(whole[f.name], f.placement, rank % tensor, tensor).flatten()[
                    f.start : f.start + f.numel
                ]
                for f in held[rank]
            ]
        )
        rounds: list[Round] = plan_rounds(held, tensor, limit)

        def read(piece: MatrixPiece, to: Tensor, buffer: Tensor = buffer) -> None:
            to.copy_(buffer[piece.offset : piece.offset + piece.numel])

        def write(piece: MatrixPiece, result: Tensor, buffer: Tensor = buffer) -> None:
            buffer[piece.offset : piece.offset + piece.numel] = result

        Exchange(rounds, rank, None, dtype).exchange_matrices(
            read, orthogonalize_matrix, write, buffer.device
        )
        found.append({"dtype": dtype, "held": held[rank], "buffer": buffer})
    return found


@pytest.mark.parametrize(("data", "tensor"), [(1, 1), (3, 1), (2, 2)])
def test_every_matrix_is_replaced_as_a_whole(data: int, tensor: int) -> None:
    wanted: dict[torch.dtype, dict[str, Tensor]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        wanted[dtype] = values()
        for name, (placement, shape) in SHAPES.items():
            for m in split_in_matrices(placement, shape) if is_orthogonalized(name, shape) else ():
                at = slice(m.row, m.row + m.rows), slice(m.column, m.column + m.columns)
                wanted[dtype][name][at] = orthogonalize_matrix(values()[name][at].to(dtype)).float()
    for rank, results in enumerate(run_ranks(data * tensor, exchanged, data, tensor)):
        for result in results:
            for f in result["held"]:
                whole = cut_shard(
                    wanted[result["dtype"]][f.name], f.placement, rank % tensor, tensor
                ).flatten()
                got = result["buffer"][f.offset : f.offset + f.numel]
                assert torch.equal(got, whole[f.start : f.start + f.numel]), f.name


# Where five iterations leave singular values of at least 0.2 % of the norm: between 0.67 and 1.21.
BAND = (0.65, 1.25)


def matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Singular values from 0.1 to 1, in fp64."""
    drawn = torch.Generator().manual_seed(seed)
    n = min(rows, columns)
    u, _ = torch.linalg.qr(torch.randn(rows, n, generator=drawn, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(columns, n, generator=drawn, dtype=torch.float64))
    return u * torch.linspace(0.1, 1.0, n, dtype=torch.float64) @ v.t()


@pytest.mark.parametrize(("rows", "columns"), [(48, 48), (32, 80), (80, 32), (1, 7), (7, 1)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_singular_vectors_stay_and_values_become_one(
    rows: int, columns: int, dtype: torch.dtype, tolerance: float
) -> None:
    x = matrix(rows, columns)
    u, _, vt = torch.linalg.svd(x, full_matrices=False)
    y = orthogonalize_matrix(x.to(dtype))
    assert y.dtype is dtype and y.shape == x.shape
    inside = u.t() @ y.double() @ vt.t()  # diagonal if the singular vectors are the same
    values = inside.diagonal()
    assert BAND[0] <= float(values.min()) and float(values.max()) <= BAND[1]
    assert float((inside - values.diag()).abs().max()) <= tolerance
    assert float((u @ inside @ vt - y.double()).abs().max()) <= tolerance  # and nothing outside of them


@settings(max_examples=examples(30), deadline=None)
@given(
    rows=st.integers(1, 40), columns=st.integers(1, 40), power=st.integers(-60, 30), seed=st.integers(0, 999)
)
def test_the_size_of_a_matrix_does_not_matter(rows: int, columns: int, power: int, seed: int) -> None:
    x = matrix(rows, columns, seed).float()
    y = orthogonalize_matrix(x)
    assert float(torch.linalg.svdvals(y).max()) <= BAND[1]
    assert torch.equal(orthogonalize_matrix(x * 2.0**power), y)
    assert torch.allclose(orthogonalize_matrix(x.t().contiguous()), y.t(), atol=1e-4)
