"""Slow-moving signals through the whole run: a warning with its remedy each, and no action.

`TrendWatch` measures and journals, `Trends` judges. Every `interval` steps a look is judged (`trend_signals`), and
every evaluation against the training loss; every loss with those before it (`swings`), of which one is enough. Else a
signal is warned of when it is beyond its limit at one place (a block, a kind of parameter) at several looks in a row. A
place is told once; it is over when it has been well within the limit
for as many looks, and may then be told again. A signal is over with the last of its places. The state is stored in
checkpoints and snapshots: after a resume or a rewind the same numbers give the same warnings, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from statistics import median
from typing import Any

from pydantic import BaseModel, ConfigDict

from megastable.base.text import plural
from megastable.checkpoint.store import RunState
from megastable.config.rules import ADAM_LIKE
from megastable.config.stability import TrendsConfig
from megastable.config.tree import RunConfig
from megastable.engine.engine import Engine
from megastable.engine.measured import Measured
from megastable.engine.watch import Watch
from megastable.optim.schedule import progress, warmup
from megastable.run.events.stability_events import TrendEvent
from megastable.run.log import RunLog
from megastable.warnings import swings
from megastable.warnings.trend_signals import SIGNALS, Reading, Rows, Series, TrendLook

VALIDATION = "validation"
VALIDATION_REMEDY = (
    "fresh data, fewer epochs or a smaller share of the repeated corpus; more optimizer.weight_decay"
)
OSCILLATION = "oscillation"
OSCILLATION_REMEDY = (
    "a lower optimizer.lr; corpora that come mixed, not one after the other; more train.eval_samples, if losses "
    "scatter"
)
SWINGS, SWINGS_REMEDY = (
    "swings",
    "a lower optimizer.lr, or a beta2 that forgets faster, if the data does not alternate: corpora come mixed",
)
CALM_PERIODS = 3  # without a swing, after which it is over
TURNS = 8  # evaluations in which there are two rises and two falls
CALM = 0.8  # share of the limit below which a signal counts as recovered
EVALUATIONS = 64  # kept
OF_THE_DATA = "entropy ", "focus ", "gradient"  # series whose level is another one with other data


class _State(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


class StandingWarning(_State):
    """A place of a signal that was warned of and is not over. text: its reading's."""

    where: str
    step: int
    text: str


class LossPair(_State):
    """validation, training: losses, nats per token; the latter is the median of the latest steps."""

    step: int
    validation: float
    training: float


class TrendsState(_State):
    """State for checkpoints and snapshots. streaks: by signal and place, looks in a row beyond the limit, or, if it
    was warned of, within it. standing: by signal, in the order of the warnings, the worst place of a look first.
    losses: of the latest steps; swung: the step at which they last did, and the period."""

    series: dict[str, Series] = {}
    streaks: dict[str, int] = {}
    standing: dict[str, list[StandingWarning]] = {}
    losses: list[float] = []
    swung: tuple[int, int] = (0, 0)
    evaluations: list[LossPair] = []


