"""How soon a slow host is named, and how often one is that is not slow, under noise of many kinds.

    python -m benchmarks.slow_hosts --seeds 200 --first 1000

Simulates the own time of every rank, step by step, and feeds blocks of ten steps to the detector
(supervise/straggler.py), as heartbeats would. For every kind of noise: 20,000 even steps, in which nobody must be
named; and a host that becomes 20 % slower after 1,000 steps, which must be named within 200. The detector's constants
were chosen on seeds below 1000.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.table import Table

from megastable.run.rank_ipc import WorkBlock
from megastable.supervise.straggler import Stragglers
from megastable.training.beats import STEPS

STEP = 0.5  # seconds of own work
EVEN, SOON = 20_000, 200  # steps
BEFORE = 1_000  # steps before a host becomes slow
Noise = Callable[
    [np.random.Generator, int, int], np.ndarray
]  # (chance, steps, ranks) -> factor [steps, ranks]


def iid(chance: np.random.Generator, steps: int, ranks: int, sd: float = 0.05) -> np.ndarray:
    return np.exp(sd * chance.standard_normal((steps, ranks)))


def remembering(half: float, sd: float) -> Noise:
    """AR(1), so that a deviation is e times smaller after `half` steps."""

    def noise(chance: np.random.Generator, steps: int, ranks: int) -> np.ndarray:
        keep = np.exp(-1 / half)
        x = np.empty((steps, ranks))
        x[0] = chance.standard_normal(ranks)
        shocks = chance.standard_normal((steps, ranks)) * np.sqrt(1 - keep**2)
        for step in range(1, steps):
            x[step] = keep * x[step - 1] + shocks[step]
        return np.exp(sd * x)

    return noise


def heavy(chance: np.random.Generator, steps: int, ranks: int) -> np.ndarray:
    return np.maximum(0.5, 1 + 0.04 * chance.standard_t(2, (steps, ranks)))


def checkpoints(chance: np.random.Generator, steps: int, ranks: int) -> np.ndarray:
    """Every 100 steps a thread of one rank of the first host writes for 20 steps, which are twice as slow."""
    x = iid(chance, steps, ranks)
    x[np.arange(steps) % 100 < 20, 0] *= 2
    return x


def garbage(chance: np.random.Generator, steps: int, ranks: int) -> np.ndarray:
    """Each rank pauses on its own, in one step of 50, for two steps."""
    return iid(chance, steps, ranks) + 2 * (chance.random((steps, ranks)) < 0.02)


def more_work(chance: np.random.Generator, steps: int, ranks: int) -> np.ndarray:
    """The last rank has 3 % more work."""
    x = iid(chance, steps, ranks)
    x[:, -1] *= 1.03
    return x


def hiccups(chance: np.random.Generator, steps: int, ranks: int) -> np.ndarray:
    """Once in 2,000 steps, one rank waits for its data in up to 60 steps."""
    x = iid(chance, steps, ranks)
    for begin in range(0, steps, 2000):
        begin += int(chance.integers(1000))
        x[begin : begin + chance.integers(5, 61), chance.integers(ranks)] *= 1.5
    return x


def warm_up(chance: np.random.Generator, steps: int, ranks: int) -> np.ndarray:
    """The first steps compile: each rank is up to ten times slower, for up to 20 steps."""
    x = iid(chance, steps, ranks)
    for rank in range(ranks):
        x[: chance.integers(21), rank] *= chance.uniform(1, 10)
    return x


def together(chance: np.random.Generator, steps: int, ranks: int) -> np.ndarray:
    """All are slower together, by up to half, for a thousand steps at a time."""
    return (
        iid(chance, steps, ranks) * np.repeat(chance.uniform(1, 1.5, -(-steps // 1000)), 1000)[:steps, None]
    )


KINDS: dict[str, Noise] = {
    "independent, 5 %": iid,
    "AR(1) 0.9, 5 %": remembering(9.5, 0.05),
    "remembers 100 steps, 3 %": remembering(100, 0.03),
    "remembers 100 steps, 5 %": remembering(100, 0.05),
    "remembers 1,000 steps, 3 %": remembering(1000, 0.03),
    "heavy tails": heavy,
    "checkpoints on one rank": checkpoints,
    "garbage pauses, 2 % of steps": garbage,
    "one rank with 3 % more work": more_work,
    "late data, up to 60 steps": hiccups,
    "warm-up": warm_up,
    "all slow together": together,
}


def named(factors: np.ndarray, ranks_of_host: int, since: int, slow: str = "") -> tuple[int | None, bool]:
    """Steps from `since` until the slow host was named, None if it was not; and whether another one was."""
    steps, ranks = factors.shape
    detector = Stragglers(1.1, {rank: f"host-{rank // ranks_of_host}" for rank in range(ranks)})
    own = STEP * np.mean(factors[: steps // STEPS * STEPS].reshape(-1, STEPS, ranks), axis=1)
    found, others = None, False
    for number, row in enumerate(own.tolist()):
        for rank, seconds in enumerate(row):
            parts = (0.0, seconds / 3, seconds * 2 / 3, 0.0)
            block = WorkBlock.model_construct(block=number, step=max(row), own=seconds, parts=parts)
            detector.add(rank, block)
        others |= bool(detector.slow.keys() - {slow})
        if slow in detector.slow and found is None:
            found = (number + 1) * STEPS - since
    return found, others


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=1000, help="the first seed")
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1, help="of a host")
    parser.add_argument("--even", type=int, default=EVEN)
    args = parser.parse_args()
    ranks = args.hosts * args.ranks
    table = Table(
        "noise",
        "runs with a host named\nin even steps",
        f"20 % slow: named\nwithin {SOON} steps",
        "steps until named\nmedian, 95 %, longest",
        "another\nnamed",
    )
    for name, noise in KINDS.items():
        wrong = others = 0
        after: list[float] = []
        for seed in range(args.first, args.first + args.seeds):
            chance = np.random.default_rng(seed)
            wrong += named(noise(chance, args.even, ranks), args.ranks, 0)[1]
            factors = noise(chance, BEFORE + 2 * SOON, ranks)
            host = int(chance.integers(args.hosts))
            factors[BEFORE:, host * args.ranks : (host + 1) * args.ranks] *= 1.2
            found, other = named(factors, args.ranks, BEFORE, f"host-{host}")
            after.append(float("inf") if found is None else found)
            others += other
        soon = sum(steps <= SOON for steps in after)
        middle, most = np.quantile(after, [0.5, 0.95], method="higher")
        table.add_row(
            name,
            f"{wrong} of {args.seeds}",
            f"{soon} of {args.seeds}",
            f"{middle:.0f}, {most:.0f}, {max(after):.0f}",
            str(others),
        )
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
