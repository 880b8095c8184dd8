"""Detector and policy together judge every step, in training, in a dry run and in the backtest.

judge = StepJudge(config.stability)
decision = judge.judge_step(Signals(step, loss, grad_norm, lr), oldest_snapshot)

A recording does not react (`simulate_guard`): a rewind does not take place. So the rest of an excursion that was
acted on is marked and not acted on again, and the effect of the action is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from megastable_guard.actions import Action, Cause, Decision, Finding, Signals, Verdict
from megastable_guard.detector import Detector, DetectorState
from megastable_guard.guard_config import GuardConfig
from megastable_guard.policy import Policy
from megastable_guard.policy_state import PolicyState


class GuardState(BaseModel):
    """The guard's state in a checkpoint. Of a simulation: acted, the step of the last action; broken: since a
    non-finite step."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    detector: DetectorState | None = None
    policy: PolicyState = PolicyState()
    simulated: bool = False
    acted: int | None = None
    broken: bool = False

    def of_kind(self, simulated: bool) -> GuardState:
        """For a simulation, or for a run that acts: each has its own budgets, but lasting changes hold in both."""
        if simulated == self.simulated:
            return self
        policy_state = PolicyState(adjusted=self.policy.adjusted)
        return GuardState(detector=self.detector, policy=policy_state, simulated=simulated)


class StepJudge:
    """Judges every step once, in order. Pure: the same numbers give the same decisions on every rank.

    simulated: decisions are not carried out, as in a dry run or a recorded run: the rest of an excursion that was acted
    on would not have happened, and is not acted on again. A simulation has its own budgets. fp8: whether the run
    computes in FP8.
    """

    def __init__(
        self,
        config: GuardConfig,
        state: GuardState | None = None,
        simulated: bool = False,
        fp8: bool = False,
    ) -> None:
        state = (state or GuardState()).of_kind(simulated)
        self.config = config
        self.detector = Detector(config.detector, state.detector)
        self.policy = Policy(config.policy, state.policy, fp8)
        self.simulated = simulated
        self._acted, self._broken = state.acted, state.broken

    def judge_step(self, signals: Signals, oldest_snapshot: int | None) -> Decision:
        """The decision on a step, before its update."""
        step_finding = self.detector.observe_step(signals)
        if step_finding.verdict is not Verdict.NON_FINITE:
            self._broken = False
        if not self.simulated:
            return self.policy.decide_on_step(step_finding, oldest_snapshot)
        if self._acted is not None and self._acted_on(step_finding):
            reason = f"part of the excursion that the action at step {self._acted} would have undone"
            return Decision(Action.APPLY, step_finding, reason)
        # Whether the action would have helped is unknown: the recorded loss says nothing about it.
        step_decision = self._pretend(
            self.policy.decide_on_step(replace(step_finding, on_trend=True), oldest_snapshot)
        )
        if step_decision.action not in (Action.APPLY, Action.DISCARD):
            self._acted = signals.step
            self._broken = step_finding.verdict is Verdict.NON_FINITE
        return step_decision

    def _pretend(self, decision: Decision) -> Decision:
        """The follow-up of a decision that is not carried out: nothing is examined, so the cause is unknown."""
        if decision.action is Action.REWIND:
            self.policy.note_rewind(decision.finding.step, decision.finding.step - decision.finding.onset)
            chosen_remedy = self.policy.choose_remedy(Cause.STATE, decision.finding.step)
            if chosen_remedy.action is not Action.REWIND:
                reason = f"{decision.reason}; {chosen_remedy.reason}"
                decision = replace(decision, action=chosen_remedy.action, reason=reason)
        if decision.action is Action.HANDOVER:
            self.policy.carry_out_handover(Cause.UNKNOWN)
        if decision.action is Action.STOP:
            # As if a person had restarted it.
            self.policy = Policy(self.config.policy, has_fp8=self.policy.has_fp8)
        return decision

    def _acted_on(self, finding: Finding) -> bool:
        """Whether the last action would have undone this step already."""
        if finding.verdict is Verdict.NON_FINITE:
            return self._broken
        return finding.verdict is not Verdict.HEALTHY and finding.onset <= (self._acted or 0)

    def rewind_detector(self, detector: DetectorState) -> None:
        """Undo the steps since `detector` was saved. The policy still remembers them."""
        self.detector = Detector(self.config.detector, detector)

    @property
    def state(self) -> GuardState:
        """A copy, for a checkpoint."""
        return GuardState(
            detector=self.detector.state, policy=self.policy.state.model_copy(deep=True), simulated=self.simulated,
            acted=self._acted, broken=self._broken,
        )  # fmt: skip


class Recorded(NamedTuple):
    """A step of a recording; grad_norm, lr and data (a name for its training data) are None if not recorded."""

    step: int
    loss: float
    grad_norm: float | None = None
    lr: float | None = None
    data: str | None = None


@dataclass(frozen=True)
class BacktestDecision:
    """What would have been done at a step, and why. reset: the detector's baseline would have been reset."""

    step: int
    verdict: Verdict
    action: Action
    reason: str
    reset: bool = False


def simulate_guard(
    rows: Iterable[Recorded], config: GuardConfig, fp8: bool = False, *, interval: int, keep: int
) -> Iterator[BacktestDecision]:
    """The guard's answer to every step, in order.

    interval, keep: of snapshots, steps (0: there are none, and no rewind) and number. fp8: whether the run computed in
    FP8; without measurements FP8 cannot be identified as the cause, and is left only where the rate would be cut.
    """
    guard = StepJudge(config, simulated=True, fp8=fp8)
    snapshots: list[int] = []
    data_name: str | None = None
    for row in rows:
        if not snapshots:
            snapshots = [row.step - 1]  # a run takes its first snapshot when it starts
        is_mixed = data_name is not None and row.data is not None and row.data != data_name
        data_name = row.data or data_name
        signals = Signals(row.step, row.loss, row.grad_norm, row.lr, is_mixed)
        decision = guard.judge_step(signals, snapshots[0] if interval else None)
        step_finding = decision.finding
        if interval and step_finding.verdict is Verdict.HEALTHY and row.step >= snapshots[-1] + interval:
            snapshots = thin_snapshots([*snapshots, row.step], keep, interval)
        yield BacktestDecision(
            row.step, step_finding.verdict, decision.action, decision.reason, step_finding.reset
        )


def thin_snapshots(steps: Sequence[int], capacity: int, interval: int) -> list[int]:
    """Which of the ascending `steps` to keep, at most `capacity`: the newest, and older ones ever further apart.

    Ages grow about as powers of two of `interval`, so that a few snapshots reach far back; those beyond the
    capacity are dropped.
    """
    kept = list(steps)
    while len(kept) > capacity:
        snapshot_ages = [kept[-1] - step for step in kept]
        if snapshot_ages[0] > interval * 2 ** (capacity - 1) or len(kept) < 3:
            kept.pop(0)
            continue
        # Drop the snapshot whose neighbours are closest together for their age.
        neighbour_crowding = [
            (snapshot_ages[i - 1] - snapshot_ages[i + 1]) / snapshot_ages[i - 1]
            for i in range(1, len(kept) - 1)
        ]
        kept.pop(1 + neighbour_crowding.index(min(neighbour_crowding)))
    return kept
