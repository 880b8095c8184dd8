"""Who is guilty: tables of losses and gradient norms in, conclusions out."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.stability.attribution import (
    ENOUGH,
    GRADIENT_RATIO,
    SAME,
    SCALE_FLOOR,
    WORSE,
    Suspect,
    conclude,
    deviations,
    guilty_by_gradient,
    guilty_by_loss,
    is_worse,
    ranges,
    reproduced,
)
from megastable.stability.policy import Cause

NAN, INF = math.nan, math.inf
THRESHOLD = 6.0


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)


def zeros(count: int) -> np.ndarray:
    return np.zeros(count, dtype=np.int64)


def normal(centre: float, sigma: float, count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(centre, sigma, count)


# Deviations


def test_a_deviation_is_in_robust_sigma() -> None:
    """Half of the reference lies 0.3 from the median; one wild sample among them counts for nothing."""
    reference = floats(*[2.7] * 10, *[3.0] * 3, *[3.3] * 10)
    z = deviations(floats(3.0, 3.0 + 1.4826 * 0.3 * 7, 2.0), zeros(3), reference, zeros(23))
    assert z == pytest.approx([0.0, 7.0, -1.0 / (1.4826 * 0.3)])
    wild = np.append(reference, 1e9)
    assert deviations(floats(6.0), zeros(1), wild, zeros(24)) == pytest.approx(3.0 / (1.4826 * 0.3))


def test_every_corpus_is_compared_with_its_own() -> None:
    """A loss of 3 is ordinary prose and absurd code; 1.2 the other way about is no deviation upwards."""
    prose, code = normal(3.0, 0.2, ENOUGH), normal(1.0, 0.1, ENOUGH, seed=1)
    reference = np.concatenate([prose, code])
    kinds = np.repeat([5, 2], ENOUGH)
    z = deviations(floats(3.0, 3.0, 1.2, 1.2), np.array([5, 2, 5, 2]), reference, kinds)
    assert guilty_by_loss(z, THRESHOLD).tolist() == [False, True, False, False]
    assert z[2] < -THRESHOLD


@pytest.mark.parametrize(("known", "guilty"), [(ENOUGH, True), (ENOUGH - 1, False), (0, False)])
def test_a_corpus_of_which_little_is_known_is_compared_with_all(known: int, guilty: bool) -> None:
    code = normal(1.0, 0.1, known, seed=1)
    reference = np.concatenate([normal(3.0, 0.2, 32), code])
    kinds = np.repeat([0, 1], [32, known])
    z = deviations(floats(3.0), np.array([1]), reference, kinds)
    assert guilty_by_loss(z, THRESHOLD).tolist() == [guilty]


def test_samples_of_the_reference_that_are_not_finite_do_not_count_as_known() -> None:
    """Of the corpus' own 20, five are broken: too few are left, so all are compared together."""
    own = normal(1.0, 0.1, 20, seed=1)
    own[:5] = [NAN, INF, NAN, INF, NAN]
    reference = np.concatenate([normal(3.0, 0.2, 32), own])
    z = deviations(floats(3.0), np.array([1]), reference, np.repeat([0, 1], [32, 20]))
    assert abs(z[0]) < 2


def test_a_scatter_of_nothing_is_not_believed() -> None:
    z = deviations(floats(2.0, 2.0 + SCALE_FLOOR), zeros(2), np.full(ENOUGH, 2.0), zeros(ENOUGH))
    assert z == pytest.approx([0.0, 1.0])


@pytest.mark.parametrize("known", [0, 3, ENOUGH])
def test_a_loss_that_is_not_finite_is_infinitely_far(known: int) -> None:
    z = deviations(floats(NAN, INF, -INF, 2.0), zeros(4), np.full(known, 2.0), zeros(known))
    assert z[:3].tolist() == [INF] * 3
    assert guilty_by_loss(z, THRESHOLD).tolist() == [True, True, True, False]
    assert z[3] == 0.0 if known else math.isnan(z[3])


@pytest.mark.parametrize("reference", [[], [NAN, INF]])
def test_with_nothing_to_compare_with_nobody_is_guilty(reference: list[float]) -> None:
    z = deviations(floats(2.0, 1e9), zeros(2), floats(*reference), zeros(len(reference)))
    assert np.isnan(z).all() and not guilty_by_loss(z, THRESHOLD).any()


def test_no_suspects() -> None:
    assert deviations(floats(), zeros(0), floats(1.0), zeros(1)).size == 0


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(0, 2)), min_size=1, max_size=20), st.integers(0, 99))
def test_deviations_do_not_depend_on_the_company(samples: list[tuple[float, int]], seed: int) -> None:
    losses, kinds = floats(*(loss for loss, _ in samples)), np.array([kind for _, kind in samples])
    reference = normal(3.0, 0.5, 60, seed)
    of = np.random.default_rng(seed).integers(0, 3, 60)
    together = deviations(losses, kinds, reference, of)
    alone = [deviations(losses[i : i + 1], kinds[i : i + 1], reference, of)[0] for i in range(len(samples))]
    assert together.tolist() == alone
    shuffle = np.random.default_rng(seed).permutation(60)
    assert np.allclose(deviations(losses, kinds, reference[shuffle], of[shuffle]), together)
    order = np.argsort(losses[kinds == 0], kind="stable")
    assert (np.diff(together[kinds == 0][order]) >= 0).all()


def test_the_threshold_itself_is_harmless() -> None:
    assert guilty_by_loss(floats(6.0, 6.001, -99.0, NAN, INF), 6.0).tolist() == [0, 1, 0, 0, 1]


# Gradients


