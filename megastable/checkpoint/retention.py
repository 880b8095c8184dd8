"""Retention of checkpoints: `doomed` decides which to delete, `apply` deletes them.

Kept are the newest ones, one at regular intervals for good, pinned ones, and the newest that proved healthy. Also the
first one after that (or the first of all if none has proved healthy): if a slow drift affects the unproven ones, it is
the likeliest to predate it. And if checkpoints are saved so often that the newest are replaced before they could prove
healthy, it is the one that can.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megastable.base import durable
from megastable.base.errors import CheckpointError
from megastable.checkpoint import markers, store
from megastable.checkpoint.store import DELETING, found, glance, latest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeptCheckpoint:
    """A checkpoint, by its step."""

    step: int
    healthy: bool = False
    pinned: bool = False


def doomed(checkpoints: Sequence[KeptCheckpoint], keep: int, keep_every: int = 0) -> list[int]:
    """Steps of the checkpoints to delete, ascending: all that are not vital, pinned or milestones.

    keep: this many newest stay, at least 1. keep_every: also, the first checkpoint at or after each multiple of this
    many steps stays for good (not for multiple 0); 0 = none.
    """
    stay = vital(checkpoints, keep) | {c.step for c in checkpoints if c.pinned}
    if keep_every:
        stay |= milestones([c.step for c in checkpoints], keep_every)
    return sorted({c.step for c in checkpoints} - stay)


def vital(checkpoints: Sequence[KeptCheckpoint], keep: int) -> set[int]:
    """Those that the run may have to continue from: the newest `keep`, the newest healthy one, the first one after
    it."""
    if keep < 1:
        raise ValueError(f"keep={keep}: at least 1, or nothing would be left")
    steps = sorted(c.step for c in checkpoints)
    proven = max((c.step for c in checkpoints if c.healthy), default=-1)
    return {
        *steps[-keep:],
        *([proven] if proven >= 0 else []),
        *[step for step in steps if step > proven][:1],
    }


def milestones(steps: Sequence[int], every: int) -> set[int]:
    """The first of `steps` at or after each multiple of `every`, from the first multiple on.

    Deleting checkpoints between milestones does not change the result, as long as steps ascend.
    """
    if every < 1:
        raise ValueError(f"keep_every={every}: a number of steps")
    first: dict[int, int] = {}
    for step in sorted(steps):
        first.setdefault(step // every, step)
    return {step for multiple, step in first.items() if multiple}


def standing(folder: Path) -> list[KeptCheckpoint]:
    """The checkpoints of a folder, ascending, without checking that they are complete. Links are left out: their
    targets are kept elsewhere. Raises CheckpointError for a folder that cannot be read."""
    paths = [(f.step, f.path) for f in found(folder) if f.kind == "checkpoint" and not f.path.is_symlink()]
    return [
        KeptCheckpoint(step, markers.healthy(path) is not None, markers.pinned(path) is not None)
        for step, path in paths
    ]


def apply(folder: Path, keep: int, keep_every: int = 0) -> list[str]:
    """Delete what `doomed` names in RUN/checkpoints; returns the names of the deleted checkpoints, ascending.

    A damaged checkpoint (by its sizes) does not count as kept, so it cannot displace a good one. Suspect and rejected
    checkpoints and links are neither counted nor deleted. A checkpoint is renamed before it is deleted, so that a crash
    leaves no partial one that looks complete. A disk error is logged, and the deletion retried the next time.
    """
    try:
        _clear(folder)
        names = [store.name_of(step) for step in doomed(_whole(folder, keep, keep_every), keep, keep_every)]
    except (CheckpointError, OSError) as error:
        log.warning("no old checkpoint is deleted: %s", error)
        return []
    # The target of `latest` stays, even if that file could not be updated.
    hidden = [name for name in names if name != latest(folder) and _hide(folder, name)]
    if not hidden:
        return []
    try:
        # Before any file is deleted: after a power cut the old names must not come back.
        durable.sync_directory(folder)
    except OSError as error:
        log.warning("%s: %s; old checkpoints are deleted later", folder, error)
        return hidden
    for name in hidden:
        _delete(folder / f"{DELETING}{name}")
    return hidden


def _whole(folder: Path, keep: int, keep_every: int) -> list[KeptCheckpoint]:
    """The checkpoints to decide about, without damaged ones.

    Examines only those whose presence lets others be deleted: a folder may hold thousands of files.
    """
    kept, seen = standing(folder), set[int]()
    while doomed(kept, keep, keep_every) and (unseen := vital(kept, keep) - seen):
        seen |= unseen
        for step in unseen:
            try:
                glance(folder / store.name_of(step))
            except CheckpointError as error:
                log.warning("%s; it does not count as a checkpoint", error)
                kept = [c for c in kept if c.step != step]
    return kept


def _hide(folder: Path, name: str) -> bool:
    """Rename a checkpoint for deletion; whether that worked."""
    path, aside = folder / name, folder / f"{DELETING}{name}"
    try:
        os.replace(path, aside)
        if markers.pinned(aside) is None:
            return True
        os.replace(aside, path)  # pinned in the meantime
    except OSError as error:
        log.warning("%s: not deleted: %s", path, error.strerror or error)
    return False


def _clear(folder: Path) -> None:
    """Delete what earlier calls left behind. A renamed checkpoint cannot be pinned: if it is, it is complete."""
    for left in [f for f in found(folder) if f.kind == "deleting"]:
        if markers.pinned(left.path) is None:
            _delete(left.path)
            continue
        try:
            os.replace(left.path, folder / store.name_of(left.step))
        except OSError as error:
            log.warning("%s: pinned, and could not be renamed: %s", left.path, error.strerror or error)


def _delete(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        log.warning("%s: could not be deleted: %s", path, error)
