"""Evaluate detector and policy on healthy runs with coloured noise: every action is a false alarm.

Every kind has a power law for its loss, noise of 0.03 nats about it, and gradient norms with a heavy tail. The kinds
add features of real losses: autocorrelation, levels that change with the data, tails, a changing width, and a norm
correlated with the loss. The other half of the benchmark measures the response to planted faults: a detector that never
acts raises no false alarm.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megastable.config.stability import StabilityConfig
from megastable_guard.actions import Action, Signals, Verdict
from megastable_guard.step_judge import Recorded, StepJudge, simulate_guard

Series = npt.NDArray[np.float64]
Draw = Callable[[int, np.random.Generator], Series]
SIGMA = 0.03  # nats
LINKED = 0.8  # correlation of loss and log norm in linked kinds
REVERSIBLE = (Action.APPLY, Action.DISCARD, Action.REWIND, Action.ALERT)


def autoregressive(rho: float) -> Draw:
    """AR(1) noise, in sigma: every value keeps `rho` of the one before."""

    def draw(steps: int, rng: np.random.Generator) -> Series:
        fresh_noise = math.sqrt(1.0 - rho**2) * rng.standard_normal(steps)
        series, last_value = np.empty(steps), rng.standard_normal()
        for step in range(steps):
            last_value = series[step] = rho * last_value + fresh_noise[step]
        return series

    return draw


def levels(every: int, drawn: Callable[[int, np.random.Generator], Series]) -> Draw:
    """White noise on levels that change every `every` steps."""

    def draw(steps: int, rng: np.random.Generator) -> Series:
        white_noise = rng.standard_normal(steps)
        return white_noise + np.repeat(drawn(-(-steps // every), rng), every)[:steps]

    return draw


def normal(count: int, rng: np.random.Generator) -> Series:
    fresh: Series = rng.standard_normal(count)
    return fresh


def alternating(count: int, rng: np.random.Generator) -> Series:
    return np.arange(count, dtype=np.float64) % 2.0


def changes(rho: float) -> Draw:
    """Another corpus that comes and goes, six times in 19,200 steps: 2 to 4 sigma up or down, at random times."""
    base_noise, period = autoregressive(rho), 19_200

    def draw(steps: int, rng: np.random.Generator) -> Series:
        series = base_noise(steps, rng)
        for period_begin in range(0, steps, period):
            times = period_begin + 200 * np.sort(rng.choice(np.arange(2, 96), 12, replace=False))
            for i in range(0, 12, 2):
                series[times[i] : times[i + 1]] += rng.uniform(2.0, 4.0) * rng.choice([-1.0, 1.0])
        return series

    return draw


def swelling(steps: int, rng: np.random.Generator) -> Series:
    """A width that oscillates between half and twice the usual one, every 700 steps."""
    width_waves: Series = np.sin(2 * math.pi * np.arange(steps) / 700)
    fresh_noise: Series = rng.standard_normal(steps) * 2.0**width_waves
    return fresh_noise


def bursts(steps: int, rng: np.random.Generator) -> Series:
    """Occasional bursts of three times the width for 50 steps."""
    white_noise = rng.standard_normal(steps)
    return white_noise * np.where(np.repeat(rng.random(-(-steps // 50)) < 0.15, 50)[:steps], 3.0, 1.0)


KINDS: dict[str, Draw] = {
    "white": normal,
    **{f"ar-{tenths / 10}": autoregressive(tenths / 10) for tenths in range(1, 8)},
    "levels-20": levels(20, normal),
    "levels-200": levels(200, normal),
    "alternating-20": levels(20, alternating),
    "alternating-200": levels(200, alternating),
    "changes": changes(0.0),
    "changes-ar-0.4": changes(0.4),
    "student-t3": lambda steps, rng: rng.standard_t(3, steps),
    "heteroscedastic": swelling,
    "bursts": bursts,
    "norm-linked": normal,
}


def healthy_run(
    kind: str, steps: int, seed: int, norms: bool = True, sigma: float = SIGMA
) -> Iterator[Recorded]:
    """A healthy run. norms: whether gradient norms were recorded. Raises KeyError for a kind that is not in KINDS."""
    rng = np.random.default_rng(seed)
    kind_noise = KINDS[kind](steps, rng)
    log_norm = 0.1 * rng.standard_t(3, steps)
    if kind == "norm-linked":
        log_norm = 0.25 * (LINKED * kind_noise + math.sqrt(1 - LINKED**2) * rng.standard_normal(steps))
    loss = 3.0 + 8.0 * (1.0 + np.arange(steps) / 20.0) ** -0.5 + sigma * kind_noise
    for step in range(steps):
        yield Recorded(step, float(loss[step]), 0.4 * math.exp(log_norm[step]) if norms else None)


@dataclass(frozen=True)
class FalseAlarms:
    """Actions on one kind. irreversible: cuts of the rate, swaps, hand-overs, stops, ... watched: changes of level
    without an action; resets: of the detector's baseline."""

    kind: str
    steps: int
    discards: int
    rewinds: int
    irreversible: int
    alerts: int
    watched: int
    resets: int

    def rate(self, count: int) -> float:
        """Per 10,000 steps."""
        return 1e4 * count / self.steps


