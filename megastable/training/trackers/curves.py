"""Names the curves of a run, the same in every tracker, and says which of them a refused or undone step has."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields

from megastable.run.events.training_events import Evaluated
from megastable.run.records import LayerRecord, StepRecord
from megastable.training.trackers.points import StepPoint

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
    found = {name: getattr(record, field) for field, name in CURVES.items()}
    if record.loss_scale == 1:  # there is none
        del found[CURVES["loss_scale"]]
    return {name: value for name, value in found.items() if value is not None}


def validation_values(found: Evaluated) -> dict[str, float]:
    """The losses of an evaluation, by curve."""
    values = {VALIDATION_OF + name: loss for name, loss in found.by_corpus.items()}
    return values if found.loss is None else {VALIDATION: found.loss} | values


def layer_values(rows: Iterable[LayerRecord]) -> dict[str, float]:
    """The statistics of a step's layers, by "STATISTIC/LAYER"."""
    return {
        f"{kind}/{row.name}": value for row in rows for kind in STATISTICS
        if (value := getattr(row, kind)) is not None
    }  # fmt: skip


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """What can be drawn."""
    return {name: value for name, value in values.items() if math.isfinite(value)}


def shown(point: StepPoint) -> dict[str, float]:
    """What a step adds to the run's own curves. A refused one changed nothing: only its speed counts."""
    values = finite(point.values)
    return values if point.applied else {k: v for k, v in values.items() if k.startswith("speed/")}


def apart(point: StepPoint, group: str = "train") -> dict[str, float]:
    """What a step adds to the curves of refused or undone ones; group: in place of "train"."""
    values = finite(point.values)
    return {f"{group}/{name.partition('/')[2]}": values[name] for name in APART if name in values}


def by_statistic(values: Mapping[str, float]) -> dict[str, list[float]]:
    """The finite values of all layers, by statistic; `LOGARITHMIC` ones as "log10_STATISTIC"."""
    found: dict[str, list[float]] = {}
    for name, value in finite(values).items():
        kind = name.partition("/")[0]
        if kind not in LOGARITHMIC:
            found.setdefault(kind, []).append(value)
        elif value > 0:
            found.setdefault(f"log10_{kind}", []).append(math.log10(value))
    return found
