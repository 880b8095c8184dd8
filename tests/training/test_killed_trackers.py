"""A job that is killed with its trackers, or cut off within a line: the next process tells no step twice."""

from __future__ import annotations

import errno
import io
import json
from pathlib import Path
from typing import Any, cast

import pytest

from megastable.training.trackers import line_trackers
from megastable.training.trackers.lane import Lane
from megastable.training.trackers.line_trackers import JsonlTracker, drop_torn_line
from megastable.training.trackers.points import Point, RunPoint, StepPoint, UndonePoint
from megastable.training.trackers.relay import Relay
from megastable.training.trackers.tracker import Setting


class Told:
    """A lane that keeps what it gets."""

    over = failed = False

    def __init__(self) -> None:
        self.points: list[Point] = []

    def put(self, point: Point) -> None:
        self.points.append(point)

    def check(self) -> None: ...

    def close(self, status: str) -> None:
        self.over = True


def step(number: int) -> StepPoint:
    return StepPoint(number, number * 10, float(number), True, {"train/loss": 1.0})


def relay(root: Path, after: int) -> tuple[Relay, Told]:
    (root / "trackers").mkdir(exist_ok=True)
    told = Told()
    run = RunPoint("n", str(root), after, after * 10, float(after))
    return Relay(run, cast(list[Lane], [told])), told


def undone(told: Told) -> list[tuple[int, int]]:
    return [(p.step, p.tokens) for p in told.points if isinstance(p, UndonePoint)]


def test_steps_that_a_killed_job_told_are_undone_before_they_come_again(tmp_path: Path) -> None:
    """It kept nothing of them: everything was killed at once, within seconds of its start."""
    first, told = relay(tmp_path, 0)
    for number in range(1, 9):
        first.tell(step(number))
    assert undone(told) == []
    second, told = relay(tmp_path, 5)
    second.tell(step(6))
    assert undone(told) == [(6, 51)] and isinstance(told.points[-1], StepPoint)
    assert second.close(1.0)
    # One that has ended in order has told what it kept, and nothing else.
    third, told = relay(tmp_path, 6)
    third.tell(step(7))
    assert undone(told) == []


def test_one_that_is_killed_before_its_first_step_keeps_what_the_one_before_knew(tmp_path: Path) -> None:
    first, _ = relay(tmp_path, 0)
    for number in range(1, 9):
        first.tell(step(number))
    first.close(1.0)
    relay(tmp_path, 8)
    _, told = relay(tmp_path, 5)
    (again,) = [p for p in told.points if isinstance(p, UndonePoint)]
    assert (again.step, again.last, len(again.points)) == (6, 8, 3)


def jsonl(root: Path) -> JsonlTracker:
    (root / "trackers").mkdir(exist_ok=True)
    return JsonlTracker(Setting(RunPoint("n", str(root), 0, 0, 0.0), "jsonl"))


def lines(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "trackers/records.jsonl").read_text().splitlines()]


def test_every_line_is_whole_whenever_the_process_is_killed(tmp_path: Path) -> None:
    tracker = jsonl(tmp_path)
    for number in range(1, 2 * line_trackers.MOST):
        tracker.step(step(number))
        if number % 100 == 0:
            lines(tmp_path)  # raises if one is not
    tracker.close("finished")
    assert len(lines(tmp_path)) == 2 * line_trackers.MOST


def test_a_line_that_a_full_disk_has_cut_is_removed_by_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = jsonl(tmp_path)
    tracker.step(step(1))
    tracker.flush()
    whole = lines(tmp_path)

    class Full:
        """A disk with room for half a line."""

        def __init__(self, file: io.FileIO) -> None:
            self.file, self.room = file, 30

        def write(self, content: memoryview) -> int:
            if not self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            written, self.room = self.file.write(content[: self.room]), 0
            return written

    monkeypatch.setattr(tracker, "_file", Full(tracker._file))
    tracker.step(step(2))
    with pytest.raises(OSError, match="No space"):
        tracker.flush()
    assert not (tmp_path / "trackers/records.jsonl").read_text().endswith("\n")
    again = jsonl(tmp_path)
    again.step(step(2))
    again.close("finished")
    assert [row["record"] for row in lines(tmp_path)] == ["run", "step", "run", "step"]
    assert lines(tmp_path)[:2] == whole


LONG = b"x" * 70_000


@pytest.mark.parametrize("whole", [b"", b"a\n", b"\n\n", LONG + b"\n"], ids=["none", "one", "empty", "long"])
@pytest.mark.parametrize("torn", [b"", b"b", LONG], ids=["whole", "short", "long"])
def test_what_is_cut(whole: bytes, torn: bytes, tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(whole + torn)
    with path.open("a+b", buffering=0) as file:
        drop_torn_line(file)
    assert path.read_bytes() == whole
