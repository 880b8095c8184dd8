"""Defines the interface of a tracker and names all trackers; those that write records as lines of JSON are here.

A tracker lives in one thread. Any of its methods may raise: it is then given up, with one warning. One that does not
return within `logging.tracker_timeout` is given up too, and its thread left behind.
"""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from megastable.base.process import install_command
from megastable.run.directory import TrackerMemory
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

# Of the environment: arguments are visible to other users, and wandb records them.
COMMAND = "MEGASTABLE_TRACKER_COMMAND"


class TrackerError(Exception):
    """A tracker cannot work; the message says why, and what to do."""


class Tracker(Protocol):
    """Shows one run, from the first record to the last of this process."""

    def add_step(self, point: StepPoint) -> None: ...

    def add_validation(self, point: ValidationPoint) -> None: ...

    def add_layers(self, point: LayersPoint) -> None: ...

    def add_undone(self, point: UndonePoint) -> None:
        """The run went back: steps from `point.step` on come again."""

    def add_note(self, point: NotePoint) -> None: ...

    def flush(self) -> None:
        """Make what was told so far visible. Called every few seconds."""

    def close(self, status: str) -> None:
        """Everything was told. status: "finished", "stopped" (to be resumed) or "failed"."""


class Setting:
    """What a tracker begins with. run: the first record; folder: for its files; memory: of it, from process to process;
    per_layer: show every layer by itself; command: of the tracker `command`; warn: prints a line for people."""

    def __init__(
        self, run: RunPoint, name: str, per_layer: bool = False, command: str = "",
        warn: Callable[[str], None] = print, timeout: float = 60.0,
    ) -> None:  # fmt: skip
        self.run, self.per_layer, self.command, self.warn = run, per_layer, command, warn
        self.timeout = timeout
        self.root = Path(run.directory)
        self.folder = self.root / "trackers"
        self.memory = TrackerMemory(self.root, name)


# By name: where its class is, which takes a `Setting`. Imported by the thread of the tracker only.
TRACKERS = {
    "tensorboard": "tensorboard_tracker:TensorBoardTracker",
    "wandb": "wandb_tracker:WandbTracker",
    "mlflow": "mlflow_tracker:MlflowTracker",
    "jsonl": "tracker:JsonlTracker",
    "command": "tracker:CommandTracker",
}


def open_tracker(name: str, setting: Setting) -> Tracker:
    """The tracker of that name, at work. Raises TrackerError, or whatever its library raises."""
    module_name, _, class_name = TRACKERS[name].partition(":")
    try:
        tracker_class = getattr(import_module(f"megastable.training.trackers.{module_name}"), class_name)
    except ModuleNotFoundError as error:
        raise TrackerError(
            f"the library {error.name} is not installed: {install_command(name)}, or pip install it"
        ) from None
    return cast(Tracker, tracker_class(setting))


MOST = 1000  # lines that wait to be written
BLOCK = 1 << 16  # bytes per read


class _Lines:
    """Every record as a line, those of layers if they are asked for."""

    def __init__(self, write: Callable[[str], None], run: RunPoint, per_layer: bool) -> None:
        self._write, self._per_layer = write, per_layer
        self._line(run)

    def _line(self, point: Point) -> None:
        self._write(line_of(point) + "\n")

    add_step = add_validation = add_undone = add_note = _line

    def add_layers(self, point: LayersPoint) -> None:
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
        unwritten_bytes = memoryview(b"".join(self._waiting))
        self._waiting.clear()
        while unwritten_bytes:
            unwritten_bytes = unwritten_bytes[self._file.write(unwritten_bytes) :]

    def close(self, status: str) -> None:
        self.flush()
        self._file.close()


def drop_torn_line(file: io.FileIO) -> None:
    """Cut a file behind its last whole line: a full disk or a power cut ended a process within one."""
    file_end = cut_at = file.seek(0, os.SEEK_END)
    while cut_at:
        block_begin = max(0, cut_at - BLOCK)
        file.seek(block_begin)
        if (newline := file.read(cut_at - block_begin).rfind(b"\n")) >= 0:
            cut_at = block_begin + newline + 1
            break
        cut_at = block_begin
    if cut_at < file_end:
        file.truncate(cut_at)


class CommandTracker(_Lines):
    """A program of the user's; its output goes to RUN/logs/trackers.log."""

    def __init__(self, setting: Setting) -> None:
        try:
            command_words = shlex.split(setting.command)
            self._process = subprocess.Popen(
                [os.path.expanduser(command_words[0]), *command_words[1:]], stdin=subprocess.PIPE, stdout=sys.stderr,
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
