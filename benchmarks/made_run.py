"""Run directories for the page, written by the project's own writers: no training. One has a million steps.

python -m benchmarks.made_run runs/long --steps 1000000
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from megastable.base import durable
from megastable.config.tree import RunConfig
from megastable.run.directory import RunDirectory
from megastable.run.records import SCHEMA, StepRecord

BEGIN = 1_790_000_000.0
BATCH, LENGTH, SECONDS = 8, 32, 2.0


def config(root: Path, steps: int = 200, **parts: Any) -> dict[str, Any]:
    """The content of recipe.yaml."""
    given = {
        "run": {"dir": str(root)}, "data": {"corpora": [{"path": "corpus", "weight": 1.0}]},
        "model": {"layers": 2, "hidden": 32, "heads": 2, "sequence_length": LENGTH, "vocab_size": 64},
        "train": {"steps": steps, "global_batch": BATCH, "micro_batch": 2}, **parts,
    }  # fmt: skip
    return {"config": RunConfig.model_validate(given).model_dump(mode="json"), "manifests": []}


def record(step: int, time: float, loss: float, applied: bool = True, **change: Any) -> StepRecord:
    """One step."""
    first = BATCH * (step - 1)
    sometimes: dict[str, Any] = {}
    if step % 10 == 0:
        sometimes = {
            "parameter_norm": 50.0 + step / 100, "update_ratio": 1e-3, "second_moment_norm": 0.1,
            "attention_logit": 8.0, "attention_entropy": 2.0, "clipped_fraction": 0.1,
        }  # fmt: skip
    known: dict[str, Any] = {
        "step": step, "time": time, "first_position": first, "next_position": first + BATCH, "skipped": [],
        "applied": applied, "finite": bool(np.isfinite(loss)), "clipped": step % 7 == 0, "loss": loss, "z_loss": 0.0,
        "z": 1.0, "grad_norm": loss / 4, "lr": 1e-3 * min(1.0, step / 20), "worst_position": first,
        "worst_loss": loss + 1, "worst_micro_batch": 0, "worst_rank": 0, "worst_positions": [first],
        "worst_losses": [loss + 1],
        "seconds": SECONDS * 0.9, "data_seconds": 0.01, "tokens_per_second": BATCH * LENGTH / SECONDS, "mfu_full": 0.41,
        "mfu_causal": 0.36, "memory": 31.5, "loss_scale": 1.0, "samples": BATCH, "attempt": 1,
    }  # fmt: skip
    return StepRecord(**(known | sometimes | change))


def note(run: RunDirectory, time: float, event: str, **fields: Any) -> None:
    with run.journal.open("a") as journal:
        journal.write(json.dumps({"time": time, "event": event, **fields}) + "\n")


def progress(run: RunDirectory, step: int, time: float, loss: float, steps: int = 200, **change: Any) -> None:
    """What rank 0 says of itself while it trains."""
    told = {
        "attempt": 1, "pid": 1, "host": "host-1", "world": 2, "steps": steps, "phase": "step", "step": step,
        "cursor": BATCH * step, "loss": loss, "grad_norm": loss / 4, "lr": 1e-3, "applied": True, "seconds": SECONDS,
        "tokens_per_second": 128.0, "time": time, **change,
    }  # fmt: skip
    durable.write_file(run.progress, json.dumps(told).encode())


def begin(root: Path, steps: int = 200, **parts: Any) -> RunDirectory:
    """A run that has just been started."""
    run = RunDirectory(root)
    root.mkdir(parents=True)
    for folder in (run.steps, run.layers, run.checkpoints):
        folder.mkdir()
    run.recipe.write_text(yaml.safe_dump(config(root, steps, **parts)))
    note(run, BEGIN, "supervisor", what="started", pid=1, host="host-1")
    note(run, BEGIN + 1, "launched", attempt=1, command=[], log="logs/1.log", hosts=["host-1"], wanted=1)
    note(run, BEGIN + 20, "training", step=0, cursor=0, world=2, seconds=5.0)
    return run


def long_run(root: Path, steps: int, per_file: int = 50, refused_every: int = 2000) -> RunDirectory:
    """A run of very many steps, with the files that it would have; layers every 100th."""
    run = begin(root, steps=steps)
    step = np.arange(1, steps + 1)
    random = np.random.default_rng(0)
    loss = (2.0 + 8.0 * step**-0.25 + 0.05 * random.standard_normal(steps)).astype(np.float32)
    applied = step % refused_every != 0
    loss[~applied] += 4
    time = BEGIN + 22 + SECONDS * np.arange(steps)
    known = {"step": step, "time": time, "next_position": step * BATCH, "loss": loss, "applied": applied}
    other = record(1, BEGIN, 3.0)
    for first in range(0, steps, per_file):
        rows = slice(first, min(first + per_file, steps))
        columns = {name: column_of(name, known, other, rows) for name in SCHEMA.names}
        table = pa.Table.from_pydict(columns, schema=SCHEMA)
        last = rows.stop - 1
        name = f"{step[first]:08d}-{step[last]:08d}-{int(time[last] * 1000)}.parquet"
        pq.write_table(
            table,
            run.steps / name,
            compression="zstd",
            use_dictionary=False,
            write_statistics=False,
            store_schema=False,
        )
    progress(run, steps, float(time[-1]) + 1, float(loss[-1]), steps=steps)
    return run


def column_of(name: str, known: dict[str, npt.NDArray[Any]], other: StepRecord, rows: slice) -> Any:
    if name in known:
        return known[name][rows]
    count = rows.stop - rows.start
    value = getattr(other, name)
    if name in (
        "parameter_norm",
        "update_ratio",
        "attention_logit",
        "attention_entropy",
        "second_moment_norm",
    ):
        return [1.0 if (rows.start + n) % 20 == 0 else None for n in range(count)]
    return [value] * count


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.made_run", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("run", type=Path, help="a directory that is not there yet")
    parser.add_argument("--steps", type=int, default=1_000_000)
    args = parser.parse_args(arguments)
    if args.run.exists():
        parser.error(f"{args.run} is there already")
    long_run(args.run, args.steps)


if __name__ == "__main__":
    main()
