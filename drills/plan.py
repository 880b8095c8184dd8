"""What a rank is told of its drill: a JSON file that an environment variable names. Production code knows of neither.

The variable also marks every process of a drilled run, launcher and orphans included: by it they are found again.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

VARIABLE = "MEGASTABLE_DRILL"


class Policy(StrEnum):
    """What is done about trouble. The first three are what runs are often left with; none of them restarts anything."""

    NOTHING = "nothing"  # no clipping, every update is applied; what DeepSpeed itself refuses it refuses
    CLIPPING = "clipping"  # the same with gradients clipped to a norm of 1
    SKIPPING = "skipping"  # and updates skipped that are 6 standard deviations out (skipstep.py)
    OURS = "ours"  # megastable, under its supervisor


class Fault(BaseModel):
    """Something that goes wrong inside of a rank.

    kind: "nan_gradient": one of `rank`'s gradients is NaN in the backward pass of step `step`. "inf_loss": the loss of
    its first micro-batch of that step is infinite. "moments": before that step, 16 KiB of its first moments hold random
    numbers. "bit_flip": before that step, the highest bit of an exponent among its master weights is another.
    Each happens once in the life of a run: it is a passing fault, not one of the step. "high_rate": a mistake in the
    schedule, which is a function of applied updates: the `steps` updates from `step` on are done at `factor` times the
    rate, as often as they are done. "fp8": from step `step` on, for `steps` steps, FP8 products come out with a tile
    that is `factor` times too large, on all ranks, as often as they are computed; those of other precisions are right.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["nan_gradient", "inf_loss", "moments", "bit_flip", "high_rate", "fp8"]
    step: int
    rank: int = 1
    steps: int = 1
    factor: float = 10.0

    def among(self, ranks: int) -> Fault:
        """The same in a run of so many ranks."""
        return self.model_copy(update={"rank": min(self.rank, ranks - 1)})


class Plan(BaseModel):
    """Of one drilled run. run: its directory. seed: of what is drawn."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: Policy
    run: Path
    seed: int = 0
    fault: Fault | None = None
