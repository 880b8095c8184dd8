"""Tries again what incidents of a run skip, on its newest checkpoint, and gives back what does no harm.

A group is what an incident skips for good: samples of the skip ledger that no person named. One branch trains the next
steps of the run with the samples of a group in their first places, the control trains those steps as they are. The
samples lie as close together as a step has room for: as in the region where they were met, not spread over an epoch,
where a few would do no harm that can be measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megastable.base.errors import DataError
from megastable.base.progress_bar import Bar
from megastable.checkpoint.store import step_of
from megastable.data.order import Order
from megastable.data.samples import documents_at
from megastable.data.skip_ledger import Ledger, append_entries, release_entries
from megastable.data.skips import NONE, Selection, batches_ahead
from megastable.recovery.replay_trials import COMING, FARTHEST
from megastable.run.changes import changes_of, config_at
from megastable.run.directory import RunDirectory
from megastable.run.events.data_events import SkipsGivenBack
from megastable.run.log import RunLog
from megastable.supervise.locks import SUPERVISOR, TRAINING, take_lock
from megastable_guard.policy import FEW
from megastable_guard.scores import robust_scale
from megastable_guard.trials import (
    COMPRESSED,
    GUESSING,
    HELD_OUT,
    BranchLosses,
    HarmTrial,
    TrialVerdict,
    choose_held_out,
    find_repetition,
    judge_trial,
)
from megastable_tools.forensics.court.hold_court import choose_coming
from megastable_tools.forensics.court.offline_run import (
    OfflineRun,
    find_checkpoint,
    recipe_of,
    single_process,
)
from megastable_tools.forensics.history import History

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
FAR = 6.0  # robust deviations above the data to come, from which a few samples are gross (attribution.threshold)
LITTLE_RATE = 0.2  # of the peak rate: with less, little harm shows, and no harm is no evidence
LAST_SEARCHED = 1 << 50  # positions that are searched for a sample


@dataclass(frozen=True)
class SkipGroup:
    """The samples that an incident skips, at positions that hold them: int64 [n], in the order of their corpora and
    tokens. step: of the incident."""

    incident: int
    step: int
    positions: Int64s

    @property
    def name(self) -> str:
        return f"incident {self.incident}"


@dataclass(frozen=True)
class TriedSamples:
    """Positions of a group that are trained on, and of those that are measured only."""

    trained: Int64s
    held_out: Int64s


def find_groups(ledger: Ledger, order: Order, selection: Selection, cursor: int) -> list[SkipGroup]:
    """The groups that are skipped now, by their incidents. selection: what the whole ledger leaves."""
    by_others = Selection(order, replace(ledger.by_others.exclusions, positions=NONE, swapped={})).sequences
    named_entries = ledger.by_identity.ever.entries
    incident_numbers = {
        named_entry.incident for named_entry in named_entries if named_entry.incident is not None
    }
    skip_groups = []
    for incident_number in sorted(incident_numbers):
        incident_lines = ledger.of_incident(incident_number).by_identity.ever
        position_parts = [np.empty(0, np.int64)]
        for corpus_index, sequences in Selection(order, incident_lines.exclusions).sequences.items():
            left_out = selection.sequences.get(corpus_index, NONE)
            skipped_now = sequences.minus(left_out.gaps()).minus(by_others.get(corpus_index, NONE))
            skipped_sequences = skipped_now.gaps().next_kept(0, skipped_now.count())[0]
            position_parts.append(find_positions(order, corpus_index, skipped_sequences, cursor))
        steps = [entry.step for entry in incident_lines.entries if entry.step is not None]
        skip_group = SkipGroup(incident_number, max(steps, default=0), np.concatenate(position_parts))
        skip_groups += [skip_group] if skip_group.positions.size else []
    return skip_groups


def find_positions(order: Order, corpus: int, sequences: Int64s, cursor: int) -> Int64s:
    """A position of each of n sequences of a corpus, in their order: the last one up to two passes over it after the
    cursor. Without those that the order gives nowhere there."""
    samples_wanted = order.samples_before(cursor)[corpus] + 2 * order.sequences[corpus]
    search_end = max(1, cursor)
    while order.samples_before(search_end)[corpus] < samples_wanted and search_end < LAST_SEARCHED:
        search_end *= 2
    search_end = search_end if search_end < LAST_SEARCHED else max(1, cursor)
    positions = order.positions_of(corpus, sequences, 0, search_end)
    found_sequences = order.locate_samples(positions).sequence
    last = {int(number): int(position) for number, position in zip(found_sequences, positions, strict=True)}
    return np.array([last[n] for n in sequences.tolist() if n in last], dtype=np.int64)


def choose_tried(group: SkipGroup, slots: int) -> TriedSamples:
    """The samples of a group to be tried: all, or evenly spread ones so that at most half of `slots` are trained on."""
    chosen_count = min(group.positions.size, slots // 2 + HELD_OUT)
    chosen_indexes = np.linspace(0, group.positions.size - 1, chosen_count).round().astype(np.int64)
    chosen_positions = group.positions[chosen_indexes]
    held_out = choose_held_out(chosen_positions)
    trained = chosen_positions[~np.isin(chosen_positions, held_out)]
    return TriedSamples(trained[: max(1, slots // 2)], held_out)


def put_first(batches: list[Int64s], samples: Int64s) -> list[Int64s]:
    """The batches with `samples` in their first places."""
    flat_positions = np.concatenate(batches)
    flat_positions[: samples.size] = samples
    return np.split(flat_positions, np.cumsum([batch.size for batch in batches])[:-1])


def is_given_back(trial: HarmTrial, suspects: Floats, coming: Floats, vocabulary: int, share: float) -> bool:
    """Whether skipped samples do no harm: what is new, and what does none that can be measured. Not of these a few that
    are far out by themselves, as the run itself decides (`is_harmless`), and what is as hard as guessing: a low rate
    hides the harm of both.

    Args:
        suspects: their losses before the trial, [n] nats.
        coming: losses of the data to come, likewise.
        vocabulary: how many tokens there are.
        share: of the peak rate that the trial was held with.
    """
    if trial.verdict is not TrialVerdict.NOISE or share < LITTLE_RATE:
        return trial.verdict is TrialVerdict.NEW
    median_loss = float(np.median(suspects))
    middle, scale = robust_scale(coming)
    few_and_far = suspects.size <= FEW and median_loss > middle + FAR * scale
    return not few_and_far and median_loss < GUESSING * math.log(vocabulary)


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
    with ExitStack() as held_locks:
        for lock_name, lock_holder in ((SUPERVISOR, "supervisor"), (TRAINING, "training")):
            if (held_lock := take_lock(run.root / lock_name)) is None:
                raise DataError(
                    f"{run.root}: its {lock_holder} is at work: stop the run first, or leave out --give-back"
                )
            held_locks.enter_context(held_lock)
        yield


def open_groups(history: History, only: Sequence[int]) -> list[SkipGroup]:
    """What incidents of a run skip. only: of these incidents, if any are named. Raises DataError if one of them skips
    nothing."""
    library = history.library_at()
    order, selection = library.source.order, history.select_from(library)
    skip_groups = find_groups(history.ledger, order, selection, history.cursor)
    known_incidents = [skip_group.incident for skip_group in skip_groups]
    if unknown := [incident_number for incident_number in only if incident_number not in known_incidents]:
        incidents_listed = ", ".join(map(str, known_incidents)) or "none does"
        raise DataError(
            f"{history.run.skips}: incident {unknown[0]} skips no samples for good; these do: {incidents_listed}"
        )
    return [skip_group for skip_group in skip_groups if not only or skip_group.incident in only]


def review_groups(history: History, groups: Sequence[SkipGroup], steps: int, bar: Bar) -> SkipReview:
    """Try every group in a branch of `steps` steps.

    Raises:
        CheckpointError: there is none, or it cannot be loaded here.
        DataError: a sample cannot be read, or the rate is too low to learn anything.
    """
    checkpoint = find_checkpoint(history.run)
    run_config, library = recipe_of(checkpoint, history.config), history.library_at()
    run_config = config_at(run_config, changes_of(history.run.journal), step_of(checkpoint) + 1)
    vocabulary = run_config.model.vocab_size
    assert vocabulary is not None, "a frozen recipe has it"
    selection = history.select_from(library)
    bar.extend_total(steps * (len(groups) + 1))
    with (
        single_process(run_config),
        closing(OfflineRun(checkpoint, run_config, library.source, selection)) as offline_run,
    ):
        offline_run.load_checkpoint()
        batches = batches_ahead(selection, run_config.batches, offline_run.state.cursor, steps)
        cursor = int(batches[-1][-1]) + 1
        rate_share = offline_run.first_rate(batches[0]) / run_config.optimizer.lr
        if rate_share < LEAST_RATE:
            raise DataError(
                f"{checkpoint}: the learning rate has fallen to {rate_share:.1%} of its peak: nothing is learnt with "
                "it, so nothing can be tried"
            )
        positions_ahead = max(COMING, run_config.batches.reach_after(cursor, FARTHEST) - cursor)
        coming = choose_coming(selection.next_kept(cursor, positions_ahead)[0])
        slot_count = sum(batch.size for batch in batches)
        tried = [choose_tried(skip_group, slot_count) for skip_group in groups]
        kept_state = offline_run.keep_state()

        def measure_losses(samples_by_group: Sequence[Int64s]) -> tuple[Floats, list[Floats]]:
            """Of the data to come, and of some samples of every group, in nats."""
            losses = offline_run.laboratory.measure_losses(np.concatenate([coming, *samples_by_group]))
            sizes = [coming.size, *(samples.size for samples in samples_by_group)]
            coming_losses, *group_losses = np.split(losses, np.cumsum(sizes)[:-1])
            return coming_losses, group_losses

        def measure_branch(branch_batches: Sequence[Int64s]) -> tuple[Floats, list[Floats]]:
            """At the end of a branch: of the data to come, and of what is held out of every group."""
            try:
                offline_run.train_on(branch_batches, offline_run.limit_rate, bar)
                return measure_losses([tried_some.held_out for tried_some in tried])
            finally:
                offline_run.restore_state(kept_state)

        losses_before, suspect_losses = measure_losses(
            [np.concatenate([tried_some.trained, tried_some.held_out]) for tried_some in tried]
        )
        bar.set_description("the next steps as they are")
        control_losses = measure_branch(batches)
        reviewed_groups = list[ReviewedGroup]()
        for group_number, skip_group in enumerate(groups):
            bar.set_description(skip_group.name)
            tried_some = tried[group_number]
            losses_after = measure_branch(put_first(batches, tried_some.trained))
            branch_losses = BranchLosses(losses_after[0], control_losses[0], losses_before, losses_before)
            held_out = losses_after[1][group_number], control_losses[1][group_number]
            text_positions = tried_some.trained[:COMPRESSED], np.concatenate(batches)[:COMPRESSED], coming
            sample_texts = [library.source.read_samples(p).astype(np.int32) for p in text_positions]
            repetition = find_repetition(*sample_texts)
            suspect_count = tried_some.trained.size + tried_some.held_out.size
            harm_trial = judge_trial(branch_losses, held_out, vocabulary, suspect_count, steps, repetition)
            is_harmless = is_given_back(
                harm_trial, suspect_losses[group_number], losses_before, vocabulary, rate_share
            )
            documents = _documents(history, skip_group)
            reviewed_groups.append(ReviewedGroup(skip_group, documents, harm_trial, is_harmless))
    return SkipReview(checkpoint.name, step_of(checkpoint), rate_share, steps, reviewed_groups)


def give_back(history: History, review: SkipReview) -> SkipReview:
    """Write into the ledger that the run reads again what does no harm. No line is removed.

    The caller holds the locks. Raises DataError if it cannot be written.
    """
    order = history.library_at().source.order
    reviewed_groups = list[ReviewedGroup]()
    for one in review.groups:
        if not one.harmless:
            reviewed_groups.append(one)
            continue
        skip_group, release_reason = one.group, f"tried again on {review.checkpoint}: {one.trial.reason}"
        positions = np.sort(skip_group.positions)
        release_lines = release_entries(
            history.ledger, order, positions, release_reason, skip_group.incident, skip_group.step
        )
        append_entries(history.run.skips, release_lines)
        given_back_event = SkipsGivenBack(
            step=review.step, incident=skip_group.incident, samples=positions.size, lines=len(release_lines),
            reason=release_reason,
        )  # fmt: skip
        RunLog(history.run).emit_event(given_back_event)
        reviewed_groups.append(replace(one, given_back=True))
    return replace(review, groups=reviewed_groups)


def _documents(history: History, group: SkipGroup) -> int | None:
    try:
        return len(documents_at(history.library_at().source, group.positions))
    except DataError:
        return None
