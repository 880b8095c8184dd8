"""Judges damage to the model that no batch shows, from looks at it once in a while. Pure.

The probe is the losses of a few samples that are never trained on. They are the same at every look, so what differs is
the model: the difference of two looks has hardly any noise. While a run learns they get easier, ever more slowly. A
model that is worse on them than that lets expect is damaged, or learns something else; which of the two, replays decide
(attribution/harm.py).

Tensors: an update moves a weight by about the rate, so the norm of a tensor changes slowly, and each tensor has a pace
of its own. Adam's second moments forget no faster than beta2 lets them. What breaks one of the two is not the work of
the optimizer, or of an update that is far beyond all others; whether the same steps do it again, a replay shows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megastable.guard.robust import MAD_TO_SIGMA

Floats = npt.NDArray[np.float64]

LEAST = 0.03  # nats by which the mean loss must lie above what was to be expected
# Usual scatters of these differences, and standard errors over the samples, beyond which one is clear: a trial decides.
SURE, ERRORS = 4.0, 3.0
KNOWN, NEWEST = 3, 16  # differences that tell their scatter: at least, and at most
APART = 5  # steps between looks that tell how fast the loss falls, at least
REST = 25  # steps
FASTER = 8.0  # times the fastest change of its norm that the tensor has shown
CHANGED = 0.05  # of its norm, at least
KNOWN_PACES, NEWEST_PACES = 2, 8  # looks that tell the pace of a tensor: at least, and at most
FORGOTTEN = 0.5  # of what is left of second moments if every gradient since was zero: less was changed


class JudgementPause:
    """No judgement for a while after a find that was the run's own work, twice as long each time that happens soon."""

    def __init__(self) -> None:
        self._end, self._times = 0, 0

    def begin(self, step: int) -> None:
        self._times = self._times + 1 if step <= self._end + REST * 2**self._times else 1
        self._end = step + REST * 2**self._times

    def is_over(self, step: int) -> bool:
        return step >= self._end


@dataclass(frozen=True)
class Rise:
    """The probe changed by `change` nats between the looks after steps `before` and `step`, which is `nats` more than
    expected."""

    before: int
    step: int
    change: float
    nats: float
    limit: float

    @property
    def reason(self) -> str:
        """As a sentence."""
        return (
            f"the loss of the probe samples, which are never trained on, changed by {self.change:+.3f} nats from step "
            f"{self.before} to step {self.step}, {self.nats:.3f} more than expected; usual are at most {self.limit:.3f}"
        )


class ProbeTrend:
    """One `judge` per look, in order."""

    def __init__(self) -> None:
        self.looks: list[tuple[int, Floats]] = []  # the newest ones
        # Changes less the expected ones, in units of these: while a run learns fast, its surprises are larger.
        self._surprises: deque[float] = deque(maxlen=NEWEST)
        self._pause = JudgementPause()

    def judge(self, step: int, losses: Floats) -> Rise | None:
        """A look after `step`: losses of the samples, [n] nats. A rise is no part of the trend until it is accepted."""
        if not self.looks:
            self.looks.append((step, losses))
            return None
        before, known = self.looks[-1]
        change = losses - known
        mean = float(change.mean()) if np.isfinite(losses).all() else math.inf
        error = float(change.std()) / math.sqrt(max(1, change.size - 1)) if math.isfinite(mean) else 0.0
        expected = self.expect(step)
        if expected is not None:
            unit = LEAST / SURE + abs(expected)
            limit = max(LEAST, ERRORS * error, unit * self._usual())
            if mean - expected > limit and self._pause.is_over(step):
                return Rise(before, step, mean, mean - expected, limit)
            if math.isfinite(mean):
                self._surprises.append((mean - expected) / unit)
        if math.isfinite(mean):
            self.looks = [*self.looks[-2 * NEWEST :], (step, losses)]
        return None

    def expect(self, step: int) -> float | None:
        """The change of the mean loss from the newest look to one after `step`: what the last rate of its fall makes,
        which goes on to slow down as it did; a loss that rose is expected to stay. None: too few looks are known."""
        known = [(at, float(losses.mean())) for at, losses in self.looks]
        spread = [known[-1]]
        for at, loss in reversed(known[:-1]):
            if spread[-1][0] - at >= APART:
                spread.append((at, loss))
        if len(spread) < 3:
            return None
        (last, level), (middle, before), (first, start) = spread[:3]
        rate, earlier = (level - before) / (last - middle), (before - start) / (middle - first)
        slows = min(1.0, rate / earlier) if earlier < 0 else 1.0
        return min(0.0, rate) * slows * (step - last)

    def accept(self, step: int, losses: Floats) -> None:
        """A rise was no damage: it is the level from now on."""
        if not np.isfinite(losses).all():
            return
        self._pause.begin(step)
        # At another level the loss falls as fast as before, for want of anything better.
        shift = losses - self.looks[-1][1]
        self.looks = [*((at, known + shift) for at, known in self.looks[:-1]), (step, losses)]

    def rewind(self, step: int) -> None:
        """The run is back after `step`."""
        self.looks = [(at, losses) for at, losses in self.looks if at <= step]

    def _usual(self) -> float:
        """The largest surprise that is usual, in its unit. At the start of a run, while the rate rises, any is."""
        if len(self._surprises) < KNOWN:
            return math.inf
        middle = float(np.median(self._surprises))
        scatter = MAD_TO_SIGMA * float(np.median(np.abs(np.array(self._surprises) - middle)))
        return middle + SURE * scatter


