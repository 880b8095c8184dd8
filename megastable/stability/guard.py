"""Detector and policy together: what judges a step, in training, in a dry run and in the backtest.

guard = Guard(config.stability)
decision = guard.judge(Signals(step, loss, grad_norm, lr), oldest_snapshot)
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import BaseModel, ConfigDict

from megastable.stability.detector import Detector, DetectorState
from megastable.stability.policy import Action, Decision, Policy, PolicyState
from megastable.stability.settings import StabilityConfig
from megastable.stability.signals import Signals, Verdict


class GuardState(BaseModel):
    """What a checkpoint keeps. acted: see `Guard.judge`."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    detector: DetectorState | None = None
    policy: PolicyState = PolicyState()
    acted: int | None = None


class Guard:
    """Judges every step once, in order. Pure: the same numbers give the same decisions on every rank.

    simulated: nothing that is decided is carried out, as in a recorded run: what belongs to an excursion on which
    an action was taken already would not have happened, and is not acted on again.
    """

    def __init__(
        self, config: StabilityConfig, state: GuardState | None = None, simulated: bool = False
    ) -> None:
        state = state or GuardState()
        self.config = config
        self.detector = Detector(config.detector, state.detector)
        self.policy = Policy(config.policy, state.policy)
        self.simulated = simulated
        self._acted = state.acted

    def judge(self, signals: Signals, oldest_snapshot: int | None) -> Decision:
        """The decision on a step, before its update."""
        finding = self.detector.observe(signals)
        if (
            self.simulated
            and self._acted is not None
            and finding.verdict not in (Verdict.HEALTHY, Verdict.NON_FINITE)
            and finding.onset <= self._acted
        ):
            reason = f"part of the excursion that the action at step {self._acted} would have undone"
            return Decision(Action.APPLY, finding, reason)
        if self.simulated:
            # Whether the action would have helped is not known: the recorded loss says nothing about it.
            finding = replace(finding, on_trend=True)
        decision = self.policy.decide(finding, oldest_snapshot)
        if self.simulated and decision.action not in (Action.APPLY, Action.DISCARD):
            self._acted = signals.step
        return decision

    def rewind(self, detector: DetectorState) -> None:
        """The steps since `detector` was saved have not happened. The policy remembers them."""
        self.detector = Detector(self.config.detector, detector)

    @property
    def state(self) -> GuardState:
        """A copy, for a checkpoint."""
        policy = self.policy.state.model_copy(deep=True)
        return GuardState(detector=self.detector.state, policy=policy, acted=self._acted)
