"""The guard of a training loop of any stack: judges every update before it is made, and rewinds.

    guard = Guard(model, optimizer, scheduler)
    ...
    loss.backward()
    verdict = guard.check(loss=loss, grad_norm=norm)     # the same on all ranks, by one all-reduce
    if verdict.apply:
        optimizer.step(), scheduler.step()
    elif verdict.rewind:
        data.seek(guard.rewind(), defer=guard.deferred)  # weights, moments, scheduler and random states are restored

Where it knows the ids of the samples (`check(sample_ids=)`) and a function that measures them (`use_replay`), it looks
at an incident before it rewinds: where no sample is bad and the state is as good as before, nothing is undone.
Otherwise it names the bad samples, and tries whether they harm: `guard.skipped`.

What it decides is the pure `StepJudge`; what it keeps, `HostCopies`; what it examines, `SampleExaminer`.
"""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megastable_guard.actions import Action, Cause, Decision, Finding, Signals, Verdict
from megastable_guard.conclusion import Conclusion
from megastable_guard.detector import DetectorState
from megastable_guard.guard_config import GuardConfig
from megastable_guard.guard_record import GuardRecord, GuardReport
from megastable_guard.host_copies import (
    HostCopies,
    Stateful,
    find_inner_optimizers,
    local_part,
    read_forward_state,
    restore_buffers,
)
from megastable_guard.policy_state import JUMP
from megastable_guard.random_states import restore_random_states
from megastable_guard.rate_limits import RateLimiter, RefusalWatch, read_rate
from megastable_guard.sample_examiner import (
    STEPS,
    ReadStep,
    Replay,
    SampleEvidence,
    SampleExaminer,
    WindowRemedy,
    choose_sample_remedy,
    compare_states,
    count_ranks,
    share_first,
)
from megastable_guard.sampler import SkippableSampler
from megastable_guard.step_judge import GuardState, StepJudge
from megastable_guard.trials import HarmTrial

T = TypeVar("T")
CALM = 4  # steps until an incident where nothing was wrong is looked at again, and twice as many each time


@dataclass(frozen=True)
class StepVerdict:
    """What to do with an update. apply: make it; rewind: call `Guard.rewind` instead; neither: leave it out, with the
    step of the scheduler. stop: nothing in memory helps: end, and go back to a checkpoint from before `onset`. alert:
    stop, or the budgets are spent: what is finite is applied, though it does harm."""

    step: int
    apply: bool
    rewind: bool
    stop: bool
    alert: bool
    onset: int
    reason: str


@dataclass(frozen=True)
class ExaminedIncident:
    """What a look at an incident has shown. remedy: for the steps since its onset, on the copy of after `step`, which
    is good; is_over: nothing is undone, as no sample is bad, or they are only new, and the present state is no worse
    than that copy; reason: a sentence; trial: of the suspects; seconds: that it took."""

    finding: Finding
    evidence: SampleEvidence
    step: int
    remedy: WindowRemedy
    is_over: bool
    reason: str
    trial: HarmTrial | None
    seconds: float


@dataclass(frozen=True)
class CopiedJudgement:
    """What belongs to a copy: the detector, and how many updates were applied."""

    detector: DetectorState
    updates: int


