"""Slow leading indicators: second moments, attention logits, the level of the gradient norm. Warnings only."""

from __future__ import annotations

import math
from itertools import pairwise

from megastable.config.stability import DetectorConfig
from megastable.guard.detector_state import DetectorState
from megastable.guard.robust import median
from megastable.guard.signals import Signals

_MOST = 16  # measurements kept, so that the state stays small
_NORM_EVERY = 25  # observations between two measurements of the gradient norm's level
_STANDS_OUT = 4.0  # scatters of neighbours


def warnings(signals: Signals, state: DetectorState, config: DetectorConfig) -> tuple[str, ...]:
    """Warnings on the indicators that were measured, and periodically on the level of the gradient norm. Updates
    `state`."""
    said = [f"{name} is {value}" for name, value in signals.indicators.items() if not math.isfinite(value)]
    logs = {name: math.log(value) for name, value in signals.indicators.items() if 0.0 < value < math.inf}
    if state.seen % _NORM_EVERY == 0 and state.norm.values:
        logs["gradient norm"] = median(state.norm.values[-_NORM_EVERY:])
    grown = [_growth(name, value, state.indicators, config) for name, value in logs.items()]
    return (*said, *filter(None, grown))


def _growth(name: str, value: float, known: dict[str, list[float]], config: DetectorConfig) -> str:
    """Whether it grows: the newest third of the measurements against the oldest, in log units; "" = no."""
    if name not in known and len(known) >= _MOST:
        return ""
    series = known.setdefault(name, [])
    series.append(value)
    del series[: -config.indicator_window]
    third = len(series) // 3
    if third < 3:
        return ""
    growth = median(series[-third:]) - median(series[:third])
    scatter = median([abs(after - before) for before, after in pairwise(series)])
    if growth <= max(math.log(config.indicator_growth), _STANDS_OUT * scatter):
        return ""
    return f"{name} has grown {math.exp(min(growth, 700.0)):.1f} times in {len(series)} measurements"
