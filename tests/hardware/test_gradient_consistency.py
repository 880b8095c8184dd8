from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.engine.local_gradients import COLUMNS, RankGradient, bound_rounding, read_columns
from megastable.hardware import gradient_watch
from megastable.hardware.gradient_watch import Consistency, Kind, find_wrong_sums

SIZE = 400  # of a slice


def columns_of(gradients: Sequence[np.ndarray], before: Sequence[np.ndarray] | None = None) -> list[float]:
    """What engine/local_gradients.py would sum up, in fp64. gradients: of each rank, [ranks x SIZE]."""
    n, total = len(gradients), np.sum(gradients, 0)
    found = []
    for d, g in enumerate(gradients):
        part = slice(d * SIZE, (d + 1) * SIZE)
        others = total[part] - g[part]
        stale = before is not None and bool((g == before[d]).all())
        found += [
            0.0, float(sum(np.square(x[part]).sum() for x in gradients)), float(np.square(g).sum()),
            float(g[part] @ others), float(np.square(g[part]).sum()), float(np.square(others).sum()),
            float(stale), float(not g.any()), float(np.square(total[part]).sum()),
        ]  # fmt: skip
    assert len(found) == n * COLUMNS
    return found


def usual(random: np.random.Generator, ranks: int, noise: float) -> list[np.ndarray]:
    true = random.standard_normal(ranks * SIZE)
    return [true + noise * random.standard_normal(ranks * SIZE) for _ in range(ranks)]


def learnt(random: np.random.Generator, ranks: int, noise: float) -> Consistency:
    judge = Consistency()
    for _ in range(30):
        found = read_columns(columns_of(usual(random, ranks, noise)))
        assert judge.find_doubts(found) == []
        judge.accept_step(found)
    return judge


@given(st.integers(2, 6), st.integers(0, 5), st.integers(0, 9), st.sampled_from(Kind))
@settings(deadline=None)
def test_the_wrong_rank_is_doubted(ranks: int, wrong: int, seed: int, kind: Kind) -> None:
    random, wrong = np.random.default_rng(seed), wrong % ranks
    judge, before, now = learnt(random, ranks, 1.0), usual(random, ranks, 1.0), usual(random, ranks, 1.0)
    own = now[wrong]
    now[wrong] = {
        Kind.ZERO: 0 * own, Kind.STALE: before[wrong], Kind.SCALED: 3 * own, Kind.NEGATED: -own
    }[kind]  # fmt: skip
    doubts = judge.find_doubts(read_columns(columns_of(now, before)))
    # Of two ranks it cannot be said which one is the other way round.
    named = {wrong} if ranks > 2 or kind in (Kind.ZERO, Kind.STALE) else {0, 1}
    assert {doubt.rank for doubt in doubts} == named and {doubt.kind for doubt in doubts} == {kind}


@given(st.integers(2, 6), st.integers(0, 9))
@settings(deadline=None)
def test_a_direction_that_is_noise_is_not_judged(ranks: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    judge, now = learnt(random, ranks, 100.0), usual(random, ranks, 100.0)
    now[0] = -now[0]
    assert judge.find_doubts(read_columns(columns_of(now))) == []


def test_all_zero_is_nobodys_fault_and_not_finite_is_left_to_the_guard() -> None:
    nothing = [np.zeros(3 * SIZE)] * 3
    assert Consistency().find_doubts(read_columns(columns_of(nothing, nothing))) == []
    broken = read_columns(columns_of(usual(np.random.default_rng(0), 3, 1.0)))
    broken[1] = broken[1]._replace(square=math.inf)
    assert Consistency().find_doubts(broken) == [] and find_wrong_sums(broken) == []


@pytest.mark.parametrize("ranks", [2, 4])
def test_accepted_steps_decide_what_is_usual(ranks: int) -> None:
    """A rank with twice the norm of the others', always, is as usual; half of that is not."""
    random, judge = np.random.default_rng(1), Consistency()
    for _ in range(30):
        now = usual(random, ranks, 1.0)
        now[0] *= 1.9
        judge.accept_step(read_columns(columns_of(now)))
    assert judge.find_doubts(read_columns(columns_of([now[0], *usual(random, ranks, 1.0)[1:]]))) == []
    assert 0 in {doubt.rank for doubt in judge.find_doubts(read_columns(columns_of([now[0] / 3, *now[1:]])))}


@given(
    st.integers(2, 16), st.integers(0, 31), st.floats(1e-20, 1e20), st.floats(-0.99, 0.99),
    st.sampled_from([1.01, 100.0, math.inf, math.nan]),
)  # fmt: skip
def test_a_sum_off_by_more_than_rounding_is_wrong(
    ranks: int, wrong: int, square: float, share: float, off: float
) -> None:
    wrong %= ranks
    row = RankGradient(share * bound_rounding(square, ranks), square, 1, 1, 1, 1, 0, 0)
    found = [row] * ranks
    assert find_wrong_sums(found) == []
    found[wrong] = row._replace(excess=-off * bound_rounding(square, ranks))
    assert find_wrong_sums(found) == [wrong]


def test_the_same_batch_on_the_same_weights_is_no_fault_of_a_rank() -> None:
    random = np.random.default_rng(0)
    judge, now = learnt(random, 3, 1.0), usual(random, 3, 1.0)
    assert judge.find_doubts(read_columns(columns_of(now, now))) == []
    others = [usual(random, 3, 1.0)[0], *now[1:]]
    assert [(d.rank, d.kind) for d in judge.find_doubts(read_columns(columns_of(now, others)))] == [
        (1, Kind.STALE),
        (2, Kind.STALE),
    ]


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0, 1e6]), min_size=2, max_size=9))
def test_a_norm_is_compared_with_the_median_of_the_others(squares: list[float]) -> None:
    logs = [math.log(x) / 2 if x else 0.0 for x in squares]
    wanted = [log - statistics.median(logs[:d] + logs[d + 1 :]) for d, log in enumerate(logs)]
    assert gradient_watch._ratios(np.array(squares)) == pytest.approx(wanted)


