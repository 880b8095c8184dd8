"""Operations of a training step by name, and the order in which one can cause another. Pure, without torch.

    step 7, rank 0, micro-batch 1, blocks.1.mlp.down output (forward)

The order within a step follows the data, not the clock: what comes later in it never changes what came earlier, on
whatever rank. On one pipeline stage it is the order of execution; on several a stage may begin the forward pass of a
micro-batch before the backward pass of another, and neither depends on the other.
"""

from __future__ import annotations

from typing import NamedTuple

# In order. Those of one number are passes over the micro-batches, one micro-batch after the other.
PARTS = {
    "start": 0, "data": 1, "forward": 1, "backward": 1, "recomputed": 1, "reduction": 2, "norm": 3, "update": 4,
    "weights": 5,
}  # fmt: skip
PASSES = {"data": 0, "forward": 1, "backward": 2, "recomputed": 2}
START = 0  # the "step" of the initial state


class TracedOperation(NamedTuple):
    """One tensor of a step. phase: of `PARTS`; micro_batch: from 0, -1 outside of the passes; depth: of its layer in
    the model, negative in the backward pass, so that less is earlier. name: e.g. "blocks.1.mlp.down output"."""

    phase: str
    micro_batch: int
    depth: int
    name: str

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Less is earlier; operations that are alike in it come in the order of execution."""
        return PARTS[self.phase], self.micro_batch, PASSES.get(self.phase, 0), self.depth

    def __str__(self) -> str:
        where = f"micro-batch {self.micro_batch}, " if self.micro_batch >= 0 else ""
        return f"{where}{self.name} ({self.phase})"


def when(step: int) -> str:
    """A step, counted from 1, in words."""
    return "before step 1" if step == START else f"step {step}"
