"""Measure what each watch over the hardware costs in a step.

    python -m benchmarks.hardware_watch_cost --steps 60

Two ranks train 5M parameters, 3M of them in embeddings. The processor time of a step scatters by more than a watch
takes, so that of its own functions is measured, as a share of the step's. Replays are measured every ten steps, and
their share is that of `stability.hardware.replay_interval`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.memory_copy_speed import write_corpus
from benchmarks.ranks import launch
from megastable.config.stability import HardwareConfig
from megastable.config.tree import RunConfig

OFTEN = 10  # steps between two replays here
FIRST = 4  # steps that are left out
Row = dict[str, float]
"""Processor seconds by part, and of the step."""


def recipe(folder: Path, steps: int, samples: int) -> RunConfig:
    return RunConfig.model_validate({
        "run": {"dir": folder / "run"}, "data": {"corpora": [{"path": folder / "corpus"}]},
        "model": {"layers": 4, "hidden": 192, "heads": 4, "kv_heads": 4, "ffn": 512, "sequence_length": 256},
        "train": {
            "steps": steps, "global_batch": 2 * samples, "micro_batch": 4, "eval_interval": 0, "eval_samples": 0,
        },
        "checkpoint": {"interval": 0, "at_end": False},
        "logging": {"trackers": [], "peak_tflops": 1.0, "interval": 1000},
        "stability": {"hardware": {"replay_interval": OFTEN, "fingerprint_interval": 1}},
    })  # fmt: skip


def measure(config: RunConfig) -> list[Row]:
    from megastable.engine.engine import Engine
    from megastable.engine.local_gradients import LocalGradients
    from megastable.hardware.gradient_watch import GradientWatch
    from megastable.hardware.recomputation import ReplayCheck
    from megastable.hardware.replica_watch import ReplicaWatch
    from megastable.hardware.state_watch import StateWatch
    from megastable.train import train

    parts: dict[str, list[tuple[type, str]]] = {
        "copies": [(ReplicaWatch, "ballot"), (ReplicaWatch, "judge")],
        "state": [(StateWatch, "ballot"), (StateWatch, "seal")],
        "gradients": [
            *((LocalGradients, name) for name in ("before", "after", "columns")),
            *((GradientWatch, name) for name in ("judge", "after_update")),
        ],
        "replay": [(ReplayCheck, "check")],
    }
    rows: list[Row] = []
    spent, replaying = dict.fromkeys(parts, 0.0), [False]

    def timed(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        clock = time.process_time if part == "replay" else time.thread_time  # the backward pass has a thread

        def inner(*args: Any) -> Any:
            if replaying[0]:
                return call(*args)
            replaying[0], begin = part == "replay", clock()
            try:
                return call(*args)
            finally:
                spent[part] += clock() - begin
                replaying[0] = False

        return inner

    for part, functions in parts.items():
        for owner, name in functions:
            setattr(owner, name, timed(part, getattr(owner, name)))
    real = Engine.train_step

    def train_step(self: Engine, *args: Any) -> Any:
        begin = time.process_time()
        found = real(self, *args)
        if not self._probing:
            rows.append({**spent, "step": time.process_time() - begin})
            spent.update(dict.fromkeys(parts, 0.0))
        return found

    Engine.train_step = train_step  # type: ignore[method-assign,assignment]
    train(config, Path("recipe.yaml"))
    return rows[FIRST:]


def parser(about: str | None, steps: int, samples: str) -> argparse.ArgumentParser:
    """samples: what --samples counts."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--samples", type=int, default=8, help=f"of 256 tokens, {samples}")
    parser.add_argument("--minutes", type=float, default=10.0, help="at most")
    return parser


@contextmanager
def trained(steps: int, samples: int) -> Iterator[RunConfig]:
    """What is trained on a corpus that is there meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "corpus").mkdir()
        write_corpus(Path(folder) / "corpus")
        yield recipe(Path(folder), steps, samples)


def main(arguments: list[str] | None = None) -> None:
    args = parser(__doc__, 60, "a rank and step").parse_args(arguments)
    with trained(args.steps, args.samples) as config:
        ranks: list[list[Row]] = launch(2, measure, config, 60 * args.minutes)
    for rank, rows in enumerate(ranks):
        step = statistics.median(row["step"] for row in rows)
        told = []
        for part in ("copies", "state", "gradients", "replay"):
            each = statistics.median(row[part] for row in rows if row[part])
            share = each / step / (HardwareConfig().replay_interval if part == "replay" else 1)
            told.append(f"{part} {share:.2%} ({1e3 * each:.1f} ms)")
        print(f"rank {rank}, of a step's {1e3 * step:.0f} ms of processor time: {', '.join(told)}")


if __name__ == "__main__":
    main()
