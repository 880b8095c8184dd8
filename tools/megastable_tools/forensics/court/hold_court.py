"""Holds a trial again, from a checkpoint: all candidates from the same state, compared on the same data to come; and
shows it: a table and sentences for people, a tree for programs, a picture.

A case is what a run had before it when trouble began, rebuilt from the run directory alone: its data order, its skips,
the steps since a checkpoint, the suspects; and what it did about them. The data order and the ledger are those of the
moment at which the trouble was seen, before anything was done about it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table

from megastable.base.errors import DataError
from megastable.base.progress_bar import Bar
from megastable.base.text import count_noun
from megastable.checkpoint.store import step_of
from megastable.config.tree import RunConfig
from megastable.data.skips import Selection, batches_ahead
from megastable.recovery.replay_trials import COMING, FARTHEST
from megastable.report.figures import save_figure
from megastable.report.postmortem.evidence import RecordFolder, split_passes
from megastable.report.postmortem.facts import StepRow
from megastable.report.postmortem.journal import named_when
from megastable.report.postmortem.pictures import STYLE, draw_branches
from megastable.report.postmortem.sample_texts import Library
from megastable.report.postmortem.trial_facts import BranchFacts, TrialFacts
from megastable.run.changes import changes_of, config_at
from megastable.run.events.stability_events import BranchesTried
from megastable.run.records import SCHEMA
from megastable_guard.actions import Action
from megastable_guard.trials import (
    COMPRESSED,
    NOTHING,
    OTHER_DATA,
    choose_held_out,
    find_repetition,
    replace_samples,
)
from megastable_tools.forensics.court.offline_run import (
    KeptState,
    OfflineRun,
    ReplayedStep,
    find_checkpoint,
    recall_rate,
    recipe_of,
    single_process,
)
from megastable_tools.forensics.court.verdict import (
    ADJUSTMENTS,
    BranchOutcome,
    Candidate,
    CourtVerdict,
    choose_candidates,
    describe_verdict,
    judge_branches,
    list_candidates,
)
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
    incident, told_events, events_between = history.incident(number)
    opening_time = float(told_events[0]["time"])
    if incident.breakdown:
        raise DataError(
            f"{history.run.root}: incident {number} is of processes or files ({incident.verdict}): there is nothing to "
            "be tried about it"
        )
    data_order = history.library_at(opening_time).source.order
    named_parts = [np.empty(0, np.int64)]
    for naming_time, skipped_ranges, deferred_ranges in named_when(told_events):
        named_ranges = (*skipped_ranges, *deferred_ranges)
        if sum(range_end - range_first for range_first, range_end in named_ranges) > MOST:
            raise DataError(f"{history.run.root}: incident {number} has more than {MOST:,} samples")
        order_then = history.library_at(naming_time).source.order
        named_parts += [
            order_then.moved_to(data_order, np.arange(*named_range)) for named_range in named_ranges
        ]
    actions_taken = " then ".join(dict.fromkeys(incident.actions)) or "nothing"
    told_as = f"the run did: {actions_taken}; cause: {incident.cause}"
    named_positions = np.unique(np.concatenate(named_parts))
    trials_won = [e for e in events_between if isinstance(e, BranchesTried) and not e.get("corpus")]
    winning_branches = [str(trial_won.get("chosen")) for trial_won in trials_won if trial_won.get("chosen")]
    winning_branches += ["other_kernels"] if incident.kernels else []
    chosen_branch = choose_branch_like(incident.actions, winning_branches, bool(named_positions.size))
    return _rebuild(
        history, f"{history.run.root.name}, incident {number}", told_as, chosen_branch, incident.onset,
        incident.step, opening_time, named_positions,
    )  # fmt: skip


def choose_branch_like(actions: Sequence[str], won: Sequence[str], took_away: bool) -> str:
    """The branch that comes nearest to what a run did.

    Args:
        actions: of the incident.
        won: names of the branches that won a trial of remedies.
        took_away: whether samples were skipped or deferred.
    """
    actions_taken = [action for action in Action if action in actions]
    if Action.ADJUST in actions_taken or any(action in actions_taken for action in DONE):
        usual_branch = next((DONE[action] for action in DONE if action in actions_taken), NOTHING)
        remedies_tried = [branch_name for branch_name in won if branch_name not in (NOTHING, OTHER_DATA)]
        has_remedy = remedies_tried and Action.SWAP_CORPUS not in actions_taken
        return remedies_tried[-1] if has_remedy else usual_branch
    # A skip alone undoes nothing: the samples were trained on.
    return OTHER_DATA if took_away and set(actions_taken) - {Action.SKIP} else NOTHING


def open_steps(history: History, first: int, last: int) -> CourtCase:
    """The case of all samples of the steps [first, last], when the last of them was first done. Raises DataError if one
    was not recorded, and CheckpointError if no good checkpoint is from before them."""
    last_time = history.require_steps(last, last)[0].time
    done_steps = [step for step in _chain(history, last, last_time) if step.step >= first]
    positions = np.unique(_positions(history, done_steps))
    skipped_mask = history.left_out(history.library_at(last_time), positions)
    refused_count = sum(not step.applied for step in done_steps)
    choice = OTHER_DATA if refused_count or skipped_mask.any() else NOTHING
    run_told = f"{refused_count} of {count_noun(len(done_steps), 'update')} refused, "
    run_told += f"{int(skipped_mask.sum())} of {count_noun(skipped_mask.size, 'sample')} skipped by now"
    steps_named = f"step {first}" if first == last else f"steps {first} to {last}"
    title = f"{history.run.root.name}, {steps_named}"
    return _rebuild(history, title, run_told, choice, first, last, last_time, positions)


def _rebuild(
    history: History, title: str, told: str, choice: str, onset: int, last: int, time: float, named: Int64s
) -> CourtCase:
    """onset, last: the steps of the trouble. time: when it was seen. named: suspects, as far as they are known."""
    step_chain = _chain(history, last, time)
    suspects = named if named.size else _positions(history, [d for d in step_chain if d.step >= onset])
    touching_steps = (
        [d.step for d in step_chain if np.isin(history.positions_of(d), suspects).any()] if named.size else []
    )
    begin = min([onset, *touching_steps])
    checkpoint = find_checkpoint(history.run, begin)
    steps_after = [d for d in step_chain if d.step > step_of(checkpoint)]
    missing_steps = sorted(set(range(step_of(checkpoint) + 1, begin)) - {d.step for d in steps_after})
    if missing_steps:
        raise DataError(
            f"{history.run.steps}: step {missing_steps[0]} was not recorded, so it is not known what the run read "
            f"after {checkpoint.name}"
        )
    library = history.library_at(time)
    usable_skips = history.ledger.lines_until(time).select_usable(
        history.run.skips, library.source.order, history.config.data.skip
    )[0]
    rates_by_step: dict[tuple[int, float], float] = {}
    if steps_after:
        record_rows, _ = RecordFolder(history.run.steps, SCHEMA).read_rows(
            steps_after[0].step, steps_after[-1].step, ("step", "time", "lr")
        )
        rates_by_step = {
            (record_row["step"], record_row["time"]): record_row["lr"] for record_row in record_rows
        }
    as_done = [
        ReplayedStep(history.positions_of(d), rates_by_step[d.step, d.time], d.applied) for d in steps_after
    ]
    before_count = sum(d.step < begin for d in steps_after)
    if before_count < len(steps_after):
        cursor = steps_after[before_count].first_position
    else:
        cursor = steps_after[-1].next_position if steps_after else 0
    return CourtCase(
        title, told, choice, checkpoint, library, usable_skips, as_done[:before_count],
        np.array([d.loss for d in steps_after[:before_count]]), as_done[before_count:], cursor, np.sort(suspects),
    )  # fmt: skip


def _chain(history: History, last: int, time: float) -> list[Done]:
    """The steps up to `last` that were in force at a time, ascending: what was undone by then is not among them."""
    steps_in_force: list[Done] = []
    for done_step in history.list_steps(0, last):
        if done_step.time > time:
            continue
        while steps_in_force and steps_in_force[-1].step >= done_step.step:
            steps_in_force.pop()
        steps_in_force.append(done_step)
    return steps_in_force


def _positions(history: History, steps: Sequence[Done]) -> Int64s:
    return np.concatenate([np.empty(0, np.int64), *(history.positions_of(done_step) for done_step in steps)])


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
        closing(OfflineRun(case.checkpoint, config, case.library.source, case.selection)) as offline_run,
    ):
        all_candidates = list_candidates(config, offline_run.possible)
        choice = case.choice if case.choice in [candidate.name for candidate in all_candidates] else NOTHING
        candidates = choose_candidates(all_candidates, only, choice)
        bar.extend_total(len(case.steps) + len(candidates) * steps)
        bar.print_line(
            f"{len(case.steps)} steps are replayed, then {len(candidates)} branches of {steps} steps trained (--only "
            "NAME: fewer)"
        )
        bar.set_description("replaying the run")
        offline_run.load_checkpoint()
        replayed_losses = offline_run.replay_steps(case.steps, bar)
        kept, losses_before = offline_run.keep_state(), offline_run.laboratory.measure_losses(data.coming)
        outcomes = [_try(offline_run, candidate, kept, case, data, bar) for candidate in candidates]
    vocabulary = config.model.vocab_size
    assert vocabulary is not None, "a frozen recipe has it"
    read = case.library.source.read_samples
    text_positions = data.suspects[:COMPRESSED], data.fillers[-COMPRESSED:], data.coming
    texts = [read(text_position).astype(np.int32) for text_position in text_positions]
    repetition = find_repetition(*texts)
    verdict = judge_branches(outcomes, losses_before, choice, vocabulary, data.suspects.size, repetition)
    replay_difference = float(np.max(np.abs(replayed_losses - case.losses), initial=0.0))
    loss_before = float(losses_before.mean())
    return CourtRecord(case, steps, data.suspects.size, replay_difference, loss_before, verdict)


def gather_data(history: History, case: CourtCase, config: RunConfig, steps: int) -> TrialData:
    """What the branches of a case are trained and measured on. Raises DataError if there is nothing to compare."""
    batches = [step.positions for step in case.coming][:steps]
    cursor = int(batches[-1][-1]) + 1 if batches else case.cursor
    batches += batches_ahead(case.selection, config.batches, cursor, steps - len(batches))
    cursor = int(batches[-1][-1]) + 1
    suspects = np.intersect1d(case.suspects, np.concatenate(batches))
    if not suspects.size:
        raise DataError(f"{case.title}: none of its samples is read within {steps} steps: give more --steps")
    searched_count = SEARCHED * suspects.size
    earlier_positions, _ = case.selection.next_kept(max(0, case.cursor - searched_count), searched_count)
    before_case = earlier_positions[earlier_positions < case.cursor]
    fillers = _never_skipped(history, case, before_case)[-suspects.size :]
    if not fillers.size:
        raise DataError(
            f"{case.title}: the run has read no harmless samples before it, to put in place of the suspects"
        )
    # The data to come is what is left of the run, `FARTHEST` batches at most; beyond its end if that is near.
    run_end = config.batches.reach_after(0, config.train.steps)
    positions_ahead = min(config.batches.reach_after(cursor, FARTHEST), run_end) - cursor
    later_positions = case.selection.next_kept(cursor, max(COMING, positions_ahead))[0]
    coming = choose_coming(_never_skipped(history, case, later_positions))
    return TrialData(batches, suspects, choose_held_out(suspects), fillers, coming)


def choose_coming(positions: Int64s) -> Int64s:
    """`COMING` of some positions, evenly spread."""
    chosen_indexes = np.linspace(0, positions.size - 1, min(COMING, positions.size)).round().astype(np.int64)
    return positions[chosen_indexes]


def _never_skipped(history: History, case: CourtCase, positions: Int64s) -> Int64s:
    """Those that are no suspects, and were not skipped since."""
    return positions[~(history.left_out(case.library, positions) | np.isin(positions, case.suspects))]


def _try(
    run: OfflineRun, candidate: Candidate, kept: KeptState, case: CourtCase, data: TrialData, bar: Bar
) -> BranchOutcome:
    """Train a branch, measure it, and go back."""
    bar.set_description(candidate.name)
    run.compute_as_usual(candidate.adjustment, candidate.leaves_fp8, candidate.leaves_kernels)
    run.engine.change_once(candidate.name)
    first, began = run.first_rate(data.batches[0]), run.start.updates
    recorded = as_recorded(case)

    def limit_rate(updates: int, scheduled: float) -> float:
        updates_done = updates - began
        usual_rate = run.limit_rate(updates, scheduled)
        if updates_done < len(recorded):
            usual_rate = recall_rate(usual_rate, recorded[updates_done])
        return candidate.change_rate(usual_rate, updates_done, first)

    try:
        replaced_samples = data.suspects if candidate.name == OTHER_DATA else data.held_out
        batches = replace_samples(data.batches, replaced_samples, data.fillers)
        trained_branch = run.train_on(batches, limit_rate, bar)
        measured = run.laboratory.measure_losses(np.concatenate([data.coming, data.held_out]))
    finally:
        run.restore_state(kept)
    n = data.coming.size
    return BranchOutcome(candidate, measured[:n], measured[n:], trained_branch.losses, trained_branch.norms)


def as_recorded(case: CourtCase) -> list[float]:
    """The rates of the first steps of the branches, as far as the run did the same updates: a refused one is applied in
    a branch."""
    recorded_rates = list[float]()
    for step in case.coming:
        recorded_rates.append(step.rate)
        if not step.applied:
            break
    return recorded_rates


EXACT = 1e-6  # nats: the records have losses in fp32
LEGEND = (
    "loss: of the data to come, at the end of a branch; difference: that minus the loss after other data, with its "
    "standard error; learnt: by how much suspects that no branch was trained on are easier than after other data; "
    "norm: the highest gradient norm; intrusive: from 0. Nats. (…): counts only where other data does harm, too"
)


def describe_case(record: CourtRecord) -> Iterator[str]:
    """What was tried, in sentences."""
    case = record.case
    yield f"{case.title}: {case.told}"
    replay_text = f"{count_noun(len(case.steps), 'step')} replayed from {case.checkpoint.name}"
    if case.steps:
        replay_exactness = (
            "as recorded" if record.differs <= EXACT else f"losses differ by {record.differs:.2g} at most"
        )
        replay_text += f" ({replay_exactness})"
    yield (
        f"{replay_text}; branches of {count_noun(record.steps, 'step')} from step {case.first_step} on, with "
        f"{count_noun(record.suspects, 'suspect')}; the data to come has a loss of {record.before:.4f} before them"
    )


def draw_table(record: CourtRecord) -> Table:
    """A row for every branch."""
    table = Table()
    for branch_name in ("branch", "what it does"):
        table.add_column(branch_name)
    for branch_name in ("loss", "difference", "learnt", "norm", "intrusive"):
        table.add_column(branch_name, justify="right", no_wrap=True)
    for row in record.verdict.rows:
        marked_names = {"best": record.verdict.best, "run": record.verdict.choice}
        row_marks = [mark for mark, marked_name in marked_names.items() if marked_name == row.name]
        branch_name = row.name if row.counts else f"({row.name})"
        loss_text = f"{row.loss:.4f}" if math.isfinite(row.loss) else "not finite"
        table.add_row(
            f"{branch_name} <- {', '.join(row_marks)}" if row_marks else branch_name, row.about, loss_text,
            _with_error(row.difference, row.difference_error), _with_error(row.learnt, row.learnt_error),
            f"{row.highest_norm:.3g}", str(row.intrusive),
        )  # fmt: skip
    return table


def describe_outcome(record: CourtRecord) -> Iterator[str]:
    """The verdicts, in sentences."""
    yield f"suspects: {record.verdict.trial.reason}"
    yield f"verdict: {describe_verdict(record.verdict)}"


def court_tree(record: CourtRecord) -> dict[str, Any]:
    """For programs. Losses in nats; the run's choice and the best branch by their names."""
    case, verdict = record.case, record.verdict
    return {
        "title": case.title, "run_did": case.told, "checkpoint": str(case.checkpoint), "first_step": case.first_step,
        "steps": record.steps, "replayed_steps": len(case.steps), "replay_differs": record.differs,
        "suspects": record.suspects, "loss_before": record.before, "choice": verdict.choice, "best": verdict.best,
        "choice_worse": verdict.worse, "choice_worse_error": verdict.worse_error, "good": verdict.is_good,
        "other_data_harms": verdict.harmed_anyway, "trial": verdict.trial.facts,
        "branches": [asdict(branch_row) for branch_row in verdict.rows],
    }  # fmt: skip


def court_picture(record: CourtRecord, history: History, path: Path) -> None:
    """Losses of the branches and of the run, and of the data to come after each branch. The format follows from the
    name (.png, .svg, .pdf). Raises DataError when it cannot be written."""
    import matplotlib

    first_step, verdict = record.case.first_step - 1, record.verdict
    branch_facts = [
        BranchFacts(
            name=branch_row.name, cost=branch_row.intrusive, loss=branch_row.loss, difference=branch_row.difference,
            error=branch_row.difference_error,
            losses=branch_row.losses, norms=branch_row.norms,
        )
        for branch_row in verdict.rows
    ]  # fmt: skip
    trial_facts = TrialFacts(
        step=first_step, snapshot=first_step, steps=record.steps, chosen=verdict.best, before=record.before,
        branches=branch_facts,
    )  # fmt: skip
    done_steps = history.list_steps(first_step, trial_facts.last)
    step_rows = [StepRow.model_validate(asdict(done_step)) for done_step in done_steps]
    with matplotlib.rc_context(STYLE):
        save_figure(draw_branches(trial_facts, split_passes(step_rows)), path)


def _with_error(value: float, error: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:+.3f} ± {error:.3f}" if math.isfinite(value) else f"{value:+}"
