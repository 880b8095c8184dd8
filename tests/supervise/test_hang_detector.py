"""When a run counts as hung: learnt from itself, and no clock can fool it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.config.supervise import SuperviseConfig
from megastable.run.rank_ipc import Progress
from megastable.supervise.hang_detector import LEARNT, LEAST, TICK, HangDetector

CONFIG = SuperviseConfig(hang_factor=10, hang_floor=5, hang_unknown=100)


def progress(step: int, phase: str = "step", seconds: float | None = 2.0, **more: Any) -> Progress:
    known = {"pid": 1, "host": "a", "time": 0.0, "world": 2, "steps": 99, "cursor": 8 * step}
    return Progress.model_validate(known | {"phase": phase, "step": step, "seconds": seconds} | more)


def looks(patience: HangDetector, seen: Progress | None, seconds: float) -> bool:
    """Look for `seconds`, half a second at a time."""
    return sum(patience.look(seen, 0.5) for _ in range(max(1, int(2 * seconds)))) > 0


def trained(config: SuperviseConfig = CONFIG, seconds: float = 2.0) -> HangDetector:
    patience = HangDetector(config)
    for step in range(1, 6):
        looks(patience, progress(step, seconds=seconds), seconds)
    return patience


def test_a_step_may_take_ten_times_the_usual() -> None:
    patience = trained()
    assert patience.limit == 20
    assert not looks(patience, progress(5), 18) and looks(patience, progress(5), 4)


def test_the_floor_and_what_is_unknown() -> None:
    assert trained(seconds=0.01).limit == CONFIG.hang_floor
    patience = HangDetector(CONFIG)
    assert (patience.phase, patience.limit) == ("starting", 100)
    assert not looks(patience, None, 99) and looks(patience, None, 2)


@pytest.mark.parametrize("phase", ["checkpoint", "evaluate", "rewind"])
def test_other_phases_are_learnt_from_the_longest(phase: str) -> None:
    patience = trained()
    assert not looks(patience, progress(5, phase), 30) and patience.limit == 100
    looks(patience, progress(6), 1)
    looks(patience, progress(6, phase), 1)
    assert patience.limit == pytest.approx(10 * 30, rel=0.1)


def test_a_phase_that_is_known_well_is_not_waited_for_as_long_as_an_unknown_one() -> None:
    config = CONFIG.model_copy(update={"hang_unknown": 1800.0})
    patience = trained(config)
    for number in range(LEARNT):
        assert not looks(patience, progress(5 + number, "checkpoint"), 2) and patience.limit == 1800
        looks(patience, progress(6 + number), 1)
    looks(patience, progress(20, "checkpoint"), 1)
    assert patience.limit == LEAST
    assert not looks(patience, progress(20, "checkpoint"), 298) and looks(
        patience, progress(20, "checkpoint"), 3
    )


def test_the_start_is_learnt_whole_from_the_launch_to_the_first_step() -> None:
    patience = HangDetector(CONFIG)
    looks(patience, progress(3), 1)  # taken over: when it began is not known
    patience.began()
    assert (patience.phase, patience.limit) == ("starting", 100)
    looks(patience, None, 8)
    looks(patience, progress(0, "starting", None), 4)
    looks(patience, progress(1), 1)
    patience.began()
    assert patience.phase == "starting" and patience.limit == pytest.approx(120, rel=0.05)


@given(st.floats(0, 1e9), st.floats(-1e9, 1e9))
def test_a_jump_of_the_clock_or_a_stopped_supervisor_is_no_hang(slept: float, clock: float) -> None:
    patience = trained()
    assert not patience.look(progress(6, time=clock), slept)
    assert not patience.look(progress(6, time=-clock), slept) and patience.waited <= TICK
