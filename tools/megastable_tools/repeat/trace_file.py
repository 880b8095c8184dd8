"""The trace of one rank as a file: a line of JSON for each step, complete or ignored.

    with TraceWriter(folder, header) as writer:
        writer.write(step)
    header, steps = read_header(folder, rank), read_steps(folder, rank)

An operation takes 11 bytes a step: names are written only where they differ from those of the step before, and the
fingerprints are base64 of little-endian integers.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from megastable.base.errors import DataError
from megastable_tools.repeat.operations import TracedOperation

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, step: StepTrace) -> None:
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
        with path.open(encoding="utf-8") as file:
            found = json.loads(file.readline())
        if found.pop("format") != FORMAT:
            raise ValueError("another format")
        return TraceHeader(**found)
    except FileNotFoundError:
        raise DataError(
            f"{path} is not there: rank {rank} wrote its trace elsewhere; with several hosts --output must lie on a "
            "file system that all of them share"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not a trace ({error!r})") from None


def read_steps(folder: Path, rank: int) -> Iterator[StepTrace]:
    """In order, one in memory at a time. Raises DataError for a damaged line."""
    path, names = path_of(folder, rank), tuple[TracedOperation, ...]()
    try:
        with path.open(encoding="utf-8") as file:
            file.readline()
            for text in file:
                line = json.loads(text)
                if "operations" in line:
                    names = tuple(TracedOperation(*one) for one in line["operations"])
                prints = np.frombuffer(b64decode(line["fingerprints"]), "<i8").astype(np.int64)
                moments = None
                if "moments" in line:
                    moments = np.frombuffer(b64decode(line["moments"]), "<f8").reshape(-1, MOMENTS)
                if len(prints) != len(names) or (moments is not None and len(moments) != len(names)):
                    raise ValueError("names and numbers do not match")
                yield StepTrace(line["step"], names, prints, moments, tuple(line.get("losses", ())))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: damaged ({error!r}): run it again") from None


def _text(numbers: npt.NDArray[Any]) -> str:
    return b64encode(numbers.tobytes()).decode()
