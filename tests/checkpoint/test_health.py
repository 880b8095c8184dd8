"""When a checkpoint has proved healthy, against a reference that remembers every step."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from megastable.checkpoint.health import CalmSteps
from megastable.run.directory import RunDirectory
from megastable.run.events.training_events import CheckpointHealthy
from tests.conftest import tiny
from tests.distributed import run_ranks
from tests.tiers import examples
from tests.training.test_failures import batch, train


def run(trend: CalmSteps, first: int, last: int, calm: bool = True) -> dict[int, list[int]]:
    """Steps first to last; those that made checkpoints healthy."""
    done = {step: trend.step(step, calm) for step in range(first, last + 1)}
    return {step: healthy for step, healthy in done.items() if healthy}


def test_after_so_many_calm_steps_it_is_healthy_once() -> None:
    trend = CalmSteps(50)
    assert run(trend, 1, 100) == {}
    assert trend.saved(100) == [] and trend.pending == [100]
    assert run(trend, 101, 149) == {} and trend.counted(100) == 49
    assert run(trend, 150, 400) == {150: [100]}
    assert trend.pending == []


def test_a_negative_number_of_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="after=-1"):
        CalmSteps(-1)


class AgainstMemory(RuleBasedStateMachine):
    """The reference keeps the set of steps that were seen to be calm, and counts back from now."""

    @initialize(after=st.integers(0, 6), now=st.integers(0, 3))
    def begin(self, after: int, now: int) -> None:
        self.trend, self.after, self.now = CalmSteps(after), after, now
        self.trend.resumed(now, [])
        self.calm: set[int] = set()
        self.pending: set[int] = set()
        self.proven: list[int] = []

    def count(self, checkpoint: int) -> int:
        step = self.now
        while step > checkpoint and step in self.calm:
            step -= 1
        return self.now - step

    def expect(self, answer: list[int]) -> None:
        healthy = sorted(c for c in self.pending if self.count(c) >= self.after)
        assert answer == healthy
        self.pending -= set(healthy)

    def go_back(self, step: int) -> None:
        self.now = step
        self.calm.clear()
        self.pending = {c for c in self.pending if c <= step}

    @rule(calm=st.sampled_from([True, True, True, False]), jump=st.sampled_from([1] * 8 + [0, -3, 2, 5]))
    def next(self, calm: bool, jump: int) -> None:
        step = max(0, self.now + jump)
        if step <= self.now:
            self.go_back(step - 1)
        self.now = step
        if calm:
            self.calm.add(step)
        self.expect(self.trend.step(step, calm))

    @rule(n=st.integers(1, 8))
    def calm_steps(self, n: int) -> None:
        for _ in range(n):
            self.next(True, 1)

    @rule(later=st.sampled_from([0, 0, 0, -2, 3]))
    def save(self, later: int) -> None:
        step = max(0, self.now + later)
        self.now = max(self.now, step)
        self.pending.add(step)
        self.expect(self.trend.saved(step))

    @rule(by=st.integers(0, 8))
    def back(self, by: int) -> None:
        step = max(0, self.now - by)
        self.go_back(step)
        self.trend.back_to(step)

    @rule(by=st.integers(-3, 8))
    def restart(self, by: int) -> None:
        step, pending = max(0, self.now - by), sorted(self.pending)
        self.go_back(step)
        self.trend = CalmSteps(self.after)
        self.trend.resumed(step, pending)

    @invariant()
    def agree(self) -> None:
        if hasattr(self, "trend"):
            assert self.trend.pending == sorted(self.pending)
            assert all(self.trend.counted(c) == self.count(c) for c in self.pending)


TestAgainstMemory = AgainstMemory.TestCase
TestAgainstMemory.settings = settings(max_examples=examples(60), stateful_step_count=40)


@pytest.mark.slow
def test_a_checkpoint_that_had_to_make_room_is_not_missed(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of those that are saved faster than they can prove themselves only one is kept for that: it alone is marked."""
    config = tiny(
        corpus, tmp_path / "run", train=batch(), stability={"enabled": False},
        checkpoint={"interval": 2, "keep": 1, "healthy_after": 9, "asynchronous": False},
    )  # fmt: skip
    assert run_ranks(1, train, config) == [(0, "")]
    assert [e["name"] for e in RunDirectory(tmp_path / "run").events(CheckpointHealthy)] == [
        "step-2",
        "step-10",
    ]
    assert "WARNING: /" not in capfd.readouterr().out
