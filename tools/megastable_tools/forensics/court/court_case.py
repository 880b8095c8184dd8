"""Rebuilds what a run had before it when trouble began: its data order, its skips, the steps since a checkpoint, the
suspects; and what it did about them. From the run directory alone.

The data order and the ledger are those of the moment at which the trouble was seen, before anything was done about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megastable.attribution.remedies import NOTHING, OTHER_DATA
from megastable.base.errors import DataError
from megastable.base.text import plural, ranges
from megastable.checkpoint.store import step_of
from megastable.config.tree import RunConfig
from megastable.data.skips import Selection
from megastable.report.postmortem.facts import IncidentFacts
from megastable.report.postmortem.journal import Journal, named_when, summary_of
from megastable.report.postmortem.passes import RecordFolder
from megastable.report.postmortem.sample_texts import Library
from megastable.run.events.stability_events import BranchesTried
from megastable.run.records import SCHEMA
from megastable_guard.actions import Action
from megastable_tools.forensics.court.offline_run import ReplayedStep, find_checkpoint
from megastable_tools.forensics.history import Done, History

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
MOST = 200_000  # suspects of one case

# The branch that does what an action does.
DONE = {
    Action.FALL_BACK: "leave_fp8", Action.CUT_LR: "cut_lr", Action.CAP_LR: "cap_lr", Action.SWAP_CORPUS: OTHER_DATA,
}  # fmt: skip


@dataclass(frozen=True)
class CourtCase:
    """title, told: what it is about, and what the run did, in words; choice: the branch that comes nearest to that.

    library, selection: the data order, and what was left of it. steps: those since the checkpoint, up to the last one
    before the trouble; losses: theirs, as recorded, nats. coming: the recorded steps after these. cursor: behind them.
    suspects: positions, ascending.
    """

    title: str
    told: str
    choice: str
    checkpoint: Path
    library: Library
    selection: Selection
    steps: list[ReplayedStep]
    losses: Floats
    coming: list[ReplayedStep]
    cursor: int
    suspects: Int64s

    @property
    def first_step(self) -> int:
        """The first step of the branches."""
        return step_of(self.checkpoint) + len(self.steps) + 1


def open_incident(history: History, number: int) -> CourtCase:
    """The case of an incident. Raises DataError if it does not exist, or is not one of numbers; CheckpointError if no
    good checkpoint is from before it."""
    journal = Journal(history.run)
    if number not in journal.own:
        known = ranges([(n, n + 1) for n in sorted(journal.own)]) or "none"
        raise DataError(f"{history.run.journal}: there is no incident {number}; those of this run: {known}")
    told = [journal.events[index] for index in journal.own[number]]
    incident, opened = IncidentFacts.model_validate(summary_of(told[-1])), float(told[0]["time"])
    if incident.breakdown:
        raise DataError(
            f"{history.run.root}: incident {number} is of processes or files ({incident.verdict}): there is nothing to "
            "be tried about it"
        )
    order = history.library(opened).source.order
    found = [np.empty(0, np.int64)]
    for time, skipped, deferred in named_when(told):
        if sum(end - first for first, end in (*skipped, *deferred)) > MOST:
            raise DataError(f"{history.run.root}: incident {number} has more than {MOST:,} samples")
        then = history.library(time).source.order
        found += [then.moved_to(order, np.arange(first, end)) for first, end in (*skipped, *deferred)]
    what = " then ".join(dict.fromkeys(incident.actions)) or "nothing"
    told_as = f"the run did: {what}; cause: {incident.cause}"
    named = np.unique(np.concatenate(found))
    between = journal.events[journal.own[number][0] : journal.own[number][-1] + 1]
    won = [
        str(event.get("chosen"))
        for event in between
        if isinstance(event, BranchesTried) and event.get("chosen") and not event.get("corpus")
    ]
    won += ["other_kernels"] if incident.kernels else []
    choice = choose_branch_like(incident.actions, won, bool(named.size))
    title = f"{history.run.root.name}, incident {number}"
    return _rebuild(history, title, told_as, choice, incident.onset, incident.step, opened, named)


def choose_branch_like(actions: Sequence[str], won: Sequence[str], took_away: bool) -> str:
    """The branch that comes nearest to what a run did.

    Args:
        actions: of the incident.
        won: names of the branches that won a trial of remedies.
        took_away: whether samples were skipped or deferred.
    """
    acted = [action for action in Action if action in actions]
    if Action.ADJUST in acted or any(action in acted for action in DONE):
        usual = next((DONE[action] for action in DONE if action in acted), NOTHING)
        remedies = [name for name in won if name not in (NOTHING, OTHER_DATA)]
        return remedies[-1] if remedies and Action.SWAP_CORPUS not in acted else usual
    # A skip alone undoes nothing: the samples were trained on.
    return OTHER_DATA if took_away and set(acted) - {Action.SKIP} else NOTHING


def open_steps(history: History, first: int, last: int) -> CourtCase:
    """The case of all samples of the steps [first, last], when the last of them was first done. Raises DataError if one
    was not recorded, and CheckpointError if no good checkpoint is from before them."""
    time = history.at(last, last)[0].time
    done = [step for step in _chain(history, last, time) if step.step >= first]
    positions = np.unique(_positions(history, done))
    out = history.left_out(history.library(time), positions)
    refused = sum(not step.applied for step in done)
    choice = OTHER_DATA if refused or out.any() else NOTHING
    told = f"{refused} of {plural(len(done), 'update')} refused, "
    told += f"{int(out.sum())} of {plural(out.size, 'sample')} skipped by now"
    which = f"step {first}" if first == last else f"steps {first} to {last}"
    return _rebuild(history, f"{history.run.root.name}, {which}", told, choice, first, last, time, positions)


def _rebuild(
    history: History, title: str, told: str, choice: str, onset: int, last: int, time: float, named: Int64s
) -> CourtCase:
    """onset, last: the steps of the trouble. time: when it was seen. named: suspects, as far as they are known."""
    chain = _chain(history, last, time)
    suspects = named if named.size else _positions(history, [d for d in chain if d.step >= onset])
    touched = [d.step for d in chain if np.isin(history.positions(d), suspects).any()] if named.size else []
    begin = min([onset, *touched])
    checkpoint = find_checkpoint(history.run, begin)
    after = [d for d in chain if d.step > step_of(checkpoint)]
    missing = sorted(set(range(step_of(checkpoint) + 1, begin)) - {d.step for d in after})
    if missing:
        raise DataError(
            f"{history.run.steps}: step {missing[0]} was not recorded, so it is not known what the run read after "
            f"{checkpoint.name}"
        )
    library = history.library(time)
    usable = history.ledger.until(time).usable(
        history.run.skips, library.source.order, history.config.data.skip
    )[0]
    rates = _rates(history, after)
    before, rest = [d for d in after if d.step < begin], [d for d in after if d.step >= begin]
    as_done = [ReplayedStep(history.positions(d), rates[d.step, d.time], d.applied) for d in after]
    cursor = rest[0].first_position if rest else before[-1].next_position if before else 0
    return CourtCase(
        title, told, choice, checkpoint, library, usable, as_done[: len(before)],
        np.array([d.loss for d in before]), as_done[len(before) :], cursor, np.sort(suspects),
    )  # fmt: skip


def _chain(history: History, last: int, time: float) -> list[Done]:
    """The steps up to `last` that were in force at a time, ascending: what was undone by then is not among them."""
    found: list[Done] = []
    for done in history.steps(0, last):
        if done.time > time:
            continue
        while found and found[-1].step >= done.step:
            found.pop()
        found.append(done)
    return found


def _positions(history: History, steps: Sequence[Done]) -> Int64s:
    return np.concatenate([np.empty(0, np.int64), *(history.positions(done) for done in steps)])


def _rates(history: History, steps: Sequence[Done]) -> dict[tuple[int, float], float]:
    """The learning rate of every step, by its number and time."""
    if not steps:
        return {}
    folder = RecordFolder(history.run.steps, SCHEMA)
    rows, _ = folder.rows(steps[0].step, steps[-1].step, ("step", "time", "lr"))
    return {(row["step"], row["time"]): row["lr"] for row in rows}


def data_ahead(case: CourtCase, config: RunConfig, steps: int) -> tuple[list[Int64s], int]:
    """The batches of the next `steps` steps as the run would have read them, and the cursor behind them."""
    found, cursor = [step.positions for step in case.coming][:steps], case.cursor
    if found:
        cursor = int(found[-1][-1]) + 1
    while len(found) < steps:
        positions, cursor = case.selection.next_kept(cursor, config.batches.at(cursor))
        found.append(positions)
    return found, cursor
