"""Chooses the newest snapshot, or staged checkpoint, of which all hosts together hold every part. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from megastable.checkpoint.files import FileRecord
from megastable.checkpoint.pieces import part_name
from megastable.checkpoint.store import RECIPE, SHARED, STATE

# Step records that were in the memory of rank 0 only, as run/records.py writes them.
RECORDS = "records.parquet"
KEY = re.compile(r"step-(\d+)-(\d+)-([0-9a-f]{16})")


class PointKey(BaseModel):
    """Names a point, a state of which every rank holds a part: of after `step`, taken by the processes `lineage` (a
    number drawn at their start), after they had rewound `epoch` times (always 0 for a staged checkpoint)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: NonNegativeInt
    epoch: NonNegativeInt
    lineage: str = Field(pattern="^[0-9a-f]{16}$")

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"step-{self.step}-{self.epoch}-{self.lineage}"

    @classmethod
    def of(cls, name: str) -> Self | None:
        """The key of a folder's name; None if it is another's."""
        found = KEY.fullmatch(name)
        if found is None:
            return None
        return cls(step=int(found[1]), epoch=int(found[2]), lineage=found[3])


class HeldPart(BaseModel):
    """One rank's part of a point, complete: its files, those that a checkpoint would have; world: number of ranks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    key: PointKey
    rank: NonNegativeInt
    world: PositiveInt
    files: dict[str, FileRecord]

    @model_validator(mode="after")
    def _has_its_own_files(self) -> Self:
        if (
            not set(names_of(self.rank))
            <= self.files.keys()
            <= {*names_of(self.rank), *every_name(self.rank)}
        ):
            raise ValueError(f"rank {self.rank} has no files such as {sorted(self.files)}")
        return self


def names_of(rank: int) -> tuple[str, ...]:
    """The files that every rank has."""
    shared = (STATE, RECIPE) if rank == 0 else ()
    return f"{part_name(rank)}.safetensors", f"{part_name(rank)}.json", f"rng-{rank:05d}.pt", *shared


def every_name(rank: int) -> tuple[str, ...]:
    """Those that it may have."""
    return (*names_of(rank), *((SHARED, RECORDS) if rank == 0 else ()))


@dataclass(frozen=True)
class Complete:
    """A point with all parts. parts: by rank; hosts: by rank, those that hold the part, in order."""

    key: PointKey
    parts: Mapping[int, HeldPart]
    hosts: Mapping[int, Sequence[int]]

    @property
    def files(self) -> dict[str, FileRecord]:
        return {name: record for part in self.parts.values() for name, record in part.files.items()}

    def holders(self, name: str) -> Sequence[int]:
        """The hosts that hold a file."""
        return next(self.hosts[rank] for rank, part in self.parts.items() if name in part.files)


def newest_complete(
    held: Sequence[Sequence[HeldPart]], refuse: Callable[[PointKey], str]
) -> tuple[Complete | None, dict[PointKey, str]]:
    """The newest point that may be used and is complete; None if there is none. And the newer ones, with the reason.

    held: by host, the parts in its memory. refuse: why a point must not be used, "" if it may.
    """
    keys = {part.key for parts in held for part in parts}
    passed: dict[PointKey, str] = {}
    for key in sorted(keys, key=lambda key: (key.step, key.epoch, key.lineage), reverse=True):
        found = _assembled(key, held)
        passed[key] = refuse(key) or (found if isinstance(found, str) else "")
        if not passed[key] and not isinstance(found, str):
            del passed[key]
            return found, passed
    return None, passed


def _assembled(key: PointKey, held: Sequence[Sequence[HeldPart]]) -> Complete | str:
    """The point of all its parts, or why it is not complete."""
    parts: dict[int, HeldPart] = {}
    hosts: dict[int, list[int]] = {}
    for host, there in enumerate(held):
        for part in there:
            if part.key != key:
                continue
            if parts.setdefault(part.rank, part) != part:
                return f"two copies of rank {part.rank}'s part differ"
            if host not in hosts.setdefault(part.rank, []):
                hosts[part.rank].append(host)
    worlds = {part.world for part in parts.values()}
    if len(worlds) > 1:
        return f"its parts are of {' and of '.join(map(str, sorted(worlds)))} ranks"
    (world,) = worlds
    missing = sorted(set(range(world)) - parts.keys())
    if missing or len(parts) != world:
        some = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
        return (
            f"no host holds the part of rank {some}"
            if missing
            else "it has parts of ranks that there are not"
        )
    return Complete(key, parts, hosts)
