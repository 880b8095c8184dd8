"""What lies between two steps and is no event's: as usual, stalled, or unknown."""

from __future__ import annotations

from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.run.test_goodput import BEGIN, K, Row, account, at, shown, steps
from tests.tiers import examples


def spaced(gaps: list[float], seconds: float = 1.0, begin: float = 106.0) -> list[Row]:
    """Steps with so much time between them."""
    rows, now = [], begin
    for n, gap in enumerate([0.0, *gaps], 1):
        now += gap + seconds
        rows.append((n, now, seconds, True))
    return rows


def test_a_gap_far_beyond_its_neighbours_is_stalled_and_only_its_excess() -> None:
    rows = spaced([0.25] * 6 + [20.25] + [0.25] * 6)
    found = account(BEGIN, rows, now=rows[-1][1])
    # Seven steps with six gaps between them, then the stall, the usual gap, the next step.
    assert shown(found)[1:] == [
        ("training", 106, 114.5), ("stalled", 114.5, 134.5), ("between_steps", 134.5, 134.75),
        ("training", 134.75, 143.25),
    ]  # fmt: skip
    assert found.seconds()[K.BETWEEN] == 13 * 0.25 and found.seconds()[K.UNKNOWN] == 0


def test_what_is_usual_does_not_stall() -> None:
    """A slow recorder at every step; and a gap that is a second longer, but not five times as long."""
    rows = spaced([4.0] * 6 + [15.0] + [4.0] * 6, 0.1)
    found = account(BEGIN, rows, now=rows[-1][1])
    assert found.seconds()[K.BETWEEN] == pytest.approx(63) and found.seconds()[K.STALLED] == 0


@pytest.mark.parametrize(("seconds", "gap", "kind"), [
    (0.1, 0.9, K.BETWEEN), (0.1, 1.2, K.STALLED), (8.0, 7.9, K.BETWEEN), (8.0, 8.1, K.STALLED),
])  # fmt: skip
def test_up_to_a_second_or_a_step_a_gap_is_no_stall(seconds: float, gap: float, kind: K) -> None:
    rows = spaced([0.01] * 5 + [gap] + [0.01] * 5, seconds)
    found = account(BEGIN, rows, now=rows[-1][1])
    told = {k for k in (K.STALLED, K.UNKNOWN) if found.seconds()[k]} or {K.BETWEEN}
    assert told == {kind}


def test_what_an_evaluation_does_not_explain() -> None:
    rows = [*steps(1, 10, 106), *steps(11, 20, 119.1), *steps(21, 30, 150)]
    more = [
        at(119, "evaluated", step=10, loss=3.0, samples=8, seconds=3.0),
        at(132, "evaluated", step=20, loss=3.0, samples=8, seconds=2.0),
    ]
    assert shown(account([*BEGIN, *more], rows, now=160))[1:] == [
        ("training", 106, 116), ("evaluation", 116, 119), ("between_steps", 119, 119.1), ("training", 119.1, 129.1),
        ("stalled", 129.1, 130), ("evaluation", 130, 132), ("stalled", 132, 150), ("training", 150, 160),
    ]  # fmt: skip


def test_an_evaluation_at_the_end_of_a_stall_keeps_its_time() -> None:
    rows = spaced([0.25] * 6 + [20.0] + [0.25] * 6)
    more = at(134.5, "evaluated", step=7, loss=3.0, samples=8, seconds=2.0)  # up to the next step
    found = account([*BEGIN, more], rows, now=rows[-1][1]).seconds()
    assert (found[K.EVALUATION], found[K.STALLED], found[K.BETWEEN]) == (2.0, 18.0, 12 * 0.25)


def test_where_nobody_is_known_to_have_lived_time_is_unknown() -> None:
    """Records that are missing, and what follows the last of them."""
    rows = [*steps(1, 10, 106), *steps(13, 20, 130)]
    assert shown(account(BEGIN, rows, now=150))[2:] == [
        ("unknown", 116, 130), ("training", 130, 138), ("unknown", 138, 150),
    ]  # fmt: skip


@settings(max_examples=examples(300), deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.125, 0.375, 0.75, 1.5, 4.0, 60.0]), max_size=40),
    st.sampled_from([0.125, 1.0, 8.0]), st.floats(0, 100),
)  # fmt: skip
def test_every_gap_between_two_steps_is_usual_or_a_stall(
    gaps: list[float], seconds: float, rest: float
) -> None:
    """Against a slow reference, gap by gap."""
    rows = spaced(gaps, seconds)
    found = account(BEGIN, rows, now=rows[-1][1] + rest)
    usual = median(gaps) if len(rows) >= 5 else 0.0
    late = [g for g in gaps if g > max(0.5, seconds, 5 * usual, usual + 1)]
    told = found.seconds()
    assert told[K.STALLED] == pytest.approx(sum(late) - len(late) * usual)
    assert told[K.TRAINING] == pytest.approx(len(rows) * seconds)
    unknown = rest if rest > max(0.5, seconds) else 0.0
    assert told[K.UNKNOWN] == pytest.approx(unknown)
    assert told[K.BETWEEN] == pytest.approx(sum(gaps) - told[K.STALLED] + rest - unknown)
    assert sum(told.values()) == pytest.approx(found.wall) and np.all(np.diff(found.at) >= 0)
