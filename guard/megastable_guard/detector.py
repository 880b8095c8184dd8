"""Anomaly detector: judges each step's loss and gradient norm as healthy or as one of several anomalies. Pure.

Two channels are watched, the loss in nats and the logarithm of the gradient norm (its tail is heavy, its changes are
factors). Each is compared with a robust trend through the last ~100 accepted values; outliers and everything during an
excursion never enter it. These tests run on the residuals, in sigma:

    outlier      loss and norm together, or one alone, farther out than the harmless jumps seen in this run
    spike        cumulative sums of the loss, and of loss + log norm: the norm leads the loss by one to four steps
    drift        a cumulative sum of the loss above the best level held so far
    oscillation  two cumulative sums, of wide residuals on either side

Terms are clipped, and the largest of a sum does not count: no single step, however hard its batch, raises a sequential
alarm. The autocorrelation of the residuals is measured, and their weight is reduced by it (robust.py).

An alarm by the loss alone is a training anomaly only if the gradient norm is up as well, or the loss has jumped by more
than any harmless data of this run, keeps climbing, or oscillates. Otherwise the data has changed (`shift`): if the new
level stays for `settle` observations, the baseline is reset, and nothing else is done. After a known change of the data
(`Signals.mixed`), only the norm can raise an alarm.

During an excursion the trend is frozen; after `adapt` observations the new level is learnt. Before there is a trend,
`Opening` judges.

Time is counted in observations: a trace logged every tenth step is judged alike. Plain Python on floats: every rank
reaches the same verdict from the same numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from megastable_guard.actions import Finding, Signals, Verdict
from megastable_guard.guard_config import DetectorConfig
from megastable_guard.robust import MAD_TO_SIGMA, Scatter, Sum, Trend, fit_trend, median, neighbour_difference

_NEWEST = 9  # values per level of the opening
_TURNED = 0.1  # share of the rise: a drop of this much since half of the patience ago is a turn


class _DetectorState(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


class Channel(_DetectorState):
    """The state of one series.

    times, values: the accepted ones. raw: the newest finite ones, accepted or not. record: the farthest harmless jump
    in sigma, slowly forgotten. pending: jumps (observation, sigma) that are not yet known to be harmless.
    """

    times: list[int] = []
    values: list[float] = []
    raw: list[float] = []
    record: float = 0.0
    pending: list[tuple[int, float]] = []


class Excursion(_DetectorState):
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


class Drop(_DetectorState):
    """A sudden fall of the loss, such as in a shard of easy text: the way back up to `level` is not a spike."""

    level: float
    since: int


class Sums(_DetectorState):
    """The running sequential tests. All restart when an excursion is over."""

    spike: Sum = Field(default_factory=Sum)
    joint: Sum = Field(default_factory=Sum)
    drift: Sum = Field(default_factory=Sum)
    wide_up: Sum = Field(default_factory=Sum)
    wide_down: Sum = Field(default_factory=Sum)
    fall: Sum = Field(default_factory=Sum)


class Opening(_DetectorState):
    """The start of a run, before it has a trend: does a rise of the loss recover?

    Without warm-up, or with an aggressive optimizer, the loss rises in its first steps by 1 to 40 nats, far above its
    initial value, and recovers within 30 to 80 steps; the best run of a sweep may be one of these. So the height says
    nothing; the alarm is a rise that does not turn.

    newest: losses. levels: medians of them, as many as the patience is long. lowest: of all, and waited: the
    observations since then. onset: the step at which the loss rose, None before; risen: observations since.
    longest: of all rises. refused: the last value was refused.
    """

    newest: list[float] = []
    levels: list[float] = []
    lowest: float | None = None
    waited: int = 0
    onset: int | None = None
    risen: int = 0
    longest: int = 0
    refused: bool = False

    def rise(self, loss: float) -> float:
        """Nats above the lowest level."""
        return 0.0 if self.lowest is None else loss - self.lowest

    def judge(self, loss: float, step: int, config: DetectorConfig) -> tuple[Verdict, str]:
        """OUTLIER: a single value beyond all before. DRIFT: a rise that does not turn. Otherwise HEALTHY."""
        stands_alone = self.newest and loss - max(self.newest) > config.explosion
        if stands_alone and self.onset is None and not self.refused:
            self.refused = True  # once: if the next one is as high, it is not a single batch
            return Verdict.OUTLIER, f"loss {loss:.4g} is {loss - max(self.newest):.3g} nats above all before"
        self.newest = [*self.newest, loss][-_NEWEST:]
        present_level = median(self.newest)
        self.levels = [*self.levels, present_level][-config.start_patience :]
        self.waited += 1
        if self.lowest is None or present_level < self.lowest:
            self.lowest, self.waited = present_level, 0
        if present_level - self.lowest < config.explosion / 2:
            self.onset, self.risen = None, 0
            self.refused = self.refused and present_level > self.lowest
            return Verdict.HEALTHY, ""
        if self.onset is None:
            self.onset = step
        self.risen += 1
        self.longest = max(self.longest, self.risen)
        if self.risen < config.start_patience:
            return Verdict.HEALTHY, ""
        half_level = self.levels[-1 - config.start_patience // 2]
        rise = present_level - self.lowest
        if half_level - present_level > _TURNED * rise:
            return Verdict.HEALTHY, ""
        return Verdict.DRIFT, (
            f"the loss has been {rise:.3g} nats above its lowest level since step {self.onset}, "
            f"for {self.risen} observations, and does not turn"
        )

    def over(self, config: DetectorConfig) -> bool:
        """Whether it is back at its lowest level, or has settled near it."""
        assert self.lowest is not None
        if self.onset is not None:
            return False
        return (
            self.newest[-1] <= self.lowest + config.explosion / 8
            or self.levels[-1] <= (self.lowest + config.explosion / 8)
            or self.waited >= config.start_patience
        )


class DetectorState(_DetectorState):
    """The complete state of the detector, from which it continues bit for bit; under 20 KB as JSON."""

    seen: int = 0
    loss: Channel = Field(default_factory=Channel)
    norm: Channel = Field(default_factory=Channel)
    sums: Sums = Field(default_factory=Sums)
    best: float | None = None  # lowest level of the loss held so far
    best_lr: float | None = None
    width: float | None = None  # the smallest scatter of the loss, slowly forgotten
    drop: Drop | None = None
    excursion: Excursion | None = None
    opening: Opening | None = Field(default_factory=Opening)
    scatter: Scatter = Field(default_factory=Scatter)
    mixed: int | None = None  # the observation at which the data changed, if known
    doubted: int = 0  # until this observation an ordinary norm proves nothing: it was learnt in an excursion


_FARTHEST = 1e6  # sigma; residuals are clipped here so that no sum overflows
_JUMP = 4.0  # sigma beyond which a value stands out: not accepted, and remembered if harmless
_SLOW = 15  # observations; an alarm that took longer to build up is a drift, not a spike
_ABSURD = 1e6  # nats; no cross-entropy is that large, and sums of such numbers overflow
_CLIMB = 2.5  # rise between the outer thirds of some steps, in neighbour scatters, that counts as a climb
_HALFWAY = 0.2  # share of it, at least, from either outer third to the middle one: else it is a level shift
_WIDER = 3.0  # scatters of the latest neighbours: also a spike if the noise has grown
_DEEPER = 1.5  # deepest recent falls: the same, as noise reaches equally far down and up
_HELD = 3  # observations of a spike by the loss alone, of which the newest is still half as high
_WIDE = 1.5  # sigma beyond which a value is on one side; an oscillation visits one, the other, and the first again
_PLAIN = 1.4  # long-run variance of white noise about a trend, over its variance


@dataclass(frozen=True)
class _Residuals:
    """One step against the trends, in sigma.

    rise: how far the loss lies above both its line and its latest level: a loss that only falls more slowly than
    before does not rise. fall: below both. above_best: above the best level held. norm: log gradient norm
    above its line, None if unknown. wider: the current scatter over its minimum.
    """

    rise: float
    fall: float
    above_best: float
    norm: float | None
    wider: float


class Detector:
    """One `observe_step` per step, before its update. The same numbers give the same findings on every rank."""

    def __init__(self, config: DetectorConfig, state: DetectorState | None = None) -> None:
        self.config = config
        self._state = DetectorState() if state is None else state.model_copy(deep=True)
        c, log_rarer = config, -math.log(config.false_alarms) / 2
        # The logarithm of the rate of false alarms falls with 2 * limit * allowance over the variance of a term
        # (Siegmund, Sequential Analysis, 1985, chapter 2), which is 1, and 2 for loss + norm.
        self._spike_limit = max(c.spike_limit / 2, c.spike_limit + log_rarer / c.spike_allowance)
        self._joint_limit = max(c.joint_limit / 2, c.joint_limit + 2 * log_rarer / c.joint_allowance)
        self._drift_limit = max(c.drift_limit / 2, c.drift_limit + log_rarer / c.drift_allowance)
        self._swing_limit = max(
            c.oscillation_limit / 2, c.oscillation_limit + log_rarer / c.oscillation_allowance
        )

    @property
    def state(self) -> DetectorState:
        """A copy: later observations do not change it."""
        return self._state.model_copy(deep=True)

    def begin_again(self) -> None:
        """Judge the coming steps as those of a run that begins: they are of another kind than those before."""
        jump_records = self._state.loss.record, self._state.norm.record
        self._state = DetectorState(seen=self._state.seen)
        self._state.loss.record, self._state.norm.record = jump_records

    def expect_next(self) -> tuple[Trend | None, Trend | None]:
        """The expected loss (nats) and log gradient norm of the next step; None: too little is known."""
        s, c = self._state, self.config
        return self._trend(s.loss, c.loss_floor), self._trend(s.norm, c.norm_floor)

    def find_alarming_loss(self) -> float:
        """The loss from which the next step is an alarm by itself, in nats; infinite: too little is known."""
        loss_trend, _ = self.expect_next()
        return math.inf if loss_trend is None else loss_trend.level + self._least_jump(loss_trend)

    def observe_step(self, signals: Signals) -> Finding:
        """Judge one step against those before it, and remember it. Never raises, for any numbers.

        A step with non-finite numbers leaves the state unchanged.
        """
        s, c, step = self._state, self.config, signals.step
        if signals.mixed:
            s.mixed = s.seen + 1
        if wrong_number := _no_number(signals):
            return Finding(step, Verdict.NON_FINITE, 1.0, step, wrong_number, on_trend=False)
        s.seen += 1
        log_norm = None if signals.grad_norm is None else math.log(max(signals.grad_norm, 1e-30))
        if s.opening is not None:
            return self._open(s.opening, step, signals.loss, log_norm)

        for channel in (s.loss, s.norm):
            channel.record *= 0.5 ** (1 / c.record_half_life)
        loss_trend = self._trend(s.loss, c.loss_floor)
        assert loss_trend is not None
        norm_line = self._trend(s.norm, c.norm_floor)
        r = self._residuals(signals.loss, log_norm, loss_trend, norm_line)
        _keep(s.loss.raw, signals.loss, c.relearn)
        if log_norm is not None:
            _keep(s.norm.raw, log_norm, c.relearn)
        outlier_severity, outlier_reason = self._outlier(r)
        if (
            outlier_severity >= 1.0
            and self._expected_at(s.seen)
            and (r.norm is None or r.norm < c.outlier_norm)
        ):
            outlier_severity = 0.99  # the data was changed on purpose: outliers are expected
        is_watching = s.excursion is None or s.excursion.verdict is Verdict.SHIFT
        if is_watching and (raised_alarm := self._sequential(step, r, loss_trend, norm_line)):
            if s.excursion is None or raised_alarm.verdict is not Verdict.SHIFT:
                s.excursion = raised_alarm
                s.loss.pending, s.norm.pending = [], []
            if raised_alarm.verdict is not Verdict.SHIFT:
                s.sums = Sums()
        if outlier_severity >= 1.0 and self._beyond_shift(r):
            return Finding(step, Verdict.OUTLIER, outlier_severity, step, outlier_reason, on_trend=False)
        if s.excursion is not None:
            e = s.excursion
            e.severity = max(e.severity, outlier_severity)
            if e.verdict is not Verdict.SHIFT:
                self._renew(e, step)
            elif s.seen - e.since >= c.settle:
                level_text = f"the loss has had a new level since step {e.onset}"
                e.reason = f"{level_text}, with an ordinary gradient norm: baseline reset"
            excursion_finding = Finding(step, e.verdict, e.severity, e.onset, e.reason, on_trend=False)
            resets_baseline = self._follow(e, r)
            return replace(
                excursion_finding, reset=resets_baseline and excursion_finding.verdict is Verdict.SHIFT
            )
        self._learn(r, signals, log_norm, loss_trend)
        on_trend = r.rise < _JUMP / 2 and (r.norm is None or r.norm < _JUMP / 2)
        found_verdict = Verdict.OUTLIER if outlier_severity > 0.0 else Verdict.HEALTHY
        return Finding(step, found_verdict, outlier_severity, step, outlier_reason, on_trend)

    def _beyond_shift(self, r: _Residuals) -> bool:
        """Whether a step stands out, in loss and norm, also from the new level attributed to other data."""
        e, c = self._state.excursion, self.config
        if e is None or e.verdict is not Verdict.SHIFT or not e.loss or r.norm is None:
            return False
        return r.norm >= c.outlier_norm and r.rise - median(e.loss) >= c.outlier_loss

    def _open(self, o: Opening, step: int, loss: float, norm: float | None) -> Finding:
        """The start: fill the windows; only a rise that does not turn counts."""
        s, c = self._state, self.config
        found_verdict, finding_reason = o.judge(loss, step, c)
        if found_verdict is Verdict.OUTLIER:
            return Finding(
                step, found_verdict, o.rise(loss) / c.explosion, step, finding_reason, on_trend=False
            )
        for channel, channel_value in ((s.loss, loss), (s.norm, norm)):
            if channel_value is not None:
                self._accept(channel, channel_value)
                _keep(channel.raw, channel_value, c.relearn)
        onset = step if o.onset is None else o.onset
        if found_verdict is not Verdict.HEALTHY:
            s.opening = Opening()  # a person or the policy has acted on it: start again
            return Finding(step, found_verdict, 1.0, onset, finding_reason, on_trend=False)
        if len(s.loss.values) >= c.min_values and step >= c.warmup_steps and o.over(c):
            s.opening = None
            if o.longest:
                self._relearn(c.relearn)
        return Finding(step, Verdict.HEALTHY, 0.0, step, "", on_trend=o.onset is None)

    # Comparison with the trend.

    def _trend(self, channel: Channel, floor: float) -> Trend | None:
        if len(channel.values) < self.config.min_values:
            return None
        trend_time, full_window = self._state.seen, self.config.window
        if self._state.excursion is not None:
            trend_time = channel.times[-1]  # a slope is not extrapolated for longer than it was observed
        return fit_trend(channel.times, channel.values, trend_time, floor=floor, full=full_window)

    def _residuals(self, loss: float, norm: float | None, line: Trend, norm_line: Trend | None) -> _Residuals:
        s = self._state
        rise = loss - max(line.level, line.late)
        fall = min(line.low, line.late) - loss
        above_best = loss - s.best if s.best is not None else 0.0
        if s.drop is not None:
            above_drop = loss - s.drop.level
            rise, above_best = min(rise, above_drop), min(above_best, above_drop)
        norm_sigma = (
            None if norm is None or norm_line is None else _bound((norm - norm_line.level) / norm_line.scale)
        )
        width_ratio = line.scale / s.width if s.width is not None else 1.0
        z, fall_sigma, over = (
            _bound(rise / line.scale),
            _bound(fall / line.scale),
            _bound(above_best / line.noise),
        )
        return _Residuals(z, fall_sigma, over, norm_sigma, width_ratio)

    # The tests.

    def _outlier(self, r: _Residuals) -> tuple[float, str]:
        """Severity of this step by itself, 1 = refuse it, and why; 0 = nothing to report."""
        c, s = self.config, self._state
        lone_limit = c.lone if r.norm is not None else c.lone_without_norm
        severity = r.rise / max(lone_limit, c.record_margin * s.loss.record)
        finding_reason = f"loss {r.rise:.1f} sigma above its trend"
        if r.norm is not None:
            finding_reason += f", log gradient norm {r.norm:.1f}"
            joint_severity = min(r.rise / c.outlier_loss, r.norm / c.outlier_norm)
            severity = max(severity, joint_severity, r.norm / max(c.lone, c.record_margin * s.norm.record))
        if severity >= 1.0:
            return severity, finding_reason
        return (max(severity, 0.01), finding_reason) if r.rise >= max(c.notice, s.loss.record) else (0.0, "")

    def _sequential(self, step: int, r: _Residuals, line: Trend, norm_line: Trend | None) -> Excursion | None:
        """Add this step to the running sums; an excursion if one reaches its limit."""
        c, s, now = self.config, self._state.sums, self._state.seen
        noise_factor = self._state.scatter.widening_factor(c.scatter_usual, c.scatter_most)
        s.spike.add_term(min(r.rise / noise_factor, c.spike_clip) - c.spike_allowance, now, step)
        if r.norm is not None:
            # In a run with harmless norm jumps of 20 sigma the norm gets half the weight.
            tamed_norm = r.norm / max(1.0, self._state.norm.record / c.tame)
            s.joint.add_term(self._both(r.rise, tamed_norm) - c.joint_allowance, now, step)
        s.drift.add_term(min(r.above_best / noise_factor, c.drift_clip) - c.drift_allowance, now, step)
        wide_clip = c.oscillation_clip
        s.wide_up.add_term(
            min(max(r.rise * r.wider / noise_factor, 0.0), wide_clip) - c.oscillation_allowance, now, step
        )
        s.wide_down.add_term(
            min(max(r.fall * r.wider / noise_factor, 0.0), wide_clip) - c.oscillation_allowance, now, step
        )

        both_sides = min(s.wide_up.value, s.wide_down.value)
        first_side = min(s.wide_up, s.wide_down, key=lambda side: side.since)
        sum_tests = (
            (Verdict.SPIKE, s.spike, s.spike.value / self._spike_limit, "the loss stays above its trend"),
            (Verdict.SPIKE, s.joint, s.joint.value / self._joint_limit, "loss and gradient norm rise together"),
            (Verdict.DRIFT, s.drift, s.drift.value / self._drift_limit, "the loss has left the best level it held"),
            (Verdict.OSCILLATION, first_side, both_sides / self._swing_limit, "the loss swings up and down"),
        )  # fmt: skip
        raised_alarms = [sum_test for sum_test in sum_tests if sum_test[2] >= 1.0]
        for verdict, by, severity, what_rises in raised_alarms:
            if not self._confirmed(verdict, by, line, norm_line):
                continue
            steps = now - by.since + 1
            if verdict is Verdict.SPIKE and steps > _SLOW:
                verdict = Verdict.DRIFT
            elif verdict is Verdict.DRIFT and not self._rises():
                verdict = Verdict.PLATEAU
            seen_text = f"{steps} observations, {r.above_best:.1f} sigma above the best"
            reason = f"{what_rises} since step {by.onset}: {seen_text}"
            return Excursion(verdict=verdict, onset=by.onset, since=now, severity=severity, reason=reason)
        if raised_alarms:
            _, by, severity, what_rises = raised_alarms[0]
            reason = f"{what_rises} since step {by.onset}, with an ordinary gradient norm: other data?"
            verdict = Verdict.SHIFT
            return Excursion(verdict=verdict, onset=by.onset, since=now, severity=severity, reason=reason)
        return None

    def _both(self, rise: float, norm: float) -> float:
        """What loss and log gradient norm, in sigma, add to the sum of both."""
        c = self.config
        return max(min(rise, c.joint_loss_clip), -_JUMP) + max(min(norm, c.joint_norm_clip), -_JUMP)

    def _confirmed(self, verdict: Verdict, by: Sum, line: Trend, norm_line: Trend | None) -> bool:
        """Whether an alarm is a training anomaly: the norm is up as well, or the loss alone suffices. Other data show
        another level of the loss with an ordinary norm."""
        c, s = self.config, self._state
        steps = s.seen - by.since + 1
        is_expected = self._expected_at(by.since)
        if norm_line is not None:
            newest_norms = s.norm.raw[-min(steps, _SLOW) :]
            norm_heat = [
                min((newest_norm - norm_line.level) / norm_line.scale, c.joint_norm_clip)
                for newest_norm in newest_norms
            ]
            if sum(norm_heat) / len(norm_heat) >= c.heat * (1.5 if is_expected else 1.0):
                return True
        if is_expected:
            return False
        if verdict is Verdict.OSCILLATION:
            return self._swings(line, steps)
        loss_rises = sorted(x - max(line.level, line.late) for x in s.loss.raw[-min(steps, _SLOW) :])
        if verdict is Verdict.SPIKE and (norm_line is None or s.seen < s.doubted):
            # Noise that has grown reaches equally far down and up; the median of the jumps is not moved by those of a
            # spike.
            latest_losses = s.loss.raw[-2 * _SLOW :]
            neighbour_noise = MAD_TO_SIGMA / math.sqrt(2.0) * neighbour_difference(latest_losses)
            least_rise = max(
                _JUMP * line.scale, _WIDER * neighbour_noise, _DEEPER * (line.level - min(latest_losses))
            )
            is_held = steps >= _HELD and latest_losses[-1] - line.level >= least_rise / 2
            if is_held and median(loss_rises) >= least_rise:
                return True
        if len(loss_rises) > 1 and loss_rises[-2] >= self._least_jump(line):
            return True
        return self._climbs(steps, line.level)

    def _least_jump(self, line: Trend) -> float:
        """By how much a loss must rise to be an alarm by itself. [nats]"""
        c = self.config
        return max(c.gross, c.gross_sigma * line.scale, self._state.loss.record * line.scale)

    def _expected_at(self, observation: int) -> bool:
        """Whether the data was changed on purpose around that time."""
        mixed_at = self._state.mixed
        return mixed_at is not None and -2 <= observation - mixed_at <= _SLOW

    def _swings(self, line: Trend, steps: int) -> bool:
        """Whether wide residuals are correlated with their neighbours, unlike wider noise, and have turned twice,
        unlike a level shift."""
        newest_losses = [x - line.level for x in self._state.loss.raw]
        side_order = [x > 0.0 for x in newest_losses[-steps:] if abs(x) >= _WIDE * line.scale]
        if sum(before != after for before, after in pairwise(side_order)) < 2:
            return False
        mean_value = sum(newest_losses) / len(newest_losses)
        squared_sum = sum((newest_loss - mean_value) ** 2 for newest_loss in newest_losses)
        return (
            abs(sum((a - mean_value) * (b - mean_value) for a, b in pairwise(newest_losses)))
            > squared_sum / 2
        )

    def _climbs(self, steps: int, level: float) -> bool:
        """Whether the loss of the latest steps keeps rising, unlike a level shift that stays. level: the level before
        the rise."""
        c, s = self.config, self._state
        third_length = min(steps, c.relearn) // 3
        if third_length < _SLOW // 2 + 1 or s.seen < c.window:
            return False
        newest_losses = s.loss.raw[-3 * third_length :]
        last_level = median(newest_losses[-third_length:])
        neighbour_scatter = neighbour_difference(newest_losses)
        least_climb = _CLIMB * neighbour_scatter * s.scatter.widening_factor(_PLAIN, c.scatter_most)
        first_level, middle_level = (
            median(newest_losses[:third_length]),
            median(newest_losses[third_length : 2 * third_length]),
        )
        if min(middle_level - first_level, last_level - middle_level) < _HALFWAY * least_climb:
            return False
        return last_level - first_level > max(least_climb, (last_level - level) / 3)

    def _renew(self, e: Excursion, step: int) -> None:
        """A further jump during an excursion has its own onset: the action on the first one does not undo it. Judged by
        the newest values alone, and sooner, since the run is already in an excursion."""
        c, s = self.config, self._state
        if s.seen - e.since < _SLOW:
            return
        loss_above = _above(s.loss.raw, c.loss_floor)
        e.loss_again.add_term(min(loss_above, c.spike_clip) - c.spike_allowance, s.seen, step)
        joint_term = self._both(loss_above, _above(s.norm.raw, c.norm_floor))
        e.joint_again.add_term(joint_term - c.joint_allowance, s.seen, step)
        for by, limit in ((e.loss_again, self._spike_limit), (e.joint_again, self._joint_limit)):
            if by.value >= c.renewal * limit:
                e.onset, e.verdict = by.onset, Verdict.SPIKE
                e.reason = f"a further jump since step {by.onset}, on top of an excursion"
                e.loss_again, e.joint_again = Sum(), Sum()
                return

    def _rises(self) -> bool:
        """Whether the latest observations rise by more than half of the scatter between neighbours."""
        latest_losses = self._state.loss.raw[-2 * _SLOW :]
        return (
            median(latest_losses[-_SLOW:]) - median(latest_losses[:_SLOW])
            > neighbour_difference(latest_losses) / 2
        )

    # State updates.

    def _follow(self, e: Excursion, r: _Residuals) -> bool:
        """During an excursion: is it over, or a plateau? True: its level is the new normal from now on."""
        c, s = self.config, self._state
        is_slow = e.verdict in (Verdict.DRIFT, Verdict.PLATEAU, Verdict.SHIFT)
        is_swinging = e.verdict is Verdict.OSCILLATION
        _keep(
            e.loss,
            max(r.rise, r.fall) if is_swinging else r.above_best if is_slow else r.rise,
            2 * c.recovery,
        )
        if r.norm is not None:
            _keep(e.norm, r.norm, 2 * c.recovery)
        lasted_for = s.seen - e.since
        if is_swinging:
            is_over = lasted_for >= 2 * c.recovery and median(e.loss) < c.recovered
        else:
            recovered_channels = [
                median(channel_residuals[-c.recovery :]) < c.recovered
                for channel_residuals in (e.loss, e.norm)
                if channel_residuals
            ]
            is_over = lasted_for >= c.recovery and all(recovered_channels)
        if lasted_for == c.lasting and e.verdict not in (Verdict.OSCILLATION, Verdict.SHIFT):
            e.verdict = Verdict.DRIFT if self._rises() else Verdict.PLATEAU
        if is_over:
            s.excursion, s.sums = None, Sums()
        elif lasted_for >= c.adapt or (e.verdict is Verdict.SHIFT and lasted_for >= c.settle):
            s.excursion = None
            s.sums = Sums(spike=e.loss_again, joint=e.joint_again)  # a jump may be in progress
            if e.verdict is not Verdict.SHIFT:
                s.doubted = s.seen + 2 * c.adapt
            self._relearn(c.relearn if lasted_for >= c.adapt else lasted_for)
            return True
        return False

    def _relearn(self, count: int) -> None:
        """Reset the baseline to the newest `count` values."""
        s = self._state
        s.best, s.best_lr, s.width = None, None, None
        for channel in (s.loss, s.norm):
            channel.values = channel.raw[-count:]
            channel.times = list(range(s.seen - len(channel.values) + 1, s.seen + 1))

    def _learn(self, r: _Residuals, signals: Signals, norm: float | None, line: Trend) -> None:
        """Outside an excursion: accept ordinary values, hold the best level, remember harmless jumps."""
        c, s = self.config, self._state
        for channel, channel_value, z in ((s.loss, signals.loss, r.rise), (s.norm, norm, r.norm)):
            if channel_value is None:
                continue
            fell_suddenly = channel is s.loss and r.fall >= _JUMP and s.drop is None
            if z is None or (z < _JUMP and not fell_suddenly):
                self._accept(channel, channel_value)
            elif not fell_suddenly:
                channel.pending.append((s.seen, z))
            if channel.pending and s.seen - channel.pending[0][0] >= c.recovery:
                # A refused jump cannot have done harm, so it barely counts as harmless.
                known_jump = max(c.lone, c.record_margin * channel.record)
                channel.record = max(channel.record, min(channel.pending.pop(0)[1], 1.25 * known_jump))
        s.scatter.add_residual((signals.loss - line.level) / line.scale, c.scatter_memory)
        self._hold(signals, line)
        fall_sum = s.sums.fall
        fall_sum.add_term(min(r.fall, c.spike_clip) - c.fall_allowance, s.seen, signals.step)
        if fall_sum.value >= c.spike_limit:
            if s.seen - fall_sum.since <= _SLOW:  # a further fall renews the memory of the first one
                drop_level = line.level if s.drop is None else max(line.level, s.drop.level)
                s.drop = Drop(level=drop_level, since=s.seen)
            s.sums.fall = Sum()

    def _hold(self, signals: Signals, line: Trend) -> None:
        """Update the best level: lowered as the loss falls, but not to that of a few easy shards; raised slowly."""
        c, s = self.config, self._state
        level = median(s.loss.values[-c.level :])
        if s.drop is not None:
            has_returned = level >= s.drop.level
            # Easy shards come in groups: the next one may begin soon after a return.
            if s.seen - s.drop.since > (c.drop_memory // 2 if has_returned else c.drop_memory):
                s.drop = None
            else:
                level = max(level, s.drop.level)
        lr = signals.lr if signals.lr is not None and math.isfinite(signals.lr) else None
        risen_lr = s.best_lr is not None and lr is not None and lr > 1.25 * s.best_lr
        if s.best is None or risen_lr or level < s.best + c.forget * line.noise:
            s.best, s.best_lr = level, lr
        else:
            s.best += c.forget * line.noise
        if len(s.loss.values) == c.window:  # a few values may scatter little by chance
            s.width = line.scale if s.width is None else min(line.scale, s.width * (1.0 + c.forget))

    def _accept(self, channel: Channel, value: float) -> None:
        _keep(channel.times, self._state.seen, self.config.window)
        _keep(channel.values, value, self.config.window)


def _no_number(signals: Signals) -> str:
    if not abs(signals.loss) < _ABSURD:
        return f"loss is {signals.loss}"
    if signals.grad_norm is not None and not math.isfinite(signals.grad_norm):
        return f"gradient norm is {signals.grad_norm}"
    return ""


def _above(newest: list[float], floor: float) -> float:
    """The last value relative to those before it, in sigma; 0 if there are too few."""
    values_before = newest[-2 * _SLOW : -1]
    if len(values_before) < _SLOW:
        return 0.0
    level = median(values_before)
    return _bound(
        (newest[-1] - level) / max(MAD_TO_SIGMA * median([abs(x - level) for x in values_before]), floor)
    )


def _bound(z: float) -> float:
    return max(-_FARTHEST, min(_FARTHEST, z))


def _keep(items: list[Any], item: Any, most: int) -> None:
    items.append(item)
    del items[:-most]