def count_actions(
    kind: str, steps: int, seeds: Iterable[int], config: StabilityConfig, norms: bool = True
) -> FalseAlarms:
    """The actions in `steps` healthy steps with each of the seeds."""
    kept, done, total_steps = config.snapshots, Counter[str](), 0
    for seed in seeds:
        verdict_before = Verdict.HEALTHY
        for judged in simulate_guard(
            healthy_run(kind, steps, seed, norms), config, interval=kept.interval, keep=kept.keep
        ):
            done[judged.action] += 1
            done["irreversible"] += judged.action not in REVERSIBLE
            done["reset"] += judged.reset
            done["watched"] += judged.verdict is Verdict.SHIFT and verdict_before is not Verdict.SHIFT
            verdict_before = judged.verdict
        total_steps += steps
    return FalseAlarms(
        kind,
        total_steps,
        done[Action.DISCARD],
        done[Action.REWIND],
        done["irreversible"],
        done[Action.ALERT],
        done["watched"],
        done["reset"],
    )


@dataclass(frozen=True)
class Fault:
    """A fault's addition to the loss, in standard deviations of the healthy noise, and its factor on the norm; and
    the number of steps within which it should be acted on."""

    loss: Series
    norm: Series
    within: int


def spike(height: float) -> Fault:
    """The norm leads by two steps; the loss rises in three more, stays for ten, and recovers in twenty."""
    loss_rise = np.concatenate([[0.0, 0.0], np.linspace(height / 3, height, 3), np.full(10, height)])
    loss_rise = np.concatenate([loss_rise, np.linspace(height, 0.0, 20)])
    return Fault(loss_rise, np.where(loss_rise > height / 2, 3.0, 1.7), within=5 + 2)


def climb(slope: float) -> Fault:
    """A linear rise of the loss alone, per step: a divergence."""
    return Fault(slope * np.arange(120.0), np.ones(120), within=60)


FAULTS = {"spike-6": spike(6.0), "spike-10": spike(10.0), "spike-20": spike(20.0), "climb-0.25": climb(0.25)}
FIRST, APART = 600, 150  # steps: of the first fault in a run, and between two


@dataclass(frozen=True)
class Delays:
    """One fault in the noise of one kind: number planted, number acted on in time, and all delays in steps,
    ascending; faults without an action have no delay."""

    kind: str
    fault: str
    planted: int
    in_time: int
    steps: list[int]

    @property
    def median(self) -> int | None:
        """Median delay of all planted faults; None if half of them were never acted on."""
        half_count = self.planted // 2
        return self.steps[half_count] if half_count < len(self.steps) else None


def measure_delays(
    kind: str, planted: int, seed: int, config: StabilityConfig, norms: bool = True
) -> list[Delays]:
    """Plant every fault `planted` times into one healthy run, which continues unaffected."""
    longest_fault = max(len(fault.loss) for fault in FAULTS.values())
    steps = FIRST + APART * (planted - 1) + longest_fault
    healthy_rows = list(healthy_run(kind, steps, seed, norms))
    sigma = SIGMA * float(np.std(KINDS[kind](steps, np.random.default_rng(seed))))
    clean_guard = StepJudge(config, simulated=True)
    delays_by_fault: dict[str, list[int]] = {name: [] for name in FAULTS}
    for fault_step, row in enumerate(healthy_rows[: steps - longest_fault + 1]):
        if fault_step >= FIRST and (fault_step - FIRST) % APART == 0:
            for name, fault in FAULTS.items():
                branch_guard = StepJudge(config, clean_guard.state, simulated=True)
                delay = _delay(branch_guard, healthy_rows[fault_step:], fault, sigma)
                delays_by_fault[name] += [] if delay is None else [delay]
        clean_guard.judge_step(Signals(row.step, row.loss, row.grad_norm), 0)
    return [
        Delays(kind, name, planted, sum(delay < FAULTS[name].within for delay in took), sorted(took))
        for name, took in delays_by_fault.items()
    ]


def _delay(guard: StepJudge, rows: list[Recorded], fault: Fault, sigma: float) -> int | None:
    for steps, (row, loss_rise, norm_factor) in enumerate(zip(rows, fault.loss, fault.norm)):
        grad_norm = None if row.grad_norm is None else row.grad_norm * float(norm_factor)
        step_signals = Signals(row.step, row.loss + sigma * float(loss_rise), grad_norm)
        if guard.judge_step(step_signals, 0).action is not Action.APPLY:
            return steps
    return None
