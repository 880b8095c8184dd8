"""Replays the step that tripped: does it repeat bit for bit, and is it harmless without FP8? Collective."""

from __future__ import annotations

import math

from megastable.base.deterministic import exact
from megastable.data.loader import Step
from megastable.engine.engine import Engine
from megastable.engine.measured import Measured
from megastable.stability import attribution
from megastable.stability.attribution import Replay, Result
from megastable.stability.robust import Trend
from megastable.stability.signals import Verdict

UNSTEADY = "the same data on the same state gives other numbers every time: hardware"


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
        found = attribution.replay(_result(measured), self.again(batch), lambda: self.again(batch))
        if found is Replay.OTHER:
            return False, "the same data on the same state gave other numbers: hardware, or a race"
        unsteady = found is Replay.UNSTEADY
        proven = unsteady and exact(self.deterministic, self.engine.device)
        return unsteady, UNSTEADY if proven else ""

    def again(self, batch: Step) -> Result:
        return _result(self.engine.measure(batch.micro_batches))

    def differ(self, batch: Step) -> bool:
        """Whether two runs of a step differ."""
        return not attribution.alike(self.again(batch), self.again(batch))

    def without_fp8(
        self, batch: Step, measured: Measured, expected: tuple[Trend | None, Trend | None]
    ) -> str:
        """Repeat the step that tripped, on the state that refused it, without FP8: a sentence if it is then harmless.
        Skipped if FP8 is off. expected: trends of loss and log gradient norm."""
        engine, fp8 = self.engine, self.engine.fp8
        if fp8 is None or not measured.fp8:
            return ""
        counters = engine.counters()
        fp8.on = False
        try:
            other = engine.measure(batch.micro_batches)
        finally:
            fp8.on = True
            engine.restore_counters(counters)  # the magnitude history, which switching forgets
        with_fp8, without = ((m.loss, math.log(max(m.grad_norm, 1e-30))) for m in (measured, other))
        if not attribution.gone(with_fp8, without, expected):
            return ""
        return (
            f"the same step without FP8 is harmless: a loss of {other.loss:.4g} in place of {measured.loss:.4g}, a "
            f"gradient norm of {other.grad_norm:.3g} in place of {measured.grad_norm:.3g}"
        )


def _result(measured: Measured) -> Result:
    return Result(measured.losses.numpy(), measured.grad_norm)
