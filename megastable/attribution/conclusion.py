"""Find the cause of an incident and the guilty samples: losses on the last good state against harmless samples.

Pure: recovery/ measures, these functions conclude. The experiments:
1. the refused step, again, on the very state it was refused on: if two replays agree with each other but not with the
   step, it was the hardware; also if they differ where bits should repeat or where replays of a good state agree;
2. the same without FP8, or by plain PyTorch in place of a kernel: if the spike vanishes, the cause is numerics;
3. every sample since the onset, on the state before it: one that is bad there is bad data, and so is a crowd that is
   worse than harmless batches (groups.py, scores.py); then its region is followed until it ends;
4. a batch with an extraordinary gradient there: the samples in it that are like each other and unlike harmless ones, if
   losses do not name them; else, if no loss is bad, the batch is halved down to one sample.
If no sample is guilty: the same data is harmless on the good state, so the state was the cause.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megastable.attribution.region import Region
from megastable.base.text import plural
from megastable.guard.actions import Cause
from megastable.guard.policy import FEW
from megastable.guard.robust import Trend

Floats = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]

WORSE = 0.05  # nats: a healthy state only improves on what it was trained on
LIKE = 0.8  # times the deviation of a sample convicted by its gradient: similar samples beyond it are bad
TELLING = 2.0  # ... if that deviation is at least this: an ordinary loss says nothing
SAME = 1e-3  # relative: replays agree far better, even with unordered sums on a GPU
SAME_NORM = 0.05  # relative: norms agree far better, even with unordered sums of gradients
GRADIENT_RATIO = (
    4.0  # gradient norm relative to as many ordinary samples; a ratio of two occurs in clean text
)
EXCESS = 3.0  # sigma above its trend: a loss or gradient norm beyond it counts as elevated
REMAINS = 0.5  # share of it that remains when computed otherwise: above this the numerics are not the cause
OUTLIER = 6.0  # sigma, if the step was not finite: such a batch is bad by itself
BATCH_RATIO = 1.5  # the same ratio for a batch that is examined: means scatter little


@dataclass(frozen=True)
class Suspect:
    """A sample on the good state. loss: nats per token. z: robust, among harmless samples of its corpus, nan if too few
    are known. gradient_norm: of the sample alone, None if not measured."""

    position: int
    loss: float
    z: float
    gradient_norm: float | None = None


class Result(NamedTuple):
    """Result of a step: losses, fp64 [global batch], nats; the norm of its gradient."""

    losses: Floats
    norm: float


@dataclass(frozen=True)
class Conclusion:
    """The cause, the guilty positions (ascending), the worst suspects with their numbers, and a sentence.

    region: the extent of the bad data, None if no sample is guilty. later: positions that are suspected, but not
    guilty: they are deferred. alone: the guilty ones convicted individually by their own loss, not as part of a crowd
    or by a gradient. kernels: the names of those without which the step is harmless. proven: a trial has clearly shown
    that the samples do harm, or their step was not finite.
    """

    cause: Cause
    guilty: list[int]
    suspects: list[Suspect]
    reason: str
    region: Region | None = None
    later: list[int] = field(default_factory=list)
    alone: list[int] = field(default_factory=list)
    kernels: tuple[str, ...] = ()
    proven: bool = False

    @property
    def convicted(self) -> list[int]:
        """Convicted positions, ascending."""
        return sorted(self.guilty)

    @property
    def few(self) -> bool:
        """Whether a few samples are named, most of them far out by themselves."""
        return 0 < len(self.convicted) <= min(FEW, 2 * len(self.alone))

    def keep_first(self, most: int) -> Conclusion:
        """With the first `most` samples only."""
        kept = set(self.convicted[:most])
        return replace(self, guilty=[p for p in self.guilty if p in kept])

    def individuals(self, met: set[int]) -> Conclusion:
        """Without the samples of `met` that are not convicted individually; any other guilty sample resembles the
        rest."""
        if not self.alone:
            return replace(self, guilty=[])
        return replace(self, guilty=[p for p in self.guilty if p in self.alone or p not in met])


def usual_norm(batch: float, alone: float, size: int, count: int) -> float:
    """Norm of the mean gradient of `count` ordinary samples, from the norms for `size` samples and for one.

    Its square is |mean|^2 + variance / count: McCandlish et al. 2018, appendix A.1.
    """
    if size == 1 or not alone > batch:
        return batch
    variance = (alone**2 - batch**2) / (1 - 1 / size)
    return float(np.sqrt(alone**2 - variance * (1 - 1 / count)))


def halvings(size: int) -> int:
    """The budget with which `narrow` reaches one of `size` samples."""
    return (size - 1).bit_length() + 1


def narrow(
    group: Int64s, norm: float, measure: Callable[[Int64s], float], budget: int
) -> tuple[Int64s, float]:
    """Narrow down a group with gradient norm `norm` to the part that causes it; returns that part and its norm.

    measure: the norm of the mean gradient of some positions, nan if unknown; called at most `budget` times. If one
    half's norm is below that of both together, the other's is above it: the triangle inequality gives a lower bound.
    """
    known = True
    while group.size > 1 and budget > 1:
        half, rest = np.array_split(group, 2)
        found, budget = measure(half), budget - 1
        if math.isnan(found):
            return group, math.nan
        if found >= norm:
            group, norm, known = half, found, True
        else:
            least = (group.size * norm - half.size * found) / rest.size
            group, norm, known = rest, max(norm, least), False
    return group, norm if known or not budget else measure(group)


def reproduced(recorded: Floats, again: Floats, tolerance: float = SAME) -> bool:
    """Whether a replay gave the same numbers, within a relative tolerance; non-finite numbers count as equal."""
    same = np.isclose(recorded, again, rtol=tolerance, atol=0.0, equal_nan=True)
    return bool(np.all(same | (~np.isfinite(recorded) & ~np.isfinite(again))))


class Replay(StrEnum):
    """Two replays of a step, compared with the step and with each other."""

    SAME = "same"  # the first replay agrees with the original step
    OTHER = "other"  # both replays agree, the original step differs
    UNSTEADY = "unsteady"  # every run differs


def replay(step: Result, again: Result, once_more: Callable[[], Result]) -> Replay:
    """Compare a step with its replay; if they differ, run a second replay: GPUs may sum in any order, and some
    states amplify it."""
    if alike(step, again):
        return Replay.SAME
    return Replay.OTHER if alike(again, once_more()) else Replay.UNSTEADY


def alike(one: Result, other: Result) -> bool:
    """Whether two runs of a step agree, in every loss and in the norm of the gradient."""
    norms = np.array([one.norm]), np.array([other.norm])
    return reproduced(one.losses, other.losses) and reproduced(*norms, SAME_NORM)


def gone(step: Sequence[float], otherwise: Sequence[float], expected: Sequence[Trend | None]) -> bool:
    """Whether a step's anomaly vanishes when it is computed otherwise: without FP8, or by other kernels.

    Each: loss (nats) and log gradient norm. A non-finite number must become finite and ordinary. Of the excess over the
    trend more than half must vanish, for each of loss and norm that is elevated; the other one must not rise.
    """
    if not all(map(math.isfinite, otherwise)):
        return False
    broken = not all(map(math.isfinite, step))
    trouble = broken
    for now, then, usual in zip(step, otherwise, expected, strict=True):
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
    """Whether a state is worse than the states on which harmless samples were trained: then it is not a good state.

    now, recorded: losses [n] of the same samples. Detects the update before the first anomalous step:
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
    suspects: list[Suspect],
    guilty: list[int],
    compared_with: int,
    steps: str,
    crowd: float = 1.0,
    region: Region | None = None,
    together: float | None = None,
    endless: int | None = None,
) -> Conclusion:
    """Combine the experiments on the good state into a conclusion.

    steps: the suspects' steps, in words. crowd: how often as many harmless samples are as bad. region: of `Conclusion`.
    together: gradient norm of a batch of the guilty, relative to an ordinary one's. endless: batches after the window
    for which bad samples went on without an end.
    """
    worst = sorted(suspects, key=lambda s: math.inf if math.isnan(s.z) else -s.z)
    if guilty:
        named = set(guilty)
        bad = next(s for s in worst if s.position in named)
        norm = bad.gradient_norm
        alone = "" if norm is None else f", and by itself a gradient norm of {norm:.3g}"
        chance = (
            f"; as many harmless ones are as bad in at most {100 * crowd:.2g} % of draws"
            if crowd < 0.05
            else ""
        )
        reason = (
            f"{len(guilty)} of {len(suspects)} samples are bad on the state before the onset, too: the worst has a "
            f"loss of {bad.loss:.2f} ({bad.z:.0f} robust deviations above {compared_with} harmless ones){alone}{chance}"
        )
        if together is not None:
            reason = (
                f"{len(guilty)} of {len(suspects)} samples are bad together on the state before the onset, too: a "
                f"batch of them has {together:.1f} times the gradient norm of an ordinary one, and they are like each "
                "other and unlike harmless samples; by itself the worst has a loss of "
                f"{bad.loss:.2f} ({bad.z:.0f} robust deviations above {compared_with} harmless ones)"
            )
        if region is not None:
            reason += f". {region.how[0].upper()}{region.how[1:]}"
        return Conclusion(Cause.DATA, sorted(guilty), worst, reason, region)
    if endless is not None:
        going_on = (
            f"samples of {steps} are bad on the state before it, but so are those of the next "
            f"{plural(endless, 'step')}, as far as was looked: that is no region of bad data"
        )
        return Conclusion(Cause.STATE, [], worst, going_on)
    harmless = f"none of the {len(suspects)} samples of {steps} is bad on the state before it"
    if unknown := sum(math.isnan(s.z) for s in suspects):
        harmless += f" ({unknown} of them cannot be judged: too few earlier samples of their corpora)"
    return Conclusion(Cause.STATE, [], worst, harmless)
