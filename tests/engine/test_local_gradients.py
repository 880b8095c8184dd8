"""The columns that ranks add up, against the formulas, with all ranks played by one process."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megastable.engine.local_gradients import (
    BLOCK,
    BLOCKS,
    COLUMNS,
    ROW,
    LocalGradients,
    RankGradient,
    bound_rounding,
    read_columns,
)
from megastable.hardware.gradient_watch import find_wrong_sums
from megastable.parallel.layout import Layout

SLICES = [5 * ROW + 7, 3, 400 * ROW]  # of the buffers; the last one is read in several pieces, and sampled


def rank(d: int, ranks: int, tensor: int = 0, expert: int = 1) -> LocalGradients:
    topology: Any = SimpleNamespace(
        layout=Layout(tensor=2, data=ranks, expert=expert),
        data_rank=d,
        shard_rank=d,
        stage=0,
        tensor_rank=tensor,
    )
    return LocalGradients(topology, torch.device("cpu"))


def gradients(ranks: int, seed: int = 0) -> list[list[Tensor]]:
    """Of every rank, every buffer; some elements are a thousand times the others."""
    random = torch.Generator().manual_seed(seed)
    sizes = [ranks * n for n in SLICES]
    return [
        [
            torch.randn(n, generator=random) * (1 + 999 * (torch.rand(n, generator=random) < 0.01))
            for n in sizes
        ]
        for _ in range(ranks)
    ]


def summed(
    watching: list[LocalGradients],
    sent: list[list[Tensor]],
    fault: Callable[[list[list[Tensor]]], object] = id,
) -> list[RankGradient]:
    """One step; `fault` changes what the ranks received: by rank, their slices of the buffers."""
    ranks = len(sent)
    for local, own in zip(watching, sent, strict=True):
        local.begin_step()
        local.measure_before_sum(own)
    received = [
        [torch.stack(b).sum(0).view(ranks, -1)[d].clone() for b in zip(*sent, strict=True)]
        for d in range(ranks)
    ]
    fault(received)
    for local, parts in zip(watching, received, strict=True):
        local.measure_after_sum(parts)
    return read_columns(torch.stack([local.make_columns() for local in watching]).sum(0).tolist())


@pytest.mark.quick("2")
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_columns_are_what_they_say(ranks: int) -> None:
    sent = gradients(ranks)
    watching = [rank(d, ranks) for d in range(ranks)]
    found = summed(watching, sent)
    assert len(watching[0].make_columns()) * 8 == 72 * ranks == 8 * COLUMNS * ranks
    wide = [torch.stack([b.double().view(ranks, -1) for b in buffers]) for buffers in zip(*sent, strict=True)]
    for d, row in enumerate(found):
        assert row.slices == pytest.approx(sum(float(w[:, d].square().sum()) for w in wide), rel=1e-3)
        assert row.square == pytest.approx(sum(float(w[d].square().sum()) for w in wide), rel=1e-3)
        assert row.summed == pytest.approx(sum(float(w[:, d].sum(0).square().sum()) for w in wide), rel=1e-3)
        assert row.stale == row.zero == 0
        assert abs(row.excess) < bound_rounding(row.slices, ranks) / 2
        own = torch.cat([sampled(w[d, d]) for w in wide])
        others = torch.cat([sampled(w[:, d].sum(0) - w[d, d]) for w in wide])
        for value, wanted in ((row.dot, own @ others), (row.own, own @ own), (row.others, others @ others)):
            assert value == pytest.approx(float(wanted), rel=1e-3, abs=1e-3 * row.own)


def sampled(part: Tensor) -> Tensor:
    apart = part.numel() // BLOCKS
    if part.numel() <= BLOCK * BLOCKS:
        return part
    return torch.cat([part[i * apart : i * apart + BLOCK] for i in range(BLOCKS)])


def test_buckets_that_are_under_way_together_are_as_one_after_the_other() -> None:
    """Sums begin before earlier ones are over; each is compared with what this rank put into it."""
    ranks, owners = 2, (0, 1, 0, 1, 1)
    sent = [
        [torch.randn(3000 + n, generator=torch.Generator().manual_seed(10 * d + n)) for n in range(5)]
        for d in range(ranks)
    ]
    sums = [torch.stack(bucket).sum(0) for bucket in zip(*sent, strict=True)]
    told = []
    for at_once in (False, True):
        watching = [rank(d, ranks) for d in range(ranks)]
        for d, local in enumerate(watching):
            for number, owner in enumerate(owners):
                local.measure_bucket_before_sum(sent[d][number], owner)
                if owner == d and not at_once:
                    local.measure_after_sum([sums[number]])
            for number, owner in enumerate(owners):
                if owner == d and at_once:
                    local.measure_after_sum([sums[number]])
        told.append(read_columns(torch.stack([local.make_columns() for local in watching]).sum(0).tolist()))
    assert told[0] == told[1]
    for d, row in enumerate(told[0]):
        own = torch.cat([sent[d][n] for n, owner in enumerate(owners) if owner == d])
        others = torch.cat([sums[n] - sent[d][n] for n, owner in enumerate(owners) if owner == d])
        assert row.dot == pytest.approx(float(own.double() @ others.double()), rel=1e-4)
        assert abs(row.excess) < bound_rounding(row.slices, ranks)


@pytest.mark.parametrize("wrong", [None, 0, 1, 2, 3])
def test_columns_of_experts_are_of_the_ranks_that_have_them(wrong: int | None) -> None:
    """Two of four ranks have the same experts, and sum their gradients; all sum those of other layers."""
    watching = [rank(d, 4, expert=2) for d in range(4)]
    for seed, group in enumerate([(0, 1, 2, 3), (0, 2), (1, 3)]):
        sent = {
            d: torch.randn(5 * ROW, generator=torch.Generator().manual_seed(10 * seed + d)) for d in group
        }
        for place, receiver in enumerate(group):
            for d in group:
                watching[d].measure_bucket_before_sum(sent[d], place, is_split=len(group) == 2)
            total = sum(sent.values(), torch.zeros(5 * ROW))
            if receiver == wrong and len(group) == 2:
                total[7] += 1e-2
            watching[receiver].measure_after_sum([total])
    found = read_columns(torch.stack([local.make_columns() for local in watching]).sum(0).tolist())
    assert find_wrong_sums(found) == ([] if wrong is None else [wrong])
    assert all(row.own > 0 and row.others > 0 for row in found)


def flipped(bit: int) -> Callable[[list[list[Tensor]]], None]:
    def flip(received: list[list[Tensor]]) -> None:
        part = received[1][2]
        at = int(part.abs().argmax())
        words = part[at : at + 1].view(torch.int32)
        words ^= torch.tensor([1 << bit if bit < 31 else -(1 << 31)], dtype=torch.int32)

    return flip


def swapped(received: list[list[Tensor]]) -> None:
    """Two rows, or pieces of a message, at each other's place."""
    table = received[1][2].view(-1, ROW)
    table[[3, 200]] = table[[200, 3]]


