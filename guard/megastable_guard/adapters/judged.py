"""What the adapters share: they ask the guard, take the data back, and tell which samples an update has read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megastable_guard.loop_guard import Guard, StepVerdict
from megastable_guard.sample_examiner import count_ranks
from megastable_guard.sampler import SkippableSampler


class JudgedUpdates:
    """guard: of the run; sampler: which the loader follows, if the data can go back."""

    guard: Any  # a Guard
    sampler: Any = None  # a SkippableSampler
    stale = 0  # updates whose batches were fetched before the data went back
    loss: Any = 0.0  # of the micro-batches so far
    norm: Any = None
    _names = False

    def judge(self, step: int = 1, **signals: Any) -> StepVerdict | None:
        """Ask the guard, once before every update, and rewind if it says so; None: the update is of a stale batch, and
        is left out. One of a DeepSpeed engine is judged, and rewound, already.

        Args:
            step: of the loop, from 1: a guard that begins in the middle of a run counts as the loop does.
            signals: of `Guard.check`.
        """
        guard, step_verdict, self.loss, self.norm = self.guard, None, 0.0, None
        if self.stale:
            self.stale -= 1
            guard.drop_update()
        else:
            is_past = hasattr(guard, "engine")
            guard.step = guard.step or step - 1
            if self._names:
                signals["sample_ids"] = self._share_ids(self.sampler.read_indices(guard.step + 1))
            step_verdict = guard.verdict if is_past else guard.check(**signals)
            if step_verdict.rewind and not is_past:
                guard.rewind()
            if self.sampler is not None and (step_verdict.rewind or guard.deferred):
                self.stale = self.sampler.seek(
                    guard.step, step_verdict.step, skip=guard.skipped, defer=guard.deferred
                )
        guard.drops = self.stale > 0
        return step_verdict

    def name_samples(self, measure: Callable[[int], Tensor]) -> None:
        """Have the guard name bad samples: by `measure`, from an index of the dataset to the mean loss of that sample,
        a scalar, nats per token, of the model as it stands. Raises ValueError without a sampler, or with DeepSpeed."""
        if self.sampler is None:
            raise ValueError("names=True needs sampler=: it knows which samples an update has read")
        if hasattr(self.guard, "engine"):
            raise ValueError("the guard names no samples in a trainer with DeepSpeed: leave names=True out")
        self._names = True
        self.guard.use_replay(
            lambda ids: torch.stack([measure(index) for index in ids]),
            ahead=lambda count: self._share_ids(
                self.sampler.look_ahead(count * self._count_sharing(), self.guard.step)
            ),
        )

    def _count_sharing(self) -> int:
        """Ranks that iterate over the samples of all, and of these have a part each: which one is the loader's."""
        return count_ranks() if self.sampler.ranks == 1 else 1

    def _share_ids(self, indices: list[int]) -> list[int]:
        """As many for every rank; all together they are those of the update."""
        ranks = self._count_sharing()
        return indices[dist.get_rank() : len(indices) // ranks * ranks : ranks] if ranks > 1 else indices

    @staticmethod
    def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Call `around` instead of the owner's method, with the method as its first argument."""
        wrapped_method = getattr(owner, name)
        setattr(owner, name, lambda *given, **named: around(wrapped_method, *given, **named))

    def record(self, owner: Any, name: str, keep: Callable[[Any], Any]) -> None:
        """Give what the owner's method returns to `keep`, and its answer to the caller."""
        self.wrap(owner, name, lambda call, *given, **named: keep(call(*given, **named)))

    def add_loss(self, loss: Any) -> Any:
        """Of a micro-batch, divided by their number already."""
        self.loss = self.loss + loss.detach()
        return loss

    def keep_norm(self, norm: Any) -> Any:
        """Of the whole batch, before clipping."""
        self.norm = norm
        return norm


class TrainerGuard(JudgedUpdates):
    """What the callbacks of trainers share, which keep the guard's state in the trainer's checkpoint.

    sampler: of the training's loader, if the data can go back; names: tell bad samples from the others of their batches
    (needs the sampler); options: of `Guard`."""

    guard: Any = None  # from when the training begins
    _saved: Mapping[str, Any] | None = None

    def __init__(self, sampler: SkippableSampler | None = None, names: bool = False, **options: Any) -> None:
        self.sampler, self.names, self.options = sampler, names, options

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

    def _begin(self, guard: Guard, is_resumed: bool, measure: Callable[[int], Tensor]) -> None:
        """measure: of `name_samples`. Raises RuntimeError if the checkpoint was written without a guard."""
        self.guard, self.stale, self.loss = guard, 0, 0.0
        if is_resumed:
            if self._saved is None:
                raise RuntimeError(
                    "the checkpoint was written without a guard: resume from one that has its state"
                )
            guard.load_state_dict(self._saved)
        if self.names:
            self.name_samples(measure)
