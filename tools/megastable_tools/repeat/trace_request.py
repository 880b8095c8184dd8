"""What the ranks of a traced run are asked to do: a file in the folder that they write their traces to. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from megastable.base import durable
from megastable.base.errors import ConfigError, DataError
from megastable_tools.repeat.operations import PARTS, TracedOperation
from megastable_tools.repeat.trace_file import StepTrace

NAME = "request.json"
PLANTABLE = PARTS.keys() - {"start", "norm"}  # the norm is a number of the host's
SHOWN = 5  # operations suggested for a name that there is not


class TracePoint(BaseModel):
    """An operation of one step on one rank."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    phase: str
    micro_batch: int
    name: str
    rank: int


class TraceRequest(BaseModel):
    """steps: to train. moments: write statistics of the tensors, too. blocks_only: watch whole blocks, not what is in
    them. plant: flip a bit of this operation's tensor. dump: write this one to a file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int
    moments: bool = False
    blocks_only: bool = False
    plant: TracePoint | None = None
    dump: TracePoint | None = None

    def save(self, folder: Path) -> None:
        """Raises DataError."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            durable.write_file(folder / NAME, self.model_dump_json().encode())
        except OSError as error:
            raise DataError(f"{folder} cannot be written to: {error}: choose another --output") from None

    @classmethod
    def load(cls, folder: Path | None) -> Self:
        """Raises DataError."""
        path = (folder or Path()) / NAME
        try:
            return cls.model_validate_json(path.read_text())
        except (OSError, ValidationError) as error:
            raise DataError(
                f"{path}: not what a traced run is asked to do ({error}): it is started by `megastable repeat`, and "
                "with several hosts its --output must lie on a file system that all of them share"
            ) from None


class PlantSpot(BaseModel):
    """STEP:OPERATION[:RANK], not yet looked up in a trace. rank: None = the lowest one that has the operation."""

    model_config = ConfigDict(frozen=True)

    step: int
    name: str
    rank: int | None = None

    @classmethod
    def parsed(cls, text: str, steps: int) -> Self:
        """Raises ConfigError."""
        step, *rest = text.split(":")
        name, rank = rest[0].strip() if rest else "", rest[1] if len(rest) > 1 else None
        if len(rest) > 2 or not step.isdecimal() or not name or (rank is not None and not rank.isdecimal()):
            raise ConfigError(
                f"--plant {text}: say STEP:OPERATION or STEP:OPERATION:RANK, e.g. "
                "--plant '7:blocks.1.mlp.down output:0'"
            )
        if not 1 <= int(step) <= steps:
            raise ConfigError(f"--plant {text}: there is no step {step} of {steps}, counted from 1")
        return cls(step=int(step), name=name, rank=None if rank is None else int(rank))

    def found(self, ranks: Sequence[StepTrace]) -> TracePoint:
        """Where it is in the traces of its step, by rank: in the first micro-batch. "output" may be left out. Raises
        ConfigError."""
        if self.rank is not None and self.rank >= len(ranks):
            raise ConfigError(
                f"--plant: there is no rank {self.rank}: they are 0 to {len(ranks) - 1} in this run"
            )
        chosen = range(len(ranks)) if self.rank is None else [self.rank]
        for rank in chosen:
            if (operation := self._on(ranks[rank])) is not None:
                return TracePoint(
                    step=self.step, phase=operation.phase, micro_batch=operation.micro_batch,
                    name=operation.name, rank=rank,
                )  # fmt: skip
        if others := [rank for rank, trace in enumerate(ranks) if self._on(trace) is not None]:
            raise ConfigError(
                f"--plant: rank {self.rank} has no {self.name!r}; others have, for example rank {others[0]}"
            )
        names = list(dict.fromkeys(o.name for rank in chosen for o in ranks[rank].operations))
        near = difflib.get_close_matches(self.name, names, SHOWN, 0.3) or names[:SHOWN]
        raise ConfigError(
            f"--plant: there is no operation {self.name!r} in step {self.step}; there are, for example: "
            f"{'; '.join(near)}"
        )

    def _on(self, trace: StepTrace) -> TracedOperation | None:
        wanted = (self.name, f"{self.name} output")
        found = [one for one in trace.operations if one.name in wanted and one.phase in PLANTABLE]
        return min(found, key=lambda one: one.order, default=None)
