"""Judges slow-moving signals through the whole run: a warning with its remedy each, and no action. Pure.

Every `interval` steps a look is judged (`trend_signals`), and every evaluation against the training loss. A signal is
warned of when it is beyond its limit at one place (a block, a kind of parameter) at several looks in a row. A place is
told once; it is over when it has been well within the limit for as many looks, and may then be told again. A signal is
over with the last of its places. The state is stored in checkpoints and snapshots:
after a resume or a rewind the same numbers give the same warnings, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from pydantic import BaseModel, ConfigDict

from megastable.base.text import plural
from megastable.config.stability import TrendsConfig
from megastable.warnings.trend_signals import SIGNALS, LookHistory, Reading, Rows, Series

VALIDATION = "validation"
VALIDATION_REMEDY = (
    "fresh data, fewer epochs or a smaller share of the repeated corpus; more optimizer.weight_decay"
)
CALM = 0.8  # share of the limit below which a signal counts as recovered
EVALUATIONS = 64  # kept


@dataclass(frozen=True)
class TrendNotice:
    """A signal that is warned of, or is over. text: a sentence with its numbers; remedy: "" when it is over."""

    signal: str
    over: bool
    text: str
    remedy: str
    numbers: dict[str, float]


class StandingWarning(BaseModel):
    """A place of a signal that was warned of and is not over. text: its reading's."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    where: str
    step: int
    text: str


class LossPair(BaseModel):
    """validation, training: losses, nats per token; the latter is the median of the latest steps."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    step: int
    validation: float
    training: float


class TrendsState(BaseModel):
    """State for checkpoints and snapshots. streaks: by signal and place, looks in a row beyond the limit, or, if it
    was warned of, within it. standing: by signal, in the order of the warnings, the worst place of a look first."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    series: dict[str, Series] = {}
    streaks: dict[str, int] = {}
    standing: dict[str, list[StandingWarning]] = {}
    evaluations: list[LossPair] = []


class Trends:
    """One run. width: of the residual stream. The same numbers give the same trends on every rank."""

    def __init__(self, config: TrendsConfig, width: int, state: TrendsState | None = None) -> None:
        self.config, self.width = config, width
        self._state = (state or TrendsState()).model_copy(deep=True)

    @property
    def state(self) -> TrendsState:
        """A copy, for checkpoints and snapshots."""
        return self._state.model_copy(deep=True)

    def rewind(self, saved: TrendsState, step: int) -> None:
        """Continue after `step` from the state of a snapshot. Evaluations up to there are kept: that of `step`
        itself came after the point, and is not repeated."""
        newest = saved.evaluations[-1].step if saved.evaluations else 0
        later = [evaluation for evaluation in self._state.evaluations if newest < evaluation.step <= step]
        self._state = saved.model_copy(deep=True)
        self._state.evaluations += later

    def changed(self) -> None:
        """The coming step is the first of another data mix or sequence length: losses, gradients and attention have
        other levels from here on."""
        self._state.evaluations = []
        self._state.series = {
            name: held
            for name, held in self._state.series.items()
            if not name.startswith(("entropy ", "gradient"))
        }

    @property
    def standing(self) -> list[str]:
        """What was warned of and is not over, a sentence for each signal."""
        return [
            f"step {told[0].step}: {_with_others(told[0].text, len(told) - 1)}"
            for told in self._state.standing.values()
        ]

    def looks(self, step: int) -> bool:
        """Whether a step is to be measured."""
        return step > self.config.start and step % self.config.interval == 0

    def measured(self, step: int, rate: float | None, rows: Rows) -> list[TrendNotice]:
        """Judge a look at an applied step. rate: its learning rate; None of an optimizer whose update of an element is
        not about as large as it. rows: `TrendProbe.collect`."""
        history, found = LookHistory(self._state.series, self.config), list[TrendNotice]()
        for name, signal in SIGNALS.items():
            readings = list(signal.read(step, rate, rows, history, self.width))
            found += self._judged(name, step, readings, signal.remedy)
        return found

    def evaluated(self, step: int, validation: float, losses: Iterable[float]) -> list[TrendNotice]:
        """Judge an evaluation. losses: of the latest steps."""
        latest = [loss for loss in losses if math.isfinite(loss)]
        if not latest or not math.isfinite(validation):
            return []
        state = self._state
        state.evaluations.append(LossPair(step=step, validation=validation, training=median(latest)))
        del state.evaluations[:-EVALUATIONS]
        best, now = min(state.evaluations, key=lambda e: e.validation), state.evaluations[-1]
        risen, fallen = now.validation - best.validation, best.training - now.training
        text = (
            f"the validation loss has risen from {best.validation:.3f} (step {best.step}) to {now.validation:.3f}, and "
            f"the training loss has fallen from {best.training:.3f} to {now.training:.3f}: the "
            "model is overfitting"
        )
        severe = min(risen, fallen) / self.config.overfit
        reading = Reading("", severe, text, {"risen": risen, "fallen": fallen, "best_step": float(best.step)})
        return self._judged(VALIDATION, step, [reading], VALIDATION_REMEDY)

    def _judged(self, name: str, step: int, readings: list[Reading], remedy: str) -> list[TrendNotice]:
        """Count looks beyond the limit, or within it, of each place; what there is to tell."""
        streaks, standing = self._state.streaks, self._state.standing
        told = {warning.where: warning for warning in standing.get(name, [])}
        new, ended = list[Reading](), list[StandingWarning]()
        for r in sorted(readings, key=lambda r: -r.severity):
            counts = r.severity < CALM if r.where in told else r.severity >= 1.0
            place = f"{name} {r.where}"
            streak = streaks.pop(place, 0) + 1 if counts else 0
            if streak >= self.config.confirm:
                if r.where in told:
                    ended.append(told.pop(r.where))
                else:
                    new.append(r)
            elif counts:
                streaks[place] = streak
            else:
                streaks.pop(place, None)
        left = [*told.values(), *(StandingWarning(where=r.where, step=step, text=r.text) for r in new)]
        if left:
            standing[name] = left
        else:
            standing.pop(name, None)
        if new:
            text = _with_others(new[0].text, len(new) - 1)
            return [TrendNotice(name, False, text, remedy, _finite(new[0].numbers))]
        if ended and not left:
            return [TrendNotice(name, True, f"no longer, since the warning of step {ended[-1].step}", "", {})]
        return []


def _with_others(text: str, others: int) -> str:
    return text + (f"; and so for {plural(others, 'other')}" if others else "")


def _finite(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in numbers.items() if math.isfinite(value)}
