"""What the adapters of loops with their own optimizer step share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megastable_guard.loop_guard import Guard, StepVerdict
from megastable_guard.sampler import SkippableSampler


class JudgedUpdates:
    """guard: of the run; sampler: which the loader follows, if the data can go back."""

    guard: Guard
    sampler: SkippableSampler | None = None
    stale = 0  # updates whose batches were fetched before the last rewind

    def judge(self, step: int, **signals: Any) -> StepVerdict | None:
        """Ask the guard, and rewind if it says so; None: the update is of a stale batch, and is left out.

        Args:
            step: of the loop, from 1: a guard that begins in the middle of a run counts as the loop does.
            signals: of `Guard.check`.
        """
        if self.stale:
            self.stale -= 1
            self.guard.drop_update()
            return None
        if not self.guard.step:
            self.guard.step = step - 1
        step_verdict = self.guard.check(**signals)
        if step_verdict.rewind:
            self.guard.rewind()
            if self.sampler is not None:
                self.stale = self.sampler.seek(self.guard.step, step_verdict.step, defer=self.guard.deferred)
        return step_verdict

    @staticmethod
    def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Call `around` instead of the owner's method, with the method as its first argument."""
        wrapped_method = getattr(owner, name)
        setattr(owner, name, lambda *given, **named: around(wrapped_method, *given, **named))
