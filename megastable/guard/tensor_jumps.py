"""Judges how the tensors of a model and of its optimizer move between two looks. Pure.

An update moves a weight by about the rate, so the norm of a tensor changes slowly, and each tensor has a pace of its
own. Adam's second moments forget no faster than beta2 lets them. What breaks one of the two is not the work of the
optimizer, or of an update that is far beyond all others; whether the same steps do it again, a replay shows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megastable.guard.probe_trend import JudgementPause

FASTER = 8.0  # times the fastest change of its norm that the tensor has shown
CHANGED = 0.05  # of its norm, at least
KNOWN, NEWEST = 2, 8  # looks that tell the pace of a tensor: at least, and at most
FORGOTTEN = 0.5  # of what is left of second moments if every gradient since was zero: less was changed


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
            if len(usual) >= KNOWN and not change <= CHANGED * then.weight:
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
                    self._paces.setdefault(name, deque(maxlen=NEWEST)).append(pace)
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
