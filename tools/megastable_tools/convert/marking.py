"""What a person decides on a checkpoint: `pin`, `unpin`, `accept`, and `rollback` to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megastable.base import durable
from megastable.base.errors import CheckpointError
from megastable.base.login import login_name
from megastable.base.text import visible
from megastable.checkpoint import markers, store
from megastable.checkpoint.lineage import interrupted
from megastable.run.directory import RunDirectory
from megastable.run.events.stability_events import IncidentEvent
from megastable.run.events.training_events import CheckpointSaved, CheckpointSuspect, RolledBack, Training
from megastable.run.log import RunLog
from megastable.supervise.locks import SUPERVISOR, TRAINING, lock
from megastable_tools.convert.verifying import checkpoints_of


def find_one(path: Path) -> Path:
    """A checkpoint named explicitly: "the newest of a run" changes over time. Raises CheckpointError."""
    found = checkpoints_of(path)
    if len(found) > 1:
        names = ", ".join(one.name for one in found)
        raise CheckpointError(f"{path} has {len(found)} checkpoints: name one: {names}")
    return found[0]


def pin(path: Path, reason: str) -> str:
    """Protect one checkpoint from deletion; returns a message. Raises CheckpointError."""
    checkpoint = find_one(path)
    markers.pin(checkpoint, reason)
    return visible(f"{checkpoint} is kept until unpinned{f': {reason}' if reason else ''}")


def unpin(path: Path) -> str:
    """Unpin one. Raises CheckpointError."""
    checkpoint = find_one(path)
    was = markers.unpin(checkpoint)
    return visible(f"{checkpoint} " + ("may be deleted by retention" if was else "was not pinned"))


def accept(path: Path, reason: str) -> str:
    """Let runs continue from a checkpoint that was convicted or set aside, and restore its name; returns a message.

    Raises CheckpointError.
    """
    checkpoint = find_one(path)
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


def roll_back(path: Path, reason: str) -> str:
    """Set aside the checkpoints after `path`, and the summary of a finished run; returns a message. Nothing is deleted.

    Raises CheckpointError if the run could not resume from it or is at work, SpaceError if the journal cannot be
    written.
    """
    checkpoint = find_one(path).resolve()
    run, step = RunDirectory(checkpoint.parent.parent), store.read_contents(checkpoint).step
    if checkpoint.parent != run.checkpoints or not run.journal.exists():
        raise CheckpointError(f"{checkpoint} is not in the checkpoints of a run that has a journal")
    with _nobody_at_work(run):
        _check(checkpoint, run, step)
        log = RunLog(run)
        # The journal first. From this line on, copies of later steps in the memory of hosts do not count, and a start
        # finishes what is not done here.
        log.commit(RolledBack(step=step, reason=reason, who=login_name()))
        rolled_back = run.rolled_back()
        assert rolled_back is not None, "its line was just written"
        why = f"rollback{rolled_back[0]}"
        newer = store.set_aside_newer(run.checkpoints, step, forget=False, why=why)
        for name in newer:
            log.commit(CheckpointSuspect(name=name, reason=f"a person rolled the run back to step {step}"))
        if run.summary.exists():
            os.replace(run.summary, run.summary.with_name(f"{run.summary.stem}-{why}.json"))
            durable.sync_directory(run.root)
    aside = ", ".join(f"{why}-{name}" for name in newer)
    return visible(
        f"the next start of {run.root} trains on from step {step}"
        + (f"; set aside, not deleted: {aside}" if newer else "; there was no newer checkpoint")
        + f". How to start it: megastable status {run.root}"
    )


def _check(checkpoint: Path, run: RunDirectory, step: int) -> None:
    if checkpoint.name != store.name_of(step):
        raise CheckpointError(
            f"{checkpoint} was set aside: accept it first: megastable checkpoint accept {checkpoint}"
        )
    if problems := store.problems(checkpoint):
        raise CheckpointError(f"{problems[0]}: the run cannot go on from it")
    if (ruling := markers.convicted(checkpoint)) is not None and markers.accepted(checkpoint) is None:
        raise CheckpointError(
            f"{checkpoint} was convicted: {ruling.reason}. To go on from it all the same: megastable checkpoint accept "
            f"{checkpoint}"
        )
    undone = interrupted(run.events(Training, IncidentEvent, CheckpointSaved))
    before = run.handed_over()
    if before is None and undone is not None and checkpoint.name not in undone[1]:
        before = undone[0]
    if before is not None and step >= before:
        raise CheckpointError(
            f"{checkpoint}: an incident asks for a checkpoint from before step {before}: name one of those"
        )


@contextmanager
def _nobody_at_work(run: RunDirectory) -> Iterator[None]:
    """Hold the locks of the run. Raises CheckpointError if a process has one, ConfigError if they cannot be
    taken."""
    with ExitStack() as held:
        for name, who in ((SUPERVISOR, "supervisor"), (TRAINING, "training")):
            if (held_lock := lock(run.root / name)) is None:
                raise CheckpointError(f"{run.root}: its {who} is at work: stop the run first")
            held.enter_context(held_lock)
        yield
