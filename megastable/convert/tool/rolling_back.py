"""`rollback`: the next start of a run goes on from an earlier checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megastable.base import durable
from megastable.base.errors import CheckpointError
from megastable.base.text import visible
from megastable.checkpoint import markers, store
from megastable.convert.tool.verifying import checkpoints_of
from megastable.run.directory import RunDirectory
from megastable.run.events.training_events import CheckpointSuspect, RolledBack
from megastable.run.log import RunLog

LOCKS = (".supervisor.lock", ".lock")  # of a supervisor and of rank 0, which write to the run directory


def roll_back(path: Path, reason: str) -> str:
    """Set aside the checkpoints after `path`, and the summary of a finished run; returns a message. Nothing is deleted.

    Raises CheckpointError if the run could not resume from it or is at work, SpaceError if the journal cannot be
    written.
    """
    found = checkpoints_of(path)
    if len(found) > 1:
        names = ", ".join(one.name for one in found)
        raise CheckpointError(f"{path} has {len(found)} checkpoints: name the one to go back to: {names}")
    [checkpoint] = found
    run, step = RunDirectory(checkpoint.parent.parent), store.read_contents(checkpoint).step
    with _nobody_at_work(run):
        _check(checkpoint, run, step)
        newer = [one for one in store.newest_first(run.checkpoints) if store.step_of(one) > step]
        log = RunLog(run)
        # The journal first: from this line on, copies of later steps in the memory of hosts do not count either.
        log.commit(RolledBack(step=step, reason=reason))
        for one in newer:
            log.commit(CheckpointSuspect(name=one.name, reason=f"the run was rolled back to step {step}"))
        store.set_aside_newer(run.checkpoints, step, forget=False)
        kept = run.summary.with_name(f"summary-before-rollback-to-{step}.json")
        if run.summary.exists():
            os.replace(run.summary, kept)
            durable.sync_directory(run.root)
    aside = ", ".join(f"suspect-{one.name}" for one in newer)
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
    before = run.handed_over()
    if before is not None and step >= before:
        raise CheckpointError(
            f"{checkpoint}: an incident asks for a checkpoint from before step {before}: name one of those"
        )


@contextmanager
def _nobody_at_work(run: RunDirectory) -> Iterator[None]:
    """Hold the locks of the run. Raises CheckpointError if a process has one."""
    with ExitStack() as held:
        for name in LOCKS:
            try:
                lock = durable.hold(run.root / name)
            except OSError as error:
                raise CheckpointError(
                    f"{run.root / name} cannot be locked: {error.strerror or error}"
                ) from None
            if lock is None:
                raise CheckpointError(
                    f"{run.root}: its {'supervisor' if name == LOCKS[0] else 'training'} is at work: stop the run first"
                )
            held.enter_context(lock)
        yield
