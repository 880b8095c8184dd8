"""`accept`: let runs continue from a checkpoint that was convicted or set aside."""

from __future__ import annotations

import os
from pathlib import Path

from megastable.base import durable
from megastable.base.errors import CheckpointError
from megastable.base.text import visible
from megastable.checkpoint import markers, store
from megastable.convert.tool.verifying import checkpoints_of


def accept(path: Path, reason: str) -> str:
    """Accept one checkpoint, and restore its name; returns a message. Raises CheckpointError."""
    found = checkpoints_of(path)
    if len(found) > 1:
        names = ", ".join(one.name for one in found)
        raise CheckpointError(f"{path} has {len(found)} checkpoints: name one: {names}")
    [checkpoint] = found
    if problems := store.problems(checkpoint):
        raise CheckpointError(f"{problems[0]}: damaged bytes cannot be accepted")
    ruling = markers.convicted(checkpoint)
    target = checkpoint.with_name(store.name_of(store.read_contents(checkpoint).step))
    if target != checkpoint and target.exists():
        raise CheckpointError(f"{target} exists: rename or remove it first")
    markers.accept(checkpoint, reason)
    if target != checkpoint:
        try:
            os.replace(checkpoint, target)
            durable.sync_directory(target.parent)
        except OSError as error:
            raise CheckpointError(f"{checkpoint} could not be renamed: {error.strerror or error}") from None
        store.point_latest(target.parent)
    was = f"; it was convicted: {ruling.reason}" if ruling is not None else ""
    newer = [
        one.name for one in store.newest_first(target.parent) if store.step_of(one) > store.step_of(target)
    ]
    beside = (
        f". There are newer ones, and a run continues from the newest: {', '.join(newer)}" if newer else ""
    )
    return visible(f"{target} is accepted: runs continue from it, whatever they find in it{was}{beside}")
