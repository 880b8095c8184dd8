"""When a checkpoint has proved healthy: after so many later steps that stayed on trend, without a gap.

What is finite when it is saved may be ill all the same: a drift shows only later. So a checkpoint counts as healthy
when the run that went on from it kept well for a while. Pure: who calls says what each step was like.
"""

from __future__ import annotations

from collections.abc import Iterable


class CalmSteps:
    """Counts the calm steps after each checkpoint that is not proven yet.

    after: how many it takes; 0 = healthy as soon as it is saved. Of an unbroken row of calm steps, those later than the
    checkpoint count, so one step of trouble begins the count of all anew.
    """

    def __init__(self, after: int) -> None:
        if after < 0:
            raise ValueError(f"after={after}: a number of steps")
        self.after = after
        self._at: int | None = None  # the last step that is known of
        self._calm_since = 0  # all steps later than it, up to _at, stayed on trend
        self._pending: set[int] = set()

    @property
    def pending(self) -> list[int]:
        """Steps of the checkpoints that are not proven yet, ascending."""
        return sorted(self._pending)

    def counted(self, checkpoint: int) -> int:
        """How many steps after the checkpoint of that step stayed on trend up to now, without a gap."""
        return 0 if self._at is None else max(0, self._at - max(checkpoint, self._calm_since))

    def saved(self, step: int) -> list[int]:
        """A checkpoint of `step` stands. It may be told late: steps after it count from when it was taken.

        Returns the steps of the checkpoints that are healthy by that: mostly none, with after=0 this one.
        """
        if self._at is None or step > self._at:  # nobody saw the steps between
            self._at = self._calm_since = step
        self._pending.add(step)
        return self._proven()

    def step(self, step: int, calm: bool) -> list[int]:
        """`step` is done. calm: it stayed on trend: an applied update, no finding, no open incident.

        Returns the steps of the checkpoints that became healthy with it, ascending. Where steps were left out, nobody
        saw whether they were calm: the count begins anew. A step that was done before means that the run went back.
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
        """The run goes on from the state after `step`: later checkpoints are of a past that no longer counts; those
        that are left have to prove themselves anew, as what had gone well may have led into the trouble."""
        self.resumed(step, self._pending)

    def resumed(self, step: int, pending: Iterable[int]) -> None:
        """A new process goes on from `step`. pending: steps of the checkpoints in the folder that are not healthy; what
        the last process had counted of them is lost."""
        self._pending = {saved for saved in pending if saved <= step}
        self._at = self._calm_since = step

    def _proven(self) -> list[int]:
        proven = [step for step in self.pending if self.counted(step) >= self.after]
        self._pending.difference_update(proven)
        return proven
