"""Sizes of the parallel axes, and the coordinates and groups of ranks. Pure; without torch, for the planner."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Sizes of the three axes; `world` ranks in all. context: number of data ranks that share their samples."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def samples(self) -> int:
        """Number of groups of data ranks with samples of their own."""
        return self.data // self.context

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(stage, data rank, tensor rank) of a global rank."""
        return rank // (self.data * self.tensor), rank // self.tensor % self.data, rank % self.tensor

    def rank(self, stage: int, data: int, tensor: int) -> int:
        """Global rank of a coordinate; the inverse of `coordinates`."""
        return (stage * self.data + data) * self.tensor + tensor

    def replicas(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """All ranks that work on the samples of these: of every stage, tensor and context rank."""
        rows = {self.coordinates(rank)[1] // self.context for rank in ranks}
        return tuple(r for r in range(self.world) if self.coordinates(r)[1] // self.context in rows)

    def groups(self, axis: str) -> list[list[int]]:
        """The ranks of every group along `axis`: "tensor", "data", "stage" (both of these), "context", "pipeline", or
        "tied" (the data ranks of the first and the last stage)."""
        s, d, t = range(self.pipeline), range(self.data), range(self.tensor)
        match axis:
            case "tensor":
                return [[self.rank(i, j, k) for k in t] for i in s for j in d]
            case "data":
                return [[self.rank(i, j, k) for j in d] for i in s for k in t]
            case "stage":
                return [[self.rank(i, j, k) for j in d for k in t] for i in s]
            case "context":
                c = range(self.context)
                return [
                    [self.rank(i, g * self.context + j, k) for j in c]
                    for i in s for g in range(self.samples) for k in t
                ]  # fmt: skip
            case "tied":
                return [[self.rank(i, j, k) for i in (0, self.pipeline - 1) for j in d] for k in t]
            case "pipeline":
                return [[self.rank(i, j, k) for i in s] for j in d for k in t]
        raise ValueError(f"no axis {axis!r}")
