"""Memory and traffic of an optimizer's update, by its name. Pure; without torch.

Counted from the operations in optim/: each reads its inputs and writes its result, in fp32. AdamW with bf16 moments is
one compiled kernel on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from megastable.config.optimizers import OptimizerConfig


@dataclass(frozen=True)
class UpdateCost:
    """matrices, vectors: tensors of state per tensor of that kind. bytes: of memory traffic per parameter, gradient,
    weight and state included. scratch: fp32 elements of intermediate results per element of a chunk."""

    matrices: int
    vectors: int
    bytes: int
    scratch: int


_COSTS = {
    "adamw": UpdateCost(2, 2, 28, 0),
    "stable_adamw": UpdateCost(2, 2, 28 + 44, 2),  # before the kernel: its lag
    "spam": UpdateCost(2, 2, 28 + 74, 4),  # the clipped gradient
    "stable_spam": UpdateCost(2, 2, 28 + 84, 3),  # largest element, norm, the scaled gradient
    "lamb": UpdateCost(2, 2, 28 + 60, 3),  # the step, for its norm
    "adafactor": UpdateCost(0, 1, 84, 2),
    "sgd": UpdateCost(1, 1, 60, 2),
    "muon": UpdateCost(2, 2, 28 + 40, 2),  # with a matrix's two tensors of state; it has one
}


def cost(o: OptimizerConfig) -> UpdateCost:
    """The cost of an update under these settings. Not counted: shared state, a few rows and columns."""
    found = _COSTS[o.name]
    if o.name == "adamw" and o.moments == "bf16":
        return UpdateCost(2, 2, 20, 0)
    if (o.name == "spam" and o.spam.density < 1) or (o.name == "stable_spam" and o.stable_spam.density < 1):
        # The hash of each element, 8 bytes, and what it chooses.
        return UpdateCost(found.matrices, found.vectors, found.bytes + 240, found.scratch + 8)
    if o.name == "adafactor" and o.adafactor.momentum:
        return UpdateCost(1, 2, found.bytes + 28, found.scratch)
    return found
