"""The trace of one rank as a file: a line of JSON for each step, complete or ignored.

    with TraceWriter(folder, header) as writer:
        writer.write_step(step)
    header, steps = read_header(folder, rank), read_steps(folder, rank)

An operation takes 11 bytes a step: names are written only where they differ from those of the step before, and the
fingerprints are base64 of little-endian integers.
"""

from __future__ import annotations

import difflib
import json
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

from megastable.base import durable
from megastable.base.errors import ConfigError, DataError

# Operations of a step by name, and the order in which one can cause another:
#
#     step 7, rank 0, micro-batch 1, blocks.1.mlp.down output (forward)
#
# The order within a step follows the data, not the clock: what comes later in it never changes what came earlier, on
# whatever rank. On one pipeline stage it is the order of execution; on several a stage may begin the forward pass of a
# micro-batch before the backward pass of another, and neither depends on the other.


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
        batch_text = f"micro-batch {self.micro_batch}, " if self.micro_batch >= 0 else ""
        return f"{batch_text}{self.name} ({self.phase})"


def describe_step(step: int) -> str:
    """A step, counted from 1, in words."""
    return "before step 1" if step == START else f"step {step}"


# Files

FORMAT = 1
CPU = "CPU"  # how the name of such a device begins
MOMENTS = 4  # numbers per operation in `StepTrace.moments`


@dataclass(frozen=True)
class TraceHeader:
    """Who wrote a trace. layout: sizes of the axes, with the ZeRO stage. exact: whether a repeated step gives the same
    bits on sound hardware. kernels, device: in words."""

    rank: int
    world: int
    host: str
    device: str
    kernels: str
    exact: bool
    layout: dict[str, int]


@dataclass(frozen=True, eq=False)
class StepTrace:
    """What one rank did in a step, in the order of execution.

    fingerprints: int64 [n], of the operations' tensors. moments: float64 [n, 4], or None: number of elements, their
    sum, sum of squares and largest magnitude; 0 elements where another rank counts them, or a layout has no such
    tensor. losses: of all samples of the global batch, in the data's order, nats per token; empty if not asked for.
    """

    step: int
    operations: tuple[TracedOperation, ...]
    fingerprints: npt.NDArray[np.int64]
    moments: npt.NDArray[np.float64] | None = None
    losses: tuple[float, ...] = ()


def path_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.jsonl"


