"""Writes records as lines of JSON: into RUN/trackers/records.jsonl, or to the standard input of a program."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable

from megastable.training.trackers.points import (
    LayersPoint,
    NotePoint,
    Point,
    RunPoint,
    StepPoint,
    UndonePoint,
    ValidationPoint,
    line_of,
)
from megastable.training.trackers.tracker import Setting, TrackerError


class _Lines:
    """Every record as a line, those of layers if they are asked for."""

    def __init__(self, write: Callable[[str], None], run: RunPoint, per_layer: bool) -> None:
        self._write, self._per_layer = write, per_layer
        self._line(run)

    def _line(self, point: Point) -> None:
        self._write(line_of(point) + "\n")

    def step(self, point: StepPoint) -> None:
        self._line(point)

    def validation(self, point: ValidationPoint) -> None:
        self._line(point)

    def layers(self, point: LayersPoint) -> None:
        if self._per_layer:
            self._line(point)

    def undone(self, point: UndonePoint) -> None:
        self._line(point)

    def note(self, point: NotePoint) -> None:
        self._line(point)


class JsonlTracker(_Lines):
    """RUN/trackers/records.jsonl, which every process of the run adds to."""

    def __init__(self, setting: Setting) -> None:
        path = setting.folder / "records.jsonl"
        self._file = path.open("a+b")
        size = self._file.seek(0, os.SEEK_END)
        if size:
            self._file.seek(size - 1)
            if self._file.read(1) != b"\n":  # a process ended within a line: it counts for nothing
                self._file.write(b"\n")
        super().__init__(lambda line: void(self._file.write(line.encode())), setting.run, setting.per_layer)

    def flush(self) -> None:
        self._file.flush()

    def close(self, status: str) -> None:
        self._file.close()


class CommandTracker(_Lines):
    """A program of the user's; its output goes to RUN/logs/trackers.log."""

    def __init__(self, setting: Setting) -> None:
        try:
            words = shlex.split(setting.command)
            self._process = subprocess.Popen(
                [os.path.expanduser(words[0]), *words[1:]], stdin=subprocess.PIPE, stdout=sys.stderr,
                env=os.environ | {"MEGASTABLE_RUN": str(setting.root)}, text=True,
            )  # fmt: skip
        except (OSError, ValueError, IndexError) as error:
            raise TrackerError(
                f"logging.tracker_command={setting.command!r} cannot be started: {error}"
            ) from None
        super().__init__(self._send, setting.run, setting.per_layer)

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise TrackerError(f"{self._ended()} while records were still to come") from None

    def flush(self) -> None:
        if self._process.poll() is not None:
            raise TrackerError(f"{self._ended()} while records were still to come")

    def close(self, status: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._process.wait():
            raise TrackerError(self._ended())

    def _ended(self) -> str:
        return f"the program of logging.tracker_command ended with code {self._process.wait()}"


def void(_: object) -> None:
    """Takes what nobody wants."""
