"""A search for the bad samples on made-up samples, without a model: a bad region to its ends, at what price."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.attribution import sample_replay
from megastable.attribution.examination import CLEAN, FARTHEST, Examination, most_strays
from megastable.attribution.sample_replay import Known, Trained
from megastable.config.stability import AttributionConfig
from megastable.data.order import LAST_POSITION
from megastable.data.skips import Skips
from megastable_guard import scores
from megastable_guard.actions import Cause
from megastable_guard.conclusion import Conclusion
from megastable_guard.scores import STRAY

Int64s = npt.NDArray[np.int64]

BATCH, LENGTH, WORDS = 16, 64, 400
STEPS = 70  # of harmless samples before the window
FIRST = STEPS * BATCH


class Laboratory:
    """Stands for the real one. bad: the region's positions; alike: whether their tokens are others than those of
    harmless samples; out: how far their losses lie above them, in deviations."""

    def __init__(self, bad: Int64s, alike: bool = True, out: float = 4.0, seed: int = 0) -> None:
        self.config, self.batch, self.forwards = AttributionConfig(), BATCH, 0
        self.selection = Skips.from_ranges([])
        random, end = np.random.default_rng(seed), int(bad.max()) + (1 << 10) * BATCH
        self.bad = np.zeros(end, dtype=bool)
        self.bad[bad] = True
        self.alike, self._losses = alike, 3 + 0.3 * (random.standard_normal(end) + out * self.bad)

    def measure_losses(self, positions: Int64s) -> Any:
        self.forwards += math.ceil(positions.size / BATCH)
        return self._losses[positions]

    def read_tokens(self, positions: Int64s) -> Int64s:
        random = np.random.default_rng(int(positions.sum()))
        text = random.integers(WORDS, size=(positions.size, LENGTH + 1))
        other = self.bad[positions] & self.alike
        return np.where(other[:, None], WORDS + text // 4, text)

    def find_corpora(self, positions: Int64s) -> Int64s:
        return np.zeros(positions.shape, np.int64)

    prepare_samples = sample_replay.Laboratory.prepare_samples

    def find_harmless(self, history: list[Trained], *_: Any) -> Known:
        positions = np.concatenate([t.positions for t in history])
        return Known(positions, self._losses[positions], self.find_corpora(positions))

    def find_extraordinary(self, *_: Any) -> None:
        return None

    def measure_gradient_norm(self, positions: Int64s) -> float:
        return 1.0

    def concluded(self, steps: int = 2) -> Conclusion:
        every = np.arange((STEPS + steps) * BATCH).reshape(-1, BATCH)
        trained = [Trained(n + 1, at, self._losses[at], True) for n, at in enumerate(every)]
        lab: Any = self
        examination = Examination(
            lab, trained[STEPS:], trained[:STEPS], FIRST, self.selection, adjacent=False
        )
        self.forwards = 0
        return examination.reach_conclusion()


def judged(laboratory: Laboratory, found: Conclusion) -> tuple[int, int]:
    """Bad samples that were not found bad, and harmless ones that were."""
    found_bad = np.zeros_like(laboratory.bad)
    found_bad[found.bad_positions] = True
    return int((laboratory.bad & ~found_bad).sum()), int((found_bad & ~laboratory.bad).sum())


@pytest.mark.quick("480")
@pytest.mark.parametrize("count", [20, 29, 480, 1700])
def test_a_region_is_followed_batch_by_batch_to_its_last_sample(count: int) -> None:
    """Some inside it look less bad than all of the window."""
    laboratory = Laboratory(FIRST + 4 + np.arange(count), out=6.0)
    found = laboratory.concluded()
    missed, wrong_count = judged(laboratory, found)
    assert found.cause is Cause.DATA and missed <= 0.06 * count and not wrong_count
    assert found.region is not None
    assert (found.region.first, found.region.end) == (FIRST + 4, FIRST + 4 + count)
    reach = max(
        0, -(-(count + 4) // BATCH) - 2 - (count == 29)
    )  # one sample in a batch is no part of a region
    assert laboratory.forwards == reach + CLEAN == len(found.region.probes)
    assert found.region.steps == round(laboratory.forwards / 3, 1)
    assert (f"goes on for {reach} batches" if reach else "nothing is bad beyond") in found.region.how
    assert found.region.how in found.reason.replace("It goes", "it goes").replace("Nothing", "nothing")


@pytest.mark.parametrize(("steps", "looked"), [(40, 120), (10, 30), (1000, FARTHEST)])
def test_what_goes_on_beyond_the_budget_makes_nobody_bad(steps: int, looked: int) -> None:
    laboratory = Laboratory(FIRST + 4 + np.arange(500 * BATCH), out=6.0)
    laboratory.config = AttributionConfig(region=steps)
    found = laboratory.concluded()
    assert found.cause is Cause.STATE and not found.bad_positions and found.region is None
    assert laboratory.forwards == looked and f"the next {looked} steps" in found.reason


@pytest.mark.parametrize("clean", [0, 2, 3])
def test_where_the_data_ends_before_the_region_nobody_is_bad(clean: int) -> None:
    """All that is left is skipped."""
    laboratory = Laboratory(FIRST + np.arange(5 * BATCH), out=6.0)
    laboratory.selection = Skips.from_ranges([(FIRST + (5 + clean) * BATCH, LAST_POSITION)])
    found = laboratory.concluded()
    assert (found.cause is Cause.DATA) == (clean == CLEAN)
    missed, wrong_count = judged(laboratory, found)
    assert (missed <= 3 if clean == CLEAN else missed == 5 * BATCH) and not wrong_count


def test_strays_in_clean_batches_do_not_prolong_a_region_and_clean_batches_inside_do_not_end_it() -> None:
    inside = FIRST + np.arange(10 * BATCH)
    inside = inside[~np.isin((inside - FIRST) // BATCH, (4, 5, 8))]
    strays = FIRST + BATCH * np.array([10, 11, 12, 13]) + 7  # a single sample in each batch beyond
    laboratory = Laboratory(np.append(inside, strays), out=8.0)
    found = laboratory.concluded()
    assert found.region is not None and [bad for *_, bad in found.region.probes][-CLEAN:] == [1, 1, 1]
    assert len(found.region.probes) == 8 + CLEAN
    assert found.region.end == strays[0] + 1, "the first one may be the region's last"
    assert set(found.bad_positions) <= {*inside.tolist(), int(strays[0])} and len(found.bad_positions) >= 105


def test_who_is_bad_by_itself_is_told_from_one_of_a_crowd() -> None:
    """Two far out, then twenty that are a little out and use other words."""
    far, near = FIRST + np.array([0, 2]), FIRST + 4 + np.arange(20)
    laboratory = Laboratory(np.concatenate([far, near]), out=2.5)
    laboratory._losses[far] = 9.0
    found = laboratory.concluded()
    assert found.alone == far.tolist() and {*far.tolist()} < {*found.bad}
    laboratory._losses[far] = 3.0
    found = laboratory.concluded()
    assert found.alone == [] and len(found.bad) >= 6


@pytest.mark.parametrize("seed", range(3))
def test_what_all_samples_share_makes_nobody_bad(seed: int) -> None:
    """One of 16 is far out, and the state puts all samples one deviation above what was recorded."""
    places = np.random.default_rng(seed)
    bad = FIRST + np.arange(8) * BATCH + places.integers(BATCH, size=8)
    laboratory = Laboratory(bad, alike=False, out=10.0, seed=seed)
    laboratory._losses[FIRST:] += 0.3
    found = laboratory.concluded(steps=8)
    assert found.cause is Cause.DATA and judged(laboratory, found) == (0, 0)


@given(
    st.lists(st.floats(-5, 5), min_size=1, max_size=80),
    st.integers(0, 80),
    st.floats(0.5, 3),
    st.integers(0, 60),
)
def test_a_shared_shift_is_that_of_the_many(
    z: list[float], found_bad: int, shift: float, unknown: int
) -> None:
    every = np.concatenate([np.array(z), np.full(unknown, np.nan)])
    bad = np.arange(every.size) < found_bad
    found = scores.shared_shift(every, bad)
    ordinary = np.array(z)[found_bad:]
    if ordinary.size < max(24, bad.sum()):
        assert found == 0.0
    else:
        assert found == max(0.0, float(np.median(ordinary)))
        assert scores.shared_shift(every + shift, bad) == pytest.approx(
            max(0.0, float(np.median(ordinary)) + shift)
        )


@pytest.mark.quick("1.0-2")
@pytest.mark.parametrize(("lift", "steps"), [(1.0, 2), (1.5, 2), (2.0, 8)])
def test_a_state_that_is_worse_names_hardly_any_sample(lift: float, steps: int) -> None:
    """One sample is far out by itself. All of the others are as far up, also ahead: nothing goes on there, or at the
    last one nothing ends there."""
    wrong_count = 0
    for seed in range(200, 206):
        laboratory = Laboratory(FIRST + np.array([5]), alike=False, out=12.0, seed=seed)
        laboratory._losses[FIRST:] += lift * 0.3
        missed, wrong = judged(laboratory, laboratory.concluded(steps=steps))
        assert missed == 0
        wrong_count += wrong
    assert wrong_count <= 6  # 46 to 570 if what lies ahead is no reference


@pytest.mark.parametrize(("size", "most"), [(1, 1), (16, 1), (64, 1), (256, 3), (1024, 9), (4096, 29)])
def test_a_clean_batch_has_as_many_strays_as_harmless_samples_bring(size: int, most: int) -> None:
    assert most_strays(size) == most
    assert (np.random.default_rng(0).binomial(size, STRAY, 10_000) <= most).mean() > 0.95
