"""Tries again what incidents of a run skip, on its newest checkpoint, and gives back what does no harm.

One branch trains the next steps of the run with the samples of a group in their first places, the control trains those
steps as they are. The samples lie as close together as a step has room for: as in the region where they were met, not
spread over an epoch, where a few would do no harm that can be measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megastable.attribution.harm import COMPRESSED, BranchLosses, HarmTrial, find_repetition, judge_trial
from megastable.base.errors import DataError
from megastable.base.progress_bar import Bar
from megastable.checkpoint.store import step_of
from megastable.data.documents import documents_at
from megastable.data.skip_ledger import append_all, released
from megastable.recovery.replay_trials import COMING, FARTHEST
from megastable.run.changes import changes_of, config_at
from megastable.run.directory import RunDirectory
from megastable.run.events.data_events import SkipsGivenBack
from megastable.run.log import RunLog
from megastable.supervise.locks import SUPERVISOR, TRAINING, lock
from megastable_tools.forensics.court.hold_court import choose_coming
from megastable_tools.forensics.court.offline_run import (
    OfflineRun,
    find_checkpoint,
    opened,
    recipe_of,
    single_process,
)
from megastable_tools.forensics.court.skip_groups import (
    SkipGroup,
    TriedSamples,
    choose_tried,
    find_groups,
    is_given_back,
    put_first,
)
from megastable_tools.forensics.history import History

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
LEAST_RATE = 0.01  # of the peak rate: with less, nothing is learnt in so few steps


@dataclass(frozen=True)
class ReviewedGroup:
    """documents: how many, None if the index is damaged. harmless: it may be read again; given_back: it will be."""

    group: SkipGroup
    documents: int | None
    trial: HarmTrial
    harmless: bool
    given_back: bool = False


@dataclass(frozen=True)
class SkipReview:
    """checkpoint: its name. step: where it stands. rate_share: of the peak rate there: with a lower one, less shows."""

    checkpoint: str
    step: int
    rate_share: float
    steps: int
    groups: list[ReviewedGroup]


@contextmanager
def nobody_at_work(run: RunDirectory) -> Iterator[None]:
    """Hold the locks of a run. Raises DataError if a process has one, ConfigError if they cannot be taken."""
    with ExitStack() as held:
        for name, who in ((SUPERVISOR, "supervisor"), (TRAINING, "training")):
            if (held_lock := lock(run.root / name)) is None:
                raise DataError(
                    f"{run.root}: its {who} is at work: stop the run first, or leave out --give-back"
                )
            held.enter_context(held_lock)
        yield


def open_groups(history: History, only: Sequence[int]) -> list[SkipGroup]:
    """What incidents of a run skip. only: of these incidents, if any are named. Raises DataError if one of them skips
    nothing."""
    library = history.library()
    groups = find_groups(history.ledger, library.source.order, history.selection(library), history.cursor)
    known = [group.incident for group in groups]
    if unknown := [number for number in only if number not in known]:
        listed = ", ".join(map(str, known)) or "none does"
        raise DataError(
            f"{history.run.skips}: incident {unknown[0]} skips no samples for good; these do: {listed}"
        )
    return [group for group in groups if not only or group.incident in only]


def review_groups(history: History, groups: Sequence[SkipGroup], steps: int, bar: Bar) -> SkipReview:
    """Try every group in a branch of `steps` steps.

    Raises:
        CheckpointError: there is none, or it cannot be loaded here.
        DataError: a sample cannot be read, or the rate is too low to learn anything.
    """
    checkpoint = find_checkpoint(history.run)
    config, library = recipe_of(checkpoint, history.config), history.library()
    config = config_at(config, changes_of(history.run.journal), step_of(checkpoint) + 1)
    vocabulary = config.model.vocab_size
    assert vocabulary is not None, "a frozen recipe has it"
    selection = history.selection(library)
    bar.more(steps * (len(groups) + 1))
    with single_process(config), opened(checkpoint, config, library.source, selection) as run:
        run.load()
        batches, cursor = list[Int64s](), run.state.cursor
        for _ in range(steps):
            positions, cursor = selection.next_kept(cursor, config.batches.at(cursor))
            batches.append(positions)
        share = run.first_rate(batches[0]) / config.optimizer.lr
        if share < LEAST_RATE:
            raise DataError(
                f"{checkpoint}: the learning rate has fallen to {share:.1%} of its peak: nothing is learnt with it, so "
                "nothing can be tried"
            )
        ahead = max(COMING, config.batches.reach(cursor, FARTHEST) - cursor)
        coming = choose_coming(selection.next_kept(cursor, ahead)[0])
        slots = sum(batch.size for batch in batches)
        tried = [choose_tried(group, slots) for group in groups]
        measure = _Measuring(run, batches, coming, tried, bar)
        before, suspects = measure.before()
        bar.doing("the next steps as they are")
        control = measure.branch(batches)
        found = list[ReviewedGroup]()
        for number, group in enumerate(groups):
            bar.doing(group.name)
            after = measure.branch(put_first(batches, tried[number].trained))
            losses = BranchLosses(after[0], control[0], before, before)
            held_out = after[1][number], control[1][number]
            chosen = tried[number].trained[:COMPRESSED], np.concatenate(batches)[:COMPRESSED], coming
            texts = [library.source.samples(p).astype(np.int32) for p in chosen]
            repetition = find_repetition(*texts)
            trial = judge_trial(losses, held_out, vocabulary, tried[number].count, steps, repetition)
            harmless = is_given_back(trial, suspects[number], before, vocabulary, share)
            found.append(ReviewedGroup(group, _documents(history, group), trial, harmless))
    return SkipReview(checkpoint.name, step_of(checkpoint), share, steps, found)


class _Measuring:
    """Losses of the data to come, and of the samples of all groups that are in no branch."""

    def __init__(
        self, run: OfflineRun, batches: list[Int64s], coming: Int64s, tried: Sequence[TriedSamples], bar: Bar
    ) -> None:
        self.run, self.coming, self.tried, self.bar = run, coming, tried, bar
        self.kept = run.keep()

    def before(self) -> tuple[Floats, list[Floats]]:
        """On the checkpoint: of the data to come, and of the samples of every group."""
        of = [np.concatenate([some.trained, some.held_out]) for some in self.tried]
        return self._losses(of)

    def branch(self, batches: Sequence[Int64s]) -> tuple[Floats, list[Floats]]:
        """At the end of a branch: of the data to come, and of what is held out of every group."""
        try:
            self.run.train(batches, self.run.limit_rate, self.bar)
            return self._losses([some.held_out for some in self.tried])
        finally:
            self.run.restore(self.kept)

    def _losses(self, of: Sequence[Int64s]) -> tuple[Floats, list[Floats]]:
        losses = self.run.laboratory.losses(np.concatenate([self.coming, *of]))
        parts = np.split(losses, np.cumsum([self.coming.size, *(some.size for some in of)])[:-1])
        return parts[0], list(parts[1:])


def give_back(history: History, review: SkipReview) -> SkipReview:
    """Write into the ledger that the run reads again what does no harm. No line is removed.

    The caller holds the locks. Raises DataError if it cannot be written.
    """
    order = history.library().source.order
    found = list[ReviewedGroup]()
    for one in review.groups:
        if not one.harmless:
            found.append(one)
            continue
        group, reason = one.group, f"tried again on {review.checkpoint}: {one.trial.reason}"
        lines = released(history.ledger, order, np.sort(group.positions), reason, group.incident, group.step)
        append_all(history.run.skips, lines)
        RunLog(history.run).emit(
            SkipsGivenBack(
                step=review.step,
                incident=group.incident,
                samples=group.positions.size,
                lines=len(lines),
                reason=reason,
            )
        )
        found.append(ReviewedGroup(group, one.documents, one.trial, True, given_back=True))
    return replace(review, groups=found)


def _documents(history: History, group: SkipGroup) -> int | None:
    try:
        return len(documents_at(history.library().source, group.positions))
    except DataError:
        return None
