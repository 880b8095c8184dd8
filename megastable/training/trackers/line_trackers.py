"""Writes records as lines of JSON: into RUN/trackers/records.jsonl, or to the standard input of a program."""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
from collections.abc import Callable

from megastable.training.trackers.points import (
    LayersPoint,
    Point,
    RunPoint,
    line_of,
)
from megastable.training.trackers.tracker import Setting, TrackerError

MOST = 1000  # lines that wait to be written
BLOCK = 1 << 16  # bytes per read


class _Lines:
    """Every record as a line, those of layers if they are asked for."""

    def __init__(self, write: Callable[[str], None], run: RunPoint, per_layer: bool) -> None:
        self._write, self._per_layer = write, per_layer
        self._line(run)

    def _line(self, point: Point) -> None:
        self._write(line_of(point) + "\n")

    step = validation = undone = note = _line

    def layers(self, point: LayersPoint) -> None:
        if self._per_layer:
            self._line(point)


class JsonlTracker(_Lines):
    """RUN/trackers/records.jsonl, which every process of the run adds to, whole lines at a time."""

    def __init__(self, setting: Setting) -> None:
        self._file = (setting.folder / "records.jsonl").open("a+b", buffering=0)
        drop_torn_line(self._file)
        self._waiting: list[bytes] = []
        super().__init__(self._add, setting.run, setting.per_layer)

    def _add(self, line: str) -> None:
        self._waiting.append(line.encode())
        if len(self._waiting) >= MOST:
            self.flush()

    def flush(self) -> None:
        content = memoryview(b"".join(self._waiting))
        self._waiting.clear()
        while content:
            content = content[self._file.write(content) :]

    def close(self, status: str) -> None:
        self.flush()
        self._file.close()


def drop_torn_line(file: io.FileIO) -> None:
    """Cut a file behind its last whole line: a full disk or a power cut ended a process within one."""
    end = at = file.seek(0, os.SEEK_END)
    while at:
        begin = max(0, at - BLOCK)
        file.seek(begin)
        if (newline := file.read(at - begin).rfind(b"\n")) >= 0:
            at = begin + newline + 1
            break
        at = begin
    if at < end:
        file.truncate(at)


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
