"""Which checkpoints are kept. `doomed` decides, `apply` deletes.

Kept are the newest ones, every so many steps one for good, what a person pinned, and the newest that proved healthy.
Besides, the first one after that (the first of all where none has proved healthy yet): if a slow trouble is on its way
into all that are not proven, it is the likeliest to be from before it. And where checkpoints are saved so often that
the newest are replaced before any of them could prove itself, it is the one that can.
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
from megastable.checkpoint.quick_check import DELETING, found, glance, latest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeptCheckpoint:
    """A checkpoint, by its step."""

    step: int
    healthy: bool = False
    pinned: bool = False


def doomed(checkpoints: Sequence[KeptCheckpoint], keep: int, keep_every: int = 0) -> list[int]:
    """Steps of the checkpoints that are to be deleted, ascending: all that are not vital, pinned or milestones.

    keep: this many newest stay, at least 1. keep_every: besides, the first checkpoint at or after each multiple of so
    many steps stays for good (not for multiple 0); 0 = none.
    """
    stay = vital(checkpoints, keep) | {c.step for c in checkpoints if c.pinned}
    if keep_every:
        stay |= milestones([c.step for c in checkpoints], keep_every)
    return sorted({c.step for c in checkpoints} - stay)


def vital(checkpoints: Sequence[KeptCheckpoint], keep: int) -> set[int]:
    """Those that the run may have to go on from: the newest `keep`, the newest healthy one, the first one after it."""
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

    As long as steps come in ascending order it does not matter whether those between were deleted meanwhile.
    """
    if every < 1:
        raise ValueError(f"keep_every={every}: a number of steps")
    first: dict[int, int] = {}
    for step in sorted(steps):
        first.setdefault(step // every, step)
    return {step for multiple, step in first.items() if multiple}


def standing(folder: Path) -> list[KeptCheckpoint]:
    """The checkpoints of a folder, ascending; whether they are whole is not looked at. Links are left out: what they
    lead to is kept elsewhere. Raises CheckpointError for a folder that cannot be read."""
    paths = [(f.step, f.path) for f in found(folder) if f.kind == "checkpoint" and not f.path.is_symlink()]
    return [
        KeptCheckpoint(step, markers.healthy(path) is not None, markers.pinned(path) is not None)
        for step, path in paths
    ]


def apply(folder: Path, keep: int, keep_every: int = 0) -> list[str]:
    """Delete what `doomed` names in RUN/checkpoints; the names of the checkpoints that are no more, ascending.

    A checkpoint that is damaged (by its sizes) does not count as one that is kept, so it cannot push out a good one.
    Suspects, rejected ones and links are not counted and not deleted. One that is deleted is first hidden under another
    name: a crash leaves no half of one that looks whole. A disk that refuses is logged, and tried again the next time.
    """
    try:
        _clear(folder)
        names = [store.name_of(step) for step in doomed(_whole(folder, keep, keep_every), keep, keep_every)]
    except (CheckpointError, OSError) as error:
        log.warning("no old checkpoint is deleted: %s", error)
        return []
    # What `latest` names stays, even where that file could not be brought up to date.
    hidden = [name for name in names if name != latest(folder) and _hide(folder, name)]
    if not hidden:
        return []
    try:
        # Before anything inside is deleted: after a power cut the old names must not come back.
        durable.sync_directory(folder)
    except OSError as error:
        log.warning("%s: %s; old checkpoints are deleted later", folder, error)
        return hidden
    for name in hidden:
        _delete(folder / f"{DELETING}{name}")
    return hidden


def _whole(folder: Path, keep: int, keep_every: int) -> list[KeptCheckpoint]:
    """The checkpoints that the decision is made with: damaged ones are left out.

    Only those are looked at whose being there lets others go: a folder may hold thousands of files.
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
    """Whether a checkpoint was renamed, to be deleted."""
    path, aside = folder / name, folder / f"{DELETING}{name}"
    try:
        os.replace(path, aside)
        if markers.pinned(aside) is None:
            return True
        os.replace(aside, path)  # a person was faster
    except OSError as error:
        log.warning("%s: not deleted: %s", path, error.strerror or error)
    return False


def _clear(folder: Path) -> None:
    """Delete what earlier calls left behind. Nobody can pin what is hidden: if it is pinned, it is whole."""
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
