"""Check the target path of something made from a checkpoint: never an existing path, nor one inside a checkpoint."""

from __future__ import annotations

from pathlib import Path

from megastable.base.errors import CheckpointError
from megastable.checkpoint import store


def refuse_existing(out: Path, what: str = "directory") -> None:
    """Check before any long work. Raises CheckpointError for a path that exists or lies among a run's checkpoints or in
    one of them, where an additional file would damage the checkpoint."""
    try:
        if out.exists() or out.is_symlink():
            raise CheckpointError(f"{out} exists already: name a new {what}")
    except OSError as error:  # such as a name that is too long
        raise CheckpointError(f"{out} cannot be made: {error.strerror}") from None
    for folder in out.absolute().parents:
        among = folder.name == "checkpoints" and (folder.parent / store.RECIPE).is_file()
        if among or all((folder / name).is_file() for name in (store.MANIFEST, store.STATE)):
            raise CheckpointError(
                f"{out} would lie in {folder}, which holds checkpoints: name a new {what} such as runs/new"
            )
