"""Who is guilty? The losses of suspects on the last good state, against those of samples known to be harmless.

Pure: `train` side code (recovery.py) measures, these functions conclude. The experiments they read:
1. the step that tripped, again, on the very state it was refused on: another result means hardware;
2. every sample since the onset on the state before it: one that is bad there is bad data;
3. a batch whose loss is ordinary but whose gradient is not, there: its worst samples by their own gradients.
Nobody guilty: the same data is harmless on the good state, so it was the state; if it comes back with other data,
the learning rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megastable.stability.policy import Cause

Floats = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]

SCALE_FLOOR = 0.05  # nats: samples of one kind of text lie at least so far apart; a MAD below it is luck
WORSE = 0.05  # nats: a healthy state only gets better at what it was trained on
ENOUGH = 16  # samples of a corpus of its own, below which all corpora are compared together
SAME = 1e-3  # relative: the same kernels on the same numbers agree far better, also where a GPU's sums are not ordered
GRADIENT_RATIO = 4.0  # a sample's gradient norm over that of ordinary samples; twice occurs in clean text


@dataclass(frozen=True)
class Suspect:
    """A sample on the good state. loss: nats per token. z: robust, among harmless samples of its corpus. gradient_norm:
    of the sample alone, None when it was not measured."""

    position: int
    loss: float
    z: float
    gradient_norm: float | None = None


@dataclass(frozen=True)
class Conclusion:
    """The cause, the guilty positions (ascending), the worst suspects with their numbers, and a sentence."""

    cause: Cause
    guilty: list[int]
    suspects: list[Suspect]
    reason: str


def deviations(losses: Floats, corpora: Int64s, reference: Floats, reference_corpora: Int64s) -> Floats:
    """Robust z of each loss [n] among the reference losses [m] of its corpus; inf where it is not finite.

    (x - median) / (1.4826 MAD): Iglewicz & Hoaglin 1993. nan where there is nothing to compare with.
    """
    z = np.full(losses.shape, np.nan)
    reference_finite = np.isfinite(reference)
    for corpus in np.unique(corpora):
        own = reference[reference_finite & (reference_corpora == corpus)]
        known = own if own.size >= ENOUGH else reference[reference_finite]
        if known.size:
            centre = np.median(known)
            scale = max(SCALE_FLOOR, 1.4826 * float(np.median(np.abs(known - centre))))
            members = corpora == corpus
            z[members] = (losses[members] - centre) / scale
    z[~np.isfinite(losses)] = np.inf
    return z


def guilty_by_loss(z: Floats, threshold: float) -> npt.NDArray[np.bool_]:
    """Samples that the good state finds far worse than harmless ones."""
    return np.asarray(np.nan_to_num(z, nan=0.0) > threshold)


def guilty_by_gradient(norms: Floats, ordinary: Floats) -> npt.NDArray[np.bool_]:
    """Samples whose own gradient norm [n] is far above that of ordinary samples [m], or not finite."""
    usual = np.median(ordinary[np.isfinite(ordinary)]) if np.isfinite(ordinary).any() else np.inf
    return ~np.isfinite(norms) | (norms > GRADIENT_RATIO * usual)


def reproduced(recorded: Floats, again: Floats) -> bool:
    """Whether a replay gave the same per-sample losses."""
    same = np.isclose(recorded, again, rtol=SAME, atol=0.0, equal_nan=True)
    return bool(np.all(same | (~np.isfinite(recorded) & ~np.isfinite(again))))


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


def conclude(suspects: list[Suspect], guilty: list[int], recurred: bool, compared_with: int) -> Conclusion:
    """Put the experiments on the good state together. recurred: after an action that had found nobody guilty."""
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
    if recurred:
        return Conclusion(
            Cause.LEARNING_RATE,
            [],
            worst,
            "it came back with other data, and no sample is bad on the good state",
        )
    return Conclusion(
        Cause.STATE, [], worst, f"all {len(suspects)} samples are harmless on the state before the onset"
    )


def ranges(positions: list[int]) -> list[tuple[int, int]]:
    """Ascending positions as ranges [first, end)."""
    found: list[tuple[int, int]] = []
    for position in positions:
        if found and found[-1][1] == position:
            found[-1] = (found[-1][0], position + 1)
        else:
            found.append((position, position + 1))
    return found
