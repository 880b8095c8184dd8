"""Defines what trackers get: records of a run, and their lines of JSON (docs/trackers.md#records).

Also names the curves of a run, the same in every tracker, and chooses the keys of a recipe that trackers are told.

Losses in nats per token, times in Unix seconds, steps are attempted updates, tokens those of all steps so far.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from megastable.config.tree import RunConfig
from megastable.run.directory import as_json
from megastable.run.events.event import read_real
from megastable.run.events.training_events import Evaluated
from megastable.run.records import LayerRecord, StepRecord

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
    """One step. applied: its update was not refused; values: by name, as "train/loss"."""

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
        json_entry = json.loads(line)
        point_class = _KINDS[json_entry.pop("record")]
        json_entry.pop("version", None)
        field_names = {field.name for field in fields(point_class)}
        plain_fields = {key: value for key, value in json_entry.items() if key in field_names}
        if "values" in field_names:
            plain_fields["values"] = {
                key: number for key, value in json_entry.items()
                if key not in field_names and (number := read_real(value)) is not None
            }  # fmt: skip
        return point_class(**plain_fields)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


# Fields of step records and the curves that they are shown as: few, the rest is in steps/*.parquet.
CURVES = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "attention_entropy": "stability/attention_entropy_lowest",
    "attention_logit": "stability/attention_logit_largest",
    "clipped_fraction": "stability/clipped_fraction",
    "fp8": "stability/fp8_on",
    "fp8_saturation": "stability/fp8_saturation_largest",
    "fp8_underflow": "stability/fp8_underflow_largest",
    "z": "stability/log_partition",
    "loss_scale": "stability/loss_scale",
    "noise_scale": "stability/gradient_noise_scale",
    "parameter_norm": "stability/parameter_norm",
    "second_moment_max": "stability/second_moment_max",
    "token_entropy": "stability/token_entropy",
    "predictive_entropy": "stability/predictive_entropy",
    "update_ratio": "stability/update_to_weight",
    "expert_violation": "experts/load_largest",
    "expert_idle": "experts/idle_share",
    "expert_dropped": "experts/dropped_share_largest",
    "router_entropy": "experts/router_entropy_lowest",
    "router_z": "experts/router_log_partition_largest",
    "worst_loss": "stability/worst_sample_loss",
    "tokens_per_second": "speed/tokens_per_second",
    "mfu_full": "speed/mfu",
    "seconds": "speed/step_seconds",
    "data_seconds": "speed/data_seconds",
    "memory": "speed/memory_gib",
}
VALIDATION = "validation/loss"
# Sorted behind VALIDATION, and not below it: in the files of MLflow a curve cannot be a folder, too.
VALIDATION_OF = "validation/of/"  # and the corpus
TASKS = "tasks/"  # and the task, the metric
INCIDENTS = "stability/incidents"
# What a refused or undone step has in the series of its kind.
APART = ("train/loss", "train/grad_norm")
STATISTICS = tuple(f.name for f in fields(LayerRecord) if f.default is None)
# They span many orders of magnitude: their distributions are of the decimal logarithm.
LOGARITHMIC = ("gradient_rms", "gradient_max", "second_moment_rms", "second_moment_max", "update_ratio")


def values_of(record: StepRecord) -> dict[str, float]:
    """The curves' values at a step."""
    curve_values = {name: getattr(record, field) for field, name in CURVES.items()}
    if record.loss_scale == 1:  # there is none
        del curve_values[CURVES["loss_scale"]]
    return {name: value for name, value in curve_values.items() if value is not None}


def validation_values(found: Evaluated) -> dict[str, float]:
    """The losses of an evaluation, by curve."""
    corpus_losses = {VALIDATION_OF + corpu_name: loss for corpu_name, loss in found.by_corpus.items()}
    return corpus_losses if found.loss is None else {VALIDATION: found.loss} | corpus_losses


def layer_values(rows: Iterable[LayerRecord]) -> dict[str, float]:
    """The statistics of a step's layers, by "STATISTIC/LAYER"."""
    return {
        f"{kind}/{row.name}": value for row in rows for kind in STATISTICS
        if (value := getattr(row, kind)) is not None
    }  # fmt: skip


def drop_non_finite(values: Mapping[str, float]) -> dict[str, float]:
    """What can be drawn."""
    return {curve_name: value for curve_name, value in values.items() if math.isfinite(value)}


def values_shown(point: StepPoint) -> dict[str, float]:
    """What a step adds to the run's own curves. A refused one changed nothing: only its speed counts."""
    non_finite_values = drop_non_finite(point.values)
    return (
        non_finite_values
        if point.applied
        else {k: v for k, v in non_finite_values.items() if k.startswith("speed/")}
    )


def values_apart(point: StepPoint, group: str = "train") -> dict[str, float]:
    """What a step adds to the curves of refused or undone ones; group: in place of "train"."""
    non_finite_values = drop_non_finite(point.values)
    return {
        f"{group}/{name.partition('/')[2]}": non_finite_values[name]
        for name in APART
        if name in non_finite_values
    }


def by_statistic(values: Mapping[str, float]) -> dict[str, list[float]]:
    """The finite values of all layers, by statistic; `LOGARITHMIC` ones as "log10_STATISTIC"."""
    values_by_statistic: dict[str, list[float]] = {}
    for name, value in drop_non_finite(values).items():
        statistic_name = name.partition("/")[0]
        if statistic_name not in LOGARITHMIC:
            values_by_statistic.setdefault(statistic_name, []).append(value)
        elif value > 0:
            values_by_statistic.setdefault(f"log10_{statistic_name}", []).append(math.log10(value))
    return values_by_statistic


# Chooses the keys of a recipe that trackers are told, and those that a table of runs compares: what everybody looks
# for, and what was set.


ALWAYS = (
    "model.layers", "model.hidden", "model.heads", "model.sequence_length", "optimizer.name", "optimizer.lr",
    "optimizer.weight_decay", "schedule.kind", "train.steps", "train.global_batch", "precision.kind", "run.seed",
)  # fmt: skip
SECTIONS = ("model.", "data.corpora.", "optimizer.", "schedule.", "train.", "parallel.", "precision.")
# May hold secrets, and tell nothing of the training.
UNTOLD = ("supervise", "logging.tracker_command", "eval.command")


def is_untold(key: str) -> bool:
    """Whether a key of a recipe, or a section of it, is kept from trackers."""
    return any(f"{key}.".startswith(f"{one}.") or one.startswith(f"{key}.") for one in UNTOLD)


def flatten_recipe(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Values by path, those in lists of sections too: data.corpora.0.path."""
    if isinstance(tree, list) and any(isinstance(entry, dict) for entry in tree):
        tree = {str(i): entry for i, entry in enumerate(tree)}
    if not isinstance(tree, dict):
        return {prefix.removesuffix("."): tree}
    return {
        path: value for key, below in tree.items()
        for path, value in flatten_recipe(below, f"{prefix}{key}.").items()
    }  # fmt: skip


@cache
def _defaults() -> dict[str, Any]:
    return flatten_recipe(RunConfig().model_dump(mode="json"))


def choose_hyperparameters(config: Mapping[str, Any]) -> dict[str, bool | float | str]:
    """Of a recipe's values by path."""
    chosen_values = {
        path: value for path, value in config.items() if value is not None
        and (path in ALWAYS or (path.startswith(SECTIONS) and value != _defaults().get(path)))
    }  # fmt: skip
    return {
        path: value if isinstance(value, bool | int | float | str) else str(value)
        for path, value in chosen_values.items()
    }
