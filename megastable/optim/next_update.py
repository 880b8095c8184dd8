"""Compares the next update of a resumed run with the one that its old recipe would make. Pure.

A changed key may act at once and by a large factor: a decay that has ended begins again when `train.steps` grows, and
the rate jumps back up. The list of changed keys alone does not show that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from megastable.config.tree import RunConfig
from megastable.optim.schedule import find_decay_end, measure_progress, rate_at

FACTOR = 1.2  # a smaller change of a number is not told
RATE = "learning rate"
# The longer its memory, the less an average follows the next gradient: of these keys 1 - value counts.
DECAY_RATES = ("betas", "momentum", "clipping.decay", "max_decay", "norm_decays")


class RunPosition(NamedTuple):
    """Where a run stands. updates, trained_tokens: applied so far; cursor: the next data position."""

    updates: int
    trained_tokens: int
    cursor: int


class UpdateChange(NamedTuple):
    """factor: of the new value over the old one; None: it is no number, or one of them is 0 or missing."""

    name: str
    old: Any
    new: Any
    factor: float | None

    def __str__(self) -> str:
        factor_text = "" if self.factor is None else f" ({self.factor:.3g} times)"
        return f"{self.name} {_shown(self.old)} -> {_shown(self.new)}{factor_text}"


def compare_next_update(old: RunConfig, new: RunConfig, at: RunPosition) -> list[UpdateChange]:
    """What makes the update after `at` another one under `new` than under `old`, by at least `FACTOR`."""
    old_settings, new_settings = _settings(old, at), _settings(new, at)
    update_changes = []
    for setting_name, old_value in old_settings.items():
        # What only one of them has belongs to a section that another key turns on.
        if setting_name not in new_settings or old_value == (new_value := new_settings[setting_name]):
            continue
        change_factor = _factor(setting_name, old_value, new_value)
        if change_factor is None or max(change_factor, 1 / change_factor) >= FACTOR:
            update_changes.append(UpdateChange(setting_name, old_value, new_value, change_factor))
    return update_changes


def describe_next_update(old: RunConfig, new: RunConfig, at: RunPosition, changes: list[UpdateChange]) -> str:
    """The changes in a sentence, with what to do about them."""
    listed_changes = "; ".join(map(str, changes))
    change_text = f"the next update is not the one that the checkpoint's recipe would make: {listed_changes}"
    if any(change.name == RATE for change in changes) and (of_schedule := _remedy_of_schedule(old, new, at)):
        change_text += f". {of_schedule}"
    return change_text


def _settings(config: RunConfig, at: RunPosition) -> dict[str, Any]:
    """Everything of a recipe that an update depends on, other than the layout and the data."""
    sequence_length, global_batch = config.model.sequence_length, config.batches.value_at(at.cursor)
    schedule_progress = measure_progress(config.schedule, at.updates, at.trained_tokens)
    next_done = measure_progress(config.schedule, 1, global_batch * sequence_length)
    update_settings: dict[str, Any] = {
        RATE: rate_at(
            config.schedule, config.optimizer.lr, find_decay_end(config), schedule_progress, next_done
        ),
        "global batch": global_batch,
        "sequence length": config.pieces.value_at(at.cursor),
        "precision.kind": config.precision.kind,
        "model.z_loss": config.model.z_loss,
        "data.keep_documents_apart": config.data.keep_documents_apart,
    }
    fp8 = config.precision.fp8
    update_settings["precision.fp8"] = None if fp8 is None else fp8.recipe
    if fp8 is not None:
        update_settings |= _leaves("precision.fp8", fp8.model_dump(exclude={"recipe"}))
    optimizer_settings = config.optimizer.model_dump(exclude={"lr"})  # part of the rate
    clipping_settings = optimizer_settings.pop("clipping")
    optimizer_settings |= {
        f"clipping.{setting_key}": setting_value for setting_key, setting_value in clipping_settings.items()
    }
    for setting_key, value in optimizer_settings.items():
        if config.optimizer.reads_key(setting_key):
            update_settings |= _leaves(f"optimizer.{setting_key}", value)
    return update_settings


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, sub_value in value.items():
            yield from _leaves(f"{name}.{key}", sub_value)
    elif isinstance(value, tuple) and value and all(isinstance(item, float) for item in value):
        for index, item in enumerate(value):
            yield f"{name}[{index}]", item
    else:
        yield name, value


def _factor(name: str, old: Any, new: Any) -> float | None:
    """How many times as large `new` is; of the rate of a decay, how many times as much a new gradient counts."""
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in (old, new)):
        return None
    if name.partition("[")[0].endswith(DECAY_RATES):
        old, new = 1 - old, 1 - new
    change_factor = new / old if old else math.inf
    return change_factor if 0 < change_factor < math.inf else None


def _remedy_of_schedule(old: RunConfig, new: RunConfig, at: RunPosition) -> str:
    """What to do if the rate differs because the decay ends elsewhere; "" if it does not."""
    unit = "tokens" if old.schedule.by_tokens else "steps"
    end, now_end = find_decay_end(old), find_decay_end(new)
    if old.schedule.by_tokens != new.schedule.by_tokens or end == now_end or new.schedule.kind == "constant":
        return ""
    done = measure_progress(old.schedule, at.updates, at.trained_tokens)
    text = (
        f"The decay ended after {end:,} {unit}, now it ends after {now_end:,}, and {done:,} are done: set "
        f"schedule.total_{unit}={end} to keep the schedule as it was"
    )
    if now_end > end:
        text += (
            "; to make a longer run without a jump, give it schedule.kind=constant or wsd from the start and decay "
            "from a checkpoint of its constant phase (megastable checkpoint branch)"
        )
    return text


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "none" if value is None else str(value)
