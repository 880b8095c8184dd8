"""Learning rate as a pure function of the applied updates: of their number, or of their tokens.

Nothing is stepped or saved: a discarded update does not move the schedule, and a resumed or rewound run has the right
rate by construction. Cosine: Loshchilov & Hutter, arXiv:1608.03983; WSD (warm-up, stable, decay): Hu et al.,
arXiv:2404.06395; its decay as 1 - sqrt: Hägele et al., arXiv:2405.18392.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from megastable.config.tree import RunConfig, ScheduleConfig


def rate_at(schedule: ScheduleConfig, peak: float, total: int, done: int, next: int = 1) -> float:
    """The learning rate of the update that follows the applied ones.

    done: their number, or their tokens if the schedule counts tokens; next: what this update adds to it. peak: the rate
    after warm-up. total: where the decay reaches the floor, in the same unit.
    """
    decay_begin = warmup_length(schedule)
    if done < decay_begin:
        return peak * min(1.0, (done + next) / decay_begin)
    floor_rate = peak * schedule.floor
    if schedule.kind == "constant":
        return peak
    if schedule.kind == "wsd":
        decay_length = schedule.decay_tokens if schedule.by_tokens else schedule.decay_steps
        decay_begin = max(decay_begin, total - (decay_length or max(1, total // 10)))
    decay_progress = min(1.0, max(0.0, (done - decay_begin) / max(1, total - decay_begin)))
    decay_shape = schedule.decay if schedule.kind == "wsd" else schedule.kind
    if decay_shape == "sqrt":
        decay_progress = math.sqrt(decay_progress)
    if decay_shape == "cosine":
        return floor_rate + (peak - floor_rate) * 0.5 * (1 + math.cos(math.pi * decay_progress))
    return floor_rate + (peak - floor_rate) * (1 - decay_progress)


def warmup_length(schedule: ScheduleConfig) -> int:
    """Length of the warm-up, in updates or in their tokens."""
    return (schedule.warmup_tokens if schedule.by_tokens else schedule.warmup_steps) or 0


def measure_progress(schedule: ScheduleConfig, updates: int, tokens: int) -> int:
    """How far the schedule is, in its unit. tokens: of the applied updates."""
    return tokens if schedule.by_tokens else updates


def find_decay_end(config: RunConfig) -> int:
    """Where the decay ends, in the schedule's unit: given, or the length of the run, if nothing is skipped."""
    if not config.schedule.by_tokens:
        return config.schedule.total_steps or config.train.steps
    return config.schedule.total_tokens or config.tokens


def scheduled_rate(config: RunConfig, updates: int, trained_tokens: int, tokens: int) -> float:
    """The rate of the update of a step with `tokens`, after the applied updates and their tokens."""
    schedule = config.schedule
    applied_amount = measure_progress(schedule, updates, trained_tokens)
    next_amount = measure_progress(schedule, 1, tokens)
    return rate_at(schedule, config.optimizer.lr, find_decay_end(config), applied_amount, next_amount)


def list_rates(config: RunConfig) -> Iterator[float]:
    """The rate of every step of a run in which nothing is skipped or refused."""
    batch_sizes, data_position = config.batches, 0
    for step in range(config.train.steps):
        batch_size = batch_sizes.value_at(data_position)
        trained_tokens = data_position * config.model.sequence_length
        step_tokens = batch_size * config.model.sequence_length
        yield scheduled_rate(config, step, trained_tokens, step_tokens)
        data_position += batch_size
