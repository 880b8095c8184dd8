"""Where something new is made of a checkpoint: never over what is there, nor inside of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from megastable.base.errors import CheckpointError
from megastable.checkpoint import store


def refuse_existing(out: Path, what: str = "directory") -> None:
    """Before anything long begins. Raises CheckpointError for what exists, and for what would lie among a run's
    checkpoints or in one of them: it would be a file too many there, and the checkpoint a damaged one."""
    try:
        if out.exists() or out.is_symlink():
            raise CheckpointError(f"{out} exists already: name a new {what}")
    except OSError as error:  # such as a name that is too long
        raise CheckpointError(f"{out} cannot be made: {error.strerror}") from None
    for folder in out.absolute().parents:
        among = folder.name == "checkpoints" and (folder.parent / store.RECIPE).is_file()
        if among or all((folder / name).is_file() for name in (store.MANIFEST, store.STATE)):
            raise CheckpointError(
                f"{out} would lie in {folder}, where checkpoints are: name a new {what} such as runs/new"
            )
