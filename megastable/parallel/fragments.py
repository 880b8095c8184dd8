"""A piece of a parameter in the optimizer's flat buffers: the geometry that every ZeRO wrapper shares. Pure."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from megastable.parallel.sharding import Placement


class Fragment(BaseModel):
    """`numel` elements of a parameter, from `start` of its flattened tensor-parallel shard, at `offset` of buffer
    `group`. name, dim, sections: its `Placement`; shape: of the shard. counted: False for a copy that another
    rank counts (a replica over the tensor group, a tied weight on a later stage).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    dim: int | None
    sections: tuple[int, ...]
    shape: tuple[int, ...]
    group: int
    offset: int
    start: int
    numel: int
    counted: bool

    @property
    def placement(self) -> Placement:
        return Placement(self.name, self.dim, self.sections)
