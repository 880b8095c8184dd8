"""What is written into a checkpoint later: read back, and not believed when it is damaged or about another one."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from megastable.base.errors import CheckpointError
from megastable.checkpoint import markers, store
from megastable.checkpoint.markers import HEALTH, PINNED, StepsOnTrend
from tests.checkpoint.standins import checkpoint
from tests.full_disk import files_no_larger_than
from tests.tiers import examples

DAMAGED = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'{"format": 1}',
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"format": 1, "time": NaN}',
]


def test_a_marked_one_is_healthy_and_still_whole(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 100)
    assert markers.read_health(path) is None and markers.list_marker_problems(path) == []
    before = time.time()
    markers.mark_healthy(path, step=150, steps=50)
    found = markers.read_health(path)
    assert found is not None and (found.step, found.steps) == (150, 50)
    assert before - 0.01 <= found.time <= time.time() + 0.01
    store.verify_checkpoint(path)  # a marker is no file of the manifest
    assert sorted(f.name for f in path.iterdir() if f.name.startswith(".")) == []


def test_a_marker_says_nothing_of_another_checkpoint(tmp_path: Path) -> None:
    one, other = checkpoint(tmp_path, 100), checkpoint(tmp_path, 200)
    markers.mark_healthy(one, 150, 50)
    shutil.copy(one / HEALTH, other / HEALTH)
    assert markers.read_health(one) and markers.read_health(other) is None
    [problem] = markers.list_marker_problems(other)
    assert str(other / HEALTH) in problem and "another checkpoint" in problem


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_health_marker_counts_as_none_a_damaged_pin_as_a_pin(
    content: bytes, tmp_path: Path
) -> None:
    path = checkpoint(tmp_path, 100)
    (path / HEALTH).write_bytes(content)
    (path / PINNED).write_bytes(content)
    assert markers.read_health(path) is None
    found = markers.read_pin(path)
    assert found is not None and found.reason == markers.UNREADABLE
    assert len(markers.list_marker_problems(path)) == 2
    assert all(
        "damaged (" in problem and "\n" not in problem for problem in markers.list_marker_problems(path)
    )


@pytest.mark.parametrize("reason", ["", "the best so far", "\x1b[31m\n{}", "bytes \udcff of a command line"])
def test_pinned_until_unpinned(reason: str, tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 100)
    assert markers.read_pin(path) is None
    markers.pin_checkpoint(path, "an older reason")
    markers.pin_checkpoint(path, reason)
    found = markers.read_pin(path)
    assert found is not None and found.reason == reason.replace("\udcff", "\\udcff")
    assert markers.unpin_checkpoint(path) and markers.read_pin(path) is None
    assert not markers.unpin_checkpoint(path)


def test_a_disk_that_refuses_leaves_the_older_marker(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 100)
    markers.pin_checkpoint(path, "old")
    with files_no_larger_than(10):
        with pytest.raises(CheckpointError, match=r"pinned\.json could not be written"):
            markers.pin_checkpoint(path, "new")
        with pytest.raises(CheckpointError, match=r"health\.json could not be written"):
            markers.mark_healthy(path, 150, 50)
    found = markers.read_pin(path)
    assert found is not None and found.reason == "old" and markers.read_health(path) is None
    assert not [f.name for f in path.iterdir() if f.name.startswith(".")]


def test_a_quarantined_one_is_no_longer_healthy_until_a_person_accepts_it(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 100)
    markers.mark_healthy(path, 150, 50)
    markers.mark_bad(path, "its weights are others")
    ruling = markers.read_bad_ruling(path)
    assert ruling is not None and ruling.reason == "its weights are others"
    assert markers.read_health(path) is None and markers.read_acceptance(path) is None
    markers.mark_accepted(path, "on purpose")
    assert markers.read_bad_ruling(path) is None and markers.read_acceptance(path) is not None
    markers.mark_bad(path, "again")  # by a run that did not ask
    (path / store.QUARANTINED).rename(path / markers.FORMER)  # as before that name
    assert (ruling := markers.read_bad_ruling(path)) and ruling.reason == "again"
    markers.mark_accepted(path)
    assert markers.read_bad_ruling(path) is None and not (path / markers.FORMER).exists()
    markers.mark_bad(path, "again")
    assert markers.read_bad_ruling(path) is not None and markers.read_acceptance(path) is None
    store.verify_checkpoint(path)
    with pytest.raises(CheckpointError):
        markers.mark_bad(tmp_path / "step-7", "there is none")


@pytest.mark.parametrize("text", DAMAGED)
@pytest.mark.parametrize("name", [store.QUARANTINED, store.ACCEPTED])
def test_a_damaged_ruling_counts_as_none(name: str, text: bytes, tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 100)
    (path / name).write_bytes(text)
    assert markers.read_bad_ruling(path) is None and markers.read_acceptance(path) is None
    assert any("damaged" in problem for problem in markers.list_marker_problems(path))


class AgainstMemory(RuleBasedStateMachine):
    """The reference keeps the set of steps that were seen to be on trend, and counts back from now."""

    @initialize(after=st.integers(0, 6), now=st.integers(0, 3))
    def begin(self, after: int, now: int) -> None:
        self.trend, self.after, self.now = StepsOnTrend(after), after, now
        self.trend.resume_at(now, [])
        self.on_trend_steps: set[int] = set()
        self.pending: set[int] = set()
        self.proven: list[int] = []

    def count(self, checkpoint: int) -> int:
        step = self.now
        while step > checkpoint and step in self.on_trend_steps:
            step -= 1
        return self.now - step

    def expect(self, answer: list[int]) -> None:
        healthy = sorted(c for c in self.pending if self.count(c) >= self.after)
        assert answer == healthy
        self.pending -= set(healthy)

    def go_back(self, step: int) -> None:
        self.now = step
        self.on_trend_steps.clear()
        self.pending = {c for c in self.pending if c <= step}

    @rule(on_trend=st.sampled_from([True, True, True, False]), jump=st.sampled_from([1] * 8 + [0, -3, 2, 5]))
    def next(self, on_trend: bool, jump: int) -> None:
        step = max(0, self.now + jump)
        if step <= self.now:
            self.go_back(step - 1)
        self.now = step
        if on_trend:
            self.on_trend_steps.add(step)
        self.expect(self.trend.add_step(step, on_trend))

    @rule(n=st.integers(1, 8))
    def steps_on_trend(self, n: int) -> None:
        for _ in range(n):
            self.next(True, 1)

    @rule(later=st.sampled_from([0, 0, 0, -2, 3]))
    def save(self, later: int) -> None:
        step = max(0, self.now + later)
        self.now = max(self.now, step)
        self.pending.add(step)
        self.expect(self.trend.add_checkpoint(step))

    @rule(by=st.integers(0, 8))
    def back(self, by: int) -> None:
        step = max(0, self.now - by)
        self.go_back(step)
        self.trend.rewind_to(step)

    @rule(by=st.integers(-3, 8))
    def restart(self, by: int) -> None:
        step, pending = max(0, self.now - by), sorted(self.pending)
        self.go_back(step)
        self.trend = StepsOnTrend(self.after)
        self.trend.resume_at(step, pending)

    @invariant()
    def agree(self) -> None:
        if hasattr(self, "trend"):
            assert self.trend.pending == sorted(self.pending)
            assert all(self.trend.count_steps_on_trend(c) == self.count(c) for c in self.pending)


TestAgainstMemory = AgainstMemory.TestCase
TestAgainstMemory.settings = settings(max_examples=examples(60), stateful_step_count=40)
