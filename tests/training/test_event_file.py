"""TensorBoard shows a run whose processes had clocks that differ."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megastable.training.trackers.points import RunPoint, StepPoint
from megastable.training.trackers.tensorboard_tracker import EventFile, TensorBoardTracker
from megastable.training.trackers.tracker import Setting
from tests.training.test_trackers import scalars


def process(root: Path, begin: int, steps: range, loss: float) -> None:
    tracker = TensorBoardTracker(
        Setting(RunPoint("n", str(root), begin, begin * 10, time.time()), "tensorboard")
    )
    for step in steps:
        tracker.step(StepPoint(step, step * 10, time.time(), True, {"train/loss": loss}))
    tracker.close("stopped")


def test_steps_after_a_resume_on_a_host_that_is_behind_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trackers").mkdir()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 600)
    process(tmp_path, 0, range(1, 11), 2.0)
    monkeypatch.setattr(time, "time", lambda: now)
    process(tmp_path, 8, range(9, 13), 1.0)
    process(tmp_path, 12, range(13, 15), 0.5)
    wanted = {step: 2.0 if step < 9 else 1.0 if step < 13 else 0.5 for step in range(1, 15)}
    assert scalars(tmp_path / "tensorboard" / "n", "1 train/loss") == wanted
    by_tokens = scalars(tmp_path / "tensorboard" / "n" / "by_tokens", "6 by tokens/loss")
    assert by_tokens == {10 * step: loss for step, loss in wanted.items()}


def test_each_file_sorts_behind_those_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "events.out.tfevents.8888888888.host.1.0").touch()
    (tmp_path / "events.out.tfevents.notes").touch()
    for _ in range(3):
        EventFile(tmp_path).close()
    names = sorted(path.name for path in tmp_path.glob("*.0"))
    assert [name.split(".")[3] for name in names] == [str(8888888888 + n) for n in range(4)]
