"""Compares the next update of a resumed run with the one that its old recipe would make. Pure.

A changed key may act at once and by a large factor: a decay that has ended begins again when `train.steps` grows, and
the rate jumps back up. The list of changed keys alone does not show that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from megastable.config.tree import RunConfig
from megastable.optim.schedule import progress, rate, total

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
        factor = "" if self.factor is None else f" ({_times(self.factor)})"
        return f"{self.name} {_shown(self.old)} -> {_shown(self.new)}{factor}"


def compare_next_update(old: RunConfig, new: RunConfig, at: RunPosition) -> list[UpdateChange]:
    """What makes the update after `at` another one under `new` than under `old`, by at least `FACTOR`."""
    before, after = _settings(old, at), _settings(new, at)
    found = []
    for name, one in before.items():
        # What only one of them has belongs to a section that another key turns on.
        if name not in after or one == (other := after[name]):
            continue
        factor = _factor(name, one, other)
        if factor is None or max(factor, 1 / factor) >= FACTOR:
            found.append(UpdateChange(name, one, other, factor))
    return found


def describe_next_update(old: RunConfig, new: RunConfig, at: RunPosition, changes: list[UpdateChange]) -> str:
    """The changes in a sentence, with what to do about them."""
    text = "the next update is not the one that the checkpoint's recipe would make: " + "; ".join(
        map(str, changes)
    )
    if any(change.name == RATE for change in changes) and (of_schedule := _remedy_of_schedule(old, new, at)):
        text += f". {of_schedule}"
    return text


def _settings(config: RunConfig, at: RunPosition) -> dict[str, Any]:
    """Everything of a recipe that an update depends on, other than the layout and the data."""
    length, batch = config.model.sequence_length, config.batches.at(at.cursor)
    done = progress(config.schedule, at.updates, at.trained_tokens)
    next_done = progress(config.schedule, 1, batch * length)
    found: dict[str, Any] = {
        RATE: rate(config.schedule, config.optimizer.lr, total(config), done, next_done),
        "global batch": batch,
        "sequence length": config.pieces.at(at.cursor),
        "precision.kind": config.precision.kind,
        "model.z_loss": config.model.z_loss,
        "data.keep_documents_apart": config.data.keep_documents_apart,
    }
    fp8 = config.precision.fp8
    found["precision.fp8"] = None if fp8 is None else fp8.recipe
    if fp8 is not None:
        found |= _leaves("precision.fp8", fp8.model_dump(exclude={"recipe"}))
    own = config.optimizer.model_dump(exclude={"lr"})  # part of the rate
    clipping = own.pop("clipping")
    own |= {f"clipping.{key}": value for key, value in clipping.items()}
    for key, value in own.items():
        if config.optimizer.reads(key):
            found |= _leaves(f"optimizer.{key}", value)
    return found


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, below in value.items():
            yield from _leaves(f"{name}.{key}", below)
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
    factor = new / old if old else math.inf
    return factor if 0 < factor < math.inf else None


def _remedy_of_schedule(old: RunConfig, new: RunConfig, at: RunPosition) -> str:
    """What to do if the rate differs because the decay ends elsewhere; "" if it does not."""
    unit = "tokens" if old.schedule.by_tokens else "steps"
    end, now_end = total(old), total(new)
    if old.schedule.by_tokens != new.schedule.by_tokens or end == now_end or new.schedule.kind == "constant":
        return ""
    done = progress(old.schedule, at.updates, at.trained_tokens)
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


def _times(factor: float) -> str:
    return f"{factor:.3g} times"


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "none" if value is None else str(value)
