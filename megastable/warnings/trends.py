"""Slow-moving signals through the whole run: a warning with its remedy each, and no action.

`TrendWatch` measures and journals, `Trends` judges. Every `interval` steps a look is judged (trend_signals.py), and
every evaluation against the training loss. Such a signal is warned of when it is beyond its limit at one place (a
block, a kind of parameter) at several looks in a row. A place is told once; it is over when it has been well within the
limit for as many looks, and may then be told again. A signal is over with the last of its places.

Every loss is judged with those before it: does it swing (`find_swing`)? A sine is fitted to the latest `CYCLES` of its
periods. It counts if it is most of what a smooth trend leaves of them, unlike a step, a spike or a drift; and if it is
far beyond the scatter from step to step, unlike noise. One such fit is enough.

The state is stored in checkpoints and snapshots: after a resume or a rewind the same numbers give the same warnings,
bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from megastable.base.text import count_noun
from megastable.checkpoint.store import RunState
from megastable.config.rules import ADAM_LIKE
from megastable.config.stability import TrendsConfig
from megastable.config.tree import RunConfig
from megastable.engine.engine import Engine
from megastable.engine.measured import Measured
from megastable.engine.watch import Watch
from megastable.optim.schedule import measure_progress, warmup_length
from megastable.run.events.stability_events import TrendEvent
from megastable.run.log import RunLog
from megastable.warnings.trend_signals import SIGNALS, Reading, Rows, Series, TrendLook
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
    wave_phase = 2 * np.pi * np.arange(n) / period
    raw_waves = np.stack([np.sin(wave_phase), np.cos(wave_phase)], axis=1)
    sine, _ = np.linalg.qr(raw_waves - trend @ (trend.T @ raw_waves))
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
    smooth_trend, sine_basis = _bases(period)
    n = len(smooth_trend)
    if len(values) < n:
        return None
    around_trend = values[-n:] - smooth_trend @ (smooth_trend.T @ values[-n:])
    sine_wave = sine_basis.T @ around_trend
    sine_power, whole_power = float(sine_wave @ sine_wave), float(around_trend @ around_trend)
    if whole_power <= 0 or sine_power < SHARE * whole_power:
        return None
    # Of noise that widens, the scatter just before is the larger one.
    values_before = values[:-n]
    step_sigma = (
        max(_scatter(values_before), _scatter(values_before[-4 * n :]))
        if len(values_before) >= n
        else _scatter(around_trend - sine_basis @ sine_wave)
    )
    swing_amplitude = math.sqrt(2 * sine_power / n)
    if swing_amplitude < AMPLITUDE * step_sigma or sine_power < 2 * POWER * step_sigma**2:
        return None
    return Swing(period, swing_amplitude, step_sigma, sine_power / whole_power)


def _scatter(values: Floats) -> float:
    """Robust scatter of single steps, whatever trend they have."""
    return MAD_TO_SIGMA / math.sqrt(2) * float(np.median(np.abs(np.diff(values))))


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
QUIET_PERIODS = 3  # without a swing, after which it is over
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
            newest_step = self.state.evaluations[-1].step if self.state.evaluations else 0
            self.state.evaluations += [evaluation for evaluation in known if newest_step < evaluation.step]

    def begin_again(self) -> None:
        """The coming step is the first of another data mix or sequence length: losses, gradients and attention have
        other levels from here on."""
        s = self.state
        s.evaluations, s.losses = [], []
        s.series = {
            sery_name: held for sery_name, held in s.series.items() if not sery_name.startswith(OF_THE_DATA)
        }

    @property
    def standing(self) -> list[str]:
        """What was warned of and is not over, a sentence for each signal."""
        return [
            f"step {t[0].step}: {_with_others(t[0].text, len(t) - 1)}" for t in self.state.standing.values()
        ]

    def is_look(self, step: int) -> bool:
        """Whether a step is to be measured."""
        c = self.config
        return c.enabled and step > c.start and step % c.interval == 0

    def judge_look(self, step: int, rate: float | None, rows: Rows) -> list[TrendEvent]:
        """Judge a look at an applied step. rate, rows: see `TrendLook`."""
        trend_look = TrendLook(step, rate, rows, self.state.series, self.config, self.width)
        found_events = list[TrendEvent]()
        for signal_name, signal in SIGNALS.items():
            found_events += self._judged(signal_name, step, list(signal.read(trend_look)), signal.remedy)
        return found_events

    def judge_evaluation(self, step: int, validation: float, losses: Iterable[float]) -> list[TrendEvent]:
        """Judge an evaluation. losses: of the latest steps."""
        latest_losses, evaluations = [loss for loss in losses if math.isfinite(loss)], self.state.evaluations
        if not latest_losses or not math.isfinite(validation):
            return []
        evaluations.append(LossPair(step=step, validation=validation, training=median(latest_losses)))
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

    def judge_loss(self, step: int, loss: float) -> list[TrendEvent]:
        """Judge the losses of the latest steps, of which `step` is the last; nats."""
        s = self.state
        s.losses = [*s.losses, loss][-LONGEST:] if math.isfinite(loss) else s.losses
        found, was_told = find_swing(s.losses, step), SWINGS in s.standing
        if found is None:
            last_swung, period = s.swung
            if not was_told or step - last_swung <= QUIET_PERIODS * period:
                return []
            text = f"no longer, since the warning of step {s.standing.pop(SWINGS)[-1].step}"
            return [TrendEvent(what="over", step=step, signal=SWINGS, text=text, remedy="", numbers={})]
        s.swung = step, found.period
        text = (
            f"the loss swings with a period of {found.period} steps and an amplitude of {found.amplitude:.3f} nats, "
            f"{found.amplitude / max(found.sigma, 1e-12):.1f} times the scatter of single steps"
        )
        if was_told:
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
        rise, fall = (sorted([0.0, 0.0, *(swing_sign * by for by in swings)])[-2] for swing_sign in (1, -1))
        swing_text = (
            f"the validation loss oscillates: in the evaluations since step {latest[0].step} it has risen twice by "
            f"{rise:.3f} or more, and fallen twice by {fall:.3f} or more"
        )
        return Reading("", min(rise, fall) / self.config.swing, swing_text, {"rise": rise, "fall": fall})

    def _judged(self, name: str, step: int, readings: list[Reading], remedy: str) -> list[TrendEvent]:
        """Count looks beyond the limit, or within it, of each place; what there is to tell."""
        place_streaks, standing_places = self.state.streaks, self.state.standing
        told_places = {warning.where: warning for warning in standing_places.get(name, [])}
        new, ended_warnings = list[Reading](), list[StandingWarning]()
        for r in sorted(readings, key=lambda r: -r.severity):
            place_key = f"{name} {r.where}"
            streak_length = place_streaks.pop(place_key, 0) + 1
            if r.severity >= CALM if r.where in told_places else not r.severity >= 1.0:
                continue
            if streak_length < self.config.confirm:
                place_streaks[place_key] = streak_length
            elif r.where in told_places:
                ended_warnings.append(told_places.pop(r.where))
            else:
                new.append(r)
        left = [*told_places.values(), *(StandingWarning(where=r.where, step=step, text=r.text) for r in new)]
        if left:
            standing_places[name] = left
        else:
            standing_places.pop(name, None)
        if new:
            text = _with_others(new[0].text, len(new) - 1)
            numbers = {
                number_key: value for number_key, value in new[0].numbers.items() if math.isfinite(value)
            }
            return [
                TrendEvent(what="warned", step=step, signal=name, text=text, remedy=remedy, numbers=numbers)
            ]
        if ended_warnings and not left:
            text = f"no longer, since the warning of step {ended_warnings[-1].step}"
            return [TrendEvent(what="over", step=step, signal=name, text=text, remedy="", numbers={})]
        return []


def _with_others(text: str, others: int) -> str:
    return text + (f"; and so for {count_noun(others, 'other')}" if others else "")


class TrendWatch(Trends):
    """Measures and journals as well, in one training process. All methods are called on every rank with the same
    numbers, so that every rank judges alike."""

    def __init__(self, config: RunConfig, engine: Engine, log: RunLog) -> None:
        c = config.stability
        is_enabled = c.enabled and c.trends.enabled
        super().__init__(c.trends.model_copy(update={"enabled": is_enabled}), config.model.hidden)
        self.probe, self.engine, self.log = engine.trends, engine, log
        self.schedule, self.ratio = config.schedule, config.model.width_ratio
        self.adam_sized = config.optimizer.name in ADAM_LIKE

    def after_update(self, measured: Measured, step: int, rate: float) -> None:
        if self.config.enabled and step > self.config.start:
            self._tell(self.judge_loss(step, measured.loss))

    def prepare_step(self, state: RunState) -> bool:
        """Before the step after `state`: watch it, if a look is due; whether it is. None is while the rate warms up:
        weights that start at zero grow straight, attention sharpens and logits grow, as they should."""
        is_warming = measure_progress(self.schedule, state.updates, state.trained_tokens) < warmup_length(
            self.schedule
        )
        is_due = not is_warming and self.is_look(state.step + 1)
        if is_due:
            self.probe.watch_step()
        return is_due

    def judge_step(self, state: RunState, lr: float, applied: bool, incident: bool) -> None:
        """After every step. lr: its rate; incident: one is open, whose numbers are no trend."""
        if not self.probe.watching:
            return
        if incident or not applied:
            self.probe.drop_step()
            return
        probe_rows = self.probe.collect_look(self.engine.flat_state(), self.engine.kept)
        # What is measured against the rate are updates of the blocks' matrices, which have muP's.
        element_rate = lr / self.ratio if self.adam_sized else None
        self._tell(self.judge_look(state.step, element_rate, probe_rows))

    def after_evaluation(self, state: RunState, loss: float) -> None:
        """loss: nats per token."""
        if self.config.enabled:
            self._tell(self.judge_evaluation(state.step, loss, state.recent_losses))

    def _tell(self, found: Iterable[TrendEvent]) -> None:
        for event in found:
            self.log.emit_event(
                event, say=event.format_line() if event.what == "over" else f"WARNING: {event.format_line()}"
            )