class Trends(Watch):
    """Judges one run. width: of the residual stream. Pure: the same numbers give the same trends on every rank."""

    name = "trends"
    state: TrendsState

    def __init__(self, config: TrendsConfig, width: int) -> None:
        self.config, self.width = config, width
        self.state = TrendsState()

    def rewound(self, step: int, saved: Mapping[str, Any] | None) -> None:
        """Evaluations up to `step` are kept: that of `step` itself came after the snapshot, and is not repeated."""
        if saved is not None:
            known = [evaluation for evaluation in self.state.evaluations if evaluation.step <= step]
            self.load_state_dict(saved)
            newest = self.state.evaluations[-1].step if self.state.evaluations else 0
            self.state.evaluations += [evaluation for evaluation in known if newest < evaluation.step]

    def begin_again(self) -> None:
        """The coming step is the first of another data mix or sequence length: losses, gradients and attention have
        other levels from here on."""
        s = self.state
        s.evaluations, s.losses = [], []
        s.series = {name: held for name, held in s.series.items() if not name.startswith(OF_THE_DATA)}

    @property
    def standing(self) -> list[str]:
        """What was warned of and is not over, a sentence for each signal."""
        return [
            f"step {t[0].step}: {_with_others(t[0].text, len(t) - 1)}" for t in self.state.standing.values()
        ]

    def looks(self, step: int) -> bool:
        """Whether a step is to be measured."""
        c = self.config
        return c.enabled and step > c.start and step % c.interval == 0

    def measured(self, step: int, rate: float | None, rows: Rows) -> list[TrendEvent]:
        """Judge a look at an applied step. rate, rows: see `TrendLook`."""
        look = TrendLook(step, rate, rows, self.state.series, self.config, self.width)
        found = list[TrendEvent]()
        for name, signal in SIGNALS.items():
            found += self._judged(name, step, list(signal.read(look)), signal.remedy)
        return found

    def evaluated(self, step: int, validation: float, losses: Iterable[float]) -> list[TrendEvent]:
        """Judge an evaluation. losses: of the latest steps."""
        latest, evaluations = [loss for loss in losses if math.isfinite(loss)], self.state.evaluations
        if not latest or not math.isfinite(validation):
            return []
        evaluations.append(LossPair(step=step, validation=validation, training=median(latest)))
        del evaluations[:-EVALUATIONS]
        best, now = min(evaluations, key=lambda e: e.validation), evaluations[-1]
        risen, fallen = now.validation - best.validation, best.training - now.training
        text = (
            f"the validation loss has risen from {best.validation:.3f} (step {best.step}) to {now.validation:.3f}, and "
            f"the training loss has fallen from {best.training:.3f} to {now.training:.3f}: the model is overfitting"
        )
        severe = min(risen, fallen) / self.config.overfit
        reading = Reading("", severe, text, {"risen": risen, "fallen": fallen, "best_step": float(best.step)})
        return [
            *self._judged(VALIDATION, step, [reading], VALIDATION_REMEDY),
            *self._judged(OSCILLATION, step, [self._oscillation()], OSCILLATION_REMEDY),
        ]

    def trained(self, step: int, loss: float) -> list[TrendEvent]:
        """Judge the losses of the latest steps, of which `step` is the last; nats."""
        s = self.state
        s.losses = [*s.losses, loss][-swings.LONGEST :] if math.isfinite(loss) else s.losses
        found, told = swings.find_swing(s.losses, step), SWINGS in s.standing
        if found is None:
            last, period = s.swung
            if not told or step - last <= CALM_PERIODS * period:
                return []
            text = f"no longer, since the warning of step {s.standing.pop(SWINGS)[-1].step}"
            return [TrendEvent(what="over", step=step, signal=SWINGS, text=text, remedy="", numbers={})]
        s.swung = step, found.period
        text = (
            f"the loss swings with a period of {found.period} steps and an amplitude of {found.amplitude:.3f} nats, "
            f"{found.amplitude / max(found.sigma, 1e-12):.1f} times the scatter of single steps"
        )
        if told:
            return []
        s.standing[SWINGS] = [StandingWarning(where="", step=step, text=text)]
        return [
            TrendEvent(
                what="warned",
                step=step,
                signal=SWINGS,
                text=text,
                remedy=SWINGS_REMEDY,
                numbers=found._asdict(),
            )
        ]

    def _oscillation(self) -> Reading:
        """Of the validation loss: the second largest of its rises and of its falls between turning points of the latest
        evaluations. One of each is a spike that is over."""
        latest = self.state.evaluations[-TURNS:]
        swings = list[float]()
        for before, after in pairwise(latest):
            by = after.validation - before.validation
            if swings and by * swings[-1] >= 0:
                swings[-1] += by
            else:
                swings.append(by)
        rise, fall = (sorted([0.0, 0.0, *(sign * by for by in swings)])[-2] for sign in (1, -1))
        text = (
            f"the validation loss oscillates: in the evaluations since step {latest[0].step} it has risen twice by "
            f"{rise:.3f} or more, and fallen twice by {fall:.3f} or more"
        )
        return Reading("", min(rise, fall) / self.config.swing, text, {"rise": rise, "fall": fall})

    def _judged(self, name: str, step: int, readings: list[Reading], remedy: str) -> list[TrendEvent]:
        """Count looks beyond the limit, or within it, of each place; what there is to tell."""
        streaks, standing = self.state.streaks, self.state.standing
        told = {warning.where: warning for warning in standing.get(name, [])}
        new, ended = list[Reading](), list[StandingWarning]()
        for r in sorted(readings, key=lambda r: -r.severity):
            place = f"{name} {r.where}"
            streak = streaks.pop(place, 0) + 1
            if r.severity >= CALM if r.where in told else not r.severity >= 1.0:
                continue
            if streak < self.config.confirm:
                streaks[place] = streak
            elif r.where in told:
                ended.append(told.pop(r.where))
            else:
                new.append(r)
        left = [*told.values(), *(StandingWarning(where=r.where, step=step, text=r.text) for r in new)]
        if left:
            standing[name] = left
        else:
            standing.pop(name, None)
        if new:
            text = _with_others(new[0].text, len(new) - 1)
            numbers = {key: value for key, value in new[0].numbers.items() if math.isfinite(value)}
            return [
                TrendEvent(what="warned", step=step, signal=name, text=text, remedy=remedy, numbers=numbers)
            ]
        if ended and not left:
            text = f"no longer, since the warning of step {ended[-1].step}"
            return [TrendEvent(what="over", step=step, signal=name, text=text, remedy="", numbers={})]
        return []


