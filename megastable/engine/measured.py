"""Measurements of a step before its update, the gate that judges them, and a clock of what a GPU does meanwhile."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from torch import Tensor

PENDING = 4  # steps whose events are awaited


class DeviceClock:
    """An `activity.Clock` for the activities of a step on a GPU, whose kernels run long after the host has entered
    them: by events in its stream, read a step later, so that nobody waits for them.

    An event marks where the GPU gets to what the host entered then. The time between two of them is that of the kernels
    between, of what they wait for in the stream, and of gaps in which the host had not enqueued anything yet. event:
    makes one, a torch.cuda.Event with timing.
    """

    def __init__(self, event: Callable[[], Any]) -> None:
        self._event = event
        self._free: list[Any] = []
        self._marks: list[tuple[str, Any]] = []  # of this step
        self._pending: list[tuple[int, float, list[tuple[str, Any]]]] = []

    def begin_step(self) -> None:
        """A step begins; what a step that was given up has marked is forgotten."""
        self._free += [marked_event for _, marked_event in self._marks]
        self._marks = []

    def enter_activity(self, name: str) -> None:
        """The stream gets to `name` here."""
        if self._marks and self._marks[-1][0] == name:
            return
        entry_event = self._free.pop() if self._free else self._event()
        entry_event.record()
        self._marks.append((name, entry_event))

    def end_step(self, step: int, seconds: float) -> list[tuple[int, float, Mapping[str, float]]]:
        """Those of earlier steps that the GPU is done with."""
        self.enter_activity("")
        self._pending.append((step, seconds, self._marks))
        self._marks = []
        finished_steps = list[tuple[int, float, Mapping[str, float]]]()
        while self._pending and (len(self._pending) > PENDING or self._pending[0][2][-1][1].query()):
            step_number, step_seconds, step_marks = self._pending.pop(0)
            if step_marks[-1][1].query():
                finished_steps.append((step_number, step_seconds, _spent(step_marks)))
            self._free += [spent_event for _, spent_event in step_marks]
        return finished_steps


def _spent(marks: list[tuple[str, Any]]) -> dict[str, float]:
    """Seconds by activity."""
    seconds_by_activity = defaultdict[str, float](float)
    for (activity_name, activity_begin), (_, activity_end) in pairwise(marks):
        seconds_by_activity[activity_name] += activity_begin.elapsed_time(activity_end) / 1000
    return seconds_by_activity


@dataclass(frozen=True)
class Measured:
    """Measurements of a step before the optimizer runs. The same numbers on every rank.

    losses, squares: fp64 [global batch], per-sample cross-entropy (nats) and mean logsumexp^2, in the order of the
    step's positions. grad_norm: global L2 norm before clipping, unscaled; inf if any gradient is not finite. ballot: of
    all ranks (`Engine.train_step`), summed, by name. overflow: gradients beyond fp16's range, which a smaller loss
    scale fixes: normal in fp16, not an incident. fp8: whether it was computed in FP8, None if the recipe does not use
    it. gradients: of every data rank (local_gradients.py), () if they are not watched. counts: fp64 [vocabulary], how
    often each token is in the batch. entropies: as `losses`, mean entropy of the model's predictions, nats; None where
    `trends` do not look. choices: fp64 [layers, columns], of the routers, see engine/expert_routing.py; None without
    experts.
    """

    losses: Tensor
    squares: Tensor
    grad_norm: float
    ballot: dict[str, tuple[float, ...]]
    loss_scale: float
    overflow: bool = False
    fp8: bool | None = None
    gradients: tuple[float, ...] = ()
    counts: Tensor | None = None
    entropies: Tensor | None = None
    choices: Tensor | None = None

    @property
    def loss(self) -> float:
        return float(self.losses.mean())

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Judge(Protocol):
    """The gate: True clips and updates, False drops the gradients. A pure function of its input."""

    def __call__(self, measured: Measured) -> bool: ...
