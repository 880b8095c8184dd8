"""What watches a run: an object with a name, and those of these hooks that it needs, registered in one list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from megastable.engine.measured import Measured

Ballot = Mapping[str, Sequence[float]]
"""By name, what a rank adds to the sums that the gate makes of every step; as many numbers on every rank."""


class Watch:
    """The hooks, which do nothing here but store `state`, if there is one. All ranks call them in the same order, with
    the same arguments."""

    name = ""
    state: BaseModel | None = None

    def ballot(self, step: int) -> Sequence[float]:
        """This rank's numbers for the step after `step`, taken before its update. Their sums over all ranks are in
        `Measured.ballot`, under the watch's name."""
        return ()

    def after_update(self, measured: Measured, step: int, rate: float) -> None:
        """The update of `step` was applied, at this learning rate."""

    def begin_again(self) -> None:
        """What comes is of another kind than what came before, on purpose: forget what was usual."""

    def rewound(self, step: int, saved: Mapping[str, Any] | None) -> None:
        """The run is back after `step`. saved: as `state_dict` then was; None: only the step itself is repeated."""

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints and snapshots: later steps do not change it."""
        return {} if self.state is None else self.state.model_dump()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` gave, in an earlier process. Raises ValidationError if it cannot be read."""
        if self.state is not None:
            self.state = type(self.state).model_validate(state)
