"""Learning rate as a pure function of the number of applied updates.

Nothing is stepped or saved: a discarded update does not move the schedule, and a resumed or rewound run has the right
rate by construction. Cosine: Loshchilov & Hutter, arXiv:1608.03983; WSD (warm-up, stable, decay): Hu et al.,
arXiv:2404.06395; its decay as 1 - sqrt: Hägele et al., arXiv:2405.18392.
"""

from __future__ import annotations

import math

from megastable.config.tree import ScheduleConfig


def rate(schedule: ScheduleConfig, peak: float, total: int, updates: int) -> float:
    """The learning rate of the update that follows `updates` applied ones.

    peak: the rate after warm-up. total: updates at which the decay reaches the floor.
    """
    if updates < schedule.warmup_steps:
        return peak * (updates + 1) / schedule.warmup_steps
    floor = peak * schedule.floor
    if schedule.kind == "constant":
        return peak
    begin = schedule.warmup_steps
    if schedule.kind == "wsd":
        begin = max(begin, total - (schedule.decay_steps or max(1, total // 10)))
    done = min(1.0, max(0.0, (updates - begin) / max(1, total - begin)))
    shape = schedule.decay if schedule.kind == "wsd" else schedule.kind
    if shape == "sqrt":
        done = math.sqrt(done)
    if shape == "cosine":
        return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * done))
    return floor + (peak - floor) * (1 - done)
