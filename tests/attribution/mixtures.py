"""Synthetic losses for the running test of batches: mixtures of corpora, with heavy tails, healthy or not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megastable.attribution.sample_history import SampleTest
from megastable.config.stability import SampleConfig

Floats = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]
NAMES = ("code", "prose", "rare")
Draw = Callable[[np.random.Generator, int], Floats]
Spoil = Callable[[np.random.Generator, int, Floats], None]  # modifies the losses of a step in place


class Mixture(NamedTuple):
    """draw: scores of n healthy samples, about 1 sigma. shares: of the corpora at a step. level: nats above the trend
    at a step, for all samples, from its random state; spread: nats per sigma at a step."""

    draw: Draw
    shares: Callable[[int], tuple[float, ...]] = lambda step: (1.0,)
    level: Callable[[np.random.Generator, int, float], float] = lambda random, step, before: 0.0
    spread: Callable[[int], float] = lambda step: 0.6
    batch: int = 16
    scale: float = 6000.0


def normal(random: np.random.Generator, n: int) -> Floats:
    return random.standard_normal(n)


def student(df: float) -> Draw:
    return lambda random, n: random.standard_t(df, n)


def monsters(random: np.random.Generator, n: int) -> Floats:
    """One in 500 is 5 to 15 sigma out: tables and lists among text."""
    return np.where(random.random(n) < 0.002, random.uniform(5, 15, n), random.standard_normal(n))


def skewed(random: np.random.Generator, n: int) -> Floats:
    return np.exp(0.8 * random.standard_normal(n)) - 1.0


def autoregressive(by: float) -> Callable[[np.random.Generator, int, float], float]:
    """Autoregressive level of the mean loss: 0.03 nats."""
    return lambda random, step, before: (
        by * before + 0.03 * math.sqrt(1 - by**2) * float(random.standard_normal())
    )


HEALTHY = {
    "normal": Mixture(normal),
    "Student t, 3 degrees": Mixture(student(3)),
    "Student t, 2 degrees": Mixture(student(2)),
    "log-normal": Mixture(skewed),
    "one monster in 500": Mixture(monsters),
    "three corpora, one rare": Mixture(student(4), lambda step: (0.6, 0.398, 0.002)),
    "mix changes every 500 steps": Mixture(student(4), lambda step: (0.9, 0.1) if step // 500 % 2 else (0.2, 0.8)),
    "level wanders, AR(1) 0.7": Mixture(student(4), level=autoregressive(0.7)),
    "level wanders, AR(1) 0.95": Mixture(student(4), level=autoregressive(0.95)),
    "level up by 0.05 nats every 200 steps": Mixture(student(4), level=lambda r, step, b: 0.05 * (step // 200 % 2)),
    "spread breathes by a half": Mixture(student(4), spread=lambda step: 0.6 + 0.3 * math.sin(step / 300)),
    "batches of 256": Mixture(student(3), lambda step: (0.7, 0.3), batch=256),
    "batches of 4": Mixture(student(3), batch=4),
}  # fmt: skip


def steps(mixture: Mixture, count: int, seed: int) -> Iterator[tuple[Floats, Int64s]]:
    """Losses and corpora of each step; the loss falls as a power law."""
    random, level = np.random.default_rng(seed), 0.0
    for step in range(1, count + 1):
        shares = mixture.shares(step)
        corpora = random.choice(len(shares), mixture.batch, p=shares)
        level = mixture.level(random, step, level)
        trend = 2.5 + 4.0 * (1 + step / 20) ** -0.5 + 0.5 * corpora
        yield trend + level + mixture.spread(step) * mixture.draw(random, mixture.batch), corpora


def clean(random: np.random.Generator, step: int, losses: Floats) -> None:
    """No sample is bad."""


def trickle(of_each: int, above: float, begin: int, count: int) -> Spoil:
    """`of_each` samples of each step are `above` nats higher."""

    def spoil(random: np.random.Generator, step: int, losses: Floats) -> None:
        if begin <= step < begin + count:
            losses[random.choice(losses.size, of_each, replace=False)] += above

    return spoil


def alarms(
    mixture: Mixture, count: int, seed: int, spoil: Spoil = clean, config: SampleConfig | None = None
) -> Iterator[tuple[int, int]]:
    """(step, onset) of each alarm."""
    test, random = SampleTest(config or SampleConfig()), np.random.default_rng(seed + 1)
    for step, (losses, corpora) in enumerate(steps(mixture, count, seed), start=1):
        spoil(random, step, losses)
        alarm = test.observe_batch(step, losses, corpora, NAMES)
        if alarm is not None:
            yield step, alarm.onset
