"""Defines the interface of a tracker, and names those that there are.

A tracker lives in one thread. Any of its methods may raise: it is then given up, with one warning. One that does not
return within `logging.tracker_timeout` is given up too, and its thread left behind.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from megastable.base.installation import install_command
from megastable.run.tracker_memory import TrackerMemory
from megastable.training.trackers.points import (
    LayersPoint,
    NotePoint,
    RunPoint,
    StepPoint,
    UndonePoint,
    ValidationPoint,
)

# Of the environment: arguments are visible to other users, and wandb records them.
COMMAND = "MEGASTABLE_TRACKER_COMMAND"


class TrackerError(Exception):
    """A tracker cannot work; the message says why, and what to do."""


class Tracker(Protocol):
    """Shows one run, from the first record to the last of this process."""

    def step(self, point: StepPoint) -> None: ...

    def validation(self, point: ValidationPoint) -> None: ...

    def layers(self, point: LayersPoint) -> None: ...

    def undone(self, point: UndonePoint) -> None:
        """The run went back: steps from `point.step` on come again."""

    def note(self, point: NotePoint) -> None: ...

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
    "jsonl": "line_trackers:JsonlTracker",
    "command": "line_trackers:CommandTracker",
}


def opened(name: str, setting: Setting) -> Tracker:
    """The tracker of that name, at work. Raises TrackerError, or whatever its library raises."""
    module, _, kind = TRACKERS[name].partition(":")
    try:
        found = getattr(import_module(f"megastable.training.trackers.{module}"), kind)
    except ModuleNotFoundError as error:
        raise TrackerError(
            f"the library {error.name} is not installed: {install_command(name)}, or pip install it"
        ) from None
    return cast(Tracker, found(setting))
