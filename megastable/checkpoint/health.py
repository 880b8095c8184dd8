"""Decide when a checkpoint has proved healthy: after enough later steps on trend, without a gap.

A state that is finite when saved may still be bad: a drift shows only later. So a checkpoint counts as healthy when
the run that continued from it stayed on trend for a while. Pure: the caller judges each step.
"""

from __future__ import annotations

from collections.abc import Iterable


class CalmSteps:
    """Counts the calm steps after each checkpoint that is not proven yet.

    after: number of calm steps required; 0 = healthy as soon as it is saved. Only an unbroken series of calm steps
    later than the checkpoint counts, so one step that is not calm resets all counts.
    """

    def __init__(self, after: int) -> None:
        if after < 0:
            raise ValueError(f"after={after}: a number of steps")
        self.after = after
        self._at: int | None = None  # the last known step
        self._calm_since = 0  # all steps later than it, up to _at, stayed on trend
        self._pending: set[int] = set()

    @property
    def pending(self) -> list[int]:
        """Steps of the checkpoints that are not proven yet, ascending."""
        return sorted(self._pending)

    def counted(self, checkpoint: int) -> int:
        """Number of steps after the checkpoint of that step that stayed on trend so far, without a gap."""
        return 0 if self._at is None else max(0, self._at - max(checkpoint, self._calm_since))

    def saved(self, step: int) -> list[int]:
        """A checkpoint of `step` is complete. The call may come late: steps after it count from when it was taken.

        Returns the steps of the checkpoints that are healthy now: mostly none, with after=0 this one.
        """
        if self._at is None or step > self._at:  # the steps between are unknown
            self._at = self._calm_since = step
        self._pending.add(step)
        return self._proven()

    def step(self, step: int, calm: bool) -> list[int]:
        """`step` is done. calm: it stayed on trend: an applied update, no finding, no open incident.

        Returns the steps of the checkpoints that became healthy with it, ascending. A gap in the steps resets the
        count. A step that was done before means that the run was rewound.
        """
        if self._at is not None and step <= self._at:
            self.back_to(step - 1)
        elif self._at is None or step > self._at + 1:
            self._calm_since = step - 1
        self._at = step
        if not calm:
            self._calm_since = step
        return self._proven()

    def back_to(self, step: int) -> None:
        """The run continues from the state after `step`: later checkpoints no longer count, and the remaining ones
        start again, since the calm steps after them may have led into the incident."""
        self.resumed(step, self._pending)

    def resumed(self, step: int, pending: Iterable[int]) -> None:
        """A new process continues from `step`. pending: steps of the checkpoints in the folder that are not healthy;
        the counts of the last process are lost."""
        self._pending = {saved for saved in pending if saved <= step}
        self._at = self._calm_since = step

    def _proven(self) -> list[int]:
        proven = [step for step in self.pending if self.counted(step) >= self.after]
        self._pending.difference_update(proven)
        return proven