def _with_others(text: str, others: int) -> str:
    return text + (f"; and so for {plural(others, 'other')}" if others else "")


class TrendWatch(Trends):
    """Measures and journals as well, in one training process. All methods are called on every rank with the same
    numbers, so that every rank judges alike."""

    def __init__(self, config: RunConfig, engine: Engine, log: RunLog) -> None:
        c = config.stability
        enabled = c.enabled and c.trends.enabled
        super().__init__(c.trends.model_copy(update={"enabled": enabled}), config.model.hidden)
        self.probe, self.engine, self.log = engine.trends, engine, log
        self.schedule, self.ratio = config.schedule, config.model.width_ratio
        self.adam_sized = config.optimizer.name in ADAM_LIKE

    def after_update(self, measured: Measured, step: int, rate: float) -> None:
        if self.config.enabled and step > self.config.start:
            self._tell(self.trained(step, measured.loss))

    def begin(self, state: RunState) -> bool:
        """Before the step after `state`: watch it, if a look is due; whether it is. None is while the rate warms up:
        weights that start at zero grow straight, attention sharpens and logits grow, as they should."""
        warming = progress(self.schedule, state.updates, state.trained_tokens) < warmup(self.schedule)
        due = not warming and self.looks(state.step + 1)
        if due:
            self.probe.watch()
        return due

    def after(self, state: RunState, lr: float, applied: bool, incident: bool) -> None:
        """After every step. lr: its rate; incident: one is open, whose numbers are no trend."""
        if not self.probe.watching:
            return
        if incident or not applied:
            self.probe.drop()
            return
        rows = self.probe.collect(self.engine.flat_state(), self.engine.kept)
        # What is measured against the rate are updates of the blocks' matrices, which have muP's.
        rate = lr / self.ratio if self.adam_sized else None
        self._tell(self.measured(state.step, rate, rows))

    def after_evaluation(self, state: RunState, loss: float) -> None:
        """loss: nats per token."""
        if self.config.enabled:
            self._tell(self.evaluated(state.step, loss, state.recent_losses))

    def _tell(self, found: Iterable[TrendEvent]) -> None:
        for event in found:
            self.log.emit(event, say=event.line() if event.what == "over" else f"WARNING: {event.line()}")
