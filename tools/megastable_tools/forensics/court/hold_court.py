"""Holds a trial again, from a checkpoint: all candidates from the same state, compared on the same data to come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megastable.attribution.harm import COMPRESSED, choose_held_out, find_repetition, replace_samples
from megastable.attribution.remedies import NOTHING, OTHER_DATA
from megastable.base.errors import DataError
from megastable.base.progress_bar import Bar
from megastable.config.tree import RunConfig
from megastable.recovery.replay_trials import COMING, FARTHEST
from megastable.run.changes import changes_of, config_at
from megastable_tools.forensics.court.candidates import (
    ADJUSTMENTS,
    Candidate,
    choose_candidates,
    list_candidates,
)
from megastable_tools.forensics.court.court_case import CourtCase, data_ahead
from megastable_tools.forensics.court.offline_run import (
    KeptState,
    OfflineRun,
    opened,
    recall_rate,
    recipe_of,
    single_process,
)
from megastable_tools.forensics.court.verdict import BranchOutcome, CourtVerdict, judge_branches
from megastable_tools.forensics.history import History

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
SEARCHED = 4  # times as many positions as fillers are wanted, in which these are searched


@dataclass(frozen=True)
class CourtRecord:
    """suspects: how many the branches have, with those held out. differs: by how much the loss of a replayed step is
    not the recorded one, at most, nats. before: mean loss of the data to come on the state that all branches began
    with, nats."""

    case: CourtCase
    steps: int
    suspects: int
    differs: float
    before: float
    verdict: CourtVerdict


@dataclass(frozen=True)
class TrialData:
    """Positions: suspects that are met in the batches, those of them that no branch is trained on, harmless samples to
    take their places, samples of the data to come. batches: of every step, as the run would have read them."""

    batches: list[Int64s]
    suspects: Int64s
    held_out: Int64s
    fillers: Int64s
    coming: Int64s

    @property
    def measured(self) -> Int64s:
        return np.concatenate([self.coming, self.held_out])

    def batches_of(self, candidate: Candidate) -> list[Int64s]:
        """What a branch is trained on."""
        replaced = self.suspects if candidate.name == OTHER_DATA else self.held_out
        return replace_samples(self.batches, replaced, self.fillers)


def hold_court(history: History, case: CourtCase, only: Sequence[str], steps: int, bar: Bar) -> CourtRecord:
    """Train `steps` steps of every candidate.

    Args:
        only: names of candidates; the one that the run chose, and those that a verdict needs, are always tried.
        bar: of steps.

    Raises:
        DataError: a sample cannot be read, or there is nothing to compare.
        CheckpointError, ConfigError: the checkpoint cannot be loaded here.
    """
    config = recipe_of(case.checkpoint, history.config)
    config = config_at(config, changes_of(history.run.journal), case.first_step)
    choose_candidates(list_candidates(config, ADJUSTMENTS), only, NOTHING)  # before anything slow
    data = gather_data(history, case, config, steps)
    with (
        single_process(config),
        opened(case.checkpoint, config, case.library.source, case.selection) as run,
    ):
        every = list_candidates(config, run.possible)
        choice = case.choice if case.choice in [candidate.name for candidate in every] else NOTHING
        candidates = choose_candidates(every, only, choice)
        bar.more(len(case.steps) + len(candidates) * steps)
        bar.say(
            f"{len(case.steps)} steps are replayed, then {len(candidates)} branches of {steps} steps trained (--only "
            "NAME: fewer)"
        )
        bar.doing("replaying the run")
        run.load()
        replayed = run.replay(case.steps, bar)
        kept, before = run.keep(), run.laboratory.losses(data.coming)
        outcomes = [_try(run, candidate, kept, case, data, bar) for candidate in candidates]
    vocabulary = config.model.vocab_size
    assert vocabulary is not None, "a frozen recipe has it"
    read = case.library.source.samples
    texts = [
        read(p).astype(np.int32)
        for p in (data.suspects[:COMPRESSED], data.fillers[-COMPRESSED:], data.coming)
    ]
    repetition = find_repetition(*texts)
    verdict = judge_branches(outcomes, before, choice, vocabulary, data.suspects.size, repetition)
    differs = float(np.max(np.abs(replayed - case.losses), initial=0.0))
    return CourtRecord(case, steps, data.suspects.size, differs, float(before.mean()), verdict)


def gather_data(history: History, case: CourtCase, config: RunConfig, steps: int) -> TrialData:
    """What the branches of a case are trained and measured on. Raises DataError if there is nothing to compare."""
    batches, cursor = data_ahead(case, config, steps)
    suspects = np.intersect1d(case.suspects, np.concatenate(batches))
    if not suspects.size:
        raise DataError(f"{case.title}: none of its samples is read within {steps} steps: give more --steps")
    count = SEARCHED * suspects.size
    earlier, _ = case.selection.next_kept(max(0, case.cursor - count), count)
    fillers = _never_skipped(history, case, earlier[earlier < case.cursor])[-suspects.size :]
    if not fillers.size:
        raise DataError(
            f"{case.title}: the run has read no harmless samples before it, to put in place of the suspects"
        )
    return TrialData(
        batches, suspects, choose_held_out(suspects), fillers,
        choose_coming(_never_skipped(history, case, _read_later(case, config, cursor))),
    )  # fmt: skip


def choose_coming(positions: Int64s) -> Int64s:
    """`COMING` of some positions, evenly spread."""
    chosen = np.linspace(0, positions.size - 1, min(COMING, positions.size)).round().astype(np.int64)
    return positions[chosen]


def _read_later(case: CourtCase, config: RunConfig, cursor: int) -> Int64s:
    """The data to come: what is left of the run, `FARTHEST` batches at most; beyond its end if that is near."""
    end = config.batches.reach(0, config.train.steps)
    most = config.batches.reach(cursor, FARTHEST) - cursor
    return case.selection.next_kept(cursor, max(COMING, min(most, end - cursor)))[0]


def _never_skipped(history: History, case: CourtCase, positions: Int64s) -> Int64s:
    """Those that are no suspects, and were not skipped since."""
    return positions[~(history.left_out(case.library, positions) | np.isin(positions, case.suspects))]


def _try(
    run: OfflineRun, candidate: Candidate, kept: KeptState, case: CourtCase, data: TrialData, bar: Bar
) -> BranchOutcome:
    """Train a branch, measure it, and go back."""
    bar.doing(candidate.name)
    run.compute_as_usual(candidate.adjustment, candidate.leaves_fp8, candidate.leaves_kernels)
    if candidate.resets_moments:
        run.engine.reset_moments()
    first, began = run.first_rate(data.batches[0]), run.start.updates
    recorded = as_recorded(case)

    def limit_rate(updates: int, scheduled: float) -> float:
        done = updates - began
        usual = run.limit_rate(updates, scheduled)
        usual = recall_rate(usual, recorded[done]) if done < len(recorded) else usual
        return candidate.change_rate(usual, done, first)

    try:
        trained = run.train(data.batches_of(candidate), limit_rate, bar)
        measured = run.laboratory.losses(data.measured)
    finally:
        run.restore(kept)
    n = data.coming.size
    return BranchOutcome(candidate, measured[:n], measured[n:], trained.losses, trained.norms)


def as_recorded(case: CourtCase) -> list[float]:
    """The rates of the first steps of the branches, as far as the run did the same updates: a refused one is applied in
    a branch."""
    found = list[float]()
    for step in case.coming:
        found.append(step.rate)
        if not step.applied:
            break
    return found
