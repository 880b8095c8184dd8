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

from megastable.base.reproducible import is_exact
from megastable.checkpoint.store import RunState
from megastable.data.loader import Step
from megastable.engine.engine import Engine
from megastable.engine.measured import Measured
from megastable.engine.numerics import Numerics
from megastable.recovery.run_parts import RunParts
from megastable.run.events.stability_events import FellBack, KernelsLeft, KernelsTriedAgain, Returned
from megastable_guard import policy_state
from megastable_guard.actions import Verdict
from megastable_guard.robust import Trend
from megastable_guard.step_judge import StepJudge

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

    def compare_replays(
        self, batch: Step, measured: Measured, step: int, verdict: Verdict
    ) -> tuple[bool, str]:
        """Repeat the step that tripped, on the state that refused it: whether all its runs differ, and what that proves
        about the hardware: a sentence, or "" yet, as a bad state may magnify the last bits."""
        if verdict is Verdict.NON_FINITE and self.finite_again != step:
            return False, ""
        replay_result = compare_with_replays(
            _result(measured), self.repeat_step(batch), lambda: self.repeat_step(batch)
        )
        if replay_result is Replay.OTHER:
            return False, "the same data on the same state gave other numbers: hardware, or a race"
        is_unsteady = replay_result is Replay.UNSTEADY
        is_proven = is_unsteady and is_exact(self.deterministic, self.engine.device)
        return is_unsteady, UNSTEADY if is_proven else ""

    def repeat_step(self, batch: Step) -> Result:
        return _result(self.engine.measure_step(batch.micro_batches))

    def do_runs_differ(self, batch: Step) -> bool:
        """Whether two runs of a step differ."""
        return not are_results_alike(self.repeat_step(batch), self.repeat_step(batch))

    def without_fp8(self, batch: Step, measured: Measured, expected: Expected) -> Harmless | None:
        """Repeat the step that tripped, on the state that refused it, without FP8: how, if it is then harmless."""
        now = self.engine.numerics.now
        if not now.fp8 or not measured.fp8:
            return None
        return self._harmless(batch, measured, expected, Harmless(replace(now, fp8=False), "FP8"))

    def without_kernels(self, batch: Step, expected: Expected) -> Harmless | None:
        """Repeat the step that tripped, on the state that refused it, by the same kernels, and by plain PyTorch in
        their place: how, if only this is harmless. With one kernel left out, if that is enough, else with all."""
        numerics_switch = self.engine.numerics
        now, names = numerics_switch.now, numerics_switch.kernels
        used_kinds = [kind for kind in names if kind not in now.plain]
        if not used_kinds:
            return None
        repeated = self.engine.measure_step(batch.micro_batches)

        def compute_without(*kinds: str) -> Harmless | None:
            to, kernels = replace(now, plain=now.plain.union(kinds)), tuple(names[kind] for kind in kinds)
            return self._harmless(batch, repeated, expected, Harmless(to, " and ".join(kernels), kernels))

        without_all = compute_without(*used_kinds)
        if without_all is None or len(used_kinds) == 1:
            return without_all
        return next(filter(None, map(compute_without, used_kinds)), without_all)

    def _harmless(self, batch: Step, measured: Measured, expected: Expected, to: Harmless) -> Harmless | None:
        """`to` with a sentence as its reason, if the step is harmless so. measured: by the present numerics."""
        engine, numerics_switch = self.engine, self.engine.numerics
        engine_counters, present_numerics = engine.read_counters(), numerics_switch.now
        numerics_switch.switch_to(to.numerics)
        try:
            other_result = engine.measure_step(batch.micro_batches)
        finally:
            numerics_switch.switch_to(present_numerics)
            engine.restore_counters(engine_counters)  # the magnitude history, which switching FP8 forgets
        step, other_numbers = ((m.loss, math.log(max(m.grad_norm, 1e-30))) for m in (measured, other_result))
        if not has_trouble_vanished(step, other_numbers, expected):
            return None
        reason = (
            f"the same step without {to.reason} is harmless: a loss of {other_result.loss:.4g} in place of "
            f"{measured.loss:.4g}, a gradient norm of {other_result.grad_norm:.3g} in place of {measured.grad_norm:.3g}"
        )
        return replace(to, reason=reason)


def _result(measured: Measured) -> Result:
    return Result(measured.losses.numpy(), measured.grad_norm)