def shifted(received: list[list[Tensor]]) -> None:
    received[1][0].copy_(received[1][0].roll(1))


def lost(received: list[list[Tensor]]) -> None:
    received[1][2].view(-1, ROW)[7] = 0


@pytest.mark.quick("0-swapped")
@pytest.mark.parametrize(
    "fault", [flipped(31), flipped(30), flipped(23), flipped(22), swapped, shifted, lost]
)
@pytest.mark.parametrize("tensor", [0, 1])
def test_columns_show_a_wrong_sum(fault: Callable[[list[list[Tensor]]], None], tensor: int) -> None:
    watching = [rank(d, 3, tensor) for d in range(3)]
    assert find_wrong_sums(summed(watching, gradients(3))) == []
    found = summed(watching, gradients(3), fault)
    assert [d for d, row in enumerate(found) if not abs(row.excess) <= bound_rounding(row.slices, 3)] == [1]


def test_columns_count_stale_and_zero_gradients() -> None:
    watching, sent = [rank(d, 2) for d in range(2)], gradients(2)
    summed(watching, sent)
    for local in watching:
        local.keep_digest()
    after = gradients(2, seed=1)
    assert [row.stale for row in summed(watching, [sent[0], after[1]])] == [1, 0]
    watching[0].forget_digest()
    assert [row.stale for row in summed(watching, [sent[0], after[1]])] == [0, 0]
    nothing = [torch.zeros_like(b) for b in sent[0]]
    assert [row.zero for row in summed(watching, [after[0], nothing])] == [0, 1]


@pytest.mark.parametrize("size", [*SLICES, ROW - 1])
def test_slices_measured_at_once_are_as_one_by_one(size: int) -> None:
    """A GPU takes all slices in a few kernels, a CPU one by one."""
    local = rank(0, 3)
    slices = torch.randn(3 * size, generator=torch.Generator().manual_seed(1)).view(3, size)
    one, other = local._one_by_one(slices), local._at_once(slices)
    assert one.shape == other.shape == (2, 3) and one.dtype == other.dtype == torch.float64
    assert torch.allclose(one[1], other[1], rtol=1e-5)
    assert torch.allclose(one[0], other[0], atol=1e-4 * float(one[1].max().sqrt()), rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("receiver", [None, 1])
@pytest.mark.parametrize("wrong", [None, 0, 1])
def test_columns_add_up_the_buckets_of_a_step(receiver: int | None, wrong: int | None) -> None:
    """ZeRO 2 sums bucket after bucket: all ranks receive each sum, or one does. wrong: who receives another one."""
    watching = [rank(d, 3) for d in range(3)]
    sent = [[*gradients(3, seed=d)[d], *gradients(3, seed=9)[d]] for d in range(3)]
    owners = range(3) if receiver is None else [receiver]
    for number in range(len(sent[0])):
        for local, own in zip(watching, sent, strict=True):
            local.measure_bucket_before_sum(own[number], receiver)
        for d in owners:
            total = torch.stack([own[number] for own in sent]).sum(0)
            if d == wrong and number == 4:
                flipped(30)([[], [torch.empty(0), torch.empty(0), total]])
            watching[d].measure_after_sum([total])
    found = read_columns(torch.stack([local.make_columns() for local in watching]).sum(0).tolist())
    assert find_wrong_sums(found) == ([wrong] if wrong in owners else [])
    squares = [sum(float(b.double().square().sum()) for b in own) for own in sent]
    for d, row in enumerate(found):
        assert row.square == pytest.approx(squares[d], rel=1e-3)
        assert row.slices == pytest.approx(sum(squares) if d in owners else 0, rel=1e-3)
