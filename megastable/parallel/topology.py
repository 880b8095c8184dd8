"""Who talks to whom: the coordinates of a rank and the process groups of its row, column and pipe.

Ranks are numbered as DeepSpeed's `PipeModelDataParallelTopology` does: pipeline outermost, then data, tensor
innermost, so that a tensor group sits on neighbouring GPUs of one host. Context parallelism is no axis of its own:
so many data-parallel ranks in a row share their samples, each with a part of the tokens. The loss of a rank is the mean
over its tokens, so the mean of the gradients over all data-parallel ranks is that over all tokens, and ZeRO, norms and
checkpoints need not know.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class Layout:
    """Sizes of the three axes; `world` ranks in all. context: so many of the data ranks share their samples."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def samples(self) -> int:
        """How many groups of data ranks have samples of their own."""
        return self.data // self.context

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(stage, data rank, tensor rank) of a global rank."""
        return rank // (self.data * self.tensor), rank // self.tensor % self.data, rank % self.tensor

    def rank(self, stage: int, data: int, tensor: int) -> int:
        """Global rank of a coordinate; the inverse of `coordinates`."""
        return (stage * self.data + data) * self.tensor + tensor

    def groups(self, axis: str) -> list[list[int]]:
        """The ranks of every group along `axis` ("tensor", "data", "context" or "pipeline")."""
        s, d, t = range(self.pipeline), range(self.data), range(self.tensor)
        match axis:
            case "tensor":
                return [[self.rank(i, j, k) for k in t] for i in s for j in d]
            case "data":
                return [[self.rank(i, j, k) for j in d] for i in s for k in t]
            case "context":
                c = range(self.context)
                return [
                    [self.rank(i, g * self.context + j, k) for j in c]
                    for i in s for g in range(self.samples) for k in t
                ]  # fmt: skip
            case "pipeline":
                return [[self.rank(i, j, k) for i in s] for j in d for k in t]
        raise ValueError(f"no axis {axis!r}")


class Topology:
    """This rank's place in a `Layout`, with its process groups. Collective: all ranks build it alike."""

    def __init__(self, layout: Layout, rank: int, timeout: float) -> None:
        self.layout = layout
        self.rank = rank
        self.stage, self.data_rank, self.tensor_rank = layout.coordinates(rank)
        self.sample_rank, self.context_rank = divmod(self.data_rank, layout.context)
        # A new group does not inherit the world's timeout.
        self._timeout = timedelta(seconds=timeout)
        self.tensor_group = self._group("tensor")
        self.data_group = self._group("data")
        self.context_group = self._group("context") if layout.context > 1 else None

    def _group(self, axis: str) -> Any:
        mine = None
        for ranks in self.layout.groups(axis):
            group = dist.new_group(ranks, timeout=self._timeout)  # every rank must create every group
            if self.rank in ranks:
                mine = group
        return mine

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.layout.pipeline - 1


@dataclass(frozen=True)
class TensorParallel:
    """What a layer needs to know of its tensor group. `TensorParallel()` is a single process.

    `sequence`: activations between the parallel regions are split along the sequence (arXiv:2205.05198).
    """

    group: Any = None
    rank: int = 0
    size: int = 1
    sequence: bool = False


@dataclass(frozen=True)
class ContextParallel:
    """What attention needs to know of the ranks that share a sample. `ContextParallel()` is one that has it whole."""

    group: Any = None
    size: int = 1


WHOLE = ContextParallel()
