"""Tries what may be done about an incident, in branches from the same good state: the suspects and others in their
places, remedies, and the data without a corpus. Collective; leaves no trace. megastable_guard/trials.py decides."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from megastable.attribution.sample_replay import (
    BranchStart,
    Trained,
    TrainedBranch,
    collect_harmless,
    train_branch,
)
from megastable.base.collectives import run_on_first
from megastable.base.errors import DataError
from megastable.checkpoint.snapshot import Snapshot
from megastable.checkpoint.store import RunState
from megastable.data.skips import Selection
from megastable.recovery.rewind_points import Points
from megastable.recovery.run_parts import RunParts
from megastable.run.events.stability_events import BranchesTried
from megastable.run.events.training_events import Warned
from megastable_guard.conclusion import Conclusion
from megastable_guard.policy import ADJUSTED, ONCE, Offer
from megastable_guard.step_judge import StepJudge
from megastable_guard.trials import (
    COMPRESSED,
    HARM,
    NOTHING,
    OTHER_DATA,
    WITHOUT_BAD,
    WITHOUT_CORPUS,
    BranchLosses,
    CorpusTrial,
    HarmTrial,
    RemedyTrial,
    choose_held_out,
    choose_remedy,
    find_rare_tokens,
    find_repetition,
    harms_anyway,
    judge_corpus,
    judge_trial,
    mean_difference,
    replace_samples,
)

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
T = TypeVar("T")

# A branch goes on for `STEPS` steps since the first one with a suspect, or half of them if few are suspected. Near the
# end of a run it has half of the steps that are left, and is not worth it below `LEAST`.
STEPS, LEAST = 16, 4
LONGEST = 256  # steps of a branch, with those before the first suspect
PHASES = "try branches", "try branches, next step"
ADJUSTMENTS = frozenset({*ONCE, *ADJUSTED})  # what not every recipe has
COMING = 64  # samples of the data to come that a trial is measured on
FARTHEST = 256  # batches ahead from which they are taken


@dataclass(frozen=True)
class Outlook:
    """Samples of the data to come, by position, and their losses where the run stands; [n], nats. others: those between
    them. steps: how many branches may have, so that they do not train on these samples."""

    positions: Int64s
    losses: Floats
    others: Int64s
    steps: int


@dataclass(frozen=True)
class TrialStart:
    """Where branches begin: `snapshot`, which the engine holds, before and after. window: the steps under suspicion.
    left_out: what the run does not read. outlook: None where there is nothing to compare by."""

    window: Sequence[Trained]
    snapshot: Snapshot
    left_out: Selection
    outlook: Outlook | None

    @property
    def step(self) -> int:
        return self.window[-1].step

    @property
    def positions(self) -> Int64s:
        """Of the samples under suspicion."""
        return np.concatenate([trained_step.positions for trained_step in self.window])


class SuspectsTrial(NamedTuple):
    """verdict: on the suspects; None: not even other data could be trained on. harms_anyway: other data made the model
    worse, too."""

    verdict: HarmTrial | None
    harms_anyway: bool


def mean_loss(losses: Floats) -> float:
    return round(float(losses.mean()), 4)


def describe_branch(
    name: str, trained: TrainedBranch, coming: Floats, control: Floats, cost: int
) -> dict[str, Any]:
    """For the journal. coming, control: losses of the data to come at its end, and at that of the control."""
    loss_difference, difference_error = mean_difference(coming, control)
    return {
        "name": name, "cost": cost, "loss": mean_loss(coming),
        "difference": round(loss_difference, 4), "error": round(difference_error, 4),
        "losses": trained.losses.round(4).tolist(), "norms": trained.norms.round(4).tolist(),
    }  # fmt: skip


class Trials:
    """points: of which one is in the engine when a trial is held."""

    def __init__(self, parts: RunParts, guard: StepJudge, points: Points) -> None:
        self.config, self.engine, self.loader = parts.config, parts.engine, parts.loader
        self.log, self.phase = parts.log, parts.phase
        self.points, self.laboratory, self.guard = points, points.laboratory, guard

    def look_ahead(self, state: RunState, left_out: Selection) -> Outlook | None:
        """Measure the data to come on the state that the engine holds, where the run stands: samples evenly spread over
        what is left of the run, `FARTHEST` batches at most, beyond the reach of a branch. None: there is too little
        left, or it cannot be read."""
        left = self.config.train.steps - state.step
        steps = min(STEPS, left // 2)
        if steps < LEAST:
            return None

        def measure_outlook() -> Outlook:
            _, next_cursor = left_out.next_kept(state.cursor, steps * self.loader.batch)
            ahead, _ = left_out.next_kept(next_cursor, min(FARTHEST, left - steps) * self.loader.batch)
            chosen = np.linspace(0, ahead.size - 1, min(COMING, ahead.size)).round().astype(np.int64)
            losses = self.laboratory.measure_losses(ahead[chosen])
            return Outlook(ahead[chosen], losses, np.delete(ahead, chosen), steps)

        return self.unless_unreadable(state.step, measure_outlook)

    def try_suspects(self, found: Conclusion, start: TrialStart) -> SuspectsTrial | None:
        """Try the suspects of a conclusion: its bad samples, or without any all samples of the window. None: there is
        nothing to compare, or it cannot be read."""
        return self._compare(start, partial(self._try_suspects, found, start))

    def try_remedies(
        self, offers: Sequence[Offer], start: TrialStart, needs_harm: bool = True,
        heals: Callable[[], bool] = lambda: False,
    ) -> RemedyTrial | None:  # fmt: skip
        """Try remedies with the data as it was, against none, and against other data in the place of the window; over
        the steps since the snapshot and `STEPS` more, as what they are for took so long to show. None: other data is
        enough, if it `needs_harm`, or there is nothing to compare. heals: whether what was warned of is over, asked at
        the end of each branch."""
        trial_outlook, policy = start.outlook, self.guard.policy
        possible = self.engine.adjustments.possible
        offers = [offer for offer in offers if offer.name not in ADJUSTMENTS or offer.name in possible]
        if trial_outlook is None:
            return None
        steps = self._count_steps(start, trial_outlook)
        # The least intrusive ones, if the run may not try all.
        while offers and not policy.may_try_remedies((len(offers) + 3) * steps, self.config.train.steps):
            offers = offers[:-1]
        if not offers:
            return None
        return self._compare(start, partial(self._try_remedies, offers, start, needs_harm, heals))

    def try_corpus(self, corpus: str, bad: Sequence[int], start: TrialStart) -> CorpusTrial | None:
        """Try the data as it comes without a corpus, against the same without its bad samples alone. bad: their
        positions. None: there is nothing to compare, or the run has tried enough."""
        return self._compare(start, partial(self._try_corpus, corpus, np.array(bad, dtype=np.int64), start))

    def try_nothing(self, start: TrialStart, state: RunState) -> str:
        """Whether the same steps lead to the same trouble again, and go through it: `STEPS` steps later, the data to
        come is no harder than on the snapshot. How, a sentence; "": they do not, or there is nothing to compare."""
        return self._compare(start, partial(self._try_nothing, start, state)) or ""

    def repeat_steps(self, snapshot: Snapshot, state: RunState, measure: Callable[[], T]) -> T | None:
        """What `measure` finds after the same steps, with the same updates, from `snapshot`, which the engine holds
        before and after, to where the run stands. None: they are not known, too many, or cannot be read."""
        steps = [t for t in self.points.trained if snapshot.step < t.step <= state.step]
        if not 0 < len(steps) == state.step - snapshot.step <= LONGEST:
            return None
        batches, applied = [t.positions for t in steps], [t.applied for t in steps]
        return self.unless_unreadable(
            state.step, lambda: self._train(snapshot, batches, measure, applied=applied)[1]
        )

    def may_try(self, state: RunState) -> bool:
        """Whether enough of the run is left to compare branches by."""
        return (self.config.train.steps - state.step) // 2 >= LEAST

    def _count_steps(self, start: TrialStart, outlook: Outlook) -> int:
        return min(LONGEST, start.step - start.snapshot.step + outlook.steps)

    def _compare(self, start: TrialStart, work: Callable[[Outlook], T | None]) -> T | None:
        """The result of a trial; None: there is nothing to compare by, or it cannot be read."""
        outlook = start.outlook
        return None if outlook is None else self.unless_unreadable(start.step, lambda: work(outlook))

    def unless_unreadable(self, step: int, work: Callable[[], T]) -> T | None:
        """The result of `work`; None on all ranks if it cannot read samples, which training may never do."""
        try:
            return work()
        except DataError as data_error:
            warning_text = f"branches are not tried: {data_error}"
            self.log.emit_event(Warned(step=step, text=warning_text), say=f"WARNING: {warning_text}")
            return None

    def _try_suspects(self, found: Conclusion, start: TrialStart, outlook: Outlook) -> SuspectsTrial | None:
        snapshot, begin = start.snapshot, time.perf_counter()
        suspects = np.array(found.bad_positions, dtype=np.int64) if found.bad_positions else start.positions
        steps = min(outlook.steps, STEPS // 2 if found.few else STEPS)
        batches = self._next_batches(snapshot, suspects, start.left_out, steps)
        if not any(np.isin(batch, suspects).any() for batch in batches[-steps:]):
            text = f"suspects are not tried: they come more than {LONGEST} steps after the snapshot"
            self.log.emit_event(Warned(step=start.step, text=text), say=f"WARNING: {text}")
            return None
        suspects = np.sort(np.intersect1d(suspects, np.concatenate(batches)))
        fillers = self._find_fillers(snapshot, start.left_out, found.bad_positions)[-suspects.size :]
        n = outlook.positions.size
        if not suspects.size or not fillers.size:
            return None
        held_out = choose_held_out(suspects)
        measured = np.concatenate([outlook.positions, held_out])
        before = self.laboratory.measure_losses(outlook.positions)
        with_them = self._train_and_measure(snapshot, replace_samples(batches, held_out, fillers), measured)
        control = self._train_and_measure(snapshot, replace_samples(batches, suspects, fillers), measured)
        if not run_on_first(lambda: bool(np.isfinite(control.measured).all())):
            return SuspectsTrial(None, True)  # not even harmless samples can be trained on from here
        coming = BranchLosses(with_them.measured[:n], control.measured[:n], before, outlook.losses)
        held = with_them.measured[n:], control.measured[n:]
        vocabulary = self.config.model.vocab_size
        assert vocabulary is not None
        compared = suspects[:COMPRESSED], fillers[-COMPRESSED:], outlook.positions
        texts, count = [self.laboratory.read_tokens(positions) for positions in compared], suspects.size
        trial = run_on_first(
            lambda: judge_trial(coming, held, vocabulary, count, len(batches), find_repetition(*texts))
        )
        branches = {"with the suspects": with_them, WITHOUT_BAD: control}
        self._tell(start, branches, control, before, outlook, begin, trial.reason, trial.facts)
        return SuspectsTrial(trial, run_on_first(lambda: harms_anyway(coming.control, before)))

    def _try_remedies(
        self, offers: Sequence[Offer], start: TrialStart, needs_harm: bool, heals: Callable[[], bool],
        outlook: Outlook,
    ) -> RemedyTrial | None:  # fmt: skip
        snapshot, begin, suspects = start.snapshot, time.perf_counter(), start.positions
        steps = self._count_steps(start, outlook)
        batches = self._next_batches(snapshot, suspects, start.left_out, steps, steps)
        fillers = self._find_fillers(snapshot, start.left_out, [])
        if not fillers.size:
            return None
        before, ahead = self.laboratory.measure_losses(outlook.positions), outlook.positions
        tried, healing_names = self.guard.policy.state, list[str]()

        def measure_end() -> tuple[bool, Floats]:
            return heals(), self.laboratory.measure_losses(ahead)

        def train_by_name(
            name: str, own_batches: Sequence[Int64s], offer: Offer | None = None
        ) -> TrainedBranch:
            tried.tried += steps
            trained, (is_healed, end_losses) = self._train(snapshot, own_batches, measure_end, offer)
            healing_names.extend([name] * is_healed)
            return trained._replace(measured=end_losses)

        def train_on(other: Int64s) -> TrainedBranch:
            """A branch on other data throughout: what follows the window may be bad as well."""
            return train_by_name(OTHER_DATA, replace_samples(batches, np.concatenate(batches), other))

        control = train_on(fillers[-sum(batch.size for batch in batches) :])
        if needs_harm and not run_on_first(lambda: harms_anyway(control.measured, before)):
            return None
        # What the run was trained on may be what does the harm, memorised.
        if needs_harm and outlook.others.size:
            fresh = train_on(outlook.others)
            if not run_on_first(lambda: harms_anyway(fresh.measured, before)):
                return None
        branches = {NOTHING: train_by_name(NOTHING, batches), OTHER_DATA: control}
        branches |= {offer.name: train_by_name(offer.name, batches, offer) for offer in offers}
        end_losses = {branch_name: branch.measured for branch_name, branch in branches.items()}
        trial = run_on_first(lambda: choose_remedy(end_losses, len(batches), healing_names))
        texts = (self.laboratory.read_tokens(p[-COMPRESSED:]) for p in (suspects, fillers))
        tokens = find_rare_tokens(*texts)
        facts = {"chosen": trial.chosen, "healed": healing_names, "steps": len(batches), "tokens": tokens}
        self._tell(start, branches, control, before, outlook, begin, trial.reason, facts)
        return trial

    def _try_nothing(self, start: TrialStart, state: RunState, outlook: Outlook) -> str:
        snapshot, begin, ahead = start.snapshot, time.perf_counter(), outlook.positions
        steps = self._count_steps(start, outlook)
        if not self.guard.policy.may_try_remedies(2 * steps, self.config.train.steps):
            return ""
        before = self.laboratory.measure_losses(ahead)
        again = self.repeat_steps(snapshot, state, lambda: self.laboratory.measure_losses(ahead))
        # Trouble that these steps did not make, they do not heal, either.
        if again is None or not run_on_first(lambda: abs(mean_difference(again, outlook.losses)[0]) < HARM):
            return ""
        self.guard.policy.state.tried += 2 * steps
        batches = self._next_batches(snapshot, start.positions, start.left_out, steps, steps)
        branch = self._train_and_measure(snapshot, batches, ahead)
        heals = run_on_first(lambda: not harms_anyway(branch.measured, before))
        how = "no harder than before: it heals by itself" if heals else "still harder"
        reason = f"the same {steps} steps make it again, and after them the data to come is {how}"
        facts = {"chosen": NOTHING if heals else "", "steps": steps}
        self._tell(start, {NOTHING: branch}, branch, before, outlook, begin, reason, facts)
        return reason if heals else ""

    def _try_corpus(
        self, corpus: str, bad: Int64s, start: TrialStart, outlook: Outlook
    ) -> CorpusTrial | None:
        snapshot, begin = start.snapshot, time.perf_counter()
        index = [known.name for known in self.loader.source.order.corpora].index(corpus)

        def is_of(positions: Int64s) -> Bools:
            return np.asarray(self.laboratory.find_corpora(positions) == index)

        others = ~is_of(outlook.positions)
        outlook = replace(outlook, positions=outlook.positions[others], losses=outlook.losses[others])
        batches = self._next_batches(snapshot, bad, start.left_out, outlook.steps)
        coming, steps = np.concatenate(batches), 2 * len(batches)
        may_try = self.guard.policy.may_try_remedies(steps, self.config.train.steps)
        if not may_try or not np.isin(np.concatenate(batches[-outlook.steps :]), bad).any():
            return None
        every = np.union1d(np.intersect1d(coming, bad), coming[is_of(coming)])
        fillers = self._find_fillers(snapshot, start.left_out, bad.tolist())
        fillers = fillers[~is_of(fillers)][-every.size :]
        if not outlook.positions.size or not every.size or not fillers.size:
            return None
        before = self.laboratory.measure_losses(outlook.positions)
        self.guard.policy.state.tried += steps
        without, control = (
            self._train_and_measure(snapshot, replace_samples(batches, replaced, fillers), outlook.positions)
            for replaced in (every, bad)
        )
        more = coming.size / max(1, int((~is_of(coming) | np.isin(coming, bad)).sum()))
        trial = run_on_first(
            lambda: judge_corpus(corpus, without.measured, control.measured, before, more, len(batches))
        )
        branches = {WITHOUT_BAD: control, WITHOUT_CORPUS: without}
        facts = {"chosen": trial.chosen, "corpus": corpus, "steps": trial.steps}
        self._tell(start, branches, control, before, outlook, begin, trial.reason, facts)
        return trial

    def _find_fillers(self, snapshot: Snapshot, left_out: Selection, bad: Sequence[int]) -> Int64s:
        """Harmless samples that were trained on before a snapshot."""
        applied_steps = [t for t in self.points.trained if t.applied and t.step <= snapshot.step]
        filler_positions = collect_harmless(applied_steps, left_out)[0]
        # Right after a start nothing is known of them, but the checkpoint was trained on them.
        if not filler_positions.size:
            next_cursor = snapshot.extra.state.cursor
            filler_positions = np.arange(max(0, next_cursor - LONGEST * self.loader.batch), next_cursor)
            filler_positions = filler_positions[~left_out.mask_skipped(filler_positions)]
        return filler_positions[~np.isin(filler_positions, bad)]

    def _next_batches(
        self, snapshot: Snapshot, suspects: Int64s, left_out: Selection, steps: int, most: int = LONGEST
    ) -> list[Int64s]:
        """The batches that follow a snapshot, as the run reads them, until `steps` steps after the first suspect; at
        most `most`."""
        next_cursor, found_batches, steps_since = snapshot.extra.state.cursor, list[Int64s](), 0
        while steps_since < steps and len(found_batches) < most:
            batch_size = self.loader.batches.value_at(next_cursor)
            positions, next_cursor = left_out.next_kept(next_cursor, batch_size)
            found_batches.append(positions)
            steps_since += bool(steps_since) or bool(np.isin(positions, suspects).any())
        return found_batches

    def _train_and_measure(
        self, snapshot: Snapshot, batches: Sequence[Int64s], measured: Int64s, offer: Offer | None = None
    ) -> TrainedBranch:
        """A branch, and the losses of some samples at its end."""
        measure_end = partial(self.laboratory.measure_losses, measured)
        trained, end_losses = self._train(snapshot, batches, measure_end, offer)
        return trained._replace(measured=end_losses)

    def _train(
        self, snapshot: Snapshot, batches: Sequence[Int64s], measure: Callable[[], T],
        offer: Offer | None = None, applied: Sequence[bool] | None = None,
    ) -> tuple[TrainedBranch, T]:  # fmt: skip
        """A branch, and what `measure` finds at its end; the engine holds the snapshot again. applied: which updates
        are; None: all that are finite."""
        saved_state: RunState = snapshot.extra.state
        start, engine = BranchStart(saved_state.updates, saved_state.trained_tokens), self.engine
        guard_policy, numerics = self.guard.policy, engine.numerics.now
        limit_rate = guard_policy.limit_rate if offer is None else offer.policy.limit_rate
        try:
            if offer is not None:
                engine.adjustments.switch_to(offer.policy.state.adjusted)
                plain_kernels = numerics.plain | engine.numerics.kinds_of(offer.policy.state.kernels)
                engine.numerics.switch_to(replace(numerics, fp8=offer.policy.fp8, plain=plain_kernels))
                engine.change_once(offer.name)
            trained_branch = train_branch(
                engine.config, engine, self.loader, start, batches, limit_rate, self._tell_progress, applied
            )
            return trained_branch, measure()
        finally:
            engine.adjustments.switch_to(guard_policy.state.adjusted)
            engine.numerics.switch_to(numerics)
            self.points.restore_snapshot(snapshot)

    def _tell(
        self, start: TrialStart, branches: Mapping[str, TrainedBranch], control: TrainedBranch, before: Floats,
        outlook: Outlook, begin: float, reason: str, facts: Mapping[str, Any],
    ) -> None:  # fmt: skip
        n = outlook.positions.size
        described = [
            describe_branch(name, branch, branch.measured[:n], control.measured[:n], cost)
            for cost, (name, branch) in enumerate(branches.items())
        ]
        event = BranchesTried(
            step=start.step, snapshot=start.snapshot.step, reason=reason, branches=described, before=mean_loss(before),
            present=mean_loss(outlook.losses), seconds=round(time.perf_counter() - begin, 3), **facts,
        )  # fmt: skip
        self.log.emit_event(event)

    def _tell_progress(self, step: int) -> None:
        """A trial is as many steps long as a hang would be: the supervisor must see that it moves."""
        self.phase(PHASES[step % 2])
