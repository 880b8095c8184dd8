"""Sum the gradient of a tied embedding over its two copies, on the first and the last pipeline stage.

Each stage has already reduced its own gradient over the data ranks, and each rank holds the partition that it updates
(ZeRO, arXiv:1910.02054 section 5.1). The stages hold different layers, so the embedding is partitioned at different
elements. Each rank exchanges its elements with the ranks of the other stage that hold the same ones. Both sides add the
same two numbers, so the copies stay bit-identical in whatever order a collective sums. Summing over the copies first
would not achieve that: the data-parallel sums round differently on the two stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megastable.base.collectives import gathered


def overlaps(own: range, others: Sequence[range]) -> list[int]:
    """Number of elements that `own` shares with each of `others`. Ranges of step 1."""
    return [len(range(max(own.start, r.start), min(own.stop, r.stop))) for r in others]


class TiedGradient:
    """This rank's partition of a tied weight's gradient. Collective: all ranks of the group build it and call `add`."""

    def __init__(self, elements: range, stage: int, group: Any) -> None:
        """elements: the elements of the flattened weight that this rank updates, maybe none. stage: of this rank.
        group: all ranks of both stages, ordered by stage and data rank, like the partitions."""
        self.group = group
        held = gathered((stage, elements), group)
        others = [there if other != stage else range(0) for other, there in held]
        self._counts = overlaps(elements, others)
        assert sum(self._counts) == len(elements), (
            f"the other stage does not hold all of {elements}: {others}"
        )

    @torch.no_grad()
    def add(self, piece: Tensor) -> None:
        """Add the other stage's gradient of the same elements to `piece` ([len(elements)], contiguous), in place.

        Sends and receives len(elements) numbers, and allocates memory for as many.
        """
        other = torch.empty_like(piece)
        dist.all_to_all_single(other, piece, self._counts, self._counts, group=self.group)
        piece.add_(other)
