"""Keeps snapshots in host memory: copies of the engine's state in a ring that thins out with age.

Only copies tensors; `thin_snapshots` (megastable_guard/step_judge.py) decides which points are kept.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megastable.base.fingerprint import Marks, compare_marks, marks_of
from megastable.engine.hostcopy import CopiedTensors, HostCopy
from megastable_guard.step_judge import thin_snapshots

if TYPE_CHECKING:  # it would load DeepSpeed
    from megastable.engine.engine import Engine


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """The state after `step` steps. copied: fp32 masters and Adam's state, on their way to the CPU or there. marks: of
    what was copied, made where it was copied from. counters: of the engine. extra: kept along for the caller (where the
    run stands, random states, the detector)."""

    step: int
    copied: CopiedTensors
    marks: Marks
    counters: dict[str, Any]
    extra: Any

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What was copied: waits until all of it is there, from any thread. Raises the error of a failed copy."""
        self.copied.wait_until_complete()
        return self.copied.tensors


class Loan:
    """A point that another thread reads: while `recalled` is not set, and it sets `returned` in any case."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.recalled, self.returned = threading.Event(), threading.Event()


class Ring:
    """The snapshots of this rank. Every rank takes, drops and restores the same steps."""

    def __init__(self, engine: Engine, capacity: int, interval: int) -> None:
        self._engine, self.capacity, self._interval = engine, capacity, interval
        self._kept: list[Snapshot] = []
        self._spare: list[dict[str, Tensor]] = []
        self._host = HostCopy(engine.hold_updates)
        self._loan: Loan | None = None

    @property
    def steps(self) -> list[int]:
        """Ascending."""
        return [snapshot.step for snapshot in self._kept]

    def is_due(self, step: int, urgent: bool = False) -> bool:
        """Whether a point is due. urgent: only if long overdue: a doubtful one is better than an old one."""
        if not self.capacity or not self._interval:
            return False
        steps_since = step - self.steps[-1] if self._kept else step
        return steps_since >= 4 * self._interval if urgent else steps_since >= self._interval

    def take_snapshot(
        self, step: int, extra: Any, counters: dict[str, Any] | None = None, marks: Marks | None = None
    ) -> None:
        """Copy the state after `step` steps; if memory is used up, the oldest or most crowded point makes room.

        counters: if the engine's have advanced already, as after a refused step. marks: of the state, if it has been
        fingerprinted before.
        """
        if not self.capacity:
            return
        self.forget_from(step)
        keep = thin_snapshots([*self.steps, step], self.capacity, self._interval)
        self._drop([snapshot for snapshot in self._kept if snapshot.step not in keep])
        source = self._engine.optimizer_state()
        copied = self._host.copy_tensors(source, self._spare_memory())
        marks = marks_of(source) if marks is None else marks
        self._kept.append(Snapshot(step, copied, marks, counters or self._engine.read_counters(), extra))
        # The next point needs memory of its own, which a thread can prepare meanwhile.
        if len(self._kept) + len(self._spare) < self.capacity and (
            reserved := self._host.reserve_like(copied.tensors)
        ):
            self._spare.append(reserved)

    def lend_newest(self, step: int) -> Loan | None:
        """The newest point, for another thread to read, if it is of `step`. One loan at a time."""
        self.recall_loan()
        if not self._kept or self._kept[-1].step != step:
            return None
        self._loan = Loan(self._kept[-1])
        return self._loan

    def recall_loan(self) -> None:
        """Break the loan off: its memory is needed. Waits for the reader, who looks every few milliseconds."""
        if self._loan is not None:
            self._loan.recalled.set()
            self._loan.returned.wait()
            self._loan = None

    def _spare_memory(self) -> dict[str, Tensor]:
        """That of a point that is gone, and not lent if there is another."""
        loan = self._loan
        lent = loan.snapshot.copied.tensors if loan is not None and not loan.returned.is_set() else None
        free = [i for i, tensors in enumerate(self._spare) if tensors is not lent]
        if free:
            return self._spare.pop(free[0])
        if self._spare:
            self.recall_loan()
            return self._spare.pop()
        return {}

    def find_before(self, onset: int, older: int = 0) -> Snapshot | None:
        """The newest point that no step from `onset` on has touched; `older`: skip so many, if there are."""
        earlier_snapshots = [snapshot for snapshot in self._kept if snapshot.step < onset]
        return earlier_snapshots[max(0, len(earlier_snapshots) - 1 - older)] if earlier_snapshots else None

    def copy_aside(self, step: int) -> Snapshot:
        """Copy the current state, after `step` steps, besides the points, so that inspecting an older one changes
        nothing. Takes the memory of one more point while it is kept (snapshot_budget.py plans for it)."""
        source = self._engine.optimizer_state()
        copied = self._host.copy_tensors(source, {})
        return Snapshot(step, copied, marks_of(source), self._engine.read_counters(), None)

    def is_intact(self, snapshot: Snapshot) -> bool:
        """Whether this rank's memory holds what was to be copied into it: not after a copy that failed half-way."""
        try:
            held_tensors = snapshot.tensors
        except Exception:
            log.exception("the snapshot of step %s was not copied", snapshot.step)
            return False
        return not compare_marks(snapshot.marks, marks_of(held_tensors, snapshot.marks))

    def restore_snapshot(self, snapshot: Snapshot) -> None:
        """Restore the engine's state. The caller updates the low-precision weights, and drops later points if the run
        resumes from there."""
        self._engine.restore_optimizer_state(snapshot.tensors)
        self._engine.restore_counters(snapshot.counters)

    def forget_from(self, step: int) -> None:
        """Drop the points of `step` and later ones."""
        self._drop([snapshot for snapshot in self._kept if snapshot.step >= step])

    def _drop(self, snapshots: list[Snapshot]) -> None:
        for snapshot in snapshots:
            self._kept.remove(snapshot)
            # A copy on its way into it ends before the next one begins: one thread makes them all.
            self._spare.append(snapshot.copied.tensors)
