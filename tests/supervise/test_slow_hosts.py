"""Slow hosts are found among even ones, whatever the noise, and nobody else is named."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.run.rank_ipc import WorkBlock
from megastable.supervise.slow_hosts import WINDOW, Stragglers
from tests.tiers import examples


def hosts(count: int, ranks: int = 1) -> dict[int, str]:
    return {rank: f"host-{rank // ranks}" for rank in range(count * ranks)}


def block(number: int, own: float, step: float = 1.0) -> WorkBlock:
    return WorkBlock(block=number, step=step, own=own, parts=(0.0, own / 4, own / 2, own / 4))


def feed(found: Stragglers, blocks: Iterable[int], own: Callable[[int, int], float]) -> list[set[str]]:
    """own: of (rank, block). The slow hosts after every block."""
    seen = []
    for number in blocks:
        for rank in found.hosts:
            found.add_block(rank, block(number, own(rank, number)))
        seen.append(set(found.slow))
    return seen


def noisy(slow: Callable[[int, int], float], seed: int = 1, sd: float = 0.02) -> Callable[[int, int], float]:
    chance = random.Random(seed)
    return lambda rank, number: 0.5 * slow(rank, number) * chance.lognormvariate(0, sd)


@pytest.mark.quick("3-1")
@pytest.mark.parametrize(("count", "ranks"), [(2, 1), (3, 1), (3, 4), (8, 2)])
def test_stragglers_name_a_host_a_fifth_slower_within_200_steps_until_it_is_over(
    count: int, ranks: int
) -> None:
    found = Stragglers(1.1, hosts(count, ranks))
    last = count * ranks - 1  # one rank of it is enough
    seen = feed(found, range(400), noisy(lambda rank, n: 1.2 if rank == last and 100 <= n < 250 else 1.0))
    name = f"host-{count - 1}"
    assert not any(seen[:100]) and seen[119] == {name} and {frozenset(now) for now in seen} == {
        frozenset(), frozenset({name})
    }  # fmt: skip
    assert seen[249] == {name} and seen[270] == set() == seen[-1]


def test_stragglers_tell_rank_cost_and_phase() -> None:
    found = Stragglers(1.1, hosts(3, 2))
    for number in range(WINDOW):
        for rank in found.hosts:
            slow = 1.5 if rank == 3 else 1.0
            parts = (0.001, 0.2, 0.2 * slow + (slow - 1) * 0.2, 0.1)
            found.add_block(rank, WorkBlock(block=number, step=1.0, own=sum(parts), parts=parts))
    slow = found.slow["host-1"]
    assert (slow.rank, round(slow.seconds, 6), round(slow.cost, 6)) == (3, 0.2, 0.2)
    assert slow.ratio == pytest.approx(0.701 / 0.501)
    assert slow.parts == pytest.approx({"forward": 1.0, "backward": 2.0, "optimizer": 1.0})
    assert slow.describe_slowness() == (
        "host host-1 is slow: rank 3 takes 1.40 x as long as the others for its own work, which costs the run 20% "
        "(0.2 s a step); forward 1.00 x, backward 2.00 x, optimizer 1.00 x"
    )
    assert slow.describe_slowness(alone=True).startswith("rank 3 on host-1 is slow")


@given(
    seed=st.integers(0, 10_000), count=st.integers(2, 6), ranks=st.integers(1, 3), more=st.floats(1.0, 1.03)
)
@settings(max_examples=examples(30), deadline=None)
def test_stragglers_name_nobody_of_even_ones(seed: int, count: int, ranks: int, more: float) -> None:
    """Also if one has a little more work, pauses now and then, or all become slow together."""
    chance = random.Random(seed)

    def own(rank: int, number: int) -> float:
        pause = 2.0 if number % 10 == rank % 10 or (number % 10 == 3 and not rank) else 1.0
        return pause * (more if rank == 0 else 1.0) * (1.5 if 50 <= number < 120 else 1.0)

    found = Stragglers(1.1, hosts(count, ranks))
    assert not any(feed(found, range(200), noisy(own, chance.randrange(1 << 30))))


def test_stragglers_compare_no_stages_with_each_other() -> None:
    """Two stages, the second with twice the work; each lies on two hosts."""
    found = Stragglers(1.1, {0: "a", 1: "b", 2: "c", 3: "d"}, stages=2)
    assert not any(feed(found, range(60), noisy(lambda rank, n: 1 + rank // 2)))
    seen = feed(found, range(60, 80), noisy(lambda rank, n: (1 + rank // 2) * (1.3 if rank == 3 else 1)))
    assert seen[-1] == {"d"}


def test_stragglers_compare_only_ranks_with_the_same_experts() -> None:
    """Of four data ranks that share out experts, with tensor groups of two, the second gets more of the tokens."""

    def find(expert: int, slow_rank: int | None) -> set[str]:
        found = Stragglers(1.1, hosts(2, 8), shared=8, tensor=2, expert=expert)
        work = {
            rank: (1.4 if rank // 2 % 4 == 1 else 1) * (1.3 if rank == slow_rank else 1)
            for rank in found.hosts
        }
        return feed(found, range(60), noisy(lambda rank, n: work[rank]))[-1]

    assert not find(4, None) and find(4, 8) == {"host-1"}
    assert find(1, None) == {"host-0", "host-1"}


def test_stragglers_name_nobody_of_groups_that_share_layers_across_hosts() -> None:
    blind = Stragglers(1.1, {0: "a", 1: "b", 2: "a", 3: "b"}, shared=2)
    assert not any(feed(blind, range(60), noisy(lambda rank, n: 3 if rank == 1 else 1)))
    found = Stragglers(1.1, {0: "a", 1: "a", 2: "b", 3: "b"}, shared=2)
    assert feed(found, range(60), noisy(lambda rank, n: 3 if rank > 1 else 1))[-1] == {"b"}


def test_stragglers_judge_on_after_a_run_goes_back() -> None:
    found = Stragglers(1.1, hosts(3))
    feed(found, range(30), noisy(lambda rank, n: 1.0))
    found.add_block(0, block(30, 0.5))  # the others go back before they have reported it
    assert feed(found, range(10, 40), noisy(lambda rank, n: 1.4 if rank == 2 else 1.0))[-1] == {"host-2"}
    assert not found._pending


@pytest.mark.parametrize("own", [0.0, -1.0, float("inf"), float("nan")])
def test_stragglers_pass_over_times_that_cannot_be(own: float) -> None:
    found = Stragglers(1.1, hosts(2))
    assert (
        not found.add_block(0, block(0, own)) and not found.add_block(7, block(0, 1.0)) and not found._pending
    )


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=12), st.integers(1, 4))
def test_stragglers_compare_with_the_larger_median_of_other_hosts(values: list[float], ranks: int) -> None:
    found = Stragglers(1.1, {rank: f"host-{rank // ranks}" for rank in range(len(values))})
    others = found._others(dict(enumerate(values)))
    for rank in range(len(values)):
        rest = [v for other, v in enumerate(values) if other // ranks != rank // ranks]
        if found.alone:
            rest = [v for other, v in enumerate(values) if other != rank]
        assert others.get(rank) == (statistics.median_high(rest) if rest else None)
