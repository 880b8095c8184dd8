"""Loss against learning rate: the sensitivity of Wortsman et al. (arXiv:2309.14322, section 2.2), the range of usable
rates, the best rate, and their trends over widths. Pure.

A curve maps rates to final losses in nats per token, at most the loss at initialization. Between two rates it is
linear in the logarithm of the rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from megastable_tools.study.trial import TrialResult

Losses = Mapping[float, float]


def lr_sensitivity(losses: Losses) -> float:
    """How much is lost, on average over the rates, compared with the best of them; nats per token.

    The mean over the rates of min(loss, loss at initialization) less the lowest loss (section 2.2).
    """
    return fmean(losses.values()) - min(losses.values())


def best(losses: Losses) -> float:
    """The rate with the lowest loss; of equal ones the lower."""
    return min(losses, key=lambda rate: (losses[rate], rate))


@dataclass(frozen=True)
class Optimum:
    """The best rate, between those tried where it can be. inside: whether both neighbours of the best one are worse."""

    rate: float
    inside: bool


def optimum(losses: Losses) -> Optimum:
    """The lowest point of the parabola, in the logarithm of the rate, through the best rate and its neighbours; at an
    end of the curve, the rate there."""
    rates = sorted(losses)
    at = rates.index(best(losses))
    if at in (0, len(rates) - 1):
        return Optimum(rates[at], False)
    x0, x1, x2 = (math.log(rate) for rate in rates[at - 1 : at + 2])
    y0, y1, y2 = (losses[rate] for rate in rates[at - 1 : at + 2])
    below, above = (x1 - x0) * (y1 - y2), (x1 - x2) * (y1 - y0)
    if below == above:  # three equal losses
        return Optimum(rates[at], True)
    lowest = x1 - 0.5 * ((x1 - x0) * below - (x1 - x2) * above) / (below - above)
    return Optimum(math.exp(lowest), True)


@dataclass(frozen=True)
class UsableRates:
    """Rates around the best one whose loss is within a margin of the best; open: the curve ends before it leaves."""

    lowest: float
    highest: float
    open_below: bool
    open_above: bool

    @property
    def factor(self) -> float:
        return self.highest / self.lowest


def usable(losses: Losses, margin: float) -> UsableRates:
    """margin: nats per token above the lowest loss."""
    rates, middle = sorted(losses), best(losses)
    limit = losses[middle] + margin
    lowest, open_below = _crossing(losses, [rate for rate in reversed(rates) if rate <= middle], limit)
    highest, open_above = _crossing(losses, [rate for rate in rates if rate >= middle], limit)
    return UsableRates(lowest, highest, open_below, open_above)


def _crossing(losses: Losses, rates: Sequence[float], limit: float) -> tuple[float, bool]:
    """(where the loss first passes `limit` on the way along `rates`, False), or (the last of them, True)."""
    for inner, outer in pairwise(rates):
        if losses[outer] > limit:
            share = (limit - losses[inner]) / (losses[outer] - losses[inner])
            return inner * (outer / inner) ** share, False
    return rates[-1], True


def edges(losses: Losses, margin: float) -> tuple[float, ...]:
    """The rates to try with more seeds: the best one, the highest usable one, and the one above it."""
    rates, limit = sorted(losses), min(losses.values()) + margin
    at = rates.index(best(losses))
    last = at
    while last + 1 < len(rates) and losses[rates[last + 1]] <= limit:
        last += 1
    return tuple(dict.fromkeys(rates[i] for i in (at, last, last + 1) if i < len(rates)))


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Of the line of least squares; nan of fewer than two different xs."""
    x, y = fmean(xs), fmean(ys)
    spread = sum((a - x) ** 2 for a in xs)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / spread if spread else math.nan


@dataclass(frozen=True)
class LrCurve:
    """A width under an intervention. results: by seed and rate; the seeds of `whole` have all rates, others those at
    the edge."""

    intervention: str
    width: int
    results: Mapping[int, Mapping[float, TrialResult]]
    whole: tuple[int, ...]

    def losses(self, seed: int) -> dict[float, float]:
        return {rate: result.capped for rate, result in self.results[seed].items()}

    @property
    def mean(self) -> dict[float, float]:
        """The curve of all whole seeds."""
        return {r: fmean(self.losses(s)[r] for s in self.whole) for r in sorted(self.results[self.whole[0]])}

    @property
    def sensitivities(self) -> list[float]:
        """Of the whole seeds."""
        return [lr_sensitivity(self.losses(seed)) for seed in self.whole]

    def highest(self, margin: float) -> list[float]:
        """The highest usable rate by every seed."""
        return [usable(self.losses(seed), margin).highest for seed in self.results]

    @property
    def parameters(self) -> int:
        return max(result.parameters for runs in self.results.values() for result in runs.values())

    @property
    def diverged(self) -> list[float]:
        """Rates at which a seed ended no better than it began."""
        return sorted({r for runs in self.results.values() for r, result in runs.items() if result.diverged})


@dataclass(frozen=True)
class Trend:
    """Over the widths of an intervention. sensitivity: change per doubling of the width, nats per token. best_rate: the
    exponent k of best rate ~ width^k, of the `inside` best rates that lie inside their curves; nan of fewer than
    two."""

    intervention: str
    sensitivity: float
    best_rate: float
    inside: int


def trends(curves: Sequence[LrCurve]) -> list[Trend]:
    found = []
    for name in dict.fromkeys(curve.intervention for curve in curves):
        mine = [curve for curve in curves if curve.intervention == name]
        widths = [math.log2(curve.width) for curve in mine]
        optima = [(w, optimum(curve.mean)) for w, curve in zip(widths, mine, strict=True)]
        inside = [(w, math.log2(one.rate)) for w, one in optima if one.inside]
        found.append(Trend(
            name, slope(widths, [fmean(curve.sensitivities) for curve in mine]),
            slope([w for w, _ in inside], [rate for _, rate in inside]) if inside else math.nan, len(inside),
        ))  # fmt: skip
    return found
