"""How long a rank's own work took, from the activities of its steps to what heartbeats carry."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.base import activity
from megastable.training.beats import ENOUGH, STEPS, WorkBlocks


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    activity.timed.clear()
    yield
    activity.timed.clear()


def test_own_work_leaves_out_waits_and_what_is_no_step() -> None:
    activity.enter("evaluate")
    time.sleep(0.02)
    activity.begin(7)
    activity.enter(activity.FORWARD)
    time.sleep(0.04)
    activity.waited(0.01)
    other = threading.Thread(target=activity.waited, args=(1.0,))
    other.start()
    other.join()
    activity.enter(activity.REDUCE)
    time.sleep(0.05)
    activity.enter(activity.OPTIMIZER)
    activity.end(0.2)
    activity.end(0.2)  # nothing has begun
    (step, seconds, (data, forward, backward, optimizer)) = activity.timed.popleft()
    assert not activity.timed and (step, seconds, data, backward) == (7, 0.2, 0.0, 0.0)
    assert forward >= 0.029 and optimizer < forward


@given(st.lists(st.integers(0, 60), max_size=6, unique=True), st.integers(1, 7))
def test_blocks_are_of_the_same_steps_however_they_come(lost: list[int], at_once: int) -> None:
    steps = [(n, 1.0, (0.0, float(n), 0.0, 0.0)) for n in range(61) if n not in lost]
    blocks = WorkBlocks()
    found = [b for i in range(0, len(steps), at_once) for b in blocks.add(steps[i : i + at_once])]
    for block in found:
        mine = [n for n, *_ in steps if n // STEPS == block.block]
        assert len(mine) >= ENOUGH and block.own == pytest.approx(sum(mine) / len(mine), abs=1e-6)
    whole = [b for b in range(6) if sum(n // STEPS == b for n, *_ in steps) >= ENOUGH]
    # The last one is told once a step of the next has come, or its own last step.
    assert [b.block for b in found] in (whole, whole[:-1])


def test_after_a_rewind_the_steps_count_anew() -> None:
    blocks = WorkBlocks()
    steps = [(n, 1.0, (0.0, 1.0, 0.0, 0.0)) for n in [*range(10, 25), *range(20, 30)]]
    assert [b.block for b in blocks.add(steps)] == [1, 2]