class TensorNorms(NamedTuple):
    """L2 norms of a tensor's weights and of its second moments; None if the optimizer has none."""

    weight: float
    second_moment: float | None


@dataclass(frozen=True)
class TensorJump:
    """The norm of `tensor` jumped from `old` to `new` between the looks after steps `before` and `step`. kind: weight
    or second_moment."""

    before: int
    step: int
    tensor: str
    kind: str
    old: float
    new: float

    @property
    def reason(self) -> str:
        """As a sentence."""
        if self.kind == "weight":
            told, why = "weights", f"at least {FASTER:g} times as fast as ever before"
        else:
            told, why = "second moments", "which is faster than they can forget"
        return (
            f"the norm of the {told} of {self.tensor} changed from {self.old:.4g} to {self.new:.4g} between the steps "
            f"{self.before} and {self.step}, {why}"
        )

    def is_repeated(self, norms: Mapping[str, TensorNorms]) -> bool:
        """Whether a replay of the steps, which led to these norms, has made at least half of the jump again."""
        again = getattr(norms[self.tensor], self.kind)
        half = (self.old + self.new) / 2
        return bool(again >= half if self.new > self.old else again <= half)


class TensorPaces:
    """One `judge` per look, in order. beta2: the decay rate of second moments, None if they are no such averages."""

    def __init__(self, beta2: float | None) -> None:
        self.beta2 = beta2
        self._pause = JudgementPause()
        self._last: tuple[int, float, int, dict[str, TensorNorms]] | None = None
        self._paces: dict[str, deque[float]] = {}

    def judge(
        self, step: int, rates: float, updates: int, norms: Mapping[str, TensorNorms]
    ) -> TensorJump | None:
        """A look after `step`: the sum of the rates of all updates so far, and their number; norms by tensor, the same
        on every rank. The farthest jump, if any; then the look is no part of the history."""
        last = self._last
        if last is None or updates <= last[2]:
            self._last = step, rates, updates, dict(norms)
            return None
        before, old_rates, old_updates, known = last
        moved = max(rates - old_rates, 1e-30)
        jumps = list[tuple[float, TensorJump]]()
        for name, now in norms.items():
            then = known.get(name)
            if then is None:
                continue
            change = abs(now.weight - then.weight)
            usual = self._paces.get(name, deque())
            if len(usual) >= KNOWN_PACES and not change <= CHANGED * then.weight:
                times = change / moved / max(*usual, 1e-30)
                if not times <= FASTER:
                    jumps.append((times, TensorJump(before, step, name, "weight", then.weight, now.weight)))
            if self.beta2 is not None and then.second_moment and now.second_moment is not None:
                least = FORGOTTEN * self.beta2 ** (updates - old_updates) * then.second_moment
                if not now.second_moment >= least:
                    moments = then.second_moment, now.second_moment
                    jumps.append((math.inf, TensorJump(before, step, name, "second_moment", *moments)))
        if jumps and self._pause.is_over(step):
            return max(jumps, key=lambda found: found[0])[1]
        self._learn(step, rates, updates, norms)
        return None

    def _learn(self, step: int, rates: float, updates: int, norms: Mapping[str, TensorNorms]) -> None:
        if self._last is not None:
            _, old_rates, _, known = self._last
            for name, now in norms.items():
                if name in known and math.isfinite(now.weight):
                    pace = abs(now.weight - known[name].weight) / max(rates - old_rates, 1e-30)
                    self._paces.setdefault(name, deque(maxlen=NEWEST_PACES)).append(pace)
        self._last = step, rates, updates, dict(norms)

    def accept(self, step: int, rates: float, updates: int, norms: Mapping[str, TensorNorms]) -> None:
        """The jump of the last look was the run's own work: it goes on from there, at this pace."""
        self._pause.begin(step)
        self._learn(step, rates, updates, norms)

    def begin_again(self) -> None:
        """The optimizer begins again, on purpose."""
        self._last = None

    def rewind(self, step: int) -> None:
        """The run is back after `step`: a look after that is forgotten."""
        if self._last is not None and self._last[0] > step:
            self._last = None
