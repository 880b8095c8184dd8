"""How long `status` takes to look at a run with a long journal for the first time.

python -m benchmarks.status_speed [--lines 1000000] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from megastable.run.events.event import Event
from megastable.run.events.stability_events import Discarded, IncidentEvent
from megastable.run.events.training_events import CheckpointSaved, Evaluated, Training
from megastable.supervise.status import Status, read_status


def events(lines: int) -> Iterator[Event]:
    """A run in trouble: of a thousand lines some 996 are refused updates, one is of an incident."""
    summary: dict[str, Any] = {
        "step": 31,
        "onset": 30,
        "verdict": "spike",
        "kind": "recoverable",
        "outcome": "healed",
    }
    for n in range(lines):
        if n % 50_000 == 0:
            yield Training(step=n, cursor=8 * n, world=8)
        elif n % 1000 == 1:
            yield CheckpointSaved(step=n, name=f"step-{n}", bytes=10**9, seconds=1.0, blocked=0.1)
        elif n % 1000 in (2, 502):
            yield Evaluated(step=n, loss=3.5, samples=100)
        elif n % 1000 == 3:
            number = n // 20_000 + 1
            reasons = {"number": number} | summary | {"reasons": ["x" * 200]}
            yield IncidentEvent(
                what="closed", step=n, number=number, summary=reasons, policy={"of": "y" * 300}
            )
        else:
            yield Discarded(
                step=n, verdict="spike", reason="loss 9.3 is 12 deviations above", first_position=8 * n,
                next_position=8 * n + 8, loss=9.3, grad_norm=8.1, loss_scale=1.0,
            )  # fmt: skip


def write_journal(path: Path, lines: int) -> None:
    """As run/log.py writes it, but for the fsync of every line."""
    with path.open("w") as file:
        for n, event in enumerate(events(lines)):
            file.write(json.dumps({"time": 1.7e9 + n, **event.fields}) + "\n")


def measure(lines: int, rounds: int) -> tuple[float, float, Status]:
    """Seconds and CPU seconds of a first look, medians; and what was seen."""
    wall, cpu = [], []
    with tempfile.TemporaryDirectory() as folder:
        write_journal(Path(folder, "journal.jsonl"), lines)
        for _ in range(rounds):
            begin, used = time.perf_counter(), time.process_time()
            status = read_status(Path(folder))
            wall.append(time.perf_counter() - begin)
            cpu.append(time.process_time() - used)
    return median(wall), median(cpu), status


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.status_speed", description=__doc__)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(arguments)
    wall, cpu, status = measure(args.lines, args.rounds)
    print(
        f"{args.lines:,} lines: {wall:.2f} s ({cpu:.2f} s of CPU time), {status.refused:,} refused updates and "
        f"{len(status.incidents)} incidents; {os.cpu_count()} cores, load of the last minute {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