def test_a_gradient_far_above_ordinary_ones_is_guilty() -> None:
    ordinary = floats(1.0, 2.0, 3.0)
    limit = 2.0 * GRADIENT_RATIO
    norms = floats(0.0, 2.0, limit, limit + 0.01, NAN, INF)
    assert guilty_by_gradient(norms, ordinary).tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("ordinary", [[], [NAN], [INF, NAN]])
def test_without_ordinary_gradients_only_broken_ones_are_guilty(ordinary: list[float]) -> None:
    assert guilty_by_gradient(floats(1e9, NAN), floats(*ordinary)).tolist() == [False, True]


def test_ordinary_gradients_that_are_not_finite_are_left_out() -> None:
    assert guilty_by_gradient(floats(3.0, 5.0), floats(1.0, INF, NAN)).tolist() == [False, True]


# A replay


@pytest.mark.parametrize(
    ("recorded", "again", "same"),
    [
        ([2.0, 3.0], [2.0, 3.0], True),
        ([2.0, 3.0], [2.0 * (1 + SAME / 2), 3.0], True),
        ([2.0, 3.0], [2.0, 3.0 * (1 + 2 * SAME)], False),
        ([2.0, 3.0], [3.0, 2.0], False),
        ([NAN, 3.0], [NAN, 3.0], True),
        ([INF, 3.0], [INF, 3.0], True),
        ([NAN, 3.0], [INF, 3.0], True),  # the same overflow, reported by another kernel
        ([-INF, 3.0], [INF, 3.0], True),
        ([NAN, 3.0], [2.0, 3.0], False),
        ([2.0, 3.0], [2.0, INF], False),
        ([NAN, 3.0], [NAN, 4.0], False),
        ([0.0], [0.0], True),
        ([], [], True),
    ],
)
def test_a_replay(recorded: list[float], again: list[float], same: bool) -> None:
    assert reproduced(floats(*recorded), floats(*again)) is same
    assert reproduced(floats(*again), floats(*recorded)) is same


# A state that is no good any more


def test_a_state_that_got_worse_is_told_from_one_that_only_moved() -> None:
    recorded = normal(3.0, 0.5, 64)
    moved = normal(0.0, 0.05, 64, seed=1)
    assert is_worse(recorded + 0.3 + moved, recorded) is True
    assert is_worse(recorded - 0.3 + moved, recorded) is False
    assert is_worse(recorded + moved, recorded) is False
    assert is_worse(recorded + WORSE, recorded + 1e-9) is False


def test_a_few_samples_that_got_worse_do_not_condemn_a_state() -> None:
    """... and neither does a median that may be luck: eight samples that scatter by 2 nats."""
    recorded = normal(3.0, 0.5, 64)
    changed = recorded - 0.01
    changed[:20] += 5.0
    assert is_worse(changed, recorded) is False
    assert is_worse(recorded[:8] + 0.5 + normal(0.0, 2.0, 8, seed=3), recorded[:8]) is False


def test_losses_that_are_not_finite() -> None:
    recorded = np.full(8, 3.0)
    half = recorded.copy()
    half[:4] = NAN
    assert is_worse(half, recorded) is False
    assert is_worse(half + 1.0, recorded) is True
    assert is_worse(np.full(8, NAN), recorded) is True
    assert is_worse(floats(), floats()) is False


# Conclusions


def suspects(*z: float) -> list[Suspect]:
    return [Suspect(100 + i, 3.0 + deviation / 10, deviation) for i, deviation in enumerate(z)]


def test_bad_samples_mean_bad_data() -> None:
    found = conclude(suspects(0.5, 30.0, -1.0, 50.0), [103, 101], recurred=False, compared_with=64)
    assert (found.cause, found.guilty) == (Cause.DATA, [101, 103])
    assert [s.position for s in found.suspects] == [103, 101, 100, 102]
    for part in ("2 of 4 samples", "loss of 8.00", "50 robust deviations", "64 harmless"):
        assert part in found.reason


def test_bad_data_is_bad_data_however_often_it_comes() -> None:
    assert conclude(suspects(30.0), [100], recurred=True, compared_with=64).cause is Cause.DATA


def test_guilt_by_gradient_is_told_with_its_gradient() -> None:
    suspect = Suspect(7, 3.0, 0.4, gradient_norm=123.4)
    found = conclude([Suspect(6, 3.1, 0.9, 1.5), suspect], [7], recurred=False, compared_with=64)
    assert found.cause is Cause.DATA and found.guilty == [7]
    assert "gradient norm of 123" in found.reason and "loss of 3.00" in found.reason


def test_the_worst_come_first_also_where_nothing_is_known_of_some() -> None:
    found = conclude(suspects(NAN, 2.0, INF, NAN, 5.0), [102], recurred=False, compared_with=0)
    assert [s.position for s in found.suspects] == [102, 104, 101, 100, 103]
    assert "inf robust deviations" in found.reason


@pytest.mark.parametrize(("recurred", "cause"), [(False, Cause.STATE), (True, Cause.LEARNING_RATE)])
def test_nobody_guilty(recurred: bool, cause: Cause) -> None:
    found = conclude(suspects(0.5, 1.0), [], recurred, compared_with=64)
    assert (found.cause, found.guilty) == (cause, [])
    assert [s.position for s in found.suspects] == [101, 100]
    assert ("came back with other data" if recurred else "all 2 samples are harmless") in found.reason


# Ranges


@given(st.sets(st.integers(0, 40)))
def test_ranges_are_the_inverse_of_their_expansion(positions: set[int]) -> None:
    found = ranges(sorted(positions))
    assert [p for first, end in found for p in range(first, end)] == sorted(positions)
    assert all(first < end for first, end in found)
    assert all(end < first for (_, end), (first, _) in pairwise(found))
