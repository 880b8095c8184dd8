"""Judges the gradients of all data ranks before the update: is the sum that of its parts, does a rank's gradient stand
out? Pure.

Columns of a data rank d, each summed over all ranks (engine/local_gradients.py):

    0  what the checksums of slice d of every rank's gradient add up to, less that of the sum that rank d received
    1  squared norms of slice d of every rank's gradient
    2  squared norm of rank d's gradient
    3  on a sample of slice d: dot product of rank d's gradient and the sum of the others'
    4  there, squared norm of rank d's gradient
    5  there, squared norm of the sum of the others'
    6  number of ranks of d whose gradient is that of the step before, bit for bit
    7  number of ranks of d whose gradient is zero

Without other data ranks a row belongs to a rank (engine/own_gradients.py): 3 to 5 compare its gradient with its first
moments, whose squared norm is 5, and there is no sum.

So 64 bytes per row and step. What is found in columns 2 to 7 is a doubt, which repeating the step proves or
removes: data may do all that, too.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

COLUMNS = 8
ROUNDING = 2.0**-24  # fp32's
SLACK = 64.0

WINDOW = 64  # accepted steps that say what is usual
FEW = 16  # fewer say too little
NEWEST = 8  # of them, where what is usual drifts
FAR = 8.0  # sigma of a norm's ratio
APART = (
    5.0  # sigma between the usual cosine and that of a negated gradient, so that one is told from the other
)
RATIO = 0.69  # the least change of the log of a norm that counts: a factor of 2
QUIET, LONGEST = 100, 6400  # accepted steps without a doubt of what was cleared; a doubt costs about four
RATIO_SCATTER = 0.05  # the least that scatter is taken to be
COSINE_SCATTER = 0.02
# The scatter of few steps, at the start and after every resume, is often too small: it counts for this much more, over
# the number of steps. Of normal numbers a sound rank is then doubted as rarely with 16 steps as with 64: 0.4 times in
# 1,000 steps at most, instead of 1.4.
FEWNESS = 6.0


class RankGradient(NamedTuple):
    """The columns of a data rank."""

    excess: float
    slices: float
    square: float
    dot: float
    own: float
    others: float
    stale: float
    zero: float


def rows(columns: Sequence[float]) -> list[RankGradient]:
    """columns: summed over all ranks."""
    return [RankGradient(*columns[i : i + COLUMNS]) for i in range(0, len(columns), COLUMNS)]


def bound(squares: float, ranks: int) -> float:
    """The most that rounding adds to the excess of a slice. squares: of its norms on all `ranks` data ranks.

    A sum of n numbers rounds n - 1 times, each time by at most u of a partial sum, the norm of which is at most
    sqrt(n * squares). Random signs turn the n errors of an element, and those of all elements, into a random walk:
    u * n * sqrt(squares). SLACK is for its tail, and for the rounding of the checksum itself.
    """
    return SLACK * ROUNDING * ranks * math.sqrt(squares)


def wrong_sums(found: Sequence[RankGradient]) -> list[int]:
    """The data ranks that received what is not the sum of what was sent. Gradients that are not finite themselves are
    left to the guard."""
    return [
        d
        for d, row in enumerate(found)
        if math.isfinite(row.slices) and not abs(row.excess) <= bound(row.slices, len(found))
    ]


class Kind(StrEnum):
    ZERO = "zero"
    STALE = "stale"
    SCALED = "scaled"
    NEGATED = "negated"


class Doubt(NamedTuple):
    """A data rank whose gradient stands out, and why: a phrase. size: in sigma; 0 if there is no more or less."""

    rank: int
    kind: Kind
    reason: str
    size: float = 0.0


class _Bar(NamedTuple):
    """What was cleared: of this kind, less than `size` is no doubt until so many steps are accepted; quiet: how many
    that were from when it was set."""

    size: float
    until: int
    quiet: int


class Consistency:
    """Compares each rank's gradient with the others', as that usually is.

    The usual is the median of the last accepted steps, with the median absolute deviation as its scatter: of the log
    of a rank's norm over the median norm of the others, and of its cosine to their sum. Both depend on how alike the
    ranks' samples are, which differs between runs, and changes slowly in one. A negated gradient has the usual cosine
    with the other sign: where these two are not far apart, because each rank has few samples, it cannot be told in one
    step, and changes the sum no more than other samples would.

    What a repetition has cleared is no doubt again soon: that this rank's gradient is zero, or that of the step before;
    and of any rank a norm or a cosine that is no further away. Among thousands of ranks chance makes one stand out
    every few steps, but ever more rarely further than ever before; and what is wrong by much is still seen.

    mutual: whether rows are of data ranks; else a rank's gradient is compared with its own first moments, and its norm,
    as a multiple of theirs, with that of other ranks.
    """

    def __init__(self, mutual: bool = True) -> None:
        self._mutual, self._reference = mutual, "the others' sum" if mutual else "its first moments"
        self._ratios = deque[Floats](maxlen=WINDOW)  # of accepted steps, [data ranks]
        self._cosines = deque[Floats](maxlen=WINDOW)
        self._accepted = 0
        self._bars: dict[tuple[Kind, int | None], _Bar] = {}

    def doubts(self, found: Sequence[RankGradient]) -> list[Doubt]:
        """Before the update; norms that are not finite are left to the guard."""
        return [doubt for doubt in self._all(found) if not self._barred(doubt)]

    def clear(self, doubts: Iterable[Doubt]) -> None:
        """It was the data, or chance."""
        for doubt in doubts:
            before = self._bars.get(key := _key(doubt))
            quiet = LONGEST if doubt.size else QUIET if before is None else min(2 * before.quiet, LONGEST)
            size = max(doubt.size, 0.0 if before is None or not self._stands(before) else before.size)
            self._bars[key] = _Bar(size, self._accepted + quiet, quiet)

    def _barred(self, doubt: Doubt) -> bool:
        bar = self._bars.get(_key(doubt))
        return bar is not None and self._stands(bar) and doubt.size <= bar.size

    def _stands(self, bar: _Bar) -> bool:
        return self._accepted < bar.until

    def _all(self, found: Sequence[RankGradient]) -> list[Doubt]:
        table = np.asarray(found, dtype=np.float64)
        if not np.isfinite(table).all():
            return []
        zero = [d for d, row in enumerate(found) if row.zero]
        if zero and len(zero) < len(found):
            return [Doubt(d, Kind.ZERO, "is zero") for d in zero]
        stale = [d for d, row in enumerate(found) if row.stale and not row.zero]
        if stale and len(stale) < len(found):  # all of them: the same batch on the same weights
            return [Doubt(d, Kind.STALE, "is that of the step before, bit for bit") for d in stale]
        if len(self._ratios) < FEW:
            return []
        return [*self._scaled(self._ratios_of(table)), *self._negated(self._cosines_of(table))]

    def accept(self, found: Sequence[RankGradient]) -> None:
        """The update was applied."""
        self._accepted += 1
        table = np.asarray(found, dtype=np.float64)
        self._ratios.append(self._ratios_of(table))
        self._cosines.append(self._cosines_of(table))

    def _ratios_of(self, table: Floats) -> Floats:
        if self._mutual:
            return _ratios(_column(table, "square"))
        own, moments = _column(table, "own"), _column(table, "others")
        # Layers' norms drift apart in training; their moments follow.
        return _ratios(np.divide(own, moments, out=np.ones_like(own), where=(own > 0) & (moments > 0)))

    def _cosines_of(self, table: Floats) -> Floats:
        return _cosines(table, self._mutual and len(table) == 2)

    def _scaled(self, ratios: Floats) -> list[Doubt]:
        usual, scatter = (_usual if self._mutual else _newest)(self._ratios, RATIO_SCATTER)
        times = np.exp(ratios - usual)
        apart = np.abs(ratios - usual)
        far = apart > np.maximum(RATIO, FAR * scatter)
        return [
            Doubt(
                int(d),
                Kind.SCALED,
                f"has {times[d]:.3g} times its usual norm beside the others'",
                float(apart[d] / scatter[d]),
            )
            for d in np.flatnonzero(far)
        ]

    def _negated(self, cosines: Floats) -> list[Doubt]:
        usual, scatter = _usual(self._cosines, COSINE_SCATTER)
        other = (2 * usual >= APART * scatter) & (cosines < -usual / 2)
        return [
            Doubt(
                int(d),
                Kind.NEGATED,
                f"has a cosine of {cosines[d]:.2f} to {self._reference}, usually {usual[d]:.2f}",
                float((usual[d] - cosines[d]) / scatter[d]),
            )
            for d in np.flatnonzero(other)
        ]


def _key(doubt: Doubt) -> tuple[Kind, int | None]:
    return doubt.kind, None if doubt.size else doubt.rank


def _column(table: Floats, name: str) -> Floats:
    return table[:, RankGradient._fields.index(name)]


def _ratios(squares: Floats) -> Floats:
    """Of every rank: log of its norm over the median of the others'."""
    logs = np.log(np.where(squares > 0, squares, 1.0)) / 2
    place = np.argsort(np.argsort(logs, kind="stable"), kind="stable")
    ordered, half = np.sort(logs), (len(logs) - 1) // 2
    # Without itself: what is behind its place moves up by one.
    upper = ordered[half + (half >= place)]
    lower = upper if len(logs) % 2 == 0 else ordered[half - 1 + (half - 1 >= place)]
    ratios: Floats = logs - (lower + upper) / 2
    return ratios


