"""Judges the gradients of all data ranks before the update: is the sum that of its parts, does a rank's gradient stand
out? Pure.

A wrong sum is certain. That a gradient stands out is a doubt, which repeating the step proves or removes: data may do
that, too.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megastable.engine.local_gradients import RankGradient, bound_rounding

Floats = npt.NDArray[np.float64]

# Most and fewest accepted steps that say what is usual, and the newest of them, where it drifts.
WINDOW, FEW, NEWEST = 64, 16, 8
FAR = 8.0  # sigma of a norm's ratio
APART = 5.0  # sigma between the usual cosine and that of a negated gradient, to distinguish them
RATIO = 0.69  # the least change of the log of a norm that counts: a factor of 2
QUIET, LONGEST = 100, 6400  # accepted steps without a doubt of what was cleared; a doubt costs about four
RATIO_SCATTER, COSINE_SCATTER = 0.05, 0.02  # the least that the scatter of each is taken to be
# The scatter of few steps, at the start and after every resume, is often too small: it counts for this much more, over
# the number of steps. Of normal numbers a sound rank is then doubted as rarely with 16 steps as with 64: 0.4 times in
# 1,000 steps at most, instead of 1.4.
FEWNESS = 6.0


def find_wrong_sums(found: Sequence[RankGradient]) -> list[int]:
    """The data ranks that received what is not the sum of what was sent. Gradients that are not finite themselves are
    left to the guard."""
    return [
        d
        for d, row in enumerate(found)
        if math.isfinite(row.slices) and not abs(row.excess) <= bound_rounding(row.slices, len(found))
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

    def find_doubts(self, found: Sequence[RankGradient]) -> list[Doubt]:
        """Before the update; norms that are not finite are left to the guard."""
        return [doubt for doubt in self._all(found) if doubt.size > self._cleared(doubt)]

    def clear(self, doubts: Iterable[Doubt]) -> None:
        """It was the data, or chance."""
        for doubt in doubts:
            before = self._bars.get(_key(doubt))
            quiet = LONGEST if doubt.size else QUIET if before is None else min(2 * before.quiet, LONGEST)
            size = max(doubt.size, self._cleared(doubt))
            self._bars[_key(doubt)] = _Bar(size, self._accepted + quiet, quiet)

    def _cleared(self, doubt: Doubt) -> float:
        """The size up to which the like of it is cleared now; -1: none is."""
        bar = self._bars.get(_key(doubt))
        return bar.size if bar is not None and self._accepted < bar.until else -1.0

    def _all(self, found: Sequence[RankGradient]) -> list[Doubt]:
        if not np.isfinite(np.asarray(found, dtype=np.float64)).all():
            return []
        zero = [d for d, row in enumerate(found) if row.zero]
        if zero and len(zero) < len(found):
            return [Doubt(d, Kind.ZERO, "is zero") for d in zero]
        stale = [d for d, row in enumerate(found) if row.stale and not row.zero]
        if stale and len(stale) < len(found):  # all of them: the same batch on the same weights
            return [Doubt(d, Kind.STALE, "is that of the step before, bit for bit") for d in stale]
        if len(self._ratios) < FEW:
            return []
        ratios, cosines = self._compare(found)
        return [*self._scaled(ratios), *self._negated(cosines)]

    def accept(self, found: Sequence[RankGradient]) -> None:
        """The update was applied."""
        self._accepted += 1
        ratios, cosines = self._compare(found)
        self._ratios.append(ratios)
        self._cosines.append(cosines)

    def _compare(self, found: Sequence[RankGradient]) -> tuple[Floats, Floats]:
        """Of every rank: log of its norm over the others', and its gradient's cosine to what it is compared with, 0 if
        one is zero."""
        columns: Any = RankGradient(*np.asarray(found, dtype=np.float64).T)
        own, others = columns.own, columns.others
        sizes = np.sqrt(own) * np.sqrt(others)
        cosines = np.divide(columns.dot, sizes, out=np.zeros_like(sizes), where=sizes > 0)
        if not self._mutual:
            # Layers' norms drift apart in training; their moments follow.
            relative = np.divide(own, others, out=np.ones_like(own), where=(own > 0) & (others > 0))
            return _ratios(relative), cosines
        if len(found) == 2:  # two measurements of one number
            cosines[:] = cosines.mean()
        return _ratios(columns.square), cosines

    def _scaled(self, ratios: Floats) -> list[Doubt]:
        usual, scatter = _baseline(self._ratios, RATIO_SCATTER, drifts=not self._mutual)
        apart, times = np.abs(ratios - usual), np.exp(ratios - usual)
        far, sizes = np.flatnonzero(apart > np.maximum(RATIO, FAR * scatter)), apart / scatter
        reason = "has {:.3g} times its usual norm beside the others'"
        return [Doubt(int(d), Kind.SCALED, reason.format(times[d]), float(sizes[d])) for d in far]

    def _negated(self, cosines: Floats) -> list[Doubt]:
        usual, scatter = _baseline(self._cosines, COSINE_SCATTER)
        sizes = (usual - cosines) / scatter
        far = np.flatnonzero((2 * usual >= APART * scatter) & (cosines < -usual / 2))
        reason = f"has a cosine of {{:.2f}} to {self._reference}, usually {{:.2f}}"
        return [
            Doubt(int(d), Kind.NEGATED, reason.format(cosines[d], usual[d]), float(sizes[d])) for d in far
        ]


def _key(doubt: Doubt) -> tuple[Kind, int | None]:
    return doubt.kind, None if doubt.size else doubt.rank


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


def _baseline(before: Sequence[Floats], least: float, drifts: bool = False) -> tuple[Floats, Floats]:
    """Of every rank: median, and scatter, at least `least`. drifts: the median of the newest, and the scatter of the
    differences of successive ones."""
    window = np.stack(before)
    middle = np.median(window[-NEWEST:] if drifts else window, 0)
    apart = np.diff(window, axis=0) / math.sqrt(2) if drifts else window - middle
    scatter = 1.4826 * np.median(np.abs(apart), 0)
    return middle, np.maximum(least, scatter * (1 + FEWNESS * (1 / len(window) - 1 / WINDOW)))
