"""Which samples are bad by the loss, whether a state got worse, and what a replay proves: on tables of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.recovery.replays import (
    SAME,
    Replay,
    Result,
    are_losses_alike,
    compare_with_replays,
    has_trouble_vanished,
)
from megastable_guard.actions import Cause
from megastable_guard.conclusion import WORSE, Suspect, blame_samples, blame_state, is_worse
from megastable_guard.robust import Trend
from megastable_guard.scores import ENOUGH, TAIL_KNOWN, UsualLosses, bad_by_loss

NAN, INF, THRESHOLD = math.nan, math.inf, 6.0


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)


def normal(centre: float, sigma: float, count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(centre, sigma, count)


def compare(
    losses: np.ndarray, harmless: np.ndarray, kinds: Any = None, of: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """z and p of losses, among harmless ones; corpora of both, None: all are of one."""
    kinds, of = (np.zeros(x.size, np.int64) if k is None else k for x, k in ((losses, kinds), (harmless, of)))
    return UsualLosses(harmless, of).compare_losses(losses, kinds)


def judge(losses: np.ndarray, harmless: np.ndarray) -> np.ndarray:
    """Which samples are bad, all being of one corpus."""
    return bad_by_loss(*compare(losses, harmless), THRESHOLD)


# How far out a loss is


def test_compare_is_in_robust_sigma_of_the_end_of_a_falling_loss() -> None:
    """Half of the harmless lies 0.3 from the median; one wild sample among them counts for nothing."""
    harmless, sigma = np.tile([2.7, 3.0, 3.3, 2.7, 3.3, 3.0, 2.7, 3.3], 8), 1.4826 * 0.3
    for known in (harmless, np.append(harmless, 1e9), np.append(harmless, [NAN, INF])):
        z, _ = compare(floats(3.0, 3.0 + sigma * 7, 2.0), known)
        assert z == pytest.approx([0.0, 7.0, -1.0 / sigma])
    # From 6 to 3 nats within the samples that are known: 3 is ordinary, and 6 is not any more.
    z, _ = compare(floats(3.0, 6.0), np.linspace(6.0, 3.0, 240) + normal(0.0, 0.1, 240))
    assert abs(z[0]) < 3 and z[1] > 20


def test_compare_takes_every_corpus_with_its_own() -> None:
    """A loss of 3 is ordinary prose and absurd code; 1.2 the other way about is no deviation upwards."""
    prose, code = normal(3.0, 0.2, 200), normal(1.0, 0.1, 200, seed=1)
    harmless, kinds = np.concatenate([prose, code]), np.repeat([5, 2], 200)
    z, p = compare(floats(3.0, 3.0, 1.2, 1.2), harmless, np.array([5, 2, 5, 2]), kinds)
    assert bad_by_loss(z, p, THRESHOLD).tolist() == [False, True, False, False]
    assert z[2] < -THRESHOLD
    # Of 60 samples the worst says little of how far out harmless ones can be: the tail is that of all corpora.
    kinds = np.repeat([0, 1], [1000, 60])
    harmless = np.where(kinds == 0, 1.0, 3.0) + 0.1 * np.random.default_rng(0).standard_t(3, kinds.size)
    _, p = compare(floats(3.5), harmless, np.array([1]), kinds)
    _, own = compare(floats(3.5), harmless[kinds == 1], np.array([1]), kinds[kinds == 1])
    assert p[0] < 0.02 < own[0]


@pytest.mark.parametrize("known", [0, 3, ENOUGH - 1, ENOUGH, TAIL_KNOWN])
def test_compare_says_nothing_of_a_corpus_of_which_little_is_known(known: int) -> None:
    """... as another corpus is no measure of it; but for losses that are no numbers."""
    harmless = np.concatenate([normal(1.0, 0.1, 300), normal(3.0, 0.2, known, seed=1)])
    z, p = compare(
        floats(3.0, NAN, INF, -INF), harmless, np.ones(4, np.int64), np.repeat([0, 1], [300, known])
    )
    assert math.isnan(z[0]) == (known < ENOUGH) and p[1:].tolist() == [0.0] * 3
    assert bad_by_loss(z, p, THRESHOLD).tolist() == [False, True, True, True]


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(0, 2)), min_size=1, max_size=20), st.integers(0, 99))
def test_compare_does_not_depend_on_the_company(samples: list[tuple[float, int]], seed: int) -> None:
    losses, kinds = floats(*(loss for loss, _ in samples)), np.array([kind for _, kind in samples])
    harmless, of = normal(3.0, 0.5, 400, seed), np.random.default_rng(seed).integers(0, 3, 400)
    z, p = compare(losses, harmless, kinds, of)
    alone = [compare(losses[i : i + 1], harmless, kinds[i : i + 1], of) for i in range(len(samples))]
    assert z.tolist() == [one[0] for one, _ in alone] and p.tolist() == [one[0] for _, one in alone]
    order = np.argsort(losses[kinds == 0], kind="stable")
    assert (np.diff(z[kinds == 0][order]) >= 0).all() and (np.diff(p[kinds == 0][order]) <= 0).all()
    assert ((p > 0) & (p <= 1)).all()


# Which samples are bad: what is known of the samples of 160 steps or fewer, and the suspects of a few


def heavy(random: np.random.Generator, count: int) -> np.ndarray:
    return 2.6 + 0.3 * random.standard_t(4, count)


def with_others(random: np.random.Generator, count: int) -> np.ndarray:
    """Two of a hundred samples are of quite another kind of text."""
    return np.where(random.random(count) < 0.02, random.normal(6.0, 0.5, count), heavy(random, count))


@pytest.mark.quick("16-160-*")
@pytest.mark.parametrize("text", [heavy, with_others])
@pytest.mark.parametrize(
    ("batch", "known", "suspect", "rounds"), [(8, 24, 3, 300), (16, 160, 3, 300), (512, 160, 3, 60)]
)
def test_bad_by_loss_rarely_names_harmless_samples_however_many_and_however_heavy_their_tails(
    text: Callable[..., np.ndarray], batch: int, known: int, suspect: int, rounds: int
) -> None:
    """At most one time in twenty is anybody; three standard errors are left to chance."""
    found = 0
    for seed in range(rounds):
        random = np.random.default_rng(seed)
        harmless = text(random, batch * known)
        found += int(judge(text(random, batch * suspect), harmless).any())
    assert found / rounds <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / rounds) * (rounds < 100)


@pytest.mark.parametrize(("batch", "known"), [(8, 24), (512, 160)])
@pytest.mark.parametrize("share", [0.25, 1.0])
def test_bad_by_loss_finds_bad_samples_exactly(batch: int, known: int, share: float) -> None:
    """Noise, by 8 nats, in a quarter of each of three batches, or in all; and nobody else but one in fifty."""
    missed = wrong = total = 0
    for seed in range(20):
        random = np.random.default_rng(seed)
        harmless, losses = heavy(random, batch * known), heavy(random, batch * 3)
        bad = np.arange(losses.size) % round(1 / share) == 0
        losses[bad] += 8.0
        found_bad = judge(losses, harmless)
        missed, wrong = missed + (bad & ~found_bad).sum(), wrong + (found_bad & ~bad).sum()
        total += bad.sum()
    assert missed <= 0.01 * total and wrong <= 0.02 * total


def test_bad_by_loss_tells_a_crowd_from_a_few() -> None:
    """A region of foreign text lies 5 sigma out, all of it; a few such samples among ordinary ones are no region."""
    harmless, foreign = normal(3.0, 0.1, 512), normal(3.5, 0.02, 32, seed=1)
    assert judge(foreign, harmless).all()
    assert not judge(np.concatenate([foreign[:8], normal(3.0, 0.1, 56, seed=2)]), harmless).any()
    assert not judge(normal(3.35, 0.02, 32, seed=1), harmless).any()  # a harder text, not another one
    # Text that is 2 % of everything and a quarter of these batches explains them; three samples do not.
    random = np.random.default_rng(0)
    harmless, losses = with_others(random, 64 * 160), heavy(random, 64 * 3)
    few, many = losses.copy(), losses.copy()
    few[:3], many[::4] = 6.0, 6.0
    assert not judge(few, harmless).any()
    assert judge(many, harmless)[::4].all() and judge(many, harmless).sum() <= 50


def test_bad_samples_that_passed_as_harmless_do_not_hide_the_others() -> None:
    harmless, losses = normal(3.0, 0.3, 480), normal(3.0, 0.3, 24, seed=1)
    harmless[-6:], losses[4:] = 8.0, 8.0
    assert judge(losses, harmless).nonzero()[0].tolist() == list(range(4, 24))


# A state that is no good any more


def test_is_worse_tells_a_state_that_got_worse_from_one_that_only_moved() -> None:
    recorded, moved = normal(3.0, 0.5, 64), normal(0.0, 0.05, 64, seed=1)
    few, half = recorded - 0.01, np.full(8, 3.0)
    few[:20] += 5.0
    half[:4] = NAN
    eight = (
        recorded[:8] + 0.5 + normal(0.0, 2.0, 8, seed=3)
    )  # that scatter by 2 nats: their median may be luck
    for now, before, worse in (
        (recorded + 0.3 + moved, recorded, True),
        (recorded - 0.3 + moved, recorded, False),
        (recorded + WORSE, recorded + 1e-9, False),
        (few, recorded, False),
        (eight, recorded[:8], False),
        (half, np.full(8, 3.0), False),
        (half + 1.0, np.full(8, 3.0), True),
        (np.full(8, NAN), np.full(8, 3.0), True),
        (floats(), floats(), False),
    ):
        assert is_worse(now, before) is worse


# Conclusions


def test_blame_puts_the_worst_first_and_tells_what_it_is_compared_with() -> None:
    suspects = [Suspect(100 + i, 3.0 + z / 10, z) for i, z in enumerate((NAN, 2.0, 50.0, NAN, 30.0))]
    found = blame_samples(suspects, [104, 102], compared_with=64)
    assert (found.cause, found.bad) == (Cause.DATA, [102, 104])
    assert [s.position for s in found.suspects] == [102, 104, 101, 100, 103]
    for part in ("2 of 5 samples", "loss of 8.00", "50 robust deviations", "64 harmless"):
        assert part in found.reason
    nobody, endless = blame_state(suspects, "the 2 steps"), blame_state(suspects, "the 2 steps", endless=120)
    assert (nobody.cause, nobody.bad, endless.cause, endless.bad) == (Cause.STATE, [], Cause.STATE, [])
    assert "2 of them cannot be judged" in nobody.reason and "the next 120 steps" in endless.reason


# Replays

USUAL = (Trend(level=3.0, low=2.9, scale=0.1, noise=0.1, late=3.0), Trend(-1.0, -1.0, 0.2, 0.2, -0.9))


@pytest.mark.parametrize(
    ("with_fp8", "without", "expected"),
    [
        ((9.0, 2.0), (3.1, -0.9), True),
        ((9.0, 2.0), (9.0, 2.0), False),  # data, or the state
        ((9.0, 2.0), (3.1, 1.9), False),  # the loss alone is not all of it
        ((3.1, 4.0), (3.1, -0.8), True),  # what does not stand out need not shrink
        ((9.0, -1.0), (3.0, -0.5), True),
        ((9.0, -1.0), (3.0, 0.0), False),  # it is not harmless without FP8: only in another way
        ((3.05, -0.9), (3.0, -1.0), False),  # nothing was to be seen
        ((3.4, -0.9), (3.19, -0.9), True),
        ((3.4, -0.9), (3.21, -0.9), False),
        ((NAN, INF), (3.5, 0.1), True),
        ((NAN, INF), (9.0, -1.0), False),  # bad data that overflows only in FP8 is bad data
        ((INF, -1.0), (NAN, -1.0), False),
    ],
)
def test_gone_tells_trouble_that_vanishes_without_fp8(
    with_fp8: tuple[float, float], without: tuple[float, float], expected: bool
) -> None:
    assert has_trouble_vanished(with_fp8, without, USUAL) is expected
    # Where nothing is known yet only what is not finite can be gone.
    vanishes = not all(map(math.isfinite, with_fp8)) and all(map(math.isfinite, without))
    assert has_trouble_vanished(with_fp8, without, (None, None)) is vanishes


@pytest.mark.parametrize(
    ("recorded", "again", "same"),
    [
        ([2.0, 3.0], [2.0 * (1 + SAME / 2), 3.0], True),
        ([2.0, 3.0], [2.0, 3.0 * (1 + 2 * SAME)], False),
        ([2.0, 3.0], [3.0, 2.0], False),
        ([NAN, 3.0], [INF, 3.0], True),  # the same overflow, reported by another kernel
        ([2.0, 3.0], [2.0, INF], False),
        ([], [], True),
    ],
)
def test_reproduced_is_within_a_tolerance(recorded: list[float], again: list[float], same: bool) -> None:
    assert are_losses_alike(floats(*recorded), floats(*again)) is same
    assert are_losses_alike(floats(*again), floats(*recorded)) is same


STEP, OTHER_STEP, THIRD = ([2.0, 3.0], 1.0), ([2.0, 3.1], 1.0), ([2.0, 3.0], 1.2)


@pytest.mark.parametrize(
    ("again", "once_more", "told"),
    [
        (([2.001, 3.0], 1.04), None, Replay.SAME),  # a GPU's sums in another order: not even asked again
        (OTHER_STEP, OTHER_STEP, Replay.OTHER),
        (OTHER_STEP, STEP, Replay.UNSTEADY),
        (OTHER_STEP, THIRD, Replay.UNSTEADY),
        (([2.0, NAN], INF), STEP, Replay.UNSTEADY),
        (([2.0, 3.0], NAN), ([2.0, 3.0], INF), Replay.OTHER),
    ],
)
def test_replay_blames_hardware_for_what_two_replays_agree_on_and_the_step_does_not(
    again: Any, once_more: Any, told: Replay
) -> None:
    def result(given: Any) -> Result:
        assert given is not None
        return Result(floats(*given[0]), given[1])

    assert compare_with_replays(result(STEP), result(again), lambda: result(once_more)) is told
