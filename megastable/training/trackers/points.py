"""Defines what trackers get: records of a run, and their lines of JSON (docs/trackers.md#records).

Losses in nats per token, times in Unix seconds, steps are attempted updates, tokens those of all steps so far.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from megastable.run.directory import as_json
from megastable.run.events.event import real

VERSION = 1  # of the lines


@dataclass(frozen=True)
class RunPoint:
    """The run, as one process of it begins after `step`. config: every key of the recipe, by its path.

    name: of the run; directory: where it is; project: wandb's project and MLflow's experiment.
    """

    name: str
    directory: str
    step: int
    tokens: int
    time: float
    attempt: int | None = None
    project: str = "megastable"
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepPoint:
    """One step. applied: its update was not refused; values: by name, as "train/loss" (curves.py)."""

    step: int
    tokens: int
    time: float
    applied: bool
    values: Mapping[str, float]


@dataclass(frozen=True)
class ValidationPoint:
    """One evaluation; values: by name, as "validation/loss"."""

    step: int
    tokens: int
    time: float
    values: Mapping[str, float]


@dataclass(frozen=True)
class TasksPoint(ValidationPoint):
    """Scores of a checkpoint, of an earlier step; values: by name, as "tasks/arc/acc"."""


@dataclass(frozen=True)
class LayersPoint:
    """Statistics of every layer at one step; values: by "STATISTIC/LAYER", as "activation_max/blocks.0"."""

    step: int
    time: float
    values: Mapping[str, float]


@dataclass(frozen=True)
class UndonePoint:
    """The run has gone back: what was told of `step` to `last` is void. tokens: before `step`, at most those of the
    first undone step; points: the accepted ones of these steps, as far as they are remembered."""

    step: int
    last: int
    tokens: int
    time: float
    points: tuple[StepPoint, ...] = ()


@dataclass(frozen=True)
class NotePoint:
    """An event of the journal, as text. incident: its number; what: happened to it; summary: what is known of it;
    story: all that happened to it so far, in Markdown."""

    step: int
    time: float
    event: str
    text: str
    incident: int | None = None
    what: str = ""
    summary: Mapping[str, Any] = field(default_factory=dict)
    story: str = ""


Point = RunPoint | StepPoint | ValidationPoint | TasksPoint | LayersPoint | UndonePoint | NotePoint
_NAMES: dict[type[Point], str] = {
    RunPoint: "run", StepPoint: "step", ValidationPoint: "validation", TasksPoint: "tasks", LayersPoint: "layers",
    UndonePoint: "undone", NotePoint: "note",
}  # fmt: skip
_KINDS = {name: kind for kind, name in _NAMES.items()}
_LEFT_OUT = ("values", "points", "summary", "story")  # no plain values


def line_of(point: Point) -> str:
    """A record as a flat JSON object, without a newline: values stand beside the other fields. nan and infinities are
    text."""
    plain = {key: value for key, value in vars(point).items() if key not in _LEFT_OUT and value is not None}
    first = {"record": _NAMES[type(point)]} | ({"version": VERSION} if isinstance(point, RunPoint) else {})
    return as_json(first | plain | dict(getattr(point, "values", {})))


def point_of(line: bytes | str) -> Point | None:
    """The record of a line; None for a line that is none. Of an unknown kind too: a newer version may write it."""
    try:
        entry = json.loads(line)
        kind = _KINDS[entry.pop("record")]
        entry.pop("version", None)
        names = {field.name for field in fields(kind)}
        plain = {key: value for key, value in entry.items() if key in names}
        if "values" in names:
            numbers = {key: real(value) for key, value in entry.items() if key not in names}
            plain["values"] = {key: value for key, value in numbers.items() if value is not None}
        return kind(**plain)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
