"""Measure what watching the gradients of every rank costs, in pairs within one run.

    python -m benchmarks.gradient_watch_cost --steps 60

Two ranks train 5M parameters, 2,048 tokens a rank and step; every other step is watched. The processor time of a step
scatters by more than the watch takes, so that of its own functions is measured as well.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.memory_copy_speed import write_corpus
from benchmarks.ranks import launch
from megastable.config.tree import RunConfig

Row = tuple[bool, float, float]
"""Whether the step was watched, its processor seconds, and those of the watch."""


def recipe(folder: Path, steps: int) -> RunConfig:
    return RunConfig.model_validate({
        "run": {"dir": folder / "run"}, "data": {"corpora": [{"path": folder / "corpus"}]},
        "model": {"layers": 4, "hidden": 192, "heads": 4, "kv_heads": 4, "ffn": 512, "sequence_length": 256},
        "train": {"steps": steps, "global_batch": 16, "micro_batch": 4, "eval_interval": 0, "eval_samples": 0},
        "checkpoint": {"interval": 0, "at_end": False},
        "logging": {"tensorboard": False, "peak_tflops": 1.0, "interval": 1000},
    })  # fmt: skip


def measure(config: RunConfig) -> list[Row]:
    from megastable.engine.engine import Engine
    from megastable.engine.local_gradients import LocalGradients
    from megastable.recovery.gradient_watch import GradientWatch
    from megastable.train import train

    rows: list[Row] = []
    spent, on, kept = [0.0], [False], list[Any]()

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*args: Any) -> Any:
            if not on[0]:
                return None
            begin = time.thread_time()
            found = call(*args)
            spent[0] += time.thread_time() - begin
            return found

        return inner

    for owner, names in (
        (LocalGradients, ("before", "after", "columns")),
        (GradientWatch, ("judge", "accept")),
    ):
        for name in names:
            setattr(owner, name, timed(getattr(owner, name)))
    real = Engine.train_step

    def train_step(self: Engine, *args: Any) -> Any:
        kept.append(kept[0] if kept else self.zero.local)
        on[0], spent[0] = len(kept) % 2 == 0, 0.0
        self.zero.local = kept[0] if on[0] else None
        begin = time.process_time()
        found = real(self, *args)
        rows.append((on[0], time.process_time() - begin, spent[0]))
        return found

    Engine.train_step = train_step  # type: ignore[method-assign,assignment]
    train(config, Path("recipe.yaml"))
    return rows[4:]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--minutes", type=float, default=10.0, help="at most")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "corpus").mkdir()
        write_corpus(Path(folder) / "corpus")
        ranks: list[list[Row]] = launch(2, measure, recipe(Path(folder), args.steps), 60 * args.minutes)
    for rank, rows in enumerate(ranks):
        watched, other = ([row for row in rows if row[0] is on] for on in (True, False))
        pairs = [a[1] / b[1] - 1 for a, b in zip(watched, other, strict=False)]
        share = sum(row[2] for row in watched) / sum(row[1] for row in watched)
        print(
            f"rank {rank}: {share:.2%} of the processor time of a step, "
            f"{1e3 * statistics.median(row[2] for row in watched):.1f} ms; "
            f"in pairs {statistics.median(pairs):+.2%} +- {statistics.stdev(pairs) / len(pairs) ** 0.5:.2%}"
        )


if __name__ == "__main__":
    main()
