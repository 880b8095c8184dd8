"""Finds a loss that swings: a sine through the latest steps, of a period that is fitted. Pure.

A fit takes the latest `CYCLES` periods. It counts if the sine is most of what a smooth trend leaves of them, unlike a
step, a spike or a drift; and if it is far beyond the scatter from step to step, unlike noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megastable_guard.robust import MAD_TO_SIGMA

Floats = npt.NDArray[np.float64]

PERIODS = tuple(round(4 * 50 ** (i / 39)) for i in range(40))  # steps, 4 to 200
CYCLES = 2.75  # periods that a fit takes
LONGEST = math.ceil(CYCLES * PERIODS[-1])  # losses that are needed at most
SHARE = 0.7  # of the squares around the trend that the sine explains, at least
AMPLITUDE = 3.5  # of the scatter of single steps, at least: those of 5 are found in spite of noise
POWER = 40.0  # likelihood of chance: e to minus this, with the scatter known


class Swing(NamedTuple):
    """period: steps; amplitude: nats; sigma: the scatter of single steps; share: of the squares that it explains."""

    period: int
    amplitude: float
    sigma: float
    share: float


@cache
def _bases(period: int) -> tuple[Floats, Floats]:
    """Orthonormal columns over the window of a period: of a smooth trend [n, 3], and of its sine around that [n, 2]."""
    n = math.ceil(CYCLES * period)
    t = np.linspace(-1.0, 1.0, n)
    trend, _ = np.linalg.qr(np.stack([np.ones(n), t, t * t], axis=1))
    phase = 2 * np.pi * np.arange(n) / period
    waves = np.stack([np.sin(phase), np.cos(phase)], axis=1)
    sine, _ = np.linalg.qr(waves - trend @ (trend.T @ waves))
    return trend, sine


def is_due(period: int, step: int) -> bool:
    """Whether a period is fitted after a step: four times within it."""
    return step % max(1, period // 4) == 0


def find_swing(losses: Sequence[float], step: int) -> Swing | None:
    """The clearest sine of those that are due. losses: of the latest steps, nats, finite; `LONGEST` are enough."""
    values = np.asarray(losses[-LONGEST:], dtype=np.float64)
    found = [swing for period in PERIODS if is_due(period, step) and (swing := _fit(values, period))]
    return max(found, key=lambda swing: swing.share, default=None)


def _fit(values: Floats, period: int) -> Swing | None:
    trend, sine = _bases(period)
    n = len(trend)
    if len(values) < n:
        return None
    around = values[-n:] - trend @ (trend.T @ values[-n:])
    wave = sine.T @ around
    power, whole = float(wave @ wave), float(around @ around)
    if whole <= 0 or power < SHARE * whole:
        return None
    # Of noise that widens, the scatter just before is the larger one.
    before = values[:-n]
    sigma = (
        max(_scatter(before), _scatter(before[-4 * n :]))
        if len(before) >= n
        else _scatter(around - sine @ wave)
    )
    amplitude = math.sqrt(2 * power / n)
    if amplitude < AMPLITUDE * sigma or power < 2 * POWER * sigma**2:
        return None
    return Swing(period, amplitude, sigma, power / whole)


def _scatter(values: Floats) -> float:
    """Robust scatter of single steps, whatever trend they have."""
    return MAD_TO_SIGMA / math.sqrt(2) * float(np.median(np.abs(np.diff(values))))