class TraceWriter:
    """Of this rank. Raises DataError if the file cannot be written."""

    def __init__(self, folder: Path, header: TraceHeader) -> None:
        self._path = path_of(folder, header.rank)
        self._names: tuple[TracedOperation, ...] = ()
        try:
            self._file = self._path.open("w", encoding="utf-8")
        except OSError as error:
            raise self._failed(error) from None
        self._put({"format": FORMAT, **asdict(header)})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write_step(self, step: StepTrace) -> None:
        line: dict[str, Any] = {"step": step.step, "fingerprints": _text(step.fingerprints.astype("<i8"))}
        if step.operations != self._names:
            line["operations"] = self._names = step.operations
        if step.moments is not None:
            line["moments"] = _text(step.moments.astype("<f8"))
        if step.losses:
            line["losses"] = step.losses
        self._put(line)

    def _put(self, line: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._failed(error) from None

    def _failed(self, error: OSError) -> DataError:
        return DataError(f"{self._path} could not be written: {error}: make room, or choose another --output")


def read_header(folder: Path, rank: int) -> TraceHeader:
    """Raises DataError if there is no such trace."""
    path = path_of(folder, rank)
    try:
        with path.open(encoding="utf-8") as trace_file:
            header_fields = json.loads(trace_file.readline())
        if header_fields.pop("format") != FORMAT:
            raise ValueError("another format")
        return TraceHeader(**header_fields)
    except FileNotFoundError:
        raise DataError(
            f"{path} is not there: rank {rank} wrote its trace elsewhere; with several hosts --output must lie on a "
            "file system that all of them share"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not a trace ({error!r})") from None


def read_steps(folder: Path, rank: int) -> Iterator[StepTrace]:
    """In order, one in memory at a time. Raises DataError for a damaged line."""
    trace_path, names = path_of(folder, rank), tuple[TracedOperation, ...]()
    try:
        with trace_path.open(encoding="utf-8") as trace_file:
            trace_file.readline()
            for line_text in trace_file:
                line = json.loads(line_text)
                if "operations" in line:
                    names = tuple(TracedOperation(*one) for one in line["operations"])
                step_prints = np.frombuffer(b64decode(line["fingerprints"]), "<i8").astype(np.int64)
                moments = None
                if "moments" in line:
                    moments = np.frombuffer(b64decode(line["moments"]), "<f8").reshape(-1, MOMENTS)
                if len(step_prints) != len(names) or (moments is not None and len(moments) != len(names)):
                    raise ValueError("names and numbers do not match")
                yield StepTrace(line["step"], names, step_prints, moments, tuple(line.get("losses", ())))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{trace_path}: damaged ({error!r}): run it again") from None


def _text(numbers: npt.NDArray[Any]) -> str:
    return b64encode(numbers.tobytes()).decode()


# What the ranks of a traced run are asked to do: a file in the folder that they write their traces to


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

    @classmethod
    def of(cls, operation: TracedOperation, step: int, rank: int) -> Self:
        phase, micro_batch, _, name = operation
        return cls(step=step, phase=phase, micro_batch=micro_batch, name=name, rank=rank)


class TraceRequest(BaseModel):
    """steps: to train. moments: write statistics of the tensors, too. blocks_only: watch whole blocks, not what is in
    them. plant: flip a bit of this operation's tensor. dump: write this one to a file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int
    moments: bool = False
    blocks_only: bool = False
    plant: TracePoint | None = None
    dump: TracePoint | None = None

    def save_request(self, folder: Path) -> None:
        """Raises DataError."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            durable.write_file(folder / NAME, self.model_dump_json().encode())
        except OSError as error:
            raise DataError(f"{folder} cannot be written to: {error}: choose another --output") from None

    @classmethod
    def load_request(cls, folder: Path | None) -> Self:
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
    def parse_spot(cls, text: str, steps: int) -> Self:
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

    def find_point(self, ranks: Sequence[StepTrace]) -> TracePoint:
        """Where it is in the traces of its step, by rank: in the first micro-batch. "output" may be left out. Raises
        ConfigError."""
        if self.rank is not None and self.rank >= len(ranks):
            last_rank = len(ranks) - 1
            raise ConfigError(f"--plant: there is no rank {self.rank}: they are 0 to {last_rank} in this run")
        chosen_ranks = range(len(ranks)) if self.rank is None else [self.rank]
        for chosen_rank in chosen_ranks:
            if (operation := self._on(ranks[chosen_rank])) is not None:
                return TracePoint.of(operation, self.step, chosen_rank)
        if others := [rank for rank, rank_trace in enumerate(ranks) if self._on(rank_trace) is not None]:
            raise ConfigError(
                f"--plant: rank {self.rank} has no {self.name!r}; others have, for example rank {others[0]}"
            )
        names = list(dict.fromkeys(o.name for rank in chosen_ranks for o in ranks[rank].operations))
        near_names = difflib.get_close_matches(self.name, names, SHOWN, 0.3) or names[:SHOWN]
        known_names = "; ".join(near_names)
        raise ConfigError(
            f"--plant: there is no operation {self.name!r} in step {self.step}; there are, for example: {known_names}"
        )

    def _on(self, trace: StepTrace) -> TracedOperation | None:
        wanted_names = (self.name, f"{self.name} output")
        found = [one for one in trace.operations if one.name in wanted_names and one.phase in PLANTABLE]
        return min(found, key=lambda one: one.order, default=None)
