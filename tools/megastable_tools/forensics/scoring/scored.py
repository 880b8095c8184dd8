"""Result of scoring: `scores.json` in a folder, and a row for each document, from the parts beside it.

A loss is judged relative to documents of similar length, whose first tokens have a similar share: by its distance from
their median in robust standard deviations (1.4826 times the median absolute deviation). Low ones are findings, too.
Worst windows are judged by those of other documents of the same window length: long documents have no longer windows.
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
from pydantic import BaseModel, ConfigDict

from megastable.base.errors import DataError
from megastable_tools.forensics import resumable_map
from megastable_tools.forensics.resumable_map import MapResult

FEW = 32  # minimum documents per length class: neighbouring classes are merged
FEWEST = 8  # minimum documents to judge anything
SIGMA = 1.4826  # median absolute deviations of a normal distribution in its standard deviation
ODD = 4.0  # robust deviations of an odd document
LEAST = 0.02  # nats: minimum scatter
BARS = 60
SHARES = (0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)

SCHEMA = pa.schema(
    [
        ("shard", pa.dictionary(pa.int8(), pa.string())),
        ("document", pa.int64()),
        ("first_token", pa.int64()),
        ("tokens", pa.int64()),
        ("loss", pa.float32()),  # nats per token; nan for a document without any loss
        ("worst_window", pa.float32()),  # the highest mean of a window
        ("worst_first", pa.int64()),  # its first token, counted in the shard
        ("worst_tokens", pa.int32()),
        ("bits_per_byte", pa.float32()),  # nan if the tokenizer is unknown
        ("gradient_norm", pa.float32()),  # of the mean loss; nan if not requested
    ]
)

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.floating]


class Like(BaseModel):
    """Texts of fewer tokens than `below`, and not in an earlier entry: median and robust deviation of a loss."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    below: int
    documents: int
    median: float
    scale: float


class Scores(MapResult):
    """checkpoint: with its `step`, by its fingerprint; precision: of the arithmetic; window: tokens read at once.

    loss: mean over all tokens with a loss, nats; bits_per_byte: over all documents, None if the tokenizer is
    unknown. likes, window_likes: baselines of documents and of their worst windows. edges, counts: histogram of the
    documents' losses; quantiles: of them, at `shares`; high, low: number of documents that are odd by `ODD` and more.
    seconds: of the measuring in this call, of `measured_tokens`.
    """

    file = resumable_map.SCORES
    doing = "score"

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
    window_likes: list[Like]
    edges: list[float]
    counts: list[int]
    shares: tuple[float, ...] = SHARES
    quantiles: list[float]
    high: int
    low: int
    seconds: float
    measured_tokens: int
    warnings: list[str]

    @property
    def tokens_per_second(self) -> float:
        """Measuring speed; 0 if nothing was left to measure."""
        return self.measured_tokens / self.seconds if self.measured_tokens else 0.0


def read_scored_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each document (keys: `SCHEMA`, z, worst_z, odd), in the order of the shards.

    z, worst_z: of loss and worst window, in robust standard deviations; odd: the larger of |z| and worst_z, or infinite
    for losses that are not numbers. None for unknown values. Raises DataError for a missing part.
    """
    scores = Scores.load_result(folder)
    for table in resumable_map.read_parts(folder, scores.parts, "score again"):
        keys = ("tokens", "loss", "worst_window", "worst_tokens")
        token_counts, loss, worst, length = (table[key].to_numpy() for key in keys)
        z = judge_losses(scores.likes, token_counts, loss)
        worst_z = judge_losses(scores.window_likes, length, worst)
        odd = np.fmax(np.abs(z), worst_z)
        is_broken = np.isinf(worst) | (np.isnan(worst) & (length > 0))
        odd[is_broken] = np.inf
        for row, *values in zip(table.to_pylist(), z.tolist(), worst_z.tolist(), odd.tolist(), strict=True):
            row |= dict(zip(("z", "worst_z", "odd"), values, strict=True))
            yield {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()}


# Orders of the rows: the key of the column, and 1 for the highest first, -1 for the lowest.
ORDERS = {
    "window": ("worst_window", 1), "loss": ("z", 1), "low": ("z", -1), "odd": ("odd", 1),
    "gradient": ("gradient_norm", 1),
}  # fmt: skip


def check_order(by: str) -> None:
    """Raises DataError for an order that is not in `ORDERS`."""
    if by not in ORDERS:
        raise DataError(f"there is no order {by!r}: choose one of {', '.join(ORDERS)}")


def first_rows(folder: Path, most: int, by: str = "window") -> list[dict[str, Any]]:
    """The first `most` rows by one of `ORDERS`, those without that number last. Raises DataError for another order."""
    check_order(by)
    key, sign = ORDERS[by]

    def place(row: dict[str, Any]) -> float:
        if row["odd"] == math.inf and sign > 0:
            return math.inf  # a loss that is no number
        return -math.inf if row[key] is None else sign * float(row[key])

    return heapq.nlargest(most, read_scored_rows(folder), key=place)


def find_baselines(tokens: Int64s, loss: Floats) -> list[Like]:
    """Baselines by length, of texts [d]; empty if fewer than `FEWEST` have a loss.

    Lengths are grouped by powers of two, and merged with their neighbours until there are `FEW` texts.
    """
    is_finite = np.isfinite(loss)
    tokens, loss = tokens[is_finite], loss[is_finite]
    if len(tokens) < FEWEST:
        return []
    length_powers = np.frexp(np.maximum(tokens, 1).astype(np.float64))[1]  # tokens < 2 ** power
    power_ranges, power_begin, last_power = list[tuple[int, int]](), 0, int(length_powers.max())
    for power_end in range(1, last_power + 1):
        if int(((length_powers > power_begin) & (length_powers <= power_end)).sum()) >= FEW:
            power_ranges.append((power_begin, power_end))
            power_begin = power_end
    if power_begin < last_power:
        power_ranges.append((power_ranges.pop()[0] if power_ranges else 0, last_power))
    baselines_told = []
    for power_low, power_high in power_ranges:
        class_losses = loss[(length_powers > power_low) & (length_powers <= power_high)]
        median = float(np.median(class_losses))
        robust_scale = max(SIGMA * float(np.median(np.abs(class_losses - median))), LEAST)
        length_limit = 1 << 62 if power_high == last_power else 1 << power_high
        class_size = len(class_losses)
        baselines_told.append(
            Like(below=length_limit, documents=class_size, median=median, scale=robust_scale)
        )
    return baselines_told


def judge_losses(by: Sequence[Like], tokens: Int64s, loss: Floats) -> Floats:
    """Distance of the losses of texts [d] from the baseline, in robust deviations; nan without `by`."""
    if not by:
        return np.full(len(tokens), np.nan)
    baseline_index = np.searchsorted([like.below for like in by], tokens, side="right")
    medians, scales = np.array([like.median for like in by]), np.array([like.scale for like in by])
    return (loss - medians[baseline_index]) / scales[baseline_index]


def loss_histogram(loss: Floats) -> tuple[list[float], list[int]]:
    """(edges, counts) of the finite losses."""
    good = loss[np.isfinite(loss)]
    if not good.size:
        return [0.0, 1.0], [0]
    lowest_loss, highest_loss = float(good.min()), float(good.max())
    bar_counts, bar_edges = np.histogram(good, BARS, (lowest_loss, max(highest_loss, lowest_loss + LEAST)))
    return bar_edges.tolist(), bar_counts.tolist()
