"""Plan of a drill for its ranks: a JSON file named by an environment variable. Production code knows neither.

The variable also marks every process of a drilled run, launcher and orphans included, so that they can be found.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

VARIABLE = "MEGASTABLE_DRILL"
SEARCH = ".search"  # ending of the file, beside a run, that counts what recovery measured


class Policy(StrEnum):
    """The response to instabilities. The first three are common practice; none of them restarts anything."""

    NOTHING = "nothing"  # no clipping, every update is applied except those that DeepSpeed itself refuses
    CLIPPING = "clipping"  # the same with gradients clipped to a norm of 1
    SKIPPING = "skipping"  # also skips updates that are 6 standard deviations out (worker.py)
    OURS = "ours"  # megastable, under its supervisor


class Fault(BaseModel):
    """A fault inside a rank.

    kind: "nan_gradient": one of `rank`'s gradients is NaN in the backward pass of step `step`. "inf_loss": the loss of
    its first micro-batch of that step is infinite. "moments": before that step, 16 KiB of its first moments are
    overwritten with random numbers. "bit_flip": before that step, the highest exponent bit of one of its master weights
    flips. Each happens once in the life of a run: a transient fault, not one of the step. "high_rate": a mistake in the
    schedule, which is a function of applied updates: the `steps` updates from `step` on use `factor` times the
    rate, every time they are done. "fp8": from step `step` on, for `steps` steps, one tile of FP8 products is `factor`
    times too large, on all ranks, every time they are computed; products in other precisions are right. "attention":
    for as long, the backward pass of fused attention kernels makes the gradient of the first sample of a micro-batch
    `factor` times as large (NaN: no number). From "growing_gains" to "rare_tokens": before every one of `steps` steps;
    `factor` is by how much. From "permuted_head" on: what the update of step `step` does besides, once in the life of a
    run; the gradient of `rank`, `factor` times as large for `steps` steps; labels off by one in the samples of `steps`
    steps.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal[
        "nan_gradient", "inf_loss", "moments", "bit_flip", "high_rate", "fp8", "attention", "growing_gains",
        "growing_logits", "growing_outputs", "dying_block", "rare_tokens", "permuted_head", "shrunk_moments",
        "cleared_norm", "grown_embeddings", "grown_block", "grown_gradient", "shifted_labels",
    ]  # fmt: skip
    step: int
    rank: int = 1
    steps: int = 1
    factor: float = 10.0

    def among(self, ranks: int) -> Fault:
        """The same fault in a run with this many ranks."""
        return self.model_copy(update={"rank": min(self.rank, ranks - 1)})


class Plan(BaseModel):
    """The plan of one drilled run. run: its directory. seed: of random choices."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: Policy
    run: Path
    seed: int = 0
    fault: Fault | None = None
