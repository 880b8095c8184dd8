"""Switches the engine to the numerics that the policy has decided on, and tells of every change. Collective."""

from __future__ import annotations

from megastable.checkpoint.store import RunState
from megastable.engine.numerics import Numerics
from megastable.guard import fallback
from megastable.guard.guard import Guard
from megastable.recovery.run_parts import RunParts
from megastable.run.events.stability_events import FellBack, KernelsLeft, KernelsTriedAgain, Returned


class NumericsChoice:
    """Of one process."""

    def __init__(self, parts: RunParts, guard: Guard) -> None:
        self.engine, self.guard, self.acts, self.log = parts.engine, guard, parts.acts, parts.log
        self.rest = parts.config.precision.kind  # the precision without FP8
        # What the recipe says, which a person knows: a start may have left kernels already, untold.
        self._told = Numerics(self.engine.fp8 is not None)

    def choose(self, state: RunState) -> None:
        """FP8, or the precision of the rest, and the kernels for the step after `state`."""
        switch, policy = self.engine.numerics, self.guard.policy
        fp8 = self.engine.fp8 is not None and (not self.acts or policy.fp8)
        left = policy.state.kernels if self.acts else []
        to = Numerics(fp8, switch.kinds_of(left))
        switch.switch(to)
        self.engine.adjustments.switch(policy.state.adjusted if self.acts else ())
        if gone := [name for name in left if name not in switch.kernels.values()]:
            policy.state.kernels = [name for name in left if name not in gone]
            event = KernelsTriedAgain(step=state.step, kernels=gone, now=list(switch.kernels.values()))
            self.log.emit(event, say=True)
        if to != self._told:
            self._tell(to, state)
            self._told = to

    def _tell(self, to: Numerics, state: RunState) -> None:
        policy, told = self.guard.policy, self._told
        if to.fp8 != told.fp8:
            change, precision = (Returned, "FP8") if to.fp8 else (FellBack, self.rest)
            count = len(policy.state.fallbacks)
            self.log.emit(
                change(step=state.step, to=precision, reason=policy.precision, fallbacks=count),
                say=f"step {state.step}: goes on in {precision}: {policy.precision}",
            )
        if kinds := to.plain - told.plain:
            names = [name for kind, name in self.engine.numerics.kernels.items() if kind in kinds]
            self.log.emit(
                KernelsLeft(step=state.step, kernels=names, reason=fallback.WRONG_KERNELS), say=True
            )
