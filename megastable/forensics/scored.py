"""What a model thought of documents: `scores.json` in a folder, and a row for each document, from the parts beside it.

A loss is judged by those of documents of like length, whose first tokens are as large a part of them: how many robust
standard deviations (1.4826 times the median absolute deviation) it is from their median. Low ones are findings, too.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, ValidationError

from megastable.data.staging import write_file
from megastable.errors import DataError
from megastable.forensics import workplace

RESULT = "scores.json"
FEW = 32  # documents that a length is judged by, at least: neighbouring ones are taken together
FEWEST = 8  # documents below which nothing is judged
SIGMA = 1.4826  # median absolute deviations of a normal distribution in its standard deviation
LEAST = 0.02  # nats: no scatter is taken for less
BARS = 60
SHARES = (0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)

SCHEMA = pa.schema(
    [
        ("shard", pa.dictionary(pa.int8(), pa.string())),
        ("document", pa.int64()),
        ("first_token", pa.int64()),
        ("tokens", pa.int64()),
        ("loss", pa.float32()),  # nats per token; nan for a document of which none is told
        ("worst_window", pa.float32()),  # the highest mean of a window
        ("worst_first", pa.int64()),  # its first token, counted in the shard
        ("worst_tokens", pa.int32()),
        ("bits_per_byte", pa.float32()),  # nan where the tokenizer is not known
        ("gradient_norm", pa.float32()),  # of the mean loss; nan where it was not asked for
    ]
)

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.floating]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class Like(_Part):
    """Documents of fewer tokens than `below` (and not fewer than the entry before): medians and robust deviations."""

    below: int
    documents: int
    loss: float
    loss_scale: float
    worst: float
    worst_scale: float


class Scores(_Part):
    """checkpoint: of which `step`, by its fingerprint; precision: of the arithmetic; window: tokens read at once.

    loss: mean over all tokens that were told, nats; bits_per_byte: over all documents, None where the tokenizer is not
    known. edges, counts: histogram of the documents' losses. quantiles: of the losses, at `shares`. seconds: of the
    measuring in this call, of `measured_tokens`.
    """

    format: int = 1
    name: str
    fingerprint: str
    checkpoint: str
    checkpoint_fingerprint: str
    step: int
    precision: str
    device: str
    window: int
    gradients: bool
    parts: int
    documents: int
    tokens: int
    loss: float
    bits_per_byte: float | None
    likes: list[Like]
    edges: list[float]
    counts: list[int]
    shares: tuple[float, ...] = SHARES
    quantiles: list[float]
    seconds: float
    measured_tokens: int
    warnings: list[str]

    def save(self, folder: Path) -> None:
        write_file(folder / RESULT, (self.model_dump_json(indent=1) + "\n").encode())

    @classmethod
    def load(cls, folder: Path) -> Scores:
        """The result in a folder. Raises DataError when there is none, or it is damaged."""
        path = folder / RESULT
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise DataError(
                f"{path} cannot be read ({error.strerror}): an interrupted scoring goes on by the same command"
            ) from None
        except ValidationError as error:
            raise DataError(f"{path} is damaged or of another version: score again with --again") from error

    @property
    def tokens_per_second(self) -> float:
        """Of the measuring; 0 when all was there already."""
        return self.measured_tokens / self.seconds if self.measured_tokens else 0.0


def rows(folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each document (keys: `SCHEMA`, z, worst_z, odd), in the order of the shards.

    z, worst_z: of loss and worst window, in robust standard deviations; odd: the larger of |z| and worst_z, or infinite
    for losses that are no numbers. None for what is not known. Raises DataError for a part that is not there.
    """
    scores = Scores.load(folder)
    for table in parts(folder, scores.parts):
        loss, worst = (table[key].to_numpy() for key in ("loss", "worst_window"))
        z, worst_z = judged(scores.likes, table["tokens"].to_numpy(), loss, worst)
        odd = np.fmax(np.abs(z), worst_z)
        broken = np.isinf(worst) | (np.isnan(worst) & (table["worst_tokens"].to_numpy() > 0))
        odd[broken] = np.inf
        for row, *values in zip(table.to_pylist(), z.tolist(), worst_z.tolist(), odd.tolist(), strict=True):
            row |= dict(zip(("z", "worst_z", "odd"), values, strict=True))
            yield {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()}


def oddest(folder: Path, most: int) -> list[dict[str, Any]]:
    """The `most` rows of the highest `odd`, worst first."""
    return heapq.nlargest(most, rows(folder), key=lambda row: -1.0 if row["odd"] is None else row["odd"])


def parts(folder: Path, count: int, columns: list[str] | None = None) -> Iterator[pa.Table]:
    """The tables of all parts. Raises DataError for one that is missing or damaged."""
    for number in range(count):
        path = workplace.part(folder, number)
        table = workplace.read_rows(path, columns)
        if table is None:
            raise DataError(f"{path} is missing or damaged: score again with --again")
        yield table


def likes(tokens: Int64s, loss: Floats, worst: Floats) -> list[Like]:
    """What is usual, by length, of documents [d]; nothing when there are fewer than `FEWEST`.

    Lengths are taken together by powers of two, and those with their neighbours until there are `FEW` documents.
    """
    good = np.isfinite(loss) & np.isfinite(worst)
    tokens, loss, worst = tokens[good], loss[good], worst[good]
    if len(tokens) < FEWEST:
        return []
    power = np.frexp(np.maximum(tokens, 1).astype(np.float64))[1]  # tokens < 2 ** power
    found, begin = list[tuple[int, int]](), 0
    for upto in range(1, int(power.max()) + 1):
        if int(((power > begin) & (power <= upto)).sum()) >= FEW:
            found.append((begin, upto))
            begin = upto
    if begin < int(power.max()):
        begin = found.pop()[0] if found else 0
        found.append((begin, int(power.max())))
    told = []
    for low, high in found:
        inside = (power > low) & (power <= high)
        below = 1 << 62 if high == found[-1][1] else 1 << high
        told.append(Like(below=below, documents=int(inside.sum()), **_middle("loss", loss[inside]),
                         **_middle("worst", worst[inside])))  # fmt: skip
    return told


def _middle(name: str, values: Floats) -> dict[str, float]:
    median = float(np.median(values))
    scale = max(SIGMA * float(np.median(np.abs(values - median))), LEAST)
    return {name: median, f"{name}_scale": scale}


def judged(by: Sequence[Like], tokens: Int64s, loss: Floats, worst: Floats) -> tuple[Floats, Floats]:
    """(z of the loss, z of the worst window) of documents [d]; nan without `by`."""
    if not by:
        return np.full(len(tokens), np.nan), np.full(len(tokens), np.nan)
    table = np.array([(e.loss, e.loss_scale, e.worst, e.worst_scale) for e in by])
    at = table[np.searchsorted([e.below for e in by], tokens, side="right")]
    return (loss - at[:, 0]) / at[:, 1], (worst - at[:, 2]) / at[:, 3]


def histogram(loss: Floats) -> tuple[list[float], list[int]]:
    """(edges, counts) of the losses that are numbers."""
    good = loss[np.isfinite(loss)]
    if not good.size:
        return [0.0, 1.0], [0]
    low, high = float(good.min()), float(good.max())
    counts, edges = np.histogram(good, BARS, (low, max(high, low + LEAST)))
    return edges.tolist(), counts.tolist()