def _cosines(table: Floats, one: bool) -> Floats:
    """Of every rank: between its gradient and what it is compared with, 0 if one is zero. one: the rows are two
    measurements of one number."""
    dot, own, others = (_column(table, name) for name in ("dot", "own", "others"))
    sizes = np.sqrt(own) * np.sqrt(others)
    cosines: Floats = np.divide(dot, sizes, out=np.zeros_like(dot), where=sizes > 0)
    if one:
        cosines[:] = cosines.mean()
    return cosines


def _usual(before: Sequence[Floats], least: float) -> tuple[Floats, Floats]:
    """Of every rank: median, and scatter, at least `least`."""
    window = np.stack(before)
    middle = np.median(window, 0)
    return middle, np.maximum(least, _careful(1.4826 * np.median(np.abs(window - middle), 0), len(window)))


def _newest(before: Sequence[Floats], least: float) -> tuple[Floats, Floats]:
    """The same of what drifts: the median of the newest, and the scatter of the differences of successive ones."""
    window = np.stack(before)
    scatter = 1.4826 / math.sqrt(2) * np.median(np.abs(np.diff(window, axis=0)), 0)
    return np.median(window[-NEWEST:], 0), np.maximum(least, _careful(scatter, len(window)))


def _careful(scatter: Floats, steps: int) -> Floats:
    return scatter * (1 + FEWNESS * (1 / steps - 1 / WINDOW))