class Guard:
    """Guards one run; the same on every rank.

    Args:
        model, optimizer: of this rank; plain, DDP, FSDP 1 or 2. The optimizer may be wrapped, or be a list of several.
            A model of several parts is an nn.ModuleList of them. The learning rate that is judged is the largest of all
            groups.
        scheduler: its state is rewound, too.
        others: what else is to be rewound, by name.
        config: thresholds and budgets.
        interval, keep: steps from one copy in host memory to the next, and how many; keep=0: nothing is rewound.
        run_dir: of this run: the first rank writes journal and step records there (docs/guard.md); None: none.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: Any, scheduler: Stateful | None = None, *,
        others: Mapping[str, Stateful] | None = None, config: GuardConfig | None = None, interval: int = 50,
        keep: int = 3, run_dir: str | Path | None = None,
    ) -> None:  # fmt: skip
        stateful_parts = {**({"scheduler": scheduler} if scheduler is not None else {}), **(others or {})}
        if any(isinstance(part, SkippableSampler) for part in stateful_parts.values()):
            raise TypeError(
                "others has a SkippableSampler: it goes back by its own seek, with what guard.rewind returns"
            )
        self.model, self.optimizer, self.others = model, optimizer, stateful_parts
        self._optimizers: Any = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        self.applies = True  # the last update
        self.config = config or GuardConfig()
        self.judge = StepJudge(self.config)
        self.copies = HostCopies(model, optimizer, stateful_parts, interval, keep) if keep else None
        self.step = 0  # of the last check
        self.updates = 0  # applied ones
        self.record = GuardRecord(run_dir)
        # Of the last verdict: steps whose data is left for later, and ids of bad samples.
        self.deferred, self.skipped = list[int](), list[int]()
        self.samples, self._cleared = SampleExaminer(model, self.copies), 0
        self.rates = RateLimiter(self.copies.optimizers if self.copies is not None else ())
        with suppress(TypeError):  # of an optimizer that is not of torch
            RefusalWatch(find_inner_optimizers(optimizer), lambda: not self.applies)
        self._judgements: dict[int, CopiedJudgement] = {}
        self._decision: Decision | None = None
        self._examined: ExaminedIncident | None = None
        # The step of the last look at an incident where nothing was wrong, and for how many steps none follows.
        self._looked, self._calm_steps = 0, 0
        self._forward, self._awaits_forward, self._alert = read_forward_state(model), True, ""
        self._sees_forward = False  # not in Lightning, which calls no `forward`
        for part in model if isinstance(model, torch.nn.ModuleList) else [model]:
            part.register_forward_pre_hook(self._before_forward)

    @torch.compiler.disable
    def _before_forward(self, module: torch.nn.Module, _: Any) -> None:
        """Before the first forward pass of a step: what the update and its hooks have done is in it."""
        if self._awaits_forward and module.training:
            self._forward, self._awaits_forward = read_forward_state(self.model), False
            self._sees_forward = True

    def use_replay(
        self, replay: Replay, at_once: int = 1, ahead: Callable[[int], Sequence[int]] | None = None
    ) -> None:
        """Name bad samples, and try whether they harm, by the loop's own function.

        Args:
            replay: from ids, to the mean loss of each sample, [n], nats per token, of the model as it stands: in its
                present mode (evaluation to measure, training in a trial), with gradients where they are enabled, in the
                loop's own precision. It is called on every rank, each with other ids.
            at_once: ids that a call is given: as many as a micro-batch has.
            ahead: from a count, to the ids that this rank reads next, such as `SkippableSampler.look_ahead`: a bad
                region is followed to its end, and trials are measured on the data to come.
        """
        if any(type(part).__name__ == "FullyShardedDataParallel" for part in self.model.modules()):
            raise ValueError(
                "FSDP1 keeps whole weights after a pass without gradients, and would train on them: to name samples "
                "take FSDP2 (fully_shard), or leave use_replay out"
            )
        self.samples.replay, self.samples.at_once, self.samples.ahead = replay, at_once, ahead

    def check(
        self, *, loss: float | Tensor, grad_norm: float | Tensor | None = None, weight: float = 1.0,
        sample_ids: Sequence[int] | Tensor | None = None, sample_losses: Sequence[float] | Tensor | None = None,
        mixed: bool = False,
    ) -> StepVerdict:  # fmt: skip
        """Judge an update before it is made: after backward, once a step on every rank.

        Where its samples are known, a refused update leaves the bad ones in `skipped`, and its step in `deferred`: of
        that the others may be read later, by `sampler.seek(verdict.step, trained=verdict.step, skip=guard.skipped,
        defer=guard.deferred)`. Otherwise both are empty.

        Args:
            loss: mean of this rank's part of the batch, nats per token.
            grad_norm: L2 norm of the gradient of the whole batch before clipping; None: it is measured here.
            weight: of this rank's part in the mean, such as its number of tokens.
            sample_ids: of this rank's part of the batch, [n], of all micro-batches; on all ranks or on none.
            sample_losses: of these in the forward pass, [n], nats per token; on all ranks, in every step, or on none. A
                refused update is examined by them, without a replay.
            mixed: the data changes on purpose from this step on, such as to another stage of a curriculum.
        """
        if self._awaits_forward and self._sees_forward:  # there was none in this step
            self._forward = read_forward_state(self.model)
        gradient_norm = self._measure_norm() if grad_norm is None else grad_norm
        own_ids, own_losses = _as_ids(sample_ids), _as_losses(sample_losses)
        is_uneven = sample_losses is not None and len(own_losses) != len(own_ids)
        given = (sample_ids is not None, sample_losses is not None, is_uneven)
        mean_loss, norm_value, knows_ids = self._average_over_ranks(
            float(loss), float(gradient_norm), weight, given
        )
        if not self.record.has_begun:
            self._warn_of_names(knows_ids, sample_losses is not None)
            self._begin_record()
        oldest_copy = self.copies.steps[0] if self.copies and self.copies.steps else None
        scheduled_rate = read_rate(self._optimizers)
        rate = self.rates.choose_share(self.judge.policy, self.updates, scheduled_rate)
        step_signals = Signals(self.step + 1, mean_loss, norm_value, rate, mixed)
        judged_before = None
        if self.copies is not None and self.copies.is_due(self.step):
            judged_before = CopiedJudgement(self.judge.detector.state, self.updates)
        if self.step < self._cleared:
            # A trial has cleared these steps: what was usual until them is not usual any more.
            self.judge.detector.begin_again()
        step_decision = self.judge.judge_step(step_signals, oldest_copy)
        # That the loss of this step is on its trend is what is known of the state before its update.
        is_good = step_decision.finding.verdict is Verdict.HEALTHY and step_decision.finding.on_trend
        self.step += 1
        if knows_ids:
            was_refused = step_decision.action is Action.DISCARD
            self.samples.remember_step(
                ReadStep(self.step, own_ids, own_losses, not was_refused, norm_value, scheduled_rate)
            )
        step_decision, self._examined = self._look_before_rewind(step_decision, norm_value)
        is_good = is_good or (self._examined is not None and self._examined.is_over)
        if self.copies and judged_before and (is_good or not self.copies.steps):
            self.copies.take_copy(self.step - 1, self._forward)
            self._judgements[self.step - 1] = judged_before
            self._judgements = {step: self._judgements[step] for step in self.copies.steps}
        self._decision, step_verdict = step_decision, self._make_verdict(step_decision)
        self.updates += step_verdict.apply
        self.applies, self.skipped, self.deferred = step_verdict.apply, [], []
        if not step_verdict.apply:
            restore_buffers(self.model, self._forward)
        elif step_verdict.alert and self._alert != step_decision.reason:
            warnings.warn(f"megastable guard, step {self.step}: {step_decision.reason}", stacklevel=2)
        self._alert = step_decision.reason if step_verdict.alert else ""
        if not self._sees_forward:  # the next step begins as this one ends
            self._forward = read_forward_state(self.model)
        self._awaits_forward = True
        self.record.note_step(
            step_decision,
            step_signals,
            step_verdict.apply,
            self.judge.policy.state,
            self._examined is not None,
        )
        if self._examined is not None:
            self._record_examined(self._examined)
        if step_verdict.apply:
            for lifted_reason in self.judge.policy.lift_limits(
                step_decision.finding, self.updates, scheduled_rate
            ):
                self.record.note_lifted(self.step, lifted_reason)
        if knows_ids and not step_verdict.apply and not step_verdict.rewind:
            self._examine_refused()
        return step_verdict

    def _begin_record(self) -> None:
        """Raises on all ranks what the first one cannot do."""
        begin_run = partial(self.record.begin_run, self.step, count_ranks(), torch.__version__)
        self.record.take_up(share_first(begin_run))

    def _warn_of_names(self, knows_ids: bool, has_losses: bool) -> None:
        """Of half of what naming needs, which names nothing."""
        has_replay = self.samples.replay is not None
        if knows_ids and not (has_replay or has_losses):
            missing = "sample_ids are given, but no replay (Guard.use_replay) and no sample_losses"
        elif has_replay and not knows_ids:
            missing = "a replay is given (Guard.use_replay), but check has no sample_ids"
        else:
            return
        warnings.warn(f"megastable guard: {missing}: no bad samples are named", stacklevel=3)

    def rewind(self) -> int:
        """Go back to the newest good state from before the trouble. The step after which that was: the next one trains
        on the data behind it, but for the samples of `skipped` and the steps of `deferred`. Where bad samples are
        named only they are `skipped`; where data is only new, nothing is. Raises RuntimeError if the last verdict was
        no rewind."""
        if self._decision is None or not self._decision.action.rewinds or self.copies is None:
            raise RuntimeError("guard.rewind() belongs behind a check whose verdict says rewind")
        finding, tripped, began = self._decision.finding, self.step, time.monotonic()
        examined, self._examined = self._examined, None
        self.copies.restore_before(examined.step + 1 if examined else finding.onset)
        remedy = examined.remedy if examined else None
        restored_copy = self.copies.newest[0]
        self.step, self._forward, self._awaits_forward = restored_copy.step, restored_copy.forward, True
        self.samples.forget_after(self.step)
        self._looked = self._calm_steps = 0
        copied_judgement = self._judgements[self.step]
        self._judgements = {step: kept for step, kept in self._judgements.items() if step <= self.step}
        self.updates, self._decision = copied_judgement.updates, None
        self.judge.rewind_detector(copied_judgement.detector.model_copy(deep=True))
        self.judge.policy.note_rewind(self.updates, tripped - self.step)
        # Those of refused updates stay skipped, unless they were examined once more.
        named_before, cleared = self.samples.name_again(
            self.step, finding.onset if remedy else None, remedy.skipped if remedy else ()
        )
        self.record.note_cleared(cleared)
        remedy = remedy or WindowRemedy(Cause.UNKNOWN, deferred=tuple(range(finding.onset, tripped + 1)))
        if remedy.cause is Cause.STATE and examined and self._limit_rate(finding, examined.evidence):
            remedy = WindowRemedy(Cause.LEARNING_RATE)
        elif remedy.is_harmless:
            self.judge.policy.trained_through(alone=True)
            self._cleared = tripped
        else:
            self.judge.policy.choose_remedy(
                remedy.cause, self.updates, proven=remedy.proven, bad=remedy.skipped
            )
        self.skipped, self.deferred = [*named_before, *remedy.skipped], list(remedy.deferred)
        spent_seconds = time.monotonic() - began + (examined.seconds if examined else 0.0)
        self.record.note_rewind(finding, self.step, len(self.deferred), spent_seconds)
        return self.step

    def _examine_refused(self) -> None:
        """Name the bad samples of the update that was refused; the others may be read later. As no trial has shown
        that they harm, they are skipped only if each is far out by itself, and while they are few. Where most of a
        batch is, the data may only be new: all of it is read later, and what is refused then, too, is skipped."""
        found, policy = self.samples.examine_refused(self.step), self.judge.policy
        if found is None:
            return
        self.deferred = [self.step]
        are_few = 2 * len(found.alone) <= len(found.suspects)
        came_twice = self.samples.refused_ids.issuperset(found.alone)
        self.samples.refused_ids.update(suspect.position for suspect in found.suspects)
        if found.alone and (are_few or came_twice) and policy.may_take_untried(len(found.alone)):
            policy.take_untried(len(found.alone))
            policy.note_skipped(found.alone, proven=False)
            self.skipped = found.alone
            self.samples.bad_by_step[self.step] = self.skipped
        self.record.note_cause(found.cause, found.reason, self.skipped)

    def _look_before_rewind(
        self, decision: Decision, norm: float
    ) -> tuple[Decision, ExaminedIncident | None]:
        """The decision on an incident, after a look at it from the state before: where it is over, the update is
        applied, and nothing undone. So is a new level of the loss with an ordinary gradient, as of other data, looked
        at: if the state has become worse, it was not the data. norm: of the gradient of this step."""
        finding, policy, examined = decision.finding, self.judge.policy, None
        is_shift = finding.verdict is Verdict.SHIFT and decision.action is Action.APPLY
        if not (is_shift or decision.action.rewinds):
            return decision, None
        if self._is_calm(finding):
            if is_shift:
                return decision, None
            calm_until = self._looked + self._calm_steps
            reason = f"nothing was wrong; looked at again after step {calm_until}: {finding.reason}"
        else:
            evidence = self._collect_evidence(finding, is_shift)
            if evidence is None:
                return decision, None
            examined = self._examine_incident(finding, norm, evidence)
            reason = f"{finding.reason}; {examined.reason}"
            if is_shift and not examined.is_over:
                return policy.undo_steps(replace(finding, verdict=Verdict.DAMAGE), reason), examined
            if not examined.is_over:
                return decision, examined
            if examined.remedy.is_harmless:  # what was usual until now is not usual any more
                self.judge.detector.begin_again()
                self._cleared = self.step
            else:
                self._calm_steps = 2 * self._calm_steps if finding.onset <= self._looked else CALM
                self._looked = self.step
            if is_shift:
                return decision, None
        policy.trained_through(alone=not self.record.has_rewound)
        return replace(decision, action=Action.APPLY, reason=reason), examined

    def _is_calm(self, finding: Finding) -> bool:
        """Whether the same was looked at lately, and nothing was wrong."""
        is_same = finding.onset <= self._looked and finding.verdict not in (
            Verdict.OUTLIER,
            Verdict.NON_FINITE,
        )
        return is_same and self.step <= self._looked + self._calm_steps

    def _examine_incident(self, finding: Finding, norm: float, evidence: SampleEvidence) -> ExaminedIncident:
        """Look at an incident from the newest good copy before its onset. The run stands where it stood then."""
        assert self.copies is not None
        began, copies, samples = time.monotonic(), self.copies, self.samples
        trial, remedy, is_over = None, WindowRemedy(Cause.UNKNOWN), True
        last_copy = max(step for step in copies.steps if step < finding.onset)
        compared_ids, coming_count = samples.choose_compared(evidence, last_copy)
        held_state = copies.hold_present(self.step)
        try:
            repeated_norm = self._without_refusals(partial(samples.measure_gradient, self._measure_norm))
            present_losses = samples.measure_losses(compared_ids)
            copies.restore_before(finding.onset)
            good_losses = samples.measure_losses(compared_ids)
            norms = norm, repeated_norm
            is_damaged, reason = share_first(
                partial(compare_states, present_losses, good_losses, coming_count, norms)
            )
            if finding.verdict is not Verdict.SHIFT or is_damaged:
                found, trial, remedy = self._examine_window(finding, evidence)
                is_single = finding.verdict in (Verdict.OUTLIER, Verdict.NON_FINITE)
                no_data_is_bad = remedy.is_harmless or (not is_single and not found.bad_positions)
                # What was named, and is to be read again, is so behind a rewind. If the newest copy is no good state
                # either, nor is the present one.
                is_over = no_data_is_bad and not (is_damaged or samples.has_named(evidence.window))
                is_over = is_over and copies.newest[0].step == last_copy
                reason = f"{found.reason}; {trial.reason if trial else reason}"
            good_step = copies.newest[0].step
        finally:
            copies.put_back(held_state)
        return ExaminedIncident(
            finding, evidence, good_step, remedy, is_over, reason, trial, time.monotonic() - began
        )

    def _record_examined(self, examined: ExaminedIncident) -> None:
        if examined.trial is not None:
            self.record.note_trial(
                examined.finding.step, examined.step, examined.trial.facts, examined.trial.reason
            )
        cause = Cause.NEW_DATA if examined.is_over else examined.remedy.cause
        self.record.note_cause(cause, examined.reason, examined.remedy.skipped)

    def _collect_evidence(self, finding: Finding, looks_back: bool) -> SampleEvidence | None:
        """What was read since an onset, what comes, and what is known to be harmless; None: not enough is known, or of
        what has raised no alarm (`looks_back`), it may not be undone."""
        oldest_copy = self.copies.steps[0] if self.copies and self.copies.steps else None
        if looks_back and not self.judge.policy.may_look_back(self.step, finding.onset, oldest_copy):
            return None
        if not self.samples.knows_ids:
            return None
        window, harmless_steps = self.samples.read_since(finding.onset)
        if self.samples.replay is None or not window or not harmless_steps:
            return None
        return SampleEvidence(window, self.samples.read_ahead(self.step), harmless_steps)

    def _limit_rate(self, finding: Finding, evidence: SampleEvidence) -> bool:
        """Whether the learning rate was the trouble, and a limit of it that a trial has chosen holds from here on. It
        is tried where the rate has jumped, or the trouble came back though no sample was bad."""
        assert self.copies is not None
        policy, copy_step = self.judge.policy, self.copies.newest[0].step
        # The rate in a copy is already that of the step to come, whose schedule may have jumped.
        good_rates = [kept.rate for kept in evidence.harmless if kept.step <= copy_step]
        good_rate = good_rates[-1] if good_rates else read_rate(self._optimizers)
        highest_rate = max(read_step.rate for read_step in evidence.window)
        may_be_rate = highest_rate > JUMP * good_rate or policy.has_recurred()
        offers = policy.offer_remedies(self.updates, good_rate, highest_rate)
        offers = [offer for offer in offers if offer.remedy.action in (Action.CAP_LR, Action.CUT_LR)]
        tried_steps = (len(offers) + 2) * STEPS
        if not (may_be_rate and offers and policy.may_try_remedies(tried_steps, self.step)):
            return False
        policy.state.tried += tried_steps
        trial = self._without_refusals(
            partial(self.samples.try_rates, offers, policy, self.updates, evidence, self._measure_norm)
        )
        chosen_offer = None
        if trial is not None:
            chosen_offer = next((offer for offer in offers if offer.name == trial.chosen), None)
            facts = {"chosen": trial.chosen, "steps": trial.steps}
            self.record.note_trial(finding.step, copy_step, facts, trial.reason)
        if trial is None or chosen_offer is None:
            return False
        chosen_remedy = policy.adopt_remedy(chosen_offer, trial.reason)
        limited_rate = policy.limit_rate(self.updates + policy.config.rewarm_steps, highest_rate)
        told_reason = f"from {highest_rate:.3g} to {limited_rate:.3g}: {chosen_remedy.reason}"
        self.record.note_cause(chosen_remedy.cause, told_reason, action=chosen_remedy.action)
        return True

    def _without_refusals(self, work: Callable[[], T]) -> T:
        """Of branches, whose updates are no steps of the loop."""
        awaited, limited_share = self._awaits_forward, self.rates.share
        self._awaits_forward, self.applies, self.rates.share = False, True, 1.0
        try:
            return work()
        finally:
            self._awaits_forward, self.applies, self.rates.share = awaited, False, limited_share

    def _examine_window(
        self, finding: Finding, evidence: SampleEvidence
    ) -> tuple[Conclusion, HarmTrial | None, WindowRemedy]:
        """What is bad of the steps since the onset, by the restored state, or an older one if that is no good; and
        whether it harms."""
        policy, trial, (window, coming, harmless_steps) = self.judge.policy, None, evidence
        self.samples.restore_good(harmless_steps)
        found, region = self.samples.examine_window(window, coming, harmless_steps)
        is_finite = finding.verdict is not Verdict.NON_FINITE
        if found.bad_positions and is_finite:
            trial = self._without_refusals(
                partial(self.samples.try_suspects, found, region, coming, harmless_steps, self._measure_norm)
            )
        may_skip = not is_finite or policy.may_take_untried(len(found.bad_positions))
        remedy = choose_sample_remedy(found, trial, window, may_skip)
        if remedy.skipped and is_finite and not remedy.proven:
            policy.take_untried(len(remedy.skipped))
        return found, trial, remedy if is_finite else replace(remedy, proven=True)

    def hold_refused(self, scheduler: Any = None) -> None:
        """Make the optimizer leave out what is refused, for loops that call it in any case; so does a `scheduler` that
        steps with every update."""
        for inner_optimizer in self.copies.optimizers if self.copies else self._optimizers:
            self._hold_optimizer(inner_optimizer)
        if scheduler is not None:
            self.hold_scheduler(scheduler)

    def hold_scheduler(self, scheduler: Any) -> None:
        """Make it leave out the steps of refused updates."""
        guard = self
        kind: Any = type(scheduler)

        class HeldScheduler(kind):  # a class: what is set on a scheduler itself is in its state dict
            def step(self, *given: Any, **named: Any) -> None:
                if guard.applies:
                    super().step(*given, **named)

        HeldScheduler.__name__, HeldScheduler.__qualname__ = kind.__name__, kind.__qualname__
        scheduler.__class__ = HeldScheduler

    def _hold_optimizer(self, optimizer: Any) -> None:
        step_optimizer, guard = optimizer.step, self

        @functools.wraps(step_optimizer)
        def step_if_applied(closure: Callable[[], Any] | None = None) -> Any:
            # In the closure the guard may be asked, as in Lightning.
            loss = closure() if closure is not None else None
            if guard.applies:
                return step_optimizer() if closure is None else step_optimizer(lambda: loss)
            return loss

        optimizer.step = step_if_applied

    def drop_update(self) -> None:
        """Leave out an update that is not to be judged: of data that a loader had fetched before the last rewind. What
        its forward pass has changed is put back."""
        self.applies = False
        restore_buffers(self.model, self._forward)
        restore_random_states(self._forward.random)
        self._awaits_forward = True
        for given_optimizer in self._optimizers:
            given_optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint of the run. The copies are not in it: a resumed run begins with new ones."""
        return {
            "step": self.step, "updates": self.updates, "cleared": self._cleared,
            "judge": self.judge.state.model_dump(mode="json"), "record": self.record.read_state(),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self.updates = int(state["step"]), int(state["updates"])
        self.judge = StepJudge(self.config, GuardState.model_validate(state["judge"]))
        self.record.restore_state(state.get("record", {}))
        self._awaits_forward, self._decision, self._judgements, self.deferred = True, None, {}, []
        self._examined, self._looked, self._calm_steps = None, 0, 0
        self.skipped, self._cleared = [], int(state.get("cleared", 0))
        self.samples.forget_after(-1)
        self.samples.bad_by_step.clear()
        self.applies, self._alert, self.rates.share = True, "", 1.0
        if self.copies is not None:
            self.copies.forget_copies()

    def report(self, sampler: SkippableSampler | None = None) -> GuardReport:
        """What the guard has done so far: a dict of JSON, and as `str` a text. sampler: whose deferred and skipped
        samples are told. skipped_ids: ranges [first, end); without a sampler those that were named; dropped_ids: of
        these, that came with trouble twice, and were not named.

        In a run that was resumed steps, updates and samples are those of the checkpoint and since. Refused updates,
        rewinds, steps lost, alerts and incidents are also those between the checkpoint and the end of that process, as
        in the journal, where there is one: from the first step on after the resume.
        """
        left_out = sampler.list_left_out() if sampler is not None else None
        return self.record.report_counts(self.step, self.updates, left_out)

    def finish_run(self, sampler: SkippableSampler | None = None) -> None:
        """The run is complete: the run directory says so, with the report in summary.json. A run that ends without this
        counts as interrupted."""
        self.record.close_incident(self.step, "open")
        self.record.finish_run(self.step, self.report(sampler))
        self.applies = True  # whatever comes now is not judged

    def _make_verdict(self, decision: Decision) -> StepVerdict:
        """Without a copy from before the onset a finite update is applied: a loop of somebody else is not ended."""
        wants_end = decision.action in (Action.HANDOVER, Action.RESTART, Action.STOP)
        is_finite = decision.finding.verdict is not Verdict.NON_FINITE
        return StepVerdict(
            self.step, decision.applies or (wants_end and is_finite), decision.action.rewinds, wants_end,
            wants_end or decision.action is Action.ALERT, decision.finding.onset, decision.reason,
        )  # fmt: skip

    def _average_over_ranks(
        self, loss: float, norm: float, weight: float, given: tuple[bool, bool, bool]
    ) -> tuple[float, float, bool]:
        """Mean loss by weight; the norm, which the ranks know alike but for rounding; whether all know their ids.

        given: whether this rank has ids, has losses of them, and has not as many. What is wrong on one rank raises
        ValueError on all: the others would wait for it for ever.
        """
        # A part without tokens may have a loss of nan.
        sums = [loss * weight if weight else 0.0, weight, norm, 1.0, *map(float, given)]
        if count_ranks() > 1:
            device = local_part(next(self.model.parameters())).device
            rank_sums = torch.tensor(sums, dtype=torch.float64, device=device)
            dist.all_reduce(rank_sums)
            sums = rank_sums.tolist()
        weighted_loss, total_weight, norm_sum, rank_count, *given_counts, uneven_count = sums
        if not total_weight:
            raise ValueError("the weights of all ranks are 0: this step has no loss")
        if uneven_count:
            raise ValueError(
                f"{uneven_count:.0f} of {rank_count:.0f} ranks have given more or less sample_losses than sample_ids"
            )
        for count, name in zip(given_counts, ("sample_ids", "sample_losses"), strict=True):
            if count not in (0, rank_count):
                raise ValueError(
                    f"{count:.0f} of {rank_count:.0f} ranks have given {name}: give them on all or on none"
                )
        return weighted_loss / total_weight, norm_sum / rank_count, given_counts[0] > 0

    def _measure_norm(self) -> float:
        own_clipping: Any = getattr(self.model, "clip_grad_norm_", None)
        if own_clipping is not None:  # of FSDP1, whose gradients are parts of flat ones
            return float(own_clipping(math.inf))
        by_mesh = defaultdict[Any, list[Tensor]](list)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                by_mesh[getattr(parameter.grad, "device_mesh", None)].append(parameter.grad)
        norms = [torch.nn.utils.get_total_norm(gradients) for gradients in by_mesh.values()]
        return math.hypot(*(float(n.full_tensor() if hasattr(n, "full_tensor") else n) for n in norms))


def _as_ids(values: Sequence[int] | Tensor | None) -> tuple[int, ...]:
    """Raises TypeError if they are no whole numbers."""
    if values is None:
        return ()
    ids = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if ids.size and ids.dtype.kind not in "iu":
        raise TypeError(
            f"sample_ids are whole numbers, but these are {ids.dtype}: {ids.ravel()[:3].tolist()}"
        )
    return tuple(ids.ravel().tolist())


def _as_losses(values: Sequence[float] | Tensor | None) -> tuple[float, ...]:
    if values is None:
        return ()
    return tuple(values.detach().flatten().tolist() if isinstance(values, Tensor) else values)
