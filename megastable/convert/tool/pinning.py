"""`pin` and `unpin`: protect checkpoints from deletion."""

from __future__ import annotations

from pathlib import Path

from megastable.base.errors import CheckpointError
from megastable.base.text import visible
from megastable.checkpoint import markers
from megastable.convert.tool.verifying import checkpoints_of


def pin(path: Path, reason: str) -> str:
    """Pin one checkpoint; returns a message. Raises CheckpointError."""
    checkpoint = _one(path)
    markers.pin(checkpoint, reason)
    return visible(f"{checkpoint} is kept until unpinned{f': {reason}' if reason else ''}")


def unpin(path: Path) -> str:
    """Unpin one. Raises CheckpointError."""
    checkpoint = _one(path)
    was = markers.unpin(checkpoint)
    return visible(f"{checkpoint} " + ("may be deleted by retention" if was else "was not pinned"))


def _one(path: Path) -> Path:
    """A checkpoint named explicitly: "the newest of a run" changes over time."""
    found = checkpoints_of(path)
    if len(found) > 1:
        raise CheckpointError(
            f"{path} has {len(found)} checkpoints: name one: {', '.join(f.name for f in found)}"
        )
    return found[0]
