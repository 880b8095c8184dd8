"""How long `goodput` takes to read a long run for the first time.

python -m benchmarks.goodput_speed [--steps 1000000]

The run is made up: files of 50 steps, an evaluation and a checkpoint every 1,000 steps, a restart every 100,000.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megastable.run.goodput.time_account import TimeAccount
from megastable.run.goodput.watching import GoodputWatch
from megastable.run.records import SCHEMA

FILE, SAVES, RESTARTS = 50, 1_000, 100_000  # steps


def write_run(root: Path, steps: int) -> None:
    """A run whose steps take a second each, with 2 ms between them. Columns that are not read have a number."""
    (root / "steps").mkdir(parents=True)
    columns = {field.name: pa.array(_filler(field.type), field.type) for field in SCHEMA}
    columns["seconds"], columns["applied"] = pa.array(np.ones(FILE, np.float32)), pa.array([True] * FILE)
    now = 1.7e9
    journal: list[dict[str, Any]] = [{"time": now, "event": "supervisor", "what": "started", "pid": 1}]
    for first in range(1, steps + 1, FILE):
        attempt = first // RESTARTS + 1
        if first % RESTARTS == 1:
            if first > 1:
                journal.append(
                    {"time": now + 1, "event": "ended", "clock": first - 1, "silent": 1.0, "what": "SIGKILL"}
                )
            journal.append({"time": now + 3, "event": "launched", "attempt": attempt})
            journal.append({"time": now + 60, "event": "training", "step": first - 1})
            now += 61
        numbers, times = np.arange(first, first + FILE), now + 1.002 * np.arange(1, FILE + 1)
        now, last = float(times[-1]), first + FILE - 1
        columns |= {"step": pa.array(numbers), "time": pa.array(times), "attempt": pa.array([attempt] * FILE)}
        pq.write_table(
            pa.table(columns, schema=SCHEMA), root / "steps" / f"{first:08d}-{last:08d}-{int(now * 1000)}.parquet",
            compression="zstd", use_dictionary=False, write_statistics=False, store_schema=False,
        )  # fmt: skip
        if last % SAVES == 0:
            journal.append({"time": now + 0.5, "event": "evaluated", "step": last, "seconds": 0.5})
            journal.append({"time": now + 5, "event": "checkpoint", "step": last, "name": f"step-{last}"})
            now += 1
    (root / "journal.jsonl").write_text("".join(json.dumps(event) + "\n" for event in journal))


def _filler(kind: pa.DataType) -> list[Any]:
    value: Any = [1.0] * 4 if pa.types.is_list(kind) else False if pa.types.is_boolean(kind) else 1.0
    return [value] * FILE


def measure(steps: int) -> tuple[float, float, TimeAccount]:
    """Seconds of the first look and of another one; and the account."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "run")
        write_run(root, steps)
        watch, took = GoodputWatch(root), []
        for _ in range(2):
            began = time.perf_counter()
            account = watch.look(alive=False)
            took.append(time.perf_counter() - began)
        assert account is not None
        return took[0], took[1], account


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.goodput_speed", description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    args = parser.parse_args(arguments)
    first, again, account = measure(args.steps)
    print(
        f"{args.steps:,} steps, {args.steps // FILE:,} files: {first:.1f} s, again {again:.2f} s; goodput "
        f"{account.goodput():.1%}; {os.cpu_count()} cores, load of the last minute {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
