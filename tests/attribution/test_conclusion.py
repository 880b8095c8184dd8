"""Who is guilty: tables of losses and gradient norms in, conclusions out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.attribution.conclusion import (
    WORSE,
    Suspect,
    blame_samples,
    blame_state,
    is_worse,
)
from megastable.attribution.groups import ENOUGH, SCALE_FLOOR, TAIL_KNOWN, UsualLosses, bad_by_loss
from megastable.recovery.replays import SAME, Replay, Result, gone, replay, reproduced
from megastable_guard.actions import Cause
from megastable_guard.robust import Trend

NAN, INF = math.nan, math.inf
THRESHOLD = 6.0


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)


def zeros(count: int) -> np.ndarray:
    return np.zeros(count, dtype=np.int64)


def normal(centre: float, sigma: float, count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(centre, sigma, count)


def compare(
    losses: np.ndarray, corpora: np.ndarray, harmless: np.ndarray, of: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """z and p of losses, among harmless ones of these corpora."""
    return UsualLosses(harmless, of).compare(losses, corpora)


def judge(losses: np.ndarray, harmless: np.ndarray) -> np.ndarray:
    """Who is guilty, all being of one corpus."""
    z, p = compare(losses, zeros(losses.size), harmless, zeros(harmless.size))
    return bad_by_loss(z, p, THRESHOLD)


# With and without FP8

USUAL = (Trend(level=3.0, low=2.9, scale=0.1, noise=0.1, late=3.0), Trend(-1.0, -1.0, 0.2, 0.2, -0.9))


@pytest.mark.parametrize(
    ("with_fp8", "without", "expected"),
    [
        ((9.0, 2.0), (3.1, -0.9), True),
        ((9.0, 2.0), (9.0, 2.0), False),  # data, or the state
        ((9.0, 2.0), (8.0, 1.9), False),
        ((9.0, 2.0), (3.1, 1.9), False),  # the loss alone is not all of it
        ((3.1, 4.0), (3.1, -0.8), True),  # what does not stand out need not shrink
        ((9.0, -1.0), (3.0, -0.5), True),
        ((9.0, -1.0), (3.0, 0.0), False),  # it is not harmless without FP8: only in another way
        ((3.05, -0.9), (3.0, -1.0), False),  # nothing was to be seen
        ((3.29, -0.9), (2.0, -1.0), False),
        ((3.4, -0.9), (3.19, -0.9), True),
        ((3.4, -0.9), (3.21, -0.9), False),
        ((NAN, INF), (3.5, 0.1), True),
        ((3.0, INF), (3.0, -1.0), True),
        ((3.0, INF), (3.0, INF), False),
        ((9.0, 2.0), (3.0, NAN), False),
        ((INF, -1.0), (NAN, -1.0), False),
    ],
)
def test_trouble_that_is_gone_without_fp8(
    with_fp8: tuple[float, float], without: tuple[float, float], expected: bool
) -> None:
    assert gone(with_fp8, without, USUAL) is expected
    # Where nothing is known yet only what is not finite can be gone.
    assert gone(with_fp8, without, (None, None)) is (expected and not all(map(math.isfinite, with_fp8)))


@pytest.mark.parametrize("with_fp8", [(NAN, INF), (3.0, INF), (INF, -1.0)])
@pytest.mark.parametrize("without", [(9.0, -1.0), (3.0, 2.0)])
def test_bad_data_that_overflows_only_in_fp8_is_bad_data(
    with_fp8: tuple[float, float], without: tuple[float, float]
) -> None:
    assert not gone(with_fp8, without, USUAL)


@given(*(st.tuples(st.floats(), st.floats()) for _ in range(2)))
def test_no_numbers_break_the_comparison_and_equal_ones_are_not_gone(
    one: tuple[float, float], other: tuple[float, float]
) -> None:
    assert gone(one, one, USUAL) is False
    if gone(one, other, USUAL):
        assert all(map(math.isfinite, other)) and not gone(other, one, USUAL)


# How far out a loss is


def test_where_most_are_out_together_none_must_be_as_far_by_itself() -> None:
    """A region of foreign text lies 5 sigma out, all of it; a few such samples among ordinary ones are no region."""
    harmless, foreign = normal(3.0, 0.1, 512), normal(3.5, 0.02, 32, seed=1)
    assert judge(foreign, harmless).all()
    few = np.concatenate([foreign[:8], normal(3.0, 0.1, 56, seed=2)])
    assert not judge(few, harmless).any()
    assert not judge(normal(3.35, 0.02, 32, seed=1), harmless).any()  # a harder text, not another one


def test_a_deviation_is_in_robust_sigma() -> None:
    """Half of the harmless lies 0.3 from the median; one wild sample among them counts for nothing."""
    harmless = np.tile([2.7, 3.0, 3.3, 2.7, 3.3, 3.0, 2.7, 3.3], 8)
    sigma = 1.4826 * 0.3
    for known in (harmless, np.append(harmless, 1e9), np.append(harmless, [NAN, INF])):
        z, _ = compare(floats(3.0, 3.0 + sigma * 7, 2.0), zeros(3), known, zeros(known.size))
        assert z == pytest.approx([0.0, 7.0, -1.0 / sigma])


def test_a_sample_is_compared_with_the_end_of_a_falling_loss() -> None:
    """From 6 to 3 nats within the samples that are known: 3 is ordinary, and 6 is not any more."""
    harmless = np.linspace(6.0, 3.0, 240) + normal(0.0, 0.1, 240)
    z, _ = compare(floats(3.0, 6.0), zeros(2), harmless, zeros(240))
    assert abs(z[0]) < 3 and z[1] > 20


def test_every_corpus_is_compared_with_its_own() -> None:
    """A loss of 3 is ordinary prose and absurd code; 1.2 the other way about is no deviation upwards."""
    prose, code = normal(3.0, 0.2, 200), normal(1.0, 0.1, 200, seed=1)
    harmless, kinds = np.concatenate([prose, code]), np.repeat([5, 2], 200)
    z, p = compare(floats(3.0, 3.0, 1.2, 1.2), np.array([5, 2, 5, 2]), harmless, kinds)
    assert bad_by_loss(z, p, THRESHOLD).tolist() == [False, True, False, False]
    assert z[2] < -THRESHOLD


@pytest.mark.parametrize("known", [0, 3, ENOUGH - 1, ENOUGH])
def test_of_a_corpus_of_which_little_is_known_nothing_is_said(known: int) -> None:
    """... as another corpus is no measure of it; but for losses that are no numbers."""
    harmless = np.concatenate([normal(1.0, 0.1, 300), normal(3.0, 0.2, known, seed=1)])
    z, p = compare(floats(3.0, NAN), np.array([1, 1]), harmless, np.repeat([0, 1], [300, known]))
    assert math.isnan(z[0]) == (known < ENOUGH)
    assert bad_by_loss(z, p, THRESHOLD).tolist() == [False, True]


def test_the_tail_of_a_small_corpus_is_that_of_all() -> None:
    """Of 60 samples the worst says little of how far out harmless ones can be."""
    kinds = np.repeat([0, 1], [1000, 60])
    harmless = np.where(kinds == 0, 1.0, 3.0) + 0.1 * np.random.default_rng(0).standard_t(3, kinds.size)
    alone = np.array([1])
    _, p = compare(floats(3.0 + 5.0), alone, harmless, kinds)
    _, own = compare(floats(3.0 + 5.0), alone, harmless[kinds == 1], kinds[kinds == 1])
    assert p[0] < 0.005 < 0.03 < own[0]


def test_a_scatter_of_nothing_is_not_believed() -> None:
    z, _ = compare(floats(2.0, 2.0 + SCALE_FLOOR), zeros(2), np.full(ENOUGH, 2.0), zeros(ENOUGH))
    assert z == pytest.approx([0.0, 1.0])


@pytest.mark.parametrize("known", [0, 3, ENOUGH, TAIL_KNOWN])
def test_a_loss_that_is_not_finite_is_infinitely_far(known: int) -> None:
    z, p = compare(floats(NAN, INF, -INF, 2.0), zeros(4), np.full(known, 2.0), zeros(known))
    assert z[:3].tolist() == [INF] * 3 and p[:3].tolist() == [0.0] * 3
    assert bad_by_loss(z, p, THRESHOLD).tolist() == [True, True, True, False]


def test_no_suspects() -> None:
    assert judge(floats(), normal(3.0, 0.1, 100)).size == 0


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(0, 2)), min_size=1, max_size=20), st.integers(0, 99))
def test_how_far_out_a_sample_is_does_not_depend_on_the_company(
    samples: list[tuple[float, int]], seed: int
) -> None:
    losses, kinds = floats(*(loss for loss, _ in samples)), np.array([kind for _, kind in samples])
    harmless, of = normal(3.0, 0.5, 400, seed), np.random.default_rng(seed).integers(0, 3, 400)
    z, p = compare(losses, kinds, harmless, of)
    alone = [compare(losses[i : i + 1], kinds[i : i + 1], harmless, of) for i in range(len(samples))]
    assert z.tolist() == [one[0] for one, _ in alone] and p.tolist() == [one[0] for _, one in alone]
    order = np.argsort(losses[kinds == 0], kind="stable")
    assert (np.diff(z[kinds == 0][order]) >= 0).all() and (np.diff(p[kinds == 0][order]) <= 0).all()
    assert ((p > 0) & (p <= 1)).all()


# Who is guilty: what is known of the samples of 160 steps or fewer, and the suspects of a few


def heavy(random: np.random.Generator, count: int) -> np.ndarray:
    return 2.6 + 0.3 * random.standard_t(4, count)


def with_others(random: np.random.Generator, count: int) -> np.ndarray:
    """Two of a hundred samples are of quite another kind of text."""
    return np.where(random.random(count) < 0.02, random.normal(6.0, 0.5, count), heavy(random, count))


@pytest.mark.quick("16-160-*")
@pytest.mark.parametrize("text", [heavy, with_others])
@pytest.mark.parametrize(
    ("batch", "known", "suspect", "rounds"),
    [(8, 24, 3, 300), (16, 160, 3, 300), (16, 160, 16, 300), (512, 160, 3, 60), (2048, 30, 3, 40)],
)
def test_harmless_samples_are_rarely_guilty_however_many_and_however_heavy_their_tails(
    text: Callable[..., np.ndarray], batch: int, known: int, suspect: int, rounds: int
) -> None:
    """At most one time in twenty is anybody; three standard errors are left to chance."""
    found = 0
    for seed in range(rounds):
        random = np.random.default_rng(seed)
        harmless = text(random, batch * known)
        found += int(judge(text(random, batch * suspect), harmless).any())
    assert found / rounds <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / rounds) * (rounds < 100)


@pytest.mark.parametrize("steps", [3, 24, 160])
def test_a_small_corpus_is_not_guilty_of_being_another(steps: int) -> None:
    """Nine of ten samples are of a corpus with a loss of 1.6, the others of one with 2.6."""
    found = 0
    for seed in range(100):
        random = np.random.default_rng(seed)
        of, kinds = random.random(16 * steps) < 0.1, random.random(16 * 3) < 0.1
        harmless, losses = (1.6 + k + 0.15 * random.standard_t(4, k.size) for k in (of, kinds))
        z, p = compare(losses, kinds.astype(np.int64), harmless, of.astype(np.int64))
        found += int(bad_by_loss(z, p, THRESHOLD).any())
    assert found <= 5


@pytest.mark.parametrize(("batch", "known"), [(8, 24), (8, 160), (512, 16), (512, 160)])
@pytest.mark.parametrize("share", [0.25, 1.0])
def test_bad_samples_are_found_exactly(batch: int, known: int, share: float) -> None:
    """Noise, by 8 nats, in a quarter of each of three batches, or in all; and nobody else but one in fifty."""
    missed = innocent = total = 0
    for seed in range(20):
        random = np.random.default_rng(seed)
        harmless, losses = heavy(random, batch * known), heavy(random, batch * 3)
        bad = np.arange(losses.size) % round(1 / share) == 0
        losses[bad] += 8.0
        guilty = judge(losses, harmless)
        missed, innocent = missed + (bad & ~guilty).sum(), innocent + (guilty & ~bad).sum()
        total += bad.sum()
    assert missed <= 0.01 * total and innocent <= 0.02 * total


def test_what_some_harmless_samples_are_like_is_guilty_only_as_a_crowd() -> None:
    """Text that is 2 % of everything and a quarter of these batches explains them; three samples do not."""
    random = np.random.default_rng(0)
    harmless, losses = with_others(random, 64 * 160), heavy(random, 64 * 3)
    few, many = losses.copy(), losses.copy()
    few[:3], many[::4] = 6.0, 6.0
    assert not judge(few, harmless).any()
    assert judge(many, harmless)[::4].all() and judge(many, harmless).sum() <= 50


def test_one_sample_far_beyond_all_is_guilty_alone() -> None:
    losses = normal(3.0, 0.3, 24, seed=1)
    losses[5] = 12.0
    assert judge(losses, normal(3.0, 0.3, 200)).nonzero()[0].tolist() == [5]


def test_bad_samples_that_passed_as_harmless_do_not_hide_the_others() -> None:
    harmless, losses = normal(3.0, 0.3, 480), normal(3.0, 0.3, 24, seed=1)
    harmless[-6:], losses[4:] = 8.0, 8.0
    assert judge(losses, harmless).nonzero()[0].tolist() == list(range(4, 24))


def test_what_is_not_far_out_is_harmless_however_many() -> None:
    losses = normal(3.0, 0.3, 64, seed=1) + 1.0
    assert not judge(losses, normal(3.0, 0.3, 2000)).any()


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
def test_the_same_losses(recorded: list[float], again: list[float], same: bool) -> None:
    assert reproduced(floats(*recorded), floats(*again)) is same
    assert reproduced(floats(*again), floats(*recorded)) is same


STEP, OTHER_STEP, THIRD = ([2.0, 3.0], 1.0), ([2.0, 3.1], 1.0), ([2.0, 3.0], 1.2)


@pytest.mark.parametrize(
    ("again", "once_more", "told"),
    [
        (([2.001, 3.0], 1.04), None, Replay.SAME),  # a GPU's sums in another order: not even asked again
        (OTHER_STEP, OTHER_STEP, Replay.OTHER),
        (THIRD, THIRD, Replay.OTHER),
        (OTHER_STEP, STEP, Replay.UNSTEADY),
        (OTHER_STEP, THIRD, Replay.UNSTEADY),
        (([2.0, NAN], INF), STEP, Replay.UNSTEADY),
        (([2.0, 3.0], NAN), ([2.0, 3.0], NAN), Replay.OTHER),  # as losses: NaN again is the same
        (([2.0, 3.0], NAN), ([2.0, 3.0], INF), Replay.OTHER),
    ],
)
def test_a_replay(again: Any, once_more: Any, told: Replay) -> None:
    """Hardware is what two replays agree on and the step does not; one that differs alone proves nothing."""

    def result(given: Any) -> Result:
        assert given is not None
        return Result(floats(*given[0]), given[1])

    assert replay(result(STEP), result(again), lambda: result(once_more)) is told


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
    found = blame_samples(suspects(0.5, 30.0, -1.0, 50.0), [103, 101], compared_with=64)
    assert (found.cause, found.guilty) == (Cause.DATA, [101, 103])
    assert [s.position for s in found.suspects] == [103, 101, 100, 102]
    for part in ("2 of 4 samples", "loss of 8.00", "50 robust deviations", "64 harmless"):
        assert part in found.reason


def test_a_bad_sample_is_told_with_its_gradient() -> None:
    suspect = Suspect(7, 3.0, 0.4, gradient_norm=123.4)
    found = blame_samples([Suspect(6, 3.1, 0.9, 1.5), suspect], [7], compared_with=64)
    assert found.cause is Cause.DATA and found.guilty == [7]
    assert "gradient norm of 123" in found.reason and "loss of 3.00" in found.reason


def test_the_worst_come_first_also_where_nothing_is_known_of_some() -> None:
    found = blame_samples(suspects(NAN, 2.0, INF, NAN, 5.0), [102], compared_with=0)
    assert [s.position for s in found.suspects] == [102, 104, 101, 100, 103]
    assert "inf robust deviations" in found.reason


def test_nobody_guilty() -> None:
    steps = "the first 16 of 40 steps since the onset"
    found = blame_state(suspects(0.5, 1.0), steps)
    assert (found.cause, found.guilty) == (Cause.STATE, [])
    assert [s.position for s in found.suspects] == [101, 100]
    assert f"none of the 2 samples of {steps} is bad" in found.reason and "too few" not in found.reason


def test_what_goes_on_without_an_end_is_the_state_and_the_reason_says_so() -> None:
    found = blame_state(suspects(9.0, 8.0), "the 2 steps", endless=120)
    assert (found.cause, found.guilty, found.region) == (Cause.STATE, [], None)
    assert "none of" not in found.reason and "the next 120 steps" in found.reason


def test_it_is_said_of_how_many_nothing_is_known() -> None:
    found = blame_state(suspects(0.5, NAN, NAN), "the 1 steps")
    assert "2 of them cannot be judged: too few earlier samples" in found.reason