class NumericsChoice:
    def __init__(self, parts: RunParts, guard: StepJudge) -> None:
        self.engine, self.guard, self.acts, self.log = parts.engine, guard, parts.acts, parts.log
        self.rest = parts.config.precision.kind  # the precision without FP8
        # What the recipe says, which a person knows: a start may have left kernels already, untold.
        self._told = Numerics(self.engine.fp8 is not None)

    def choose_numerics(self, state: RunState) -> None:
        """FP8, or the precision of the rest, and the kernels for the step after `state`."""
        switch, guard_policy = self.engine.numerics, self.guard.policy
        fp8 = self.engine.fp8 is not None and (not self.acts or guard_policy.fp8)
        left_kernels = guard_policy.state.kernels if self.acts else []
        chosen_numerics = Numerics(fp8, switch.kinds_of(left_kernels))
        switch.switch_to(chosen_numerics)
        self.engine.adjustments.switch_to(guard_policy.state.adjusted)  # a dry run has none of its own
        if gone := [
            kernel_name for kernel_name in left_kernels if kernel_name not in switch.kernels.values()
        ]:
            guard_policy.state.kernels = [
                kernel_name for kernel_name in left_kernels if kernel_name not in gone
            ]
            event = KernelsTriedAgain(step=state.step, kernels=gone, now=list(switch.kernels.values()))
            self.log.emit_event(event, say=True)
        if chosen_numerics != self._told:
            self._tell(chosen_numerics, state)
            self._told = chosen_numerics

    def _tell(self, to: Numerics, state: RunState) -> None:
        guard_policy, told_numerics = self.guard.policy, self._told
        if to.fp8 != told_numerics.fp8:
            change_event, precision = (Returned, "FP8") if to.fp8 else (FellBack, self.rest)
            count = len(guard_policy.state.fallbacks)
            self.log.emit_event(
                change_event(step=state.step, to=precision, reason=guard_policy.precision, fallbacks=count),
                say=f"step {state.step}: goes on in {precision}: {guard_policy.precision}",
            )
        if left_kinds := to.plain - told_numerics.plain:
            names = [
                name
                for kernel_kind, name in self.engine.numerics.kernels.items()
                if kernel_kind in left_kinds
            ]
            self.log.emit_event(
                KernelsLeft(step=state.step, kernels=names, reason=policy_state.WRONG_KERNELS), say=True
            )


# Pure


def are_losses_alike(recorded: Floats, again: Floats, tolerance: float = SAME) -> bool:
    """Whether a replay gave the same numbers, within a relative tolerance; non-finite numbers count as equal."""
    are_close = np.isclose(recorded, again, rtol=tolerance, atol=0.0, equal_nan=True)
    return bool(np.all(are_close | (~np.isfinite(recorded) & ~np.isfinite(again))))


class Replay(StrEnum):
    """Two replays of a step, compared with the step and with each other."""

    SAME = "same"  # the first replay agrees with the original step
    OTHER = "other"  # both replays agree, the original step differs
    UNSTEADY = "unsteady"  # every run differs


def compare_with_replays(step: Result, again: Result, once_more: Callable[[], Result]) -> Replay:
    """Compare a step with its replay; if they differ, run a second replay: GPUs may sum in any order, and some
    states amplify it."""
    if are_results_alike(step, again):
        return Replay.SAME
    return Replay.OTHER if are_results_alike(again, once_more()) else Replay.UNSTEADY


def are_results_alike(one: Result, other: Result) -> bool:
    """Whether two runs of a step agree, in every loss and in the norm of the gradient."""
    norm_pair = np.array([one.norm]), np.array([other.norm])
    return are_losses_alike(one.losses, other.losses) and are_losses_alike(*norm_pair, SAME_NORM)


def has_trouble_vanished(
    step: Sequence[float], otherwise: Sequence[float], expected: Sequence[Trend | None]
) -> bool:
    """Whether a step's anomaly vanishes when it is computed otherwise: without FP8, or by other kernels.

    Each: loss (nats) and log gradient norm. A non-finite number must become finite and ordinary. Of the excess over the
    trend more than half must vanish, for each of loss and norm that is elevated; the other one must not rise.
    """
    if not all(map(math.isfinite, otherwise)):
        return False
    was_broken = not all(map(math.isfinite, step))
    had_trouble = was_broken
    for now, value_otherwise, usual in zip(step, otherwise, expected, strict=True):
        if usual is None:
            continue
        usual_level, excess_bound = max(usual.level, usual.late), EXCESS * usual.scale
        out = now - usual_level > excess_bound
        most = OUTLIER * usual.scale if was_broken else REMAINS * (now - usual_level) if out else excess_bound
        if value_otherwise - usual_level > most:
            return False
        had_trouble |= out
    return had_trouble
