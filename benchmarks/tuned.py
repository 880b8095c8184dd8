"""Compare recipes by the steps that each needs to reach a loss, every one tuned over the same number of rates.

A first seed chooses each candidate's learning rate, by the loss at its end; the other seeds are measured at that rate.
The loss to reach is the mean one of the first candidate at its end. Losses are training losses of a single pass,
smoothed by the mean of the last `WINDOW` steps. Real runs in processes of their own: nothing is shared but the corpus.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from megastable.base.errors import DataError
from megastable.run import records

WINDOW = 10
QUIET = (
    "train.eval_interval=0", "checkpoint.interval=0", "checkpoint.at_end=false", "logging.tensorboard=false",
    "logging.layers_interval=0", "logging.norms_interval=0", "logging.peak_tflops=1", "stability.enabled=false",
)  # fmt: skip


@dataclass(frozen=True)
class TunedRun:
    """One run. losses: smoothed, of every step, nats per token; inf from the step on where it diverged. validation: at
    the end."""

    rate: float
    seed: int
    losses: tuple[float, ...]
    validation: float
    seconds: float

    @property
    def final(self) -> float:
        return self.losses[-1]


@dataclass(frozen=True)
class Tuned:
    """A candidate. overrides: of the recipe; tuning: one run per rate; measured: runs at the best rate, other seeds."""

    overrides: str
    tuning: tuple[TunedRun, ...]
    measured: tuple[TunedRun, ...]

    @property
    def rate(self) -> float:
        return best(self.tuning).rate

    def steps_to(self, target: float) -> list[int | None]:
        return [steps_to(run.losses, target) for run in self.measured]


def best(runs: Sequence[TunedRun]) -> TunedRun:
    """The run with the lowest final loss; of equal ones that with the lower rate."""
    return min(runs, key=lambda run: (run.final if math.isfinite(run.final) else math.inf, run.rate))


def smoothed(losses: Sequence[float]) -> tuple[float, ...]:
    """The mean of the last `WINDOW` losses at every step, of fewer at the start; inf from a non-finite one on."""
    broken = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    sums = np.concatenate(([0.0], np.cumsum(losses[:broken])))
    ends = np.arange(1, broken + 1)
    begins = np.maximum(ends - WINDOW, 0)
    means = (sums[ends] - sums[begins]) / (ends - begins)
    return (*means.tolist(), *[math.inf] * (len(losses) - broken))


def steps_to(losses: Sequence[float], target: float) -> int | None:
    """The first step, counted from 1, with a whole window of losses and a mean of at most `target`; None = never."""
    return next(
        (i for i, loss in enumerate(losses, 1) if i >= min(WINDOW, len(losses)) and loss <= target), None
    )


def spread(values: Sequence[float]) -> str:
    """Mean and half the range of some numbers."""
    return f"{fmean(values):.3f} ± {(max(values) - min(values)) / 2:.3f}"


def target_of(first: Tuned) -> float:
    """The loss to reach: the first candidate's at its end, the mean of its measured seeds."""
    return fmean(run.final for run in first.measured)


def compare(
    recipe: Path,
    candidates: Sequence[str],
    rates: Sequence[float],
    seeds: Sequence[int],
    overrides: Sequence[str],
    folder: Path,
    jobs: int,
    watch: Callable[[], None],
) -> list[Tuned]:
    """Run everything, `jobs` runs at a time, in new run directories below `folder`. seeds: the first one tunes.

    Raises DataError, with the end of its output, for a run that fails.
    """

    def train(candidate: str, rate: float, seed: int) -> TunedRun:
        run = folder / f"{candidates.index(candidate)}-{rate:g}-{seed}"
        given = [
            *QUIET,
            *overrides,
            *candidate.split(),
            f"optimizer.lr={rate}",
            f"run.seed={seed}",
            f"run.dir={run}",
        ]
        found = _trained(recipe, given, run, rate, seed)
        watch()
        return found

    with ThreadPoolExecutor(jobs) as pool:
        tuning = {c: [pool.submit(train, c, rate, seeds[0]) for rate in rates] for c in candidates}
        tuned = {c: tuple(run.result() for run in runs) for c, runs in tuning.items()}
        measured = {
            c: [pool.submit(train, c, best(runs).rate, s) for s in seeds[1:]] for c, runs in tuned.items()
        }
        return [Tuned(c, tuned[c], tuple(run.result() for run in measured[c])) for c in candidates]


def _trained(recipe: Path, overrides: Sequence[str], run: Path, rate: float, seed: int) -> TunedRun:
    """One run on one rank."""
    command = [sys.executable, "-m", "megastable.train", str(recipe), *overrides]
    alone = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | alone,
    )
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-5:])
        raise DataError(f"{' '.join(command)}: ended with code {done.returncode}:\n{last}")
    table = records.read(run / "steps")
    losses = table.column("loss").to_pylist()
    validation = _summary(run).get("val_loss")
    return TunedRun(
        rate, seed, smoothed([math.nan if loss is None else loss for loss in losses]),
        math.nan if validation is None else float(validation), float(sum(table.column("seconds").to_pylist())),
    )  # fmt: skip


def _summary(run: Path) -> dict[str, float | None]:
    found: dict[str, float | None] = json.loads((run / "summary.json").read_text())
    return found
