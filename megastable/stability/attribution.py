"""Who is guilty? The losses of suspects on the last good state, against those of samples known to be harmless.

Pure: `train` side code (recovery.py) measures, these functions conclude. The experiments they read:
1. the step that tripped, again, on the very state it was refused on: a result that two replays agree on, and the step
   does not, means hardware; so do replays that differ, too, where bits repeat or where they differ on a good state;
2. the same in FP8 runs, but without it: where the trouble is gone, it is one of numerics;
3. every sample since the onset on the state before it: one that is bad there is bad data;
4. where no loss is bad there: a batch with an ordinary loss and an extraordinary gradient, halved down to its cause.
Nobody guilty: the same data is harmless on the good state, so it was the state; if it comes back with other data,
the learning rate.

Text has heavy tails: among thousands of harmless samples some are far out, and a fixed bound finds a culprit in every
large batch. So a suspect is measured by how often harmless samples of its corpus are as bad (a conformal p-value), and
guilty are so many of them as chance alone would hardly bring (Benjamini and Hochberg 1995): where all are harmless,
some are called guilty in at most `FALSE` of the cases, whatever the distribution (Bates, Candes, Lei, Romano and Sesia,
"Testing for outliers with conformal p-values", Annals of Statistics 2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megastable.stability.policy import Cause
from megastable.stability.robust import Trend

Floats = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

SCALE_FLOOR = 0.05  # nats: samples of one kind of text lie at least so far apart; a MAD below it is luck
WORSE = 0.05  # nats: a healthy state only gets better at what it was trained on
ENOUGH = 48  # harmless samples of a corpus, below which nothing is said of it: a window is skipped, then
GROUP = 64  # harmless samples that a median and a MAD are taken of: fewer make both luck, more span a falling loss
FALSE = 0.03  # share of the guilty that may be innocent; and how often some are guilty where nobody is
# The same for so many at once: chance brings 6 where 1.5 are expected once in 200 times.
CROWD, CROWD_FALSE = 6, 0.25
MOST = 0.7  # of the threshold, beyond which suspects are bad where at least half of all are
LIKE = 0.8  # of the deviation of a sample that its gradient convicts, beyond which its like are bad
TELLING = 2.0  # ... if that is so much at least: an ordinary loss says nothing
TAIL = 3.0  # beyond the worst harmless sample, chances fall with this power: Student t, 3 degrees; text is not as bad
TAIL_KNOWN = 100  # harmless samples from which on the worst of them says where that tail begins
SAME = 1e-3  # relative: the same kernels on the same numbers agree far better, also where a GPU's sums are not ordered
SAME_NORM = 0.05  # relative: where a GPU sums gradients in any order, their norm agrees far better
GRADIENT_RATIO = 4.0  # a gradient norm over that of as many ordinary samples; twice occurs in clean text
EXCESS = 3.0  # sigma above its trend, from which on a loss or gradient norm is trouble that can be gone
REMAINS = 0.5  # of it without FP8, above which FP8 is not to blame
OUTLIER = 6.0  # sigma, the same where there is no number in FP8: such a batch is bad by itself
BATCH_RATIO = 1.5  # the same of a batch that is looked into: means scatter little


@dataclass(frozen=True)
class Suspect:
    """A sample on the good state. loss: nats per token. z: robust, among harmless samples of its corpus, nan where too
    few are known. gradient_norm: of the sample alone, None when it was not measured."""

    position: int
    loss: float
    z: float
    gradient_norm: float | None = None


class Result(NamedTuple):
    """Of a step: fp64 [global batch], nats; the norm of its gradient."""

    losses: Floats
    norm: float


@dataclass(frozen=True)
class Conclusion:
    """The cause, the guilty positions (ascending), the worst suspects with their numbers, and a sentence."""

    cause: Cause
    guilty: list[int]
    suspects: list[Suspect]
    reason: str


def compare(losses: Floats, corpora: Int64s, harmless: Floats, of: Int64s) -> tuple[Floats, Floats]:
    """How far out each loss [n] is for its corpus, and how often a harmless one is as far out: z and p, fp64 [n].

    harmless: losses [m], oldest first, each when its sample was not trained on yet (one that was is no measure of new
    text), of: their corpora. z: (x - median) / (1.4826 MAD), Iglewicz and Hoaglin 1993, of the latest harmless ones.
    nan and 1 where fewer than `ENOUGH` of the corpus are known; inf and 0 where a loss is not finite.
    """
    z, p = np.full(losses.shape, np.nan), np.ones(losses.shape)
    finite = np.isfinite(harmless)
    by_corpus = {int(c): harmless[finite & (of == c)] for c in np.unique(of)}
    usual = {c: _standardize(known) for c, known in by_corpus.items() if known.size >= ENOUGH}
    # How corpora scatter differs, and is soon known; how far their tails reach is not, but differs less.
    everyone = np.sort(np.concatenate([np.empty(0), *(own for own, _, _ in usual.values())]))
    for corpus, (own, centre, scale) in usual.items():
        members = corpora == corpus
        z[members] = (losses[members] - centre) / scale
        p[members] = _chances(z[members], own if own.size >= TAIL_KNOWN else everyone)
    broken = ~np.isfinite(losses)
    z[broken], p[broken] = np.inf, 0.0
    return z, p


def _standardize(known: Floats) -> tuple[Floats, float, float]:
    """z of each [m] among its contemporaries, sorted; centre and scale at the end of the latest.

    Losses fall, and come apart: contemporaries are compared with a line through the medians of their halves.
    """
    z, centre, scale = [], 0.0, 1.0
    for group in np.array_split(known, max(1, min(8, known.size // GROUP))):
        early, late = (float(np.median(half)) for half in np.array_split(group, 2))
        line = (early + late) / 2 + (late - early) * np.linspace(-1.0, 1.0, group.size)
        scale = max(SCALE_FLOOR, 1.4826 * float(np.median(np.abs(group - line))))
        centre = float(line[-1])
        z.append((group - line) / scale)
    return np.sort(np.concatenate(z)), centre, scale


def _chances(z: Floats, usual: Floats) -> Floats:
    """Of each z, how often a harmless sample is as bad, or a little more often; usual: ascending.

    Luck is allowed one standard error, as one reference serves many suspects.
    """
    beyond = 1 + usual.size - np.searchsorted(usual, z, side="left")
    share = np.minimum(1.0, (beyond + np.sqrt(beyond)) / (usual.size + 1))
    if usual.size < TAIL_KNOWN:
        return np.asarray(share)
    worst = max(1.0, float(usual[-1]))
    return np.asarray(share * (worst / np.maximum(z, worst)) ** TAIL)


def guilty_by_loss(z: Floats, p: Floats, threshold: float) -> Bools:
    """The suspects [n] that are bad (z above `threshold`), and more of them than harmless samples account for.

    Few must be as bad as hardly any harmless sample is; many may be as bad as some are. Where most are far out
    together, none must be as far by itself.
    """
    known = np.nan_to_num(z, nan=0.0)
    most = known > MOST * threshold
    bad = most if 2 * most.sum() >= max(z.size, 2 * CROWD) else known > threshold
    guilty = np.zeros(z.shape, dtype=bool)
    ascending = np.sort(p[~np.isnan(z)])
    for innocent, least in ((FALSE, 1), (CROWD_FALSE, CROWD)):
        passed = np.flatnonzero(ascending <= innocent * np.arange(1, ascending.size + 1) / ascending.size)
        named = bad & (p <= ascending[passed[-1]]) if passed.size else np.zeros_like(bad)
        if named.sum() >= least:
            guilty |= named
    return guilty


def usual_norm(batch: float, alone: float, size: int, count: int) -> float:
    """Of the mean gradient of `count` ordinary samples, from those of `size` and of one.

    Its square is |mean|^2 + variance / count: McCandlish et al. 2018, appendix A.1.
    """
    if size == 1 or not alone > batch:
        return batch
    variance = (alone**2 - batch**2) / (1 - 1 / size)
    return float(np.sqrt(alone**2 - variance * (1 - 1 / count)))


def narrow(
    group: Int64s, norm: float, measure: Callable[[Int64s], float], budget: int
) -> tuple[Int64s, float]:
    """The part of a group of gradient norm `norm` that it comes from, and the norm of that part.

    measure: the norm of some positions' mean gradient, nan where it is not known; at most `budget` are asked for.
    Where one half's norm is below that of both together, the other's is above it.
    """
    known = True
    while group.size > 1 and budget > 1:
        half, rest = np.array_split(group, 2)
        found, budget = measure(half), budget - 1
        if math.isnan(found):
            return group, math.nan
        group, norm, known = (half, found, True) if found >= norm else (rest, norm, False)
    return group, norm if known or not budget else measure(group)


def reproduced(recorded: Floats, again: Floats, tolerance: float = SAME) -> bool:
    """Whether a replay gave the same numbers, within a relative tolerance; what is not finite counts as the same."""
    same = np.isclose(recorded, again, rtol=tolerance, atol=0.0, equal_nan=True)
    return bool(np.all(same | (~np.isfinite(recorded) & ~np.isfinite(again))))


class Replay(StrEnum):
    """Two replays of a step, compared with the step and with each other."""

    SAME = "same"  # the first replay agrees with the original step
    OTHER = "other"  # both replays agree, the original step differs
    UNSTEADY = "unsteady"  # every run differs


def replay(step: Result, again: Result, once_more: Callable[[], Result]) -> Replay:
    """Compare a step with its replay; where they differ, run a second replay: GPUs may sum in any order, and some
    states amplify it."""
    if alike(step, again):
        return Replay.SAME
    return Replay.OTHER if alike(again, once_more()) else Replay.UNSTEADY


def alike(one: Result, other: Result) -> bool:
    """Whether two runs of a step agree, in every loss and in the norm of the gradient."""
    norms = np.array([one.norm]), np.array([other.norm])
    return reproduced(one.losses, other.losses) and reproduced(*norms, SAME_NORM)


def gone(with_fp8: Sequence[float], without: Sequence[float], expected: Sequence[Trend | None]) -> bool:
    """Whether the trouble with a step is gone where it is computed without FP8.

    Each: loss (nats) and log gradient norm. What is not finite must become so, and no outlier. Of what lies above its
    trend more than half must vanish, of loss and norm alike where both do, and what does not lie there must not then.
    """
    if not all(map(math.isfinite, without)):
        return False
    broken = not all(map(math.isfinite, with_fp8))
    trouble = broken
    for now, then, usual in zip(with_fp8, without, expected, strict=True):
        if usual is None:
            continue
        level, bound = max(usual.level, usual.late), EXCESS * usual.scale
        out = now - level > bound
        most = OUTLIER * usual.scale if broken else REMAINS * (now - level) if out else bound
        if then - level > most:
            return False
        trouble |= out
    return trouble


def is_worse(now: Floats, recorded: Floats) -> bool:
    """Whether a state is worse than those that harmless samples were trained on: it is no good state to go back to.

    now, recorded: losses [n] of the same samples. A sign of life of the update before the first step that stood out:
    paired differences, their median against its own standard error (1.2533 sigma / sqrt(n)).
    """
    both = np.isfinite(now) & np.isfinite(recorded)
    if not both.any():
        return bool(recorded.size)
    change = now[both] - recorded[both]
    middle = float(np.median(change))
    error = 1.2533 * 1.4826 * float(np.median(np.abs(change - middle))) / np.sqrt(change.size)
    return bool(middle > WORSE + 4 * error)


def conclude(
    suspects: list[Suspect], guilty: list[int], recurred: bool, compared_with: int, steps: str
) -> Conclusion:
    """Put the experiments on the good state together.

    recurred: after an action that had found nobody guilty. steps: which ones the suspects are of, in words.
    """
    worst = sorted(suspects, key=lambda s: math.inf if math.isnan(s.z) else -s.z)
    if guilty:
        bad = next(s for s in worst if s.position in guilty)
        norm = bad.gradient_norm
        alone = "" if norm is None else f", and by itself a gradient norm of {norm:.3g}"
        return Conclusion(
            Cause.DATA,
            sorted(guilty),
            worst,
            f"{len(guilty)} of {len(suspects)} samples are bad on the state before the onset, too: the worst has a "
            f"loss of {bad.loss:.2f} ({bad.z:.0f} robust deviations above {compared_with} harmless ones){alone}",
        )
    harmless = f"none of the {len(suspects)} samples of {steps} is bad on the state before it"
    if unknown := sum(math.isnan(s.z) for s in suspects):
        harmless += f" ({unknown} of them of corpora with too few samples before to tell)"
    if recurred:
        return Conclusion(Cause.LEARNING_RATE, [], worst, f"it came back with other data, and {harmless}")
    return Conclusion(Cause.STATE, [], worst, harmless)


def ranges(positions: list[int]) -> list[tuple[int, int]]:
    """Ascending positions as ranges [first, end)."""
    found: list[tuple[int, int]] = []
    for position in positions:
        if found and found[-1][1] == position:
            found[-1] = (found[-1][0], position + 1)
        else:
            found.append((position, position + 1))
    return found
