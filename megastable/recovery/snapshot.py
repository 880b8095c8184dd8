"""Snapshots in host memory: copies of the engine's state in a ring that thins out with age.

The only impure file of this package: it copies tensors. Which points are kept is decided in spacing.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from megastable.engine.hostcopy import HostCopy
from megastable.stability.spacing import thin


class Stateful(Protocol):
    """What a ring needs of the engine."""

    def optimizer_state(self) -> dict[str, Tensor]: ...
    def restore_optimizer_state(self, saved: dict[str, Tensor]) -> None: ...
    def counters(self) -> dict[str, Any]: ...
    def restore_counters(self, saved: dict[str, Any]) -> None: ...
    def hold_updates(self, until: Any) -> None: ...


@dataclass(frozen=True)
class Snapshot:
    """The state after `step` steps. tensors: fp32 masters and Adam's state, on the CPU. counters: of the engine.
    extra: what its maker wanted to be kept along (where the run stands, random states, the detector)."""

    step: int
    tensors: dict[str, Tensor]
    counters: dict[str, Any]
    extra: Any


class Ring:
    """The rewind points of this rank. Every rank takes, drops and restores the same steps."""

    def __init__(self, engine: Stateful, capacity: int, interval: int) -> None:
        self._engine, self._capacity, self._interval = engine, capacity, interval
        self._kept: list[Snapshot] = []
        self._spare: list[dict[str, Tensor]] = []
        self._host = HostCopy(engine.hold_updates)

    @property
    def steps(self) -> list[int]:
        """Ascending."""
        return [snapshot.step for snapshot in self._kept]

    @property
    def capacity(self) -> int:
        return self._capacity

    def due(self, step: int, urgent: bool = False) -> bool:
        """Whether a point is due. urgent: only if it is long overdue: a doubtful one is better than an old one."""
        if not self._capacity or not self._interval:
            return False
        since = step - self.steps[-1] if self._kept else step
        return since >= 4 * self._interval if urgent else since >= self._interval

    def take(self, step: int, extra: Any, counters: dict[str, Any] | None = None) -> None:
        """Copy the state after `step` steps; the oldest or most crowded point gives its memory when all is used.

        counters: when the engine's have moved on already, as after a refused step.
        """
        if not self._capacity:
            return
        self.forget_from(step)
        keep = thin([*self.steps, step], self._capacity, self._interval)
        for snapshot in [s for s in self._kept if s.step not in keep]:
            self._kept.remove(snapshot)
            self._spare.append(snapshot.tensors)
        source = self._engine.optimizer_state()
        copied = self._host.copy(source, self._spare.pop() if self._spare else {})
        self._kept.append(Snapshot(step, copied.tensors, counters or self._engine.counters(), extra))

    def before(self, onset: int, older: int = 0) -> Snapshot | None:
        """The newest point that no step from `onset` on has touched; `older`: pass over so many, if there are."""
        good = [snapshot for snapshot in self._kept if snapshot.step < onset]
        return good[max(0, len(good) - 1 - older)] if good else None

    def aside(self, step: int) -> Snapshot:
        """The present state, after `step` steps, beside the points: what is looked at from an older one changes
        nothing. It needs the memory of one point more for as long as it is kept (snapshot_budget.py plans for it)."""
        copied = self._host.copy(self._engine.optimizer_state(), {})
        return Snapshot(step, copied.tensors, self._engine.counters(), None)

    def restore(self, snapshot: Snapshot) -> None:
        """Put the engine back. The caller brings the low-precision weights up to date, and drops later points where the
        run goes on from there."""
        self._host.synchronize()
        self._engine.restore_optimizer_state(snapshot.tensors)
        self._engine.restore_counters(snapshot.counters)

    def forget_from(self, step: int) -> None:
        """Drop the points of `step` and later ones."""
        for snapshot in [s for s in self._kept if s.step >= step]:
            self._kept.remove(snapshot)
            self._spare.append(snapshot.tensors)
