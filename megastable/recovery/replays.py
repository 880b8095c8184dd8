"""Replays the step that tripped: does it repeat bit for bit, and is it harmless computed otherwise: without FP8, or by
plain PyTorch in place of the run's kernels? And switches to the numerics that the policy has decided on. Collective."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megastable.base.deterministic import exact
from megastable.checkpoint.store import RunState
from megastable.data.loader import Step
from megastable.engine.engine import Engine
from megastable.engine.measured import Measured
from megastable.engine.numerics import Numerics
from megastable.recovery.run_parts import RunParts
from megastable.run.events.stability_events import FellBack, KernelsLeft, KernelsTriedAgain, Returned
from megastable_guard import policy_state
from megastable_guard.guard import Guard
from megastable_guard.robust import Trend
from megastable_guard.signals import Verdict

SAME = 1e-3  # relative: replays agree far better, even with unordered sums on a GPU
SAME_NORM = 0.05  # relative: norms agree far better, even with unordered sums of gradients
EXCESS = 3.0  # sigma above its trend: a loss or gradient norm beyond it counts as elevated
REMAINS = 0.5  # share of it that remains when computed otherwise: above this the numerics are not the cause
OUTLIER = 6.0  # sigma, if the step was not finite: such a batch is bad by itself
UNSTEADY = "the same data on the same state gives other numbers every time: hardware"

Floats = npt.NDArray[np.float64]
Expected = tuple[Trend | None, Trend | None]  # trends of loss and log gradient norm


class Result(NamedTuple):
    """Result of a step: losses, fp64 [global batch], nats; the norm of its gradient."""

    losses: Floats
    norm: float


@dataclass(frozen=True)
class Harmless:
    """How a step is harmless that is not as the run computes it. reason: a sentence. kernels: the names of those in
    whose place plain PyTorch computed it; none: FP8 was left out."""

    numerics: Numerics
    reason: str
    kernels: tuple[str, ...] = ()


class Replays:
    """Measures on the current state of `engine`, without changing it. deterministic: `run.deterministic`."""

    def __init__(self, engine: Engine, deterministic: bool) -> None:
        self.engine, self.deterministic = engine, deterministic
        self.finite_again: int | None = None  # step whose numbers were finite when repeated

    def compare(self, batch: Step, measured: Measured, step: int, verdict: Verdict) -> tuple[bool, str]:
        """Repeat the step that tripped, on the state that refused it: whether all its runs differ, and what that proves
        about the hardware: a sentence, or "" yet, as a bad state may magnify the last bits."""
        if verdict is Verdict.NON_FINITE and self.finite_again != step:
            return False, ""
        found = replay(_result(measured), self.again(batch), lambda: self.again(batch))
        if found is Replay.OTHER:
            return False, "the same data on the same state gave other numbers: hardware, or a race"
        unsteady = found is Replay.UNSTEADY
        proven = unsteady and exact(self.deterministic, self.engine.device)
        return unsteady, UNSTEADY if proven else ""

    def again(self, batch: Step) -> Result:
        return _result(self.engine.measure(batch.micro_batches))

    def differ(self, batch: Step) -> bool:
        """Whether two runs of a step differ."""
        return not alike(self.again(batch), self.again(batch))

    def without_fp8(self, batch: Step, measured: Measured, expected: Expected) -> Harmless | None:
        """Repeat the step that tripped, on the state that refused it, without FP8: how, if it is then harmless."""
        now = self.engine.numerics.now
        if not now.fp8 or not measured.fp8:
            return None
        return self._harmless(batch, measured, expected, Harmless(replace(now, fp8=False), "FP8"))

    def without_kernels(self, batch: Step, expected: Expected) -> Harmless | None:
        """Repeat the step that tripped, on the state that refused it, by the same kernels, and by plain PyTorch in
        their place: how, if only this is harmless. With one kernel left out, if that is enough, else with all."""
        switch = self.engine.numerics
        now, names = switch.now, switch.kernels
        used = [kind for kind in names if kind not in now.plain]
        if not used:
            return None
        repeated = self.engine.measure(batch.micro_batches)

        def without(*kinds: str) -> Harmless | None:
            to, kernels = replace(now, plain=now.plain.union(kinds)), tuple(names[kind] for kind in kinds)
            return self._harmless(batch, repeated, expected, Harmless(to, " and ".join(kernels), kernels))

        everything = without(*used)
        if everything is None or len(used) == 1:
            return everything
        return next(filter(None, map(without, used)), everything)

    def _harmless(self, batch: Step, measured: Measured, expected: Expected, to: Harmless) -> Harmless | None:
        """`to` with a sentence as its reason, if the step is harmless so. measured: by the present numerics."""
        engine, switch = self.engine, self.engine.numerics
        counters, now = engine.counters(), switch.now
        switch.switch(to.numerics)
        try:
            other = engine.measure(batch.micro_batches)
        finally:
            switch.switch(now)
            engine.restore_counters(counters)  # the magnitude history, which switching FP8 forgets
        step, otherwise = ((m.loss, math.log(max(m.grad_norm, 1e-30))) for m in (measured, other))
        if not gone(step, otherwise, expected):
            return None
        reason = (
            f"the same step without {to.reason} is harmless: a loss of {other.loss:.4g} in place of "
            f"{measured.loss:.4g}, a gradient norm of {other.grad_norm:.3g} in place of {measured.grad_norm:.3g}"
        )
        return replace(to, reason=reason)


def _result(measured: Measured) -> Result:
    return Result(measured.losses.numpy(), measured.grad_norm)


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
        self.engine.adjustments.switch(policy.state.adjusted)  # a dry run has none of its own
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
                KernelsLeft(step=state.step, kernels=names, reason=policy_state.WRONG_KERNELS), say=True
            )


# Pure


def reproduced(recorded: Floats, again: Floats, tolerance: float = SAME) -> bool:
    """Whether a replay gave the same numbers, within a relative tolerance; non-finite numbers count as equal."""
    same = np.isclose(recorded, again, rtol=tolerance, atol=0.0, equal_nan=True)
    return bool(np.all(same | (~np.isfinite(recorded) & ~np.isfinite(again))))


class Replay(StrEnum):
    """Two replays of a step, compared with the step and with each other."""

    SAME = "same"  # the first replay agrees with the original step
    OTHER = "other"  # both replays agree, the original step differs
    UNSTEADY = "unsteady"  # every run differs


def replay(step: Result, again: Result, once_more: Callable[[], Result]) -> Replay:
    """Compare a step with its replay; if they differ, run a second replay: GPUs may sum in any order, and some
    states amplify it."""
    if alike(step, again):
        return Replay.SAME
    return Replay.OTHER if alike(again, once_more()) else Replay.UNSTEADY


def alike(one: Result, other: Result) -> bool:
    """Whether two runs of a step agree, in every loss and in the norm of the gradient."""
    norms = np.array([one.norm]), np.array([other.norm])
    return reproduced(one.losses, other.losses) and reproduced(*norms, SAME_NORM)


def gone(step: Sequence[float], otherwise: Sequence[float], expected: Sequence[Trend | None]) -> bool:
    """Whether a step's anomaly vanishes when it is computed otherwise: without FP8, or by other kernels.

    Each: loss (nats) and log gradient norm. A non-finite number must become finite and ordinary. Of the excess over the
    trend more than half must vanish, for each of loss and norm that is elevated; the other one must not rise.
    """
    if not all(map(math.isfinite, otherwise)):
        return False
    broken = not all(map(math.isfinite, step))
    trouble = broken
    for now, then, usual in zip(step, otherwise, expected, strict=True):
        if usual is None:
            continue
        level, bound = max(usual.level, usual.late), EXCESS * usual.scale
        out = now - level > bound
        most = OUTLIER * usual.scale if broken else REMAINS * (now - level) if out else bound
        if then - level > most:
            return False
        trouble |= out
    return trouble
