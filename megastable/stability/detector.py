"""Pure numbers in, verdicts out: is this step healthy, and if not, in which way?

Two channels are watched, the loss in nats and the logarithm of the gradient norm (its tail is heavy, its changes are
factors). Each is compared with a robust trend through the last ~100 accepted values; what stands out, and everything
during an excursion, never enters it. On the residuals, in sigma, run

    outlier      loss and norm together, or one alone, farther out than the harmless jumps that this run has shown
    spike        cumulative sums of the loss, and of loss + log norm: the norm leads the loss by one to four steps
    drift        a cumulative sum of the loss above the best level that was held
    oscillation  two cumulative sums, of wide residuals on either side

Terms are clipped, and the largest of a sum does not count: no single step, however hard its batch, raises a sequential
alarm. While an excursion lasts the trend is frozen; after `adapt` observations the new level is learnt.

Time is counted in observations: a trace that was logged every tenth step is judged alike. Plain Python on floats:
every rank comes to the same verdict from the same numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from megastable.stability.robust import Sum, Trend, median, trend
from megastable.stability.settings import DetectorConfig
from megastable.stability.signals import Finding, Signals, Verdict

_FARTHEST = 1e6  # sigma; residuals end here so that no sum overflows
_JUMP = 4.0  # sigma from which on a value stands out: not accepted, and remembered if harmless
_SLOW = 15  # observations; an alarm that took longer to build up is a drift, not a spike
_ABSURD = 1e6  # nats; no cross-entropy is that large, and sums of such numbers overflow
_INDICATORS = 16  # at most, so that a state stays small
_NORM_EVERY = 25  # observations between two measurements of the gradient norm's level as an indicator


class _State(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


class Channel(_State):
    """What is remembered of one series.

    times, values: the accepted ones. raw: the newest finite ones, accepted or not. record: the farthest harmless jump
    in sigma, slowly forgotten. pending: jumps (observation, sigma) of which that is not known yet.
    """

    times: list[int] = []
    values: list[float] = []
    raw: list[float] = []
    record: float = 0.0
    pending: list[tuple[int, float]] = []


class Excursion(_State):
    """verdict, onset (a step), since (the observation that raised it), and the newest residuals of loss and norm.

    loss_again, joint_again: the tests for a further jump on top of it.
    """

    verdict: Verdict
    onset: int
    since: int
    severity: float
    reason: str
    loss: list[float] = []
    norm: list[float] = []
    loss_again: Sum = Field(default_factory=Sum)
    joint_again: Sum = Field(default_factory=Sum)


class Drop(_State):
    """A sudden fall of the loss, such as a shard of easy text: the way back up to `level` is no spike."""

    level: float
    since: int


class Sums(_State):
    """The running sequential tests. All start again when an excursion is over."""

    spike: Sum = Field(default_factory=Sum)
    joint: Sum = Field(default_factory=Sum)
    drift: Sum = Field(default_factory=Sum)
    wide_up: Sum = Field(default_factory=Sum)
    wide_down: Sum = Field(default_factory=Sum)
    fall: Sum = Field(default_factory=Sum)


class DetectorState(_State):
    """All that the detector remembers, from which it goes on bit for bit; under 20 KB as JSON."""

    seen: int = 0
    loss: Channel = Field(default_factory=Channel)
    norm: Channel = Field(default_factory=Channel)
    sums: Sums = Field(default_factory=Sums)
    best: float | None = None  # lowest level of the loss that was held
    best_lr: float | None = None
    width: float | None = None  # the scatter of the loss when it was smallest, slowly given up
    drop: Drop | None = None
    excursion: Excursion | None = None
    indicators: dict[str, list[float]] = {}


@dataclass(frozen=True)
class _Residuals:
    """One step against the trends, in sigma.

    rise: how far the loss lies above both its line and its latest level: a loss that merely falls more slowly than
    before does not rise. fall: below both. above_best: above the best level that was held. norm: log gradient norm
    above its line, None where unknown. wider: the scatter now over what it was at its smallest.
    """

    rise: float
    fall: float
    above_best: float
    norm: float | None
    wider: float


class Detector:
    """One `observe` per step, before its update. The same numbers give the same findings on every rank."""

    def __init__(self, config: DetectorConfig, state: DetectorState | None = None) -> None:
        self.config = config
        self._state = DetectorState() if state is None else state.model_copy(deep=True)

    @property
    def state(self) -> DetectorState:
        """A copy: later observations do not change it."""
        return self._state.model_copy(deep=True)

    def expected(self) -> tuple[Trend | None, Trend | None]:
        """What loss (nats) and log gradient norm of the next step are compared with; None: too little is known."""
        s, c = self._state, self.config
        return self._trend(s.loss, c.loss_floor), self._trend(s.norm, c.norm_floor)

    def observe(self, signals: Signals) -> Finding:
        """Judge one step against those before it, and remember it. Never raises, whatever the numbers.

        A step whose numbers are not finite leaves no trace in the state.
        """
        s, c, step = self._state, self.config, signals.step
        if wrong := _no_number(signals):
            return Finding(step, Verdict.NON_FINITE, 1.0, step, wrong, on_trend=False)
        s.seen += 1
        warnings = self._warnings(signals)
        norm = None if signals.grad_norm is None else math.log(max(signals.grad_norm, 1e-30))
        if len(s.loss.values) < c.min_values or step < c.warmup_steps:
            return self._start(step, signals.loss, norm, warnings)

        self._forget()
        line = self._trend(s.loss, c.loss_floor)
        assert line is not None
        norm_line = self._trend(s.norm, c.norm_floor)
        r = self._residuals(signals.loss, norm, line, norm_line)
        _keep(s.loss.raw, signals.loss, c.relearn)
        if norm is not None:
            _keep(s.norm.raw, norm, c.relearn)
        outlier, why = self._outlier(r)
        if s.excursion is None and (raised := self._sequential(step, r)):
            s.excursion, s.sums = raised, Sums()
            s.loss.pending, s.norm.pending = [], []
        if s.excursion is not None:
            e = s.excursion
            e.severity = max(e.severity, outlier)
            self._renew(e, step)
            found = Finding(step, e.verdict, e.severity, e.onset, e.reason, warnings, on_trend=False)
            self._follow(e, r)
            return found
        self._learn(r, signals, norm, line)
        on_trend = r.rise < _JUMP / 2 and (r.norm is None or r.norm < _JUMP / 2)
        verdict = Verdict.OUTLIER if outlier > 0.0 else Verdict.HEALTHY
        return Finding(step, verdict, outlier, step, why if outlier > 0.0 else "", warnings, on_trend)

    def _start(self, step: int, loss: float, norm: float | None, warnings: tuple[str, ...]) -> Finding:
        """Fill the windows; only an explosion is noticed."""
        s, c = self._state, self.config
        rise = loss - max(s.loss.values, default=loss)
        if rise > c.explosion:
            reason = f"loss {loss:.4g} is {rise:.3g} nats above all before"
            return Finding(step, Verdict.OUTLIER, rise / c.explosion, step, reason, warnings, on_trend=False)
        self._accept(s.loss, loss)
        if norm is not None and norm - max(s.norm.values, default=norm) < c.explosion * 2:
            self._accept(s.norm, norm)
        return Finding(step, Verdict.HEALTHY, 0.0, step, "", warnings)

    # What a step is compared with.

    def _trend(self, channel: Channel, floor: float) -> Trend | None:
        if len(channel.values) < self.config.min_values:
            return None
        now, full = self._state.seen, self.config.window
        if self._state.excursion is not None:
            now = channel.times[-1]  # a slope is not trusted for longer than it was seen to hold
        return trend(channel.times, channel.values, now, floor=floor, full=full)

    def _residuals(self, loss: float, norm: float | None, line: Trend, norm_line: Trend | None) -> _Residuals:
        s = self._state
        rise = loss - max(line.level, line.late)
        fall = min(line.low, line.late) - loss
        above = loss - s.best if s.best is not None else 0.0
        if s.drop is not None:
            back = loss - s.drop.level
            rise, above = min(rise, back), min(above, back)
        zn = None if norm is None or norm_line is None else _bound((norm - norm_line.level) / norm_line.scale)
        wider = line.scale / s.width if s.width is not None else 1.0
        return _Residuals(
            _bound(rise / line.scale), _bound(fall / line.scale), _bound(above / line.noise), zn, wider
        )

    # The tests.

    def _outlier(self, r: _Residuals) -> tuple[float, str]:
        """Severity of this step by itself, 1 = refuse it, and why; 0 = nothing to mention."""
        c, s = self.config, self._state
        lone = c.lone if r.norm is not None else c.lone_without_norm
        severity = r.rise / max(lone, c.record_margin * s.loss.record)
        reason = f"loss {r.rise:.1f} sigma above its trend"
        if r.norm is not None:
            reason += f", log gradient norm {r.norm:.1f}"
            together = min(r.rise / c.outlier_loss, r.norm / c.outlier_norm)
            severity = max(severity, together, r.norm / max(c.lone, c.record_margin * s.norm.record))
        if severity >= 1.0:
            return severity, reason
        return (max(severity, 0.01), reason) if r.rise >= max(c.notice, s.loss.record) else (0.0, "")

    def _sequential(self, step: int, r: _Residuals) -> Excursion | None:
        """Add this step to the running sums; an excursion if one reaches its limit."""
        c, s, now = self.config, self._state.sums, self._state.seen
        s.spike.add(min(r.rise, c.spike_clip) - c.spike_allowance, now, step)
        if r.norm is not None:
            # The norm of a run that jumps harmlessly by 20 sigma says half as much.
            norm = r.norm / max(1.0, self._state.norm.record / c.tame)
            both = max(min(r.rise, c.joint_loss_clip), -_JUMP) + max(min(norm, c.joint_norm_clip), -_JUMP)
            s.joint.add(both - c.joint_allowance, now, step)
        s.drift.add(min(r.above_best, c.drift_clip) - c.drift_allowance, now, step)
        wide = c.oscillation_clip
        s.wide_up.add(min(max(r.rise * r.wider, 0.0), wide) - c.oscillation_allowance, now, step)
        s.wide_down.add(min(max(r.fall * r.wider, 0.0), wide) - c.oscillation_allowance, now, step)

        swing = min(s.wide_up.value, s.wide_down.value)
        first = min(s.wide_up, s.wide_down, key=lambda side: side.since)
        for verdict, by, severity, what in (
            (Verdict.SPIKE, s.spike, s.spike.value / c.spike_limit, "the loss stays above its trend"),
            (Verdict.SPIKE, s.joint, s.joint.value / c.joint_limit, "loss and gradient norm rise together"),
            (
                Verdict.DRIFT,
                s.drift,
                s.drift.value / c.drift_limit,
                "the loss has left the best level it held",
            ),
            (Verdict.OSCILLATION, first, swing / c.oscillation_limit, "the loss swings up and down"),
        ):
            if severity >= 1.0:
                steps = now - by.since + 1
                if verdict is Verdict.SPIKE and steps > _SLOW:
                    verdict = Verdict.DRIFT
                elif verdict is Verdict.DRIFT and not self._rises():
                    verdict = Verdict.PLATEAU
                reason = f"{what} since step {by.onset}: {steps} observations, {r.above_best:.1f} sigma above the best"
                return Excursion(verdict=verdict, onset=by.onset, since=now, severity=severity, reason=reason)
        return None

    def _renew(self, e: Excursion, step: int) -> None:
        """A further jump on top of an excursion has an onset of its own: what was done about the first one does not
        undo it. Judged by the newest values alone, and sooner: trouble is known to be there."""
        c, s = self.config, self._state
        if s.seen - e.since < _SLOW:
            return
        up = _above(s.loss.raw, c.loss_floor)
        e.loss_again.add(min(up, c.spike_clip) - c.spike_allowance, s.seen, step)
        both = max(min(up, c.joint_loss_clip), -_JUMP) + max(
            min(_above(s.norm.raw, c.norm_floor), c.joint_norm_clip), -_JUMP
        )
        e.joint_again.add(both - c.joint_allowance, s.seen, step)
        for by, limit in ((e.loss_again, c.spike_limit), (e.joint_again, c.joint_limit)):
            if by.value >= c.renewal * limit:
                e.onset, e.verdict = by.onset, Verdict.SPIKE
                e.reason = f"a further jump since step {by.onset}, on top of an excursion"
                e.loss_again, e.joint_again = Sum(), Sum()
                return

    def _rises(self) -> bool:
        """Over the latest observations, by more than half of the scatter between neighbours."""
        latest = self._state.loss.raw[-2 * _SLOW :]
        scatter = median([abs(after - before) for before, after in pairwise(latest)])
        return median(latest[-_SLOW:]) - median(latest[:_SLOW]) > scatter / 2

    # What is remembered.

    def _follow(self, e: Excursion, r: _Residuals) -> None:
        """During an excursion: is it over, has it become a plateau, is its level the new normal?"""
        c, s = self.config, self._state
        slow = e.verdict in (Verdict.DRIFT, Verdict.PLATEAU)
        if e.verdict is Verdict.OSCILLATION:
            _keep(e.loss, max(r.rise, r.fall), 2 * c.recovery)
        else:
            _keep(e.loss, r.above_best if slow else r.rise, 2 * c.recovery)
        if r.norm is not None:
            _keep(e.norm, r.norm, 2 * c.recovery)
        lasted = s.seen - e.since
        if e.verdict is Verdict.OSCILLATION:
            over = lasted >= 2 * c.recovery and median(e.loss) < c.calm
        else:
            calm = [median(z[-c.recovery :]) < c.calm for z in (e.loss, e.norm) if z]
            over = lasted >= c.recovery and all(calm)
        if lasted == c.lasting and e.verdict is not Verdict.OSCILLATION:
            e.verdict = Verdict.DRIFT if self._rises() else Verdict.PLATEAU
        if over:
            s.excursion = None
        elif lasted >= c.adapt:
            s.excursion, s.best, s.best_lr, s.width = None, None, None, None
            s.sums = Sums(spike=e.loss_again, joint=e.joint_again)  # a jump may be on its way
            for channel in (s.loss, s.norm):
                channel.values = list(channel.raw)
                channel.times = list(range(s.seen - len(channel.raw) + 1, s.seen + 1))

    def _learn(self, r: _Residuals, signals: Signals, norm: float | None, line: Trend) -> None:
        """Outside of one: accept what does not stand out, hold the best level, remember jumps that did no harm."""
        c, s = self.config, self._state
        for channel, value, z in ((s.loss, signals.loss, r.rise), (s.norm, norm, r.norm)):
            if value is None:
                continue
            low = channel is s.loss and r.fall >= _JUMP and s.drop is None
            if z is None or (z < _JUMP and not low):
                self._accept(channel, value)
            elif not low:
                channel.pending.append((s.seen, z))
            if channel.pending and s.seen - channel.pending[0][0] >= c.recovery:
                # A refused jump cannot have done harm, so it counts as little more than what is refused.
                known = max(c.lone, c.record_margin * channel.record)
                channel.record = max(channel.record, min(channel.pending.pop(0)[1], 1.25 * known))
        self._hold(signals, line)
        fall = s.sums.fall
        fall.add(min(r.fall, c.spike_clip) - c.fall_allowance, s.seen, signals.step)
        if fall.value >= c.spike_limit:
            if s.drop is None and s.seen - fall.since <= _SLOW:
                s.drop = Drop(level=line.level, since=s.seen)
            s.sums.fall = Sum()

    def _hold(self, signals: Signals, line: Trend) -> None:
        """The best level: lowered as the loss falls, but not to that of a few easy shards; given up slowly."""
        c, s = self.config, self._state
        level = median(s.loss.values[-c.level :])
        if s.drop is not None:
            returned = level >= s.drop.level
            if s.seen - s.drop.since > c.drop_memory or (returned and s.seen - s.drop.since > c.level):
                s.drop = None
            else:
                level = max(level, s.drop.level)
        lr = signals.lr if signals.lr is not None and math.isfinite(signals.lr) else None
        risen_lr = s.best_lr is not None and lr is not None and lr > 1.25 * s.best_lr
        if s.best is None or risen_lr or level < s.best + c.forget * line.noise:
            s.best, s.best_lr = level, lr
        else:
            s.best += c.forget * line.noise
        if len(s.loss.values) == c.window:  # the scatter of a few values is small by chance
            s.width = line.scale if s.width is None else min(line.scale, s.width * (1.0 + c.forget))

    def _accept(self, channel: Channel, value: float) -> None:
        _keep(channel.times, self._state.seen, self.config.window)
        _keep(channel.values, value, self.config.window)

    def _forget(self) -> None:
        s, c = self._state, self.config
        for channel in (s.loss, s.norm):
            channel.record *= 0.5 ** (1 / c.record_half_life)

    def _warnings(self, signals: Signals) -> tuple[str, ...]:
        """Of the indicators that were measured, and every now and then of the level of the gradient norm."""
        said = [
            f"{name} is {value}" for name, value in signals.indicators.items() if not math.isfinite(value)
        ]
        logs = {name: math.log(value) for name, value in signals.indicators.items() if 0.0 < value < math.inf}
        if self._state.seen % _NORM_EVERY == 0 and self._state.norm.values:
            logs["gradient norm"] = median(self._state.norm.values[-_NORM_EVERY:])
        grown = [self._growth(name, value) for name, value in logs.items()]
        return (*said, *filter(None, grown))

    def _growth(self, name: str, value: float) -> str:
        """Does it grow? The newest third of the measurements against the oldest, in log units; "" = no."""
        c, known = self.config, self._state.indicators
        if name not in known and len(known) >= _INDICATORS:
            return ""
        series = known.setdefault(name, [])
        _keep(series, value, c.indicator_window)
        third = len(series) // 3
        if third < 3:
            return ""
        growth = median(series[-third:]) - median(series[:third])
        scatter = median([abs(after - before) for before, after in pairwise(series)])
        if growth <= max(math.log(c.indicator_growth), _JUMP * scatter):
            return ""
        return f"{name} has grown {math.exp(min(growth, 700.0)):.1f} times in {len(series)} measurements"


def _no_number(signals: Signals) -> str:
    if not abs(signals.loss) < _ABSURD:
        return f"loss is {signals.loss}"
    if signals.grad_norm is not None and not math.isfinite(signals.grad_norm):
        return f"gradient norm is {signals.grad_norm}"
    return ""


def _above(newest: list[float], floor: float) -> float:
    """The last value over those before it, in sigma; 0 where there are too few."""
    before = newest[-2 * _SLOW : -1]
    if len(before) < _SLOW:
        return 0.0
    level = median(before)
    return _bound((newest[-1] - level) / max(1.4826 * median([abs(x - level) for x in before]), floor))


def _bound(z: float) -> float:
    return max(-_FARTHEST, min(_FARTHEST, z))


def _keep(items: list[Any], item: Any, most: int) -> None:
    items.append(item)
    del items[:-most]
