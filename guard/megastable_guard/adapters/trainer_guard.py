"""What the callbacks of trainers share: they judge in a hook before the update, cannot replace the trainer's loader,
and keep the guard's state in the trainer's checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megastable_guard.loop_guard import Guard
from megastable_guard.sampler import SkippableSampler


class TrainerGuard:
    """sampler: of the training's loader, if the data can go back; options: of `Guard`."""

    guard: Any = None  # from when the training begins
    _saved: Mapping[str, Any] | None = None

    def __init__(self, sampler: SkippableSampler | None = None, **options: Any) -> None:
        self.sampler, self.options = sampler, options
        self._loss: Any = 0.0
        self._stale = 0  # updates of data that was fetched before the rewind

    def _add_loss(self, loss: Any) -> Any:
        """Of a micro-batch, divided by their number already."""
        self._loss = self._loss + loss.detach()
        return loss

    def _judge_update(self, norm: Any = None) -> None:
        """Once before every update; one of a DeepSpeed engine is judged already."""
        guard, loss, self._loss = self.guard, self._loss, 0.0
        if self._stale:
            self._stale -= 1
            guard.drop_update()
        else:
            is_past = hasattr(guard, "engine")
            verdict = guard.verdict if is_past else guard.check(loss=loss, grad_norm=norm)
            if verdict.rewind:
                step = guard.step if is_past else guard.rewind()
                if self.sampler is not None:
                    self._stale = self.sampler.seek(step, verdict.step, defer=guard.deferred)
        guard.drops = self._stale > 0

    def state_dict(self) -> dict[str, Any]:
        """For the trainer's checkpoint, JSON or not; empty before the training."""
        if self.guard is None:
            return {}
        sampler_state = self.sampler.state_dict(self.guard.step) if self.sampler is not None else None
        return {"guard": self.guard.state_dict(), "sampler": sampler_state}

    def load_state_dict(self, state: Mapping[str, Any], passed: int = 0) -> None:
        """passed: updates that the trainer passes over, as if the stream began with those that are trained already."""
        self._saved = state.get("guard")
        if self.sampler is not None and state.get("sampler") is not None:
            self.sampler.load_state_dict(state["sampler"], passed)

    def _begin(self, guard: Guard, is_resumed: bool) -> None:
        """Raises RuntimeError if the checkpoint was written without a guard."""
        self.guard, self._stale, self._loss = guard, 0, 0.0
        if is_resumed:
            if self._saved is None:
                raise RuntimeError(
                    "the checkpoint was written without a guard: resume from one that has its state"
                )
            guard.load_state_dict(self._saved)