def own_rows(random: np.random.Generator, step: int, ranks: int, noise: float = 0.3) -> list[RankGradient]:
    """Of ranks of a model whose norms drift apart, each beside its first moments."""
    found = []
    for d in range(ranks):
        norm, cosine = math.exp(-0.02 * step * d + noise * 0.2 * random.standard_normal()), 0.4
        moment = 0.5 * math.exp(-0.02 * max(0, step - 5) * d)
        dot = cosine * norm * moment
        found.append(RankGradient(0, norm**2, norm**2, dot, norm**2, moment**2, 0, 0))
    return found


@given(
    st.integers(2, 4),
    st.integers(0, 3),
    st.integers(0, 9),
    st.sampled_from([Kind.SCALED, Kind.NEGATED, None]),
)
@settings(deadline=None)
def test_beside_its_own_moments_a_rank_stands_out(
    ranks: int, wrong: int, seed: int, kind: Kind | None
) -> None:
    random, wrong = np.random.default_rng(seed), wrong % ranks
    judge = Consistency(mutual=False)
    for step in range(40):
        found = own_rows(random, step, ranks)
        assert judge.find_doubts(found) == []
        judge.accept_step(found)
    now = own_rows(random, 40, ranks)
    own = now[wrong]
    if kind is Kind.SCALED:
        now[wrong] = own._replace(
            slices=9 * own.slices, square=9 * own.square, dot=3 * own.dot, own=9 * own.own
        )
    elif kind is Kind.NEGATED:
        now[wrong] = own._replace(dot=-own.dot)
    doubts = judge.find_doubts(now)
    assert {doubt.kind for doubt in doubts} == ({kind} if kind else set())
    # Of two ranks it cannot be said which one's norm is another multiple.
    named = {0, 1} if ranks == 2 and kind is Kind.SCALED else {wrong}
    assert {doubt.rank for doubt in doubts} == (named if kind else set())
    assert all("its first moments" in doubt.reason for doubt in doubts if doubt.kind is Kind.NEGATED)


def test_what_was_cleared_is_doubted_again_only_if_it_is_further_away() -> None:
    random = np.random.default_rng(1)
    judge = learnt(random, 4, 0.3)

    def doubts(times: float, rank: int = 1) -> list[gradient_watch.Doubt]:
        now = usual(random, 4, 0.3)
        now[rank] = times * now[rank]
        return judge.find_doubts(read_columns(columns_of(now)))

    cleared = doubts(3.0)
    assert [doubt.rank for doubt in cleared] == [1] and cleared[0].size > gradient_watch.FAR
    judge.clear_doubts(cleared)
    assert doubts(2.5) == [] and doubts(2.5, rank=2) == []  # of other ranks, too: chance is the same for all
    assert [doubt.rank for doubt in doubts(10.0, rank=2)] == [2]
    assert [doubt.kind for doubt in doubts(-1.0)] == [Kind.NEGATED]  # another kind
    for _ in range(gradient_watch.LONGEST):
        judge.accept_step(read_columns(columns_of(usual(random, 4, 0.3))))
    assert [doubt.rank for doubt in doubts(2.5)] == [1]


def test_zero_or_stale_that_was_cleared_is_doubted_again_after_a_while() -> None:
    random = np.random.default_rng(1)
    judge = learnt(random, 3, 0.3)

    def doubts(rank: int) -> list[int]:
        now = usual(random, 3, 0.3)
        now[rank] = 0 * now[rank]
        return [doubt.rank for doubt in judge.find_doubts(read_columns(columns_of(now)))]

    for quiet in (gradient_watch.QUIET, 2 * gradient_watch.QUIET):
        now = usual(random, 3, 0.3)
        now[1] = 0 * now[1]
        judge.clear_doubts(judge.find_doubts(read_columns(columns_of(now))))
        for _ in range(quiet):
            assert doubts(1) == [] and doubts(2) == [2]
            judge.accept_step(read_columns(columns_of(usual(random, 3, 0.3))))
        assert doubts(1) == [1]
