"""The tests and benchmarks of a GPU host, one after the other in a budget of time, and one JSON with all of it.

    python -m megastable.bench.suite --json bench_gpu.json       (bash launch/bench_gpu.sh finds the Python for it)

Every stage is a command of its own, ended when its time is over; one that fails leaves its last words, and the next
one is begun. The JSON is written again after every stage, so that a host that goes away leaves what was measured.
"""

from __future__ import annotations

import json as json_
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from megastable import durable
from megastable.errors import ConfigError, user_errors

TAIL = 4000  # characters of a stage's output that are kept
BENCH = ("tools/bench.py", "train", "--device", "cuda")
ONE_STEP = "train.global_batch"


@dataclass(frozen=True)
class Stage:
    """command: after the Python. seconds: at most. json: whether it takes --json FILE."""

    name: str
    command: tuple[str, ...]
    seconds: int
    json: bool = True


STAGES = (
    Stage("tests", ("-m", "pytest", "tests/gpu", "-q", "-n0", "-p", "no:cacheprovider"), 150, json=False),
    Stage("350m", (*BENCH, "--recipe", "launch/recipes/350m.yaml", "--rounds", "6"), 110),
    Stage(
        "1.3b",
        (*BENCH, "--recipe", "launch/recipes/1.3b.yaml", "--rounds", "5", "--peers", "bare", "--peers", "transformers"),
        90,
    ),
    Stage(
        "7b",
        (
            *BENCH, "--recipe", "launch/recipes/7b.yaml", "--rounds", "3", "--peers", "none", "parallel.tensor=1",
            "parallel.sequence=false", "parallel.recompute=selective", "optimizer.moments=bf16",
        ),
        90,
    ),
    Stage(
        "stability",
        ("tools/bench.py", "stability", "--recipe", "launch/recipes/350m.yaml", "--rounds", "10",
            "model.vocab_size=32000",
         "train.global_batch=32"),
        60,
    ),
    Stage("checkpoint", ("tools/bench.py", "checkpoint", "--recipe", "launch/recipes/125m.yaml", "--rounds", "2"), 40),
)  # fmt: skip


@dataclass(frozen=True)
class Done:
    """A stage that was run. returned: its exit code, None when its time was over. result: its JSON."""

    command: str
    returned: int | None
    seconds: float
    result: Any
    tail: str

    @property
    def outcome(self) -> str:
        if self.returned is None:
            return "its time was over"
        return "passed" if self.returned == 0 else f"failed with {self.returned}"


def run(stage: Stage, python: str, seconds: float) -> Done:
    """A stage in a process group of its own, ended with all of it after so many seconds."""
    with tempfile.TemporaryDirectory(prefix="megastable-bench-") as folder:
        found = Path(folder) / "found.json"
        command = [python, *stage.command, *(["--json", str(found)] if stage.json else [])]
        begin = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            errors="replace",
        )  # fmt: skip
        returned: int | None
        try:
            said, _ = process.communicate(timeout=seconds)
            returned = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
            returned = None
        took = time.perf_counter() - begin
        try:
            result = json_.loads(found.read_text())
        except (OSError, ValueError):
            result = None
    return Done(" ".join(command[1:]), returned, round(took, 1), result, said[-TAIL:])


def table(stages: dict[str, Done]) -> Table:
    """For a person: what was run, how long, how it ended."""
    shown = Table("stage", "seconds", "outcome", title="GPU", title_justify="left")
    for name, done in stages.items():
        shown.add_row(name, f"{done.seconds:.0f}", done.outcome)
    return shown


def main(
    json: Annotated[Path, typer.Option(help="Where everything goes")] = Path("bench_gpu.json"),
    seconds: Annotated[int, typer.Option(min=1, help="For all stages together")] = 540,
    only: Annotated[list[str] | None, typer.Option(help="A stage; repeatable")] = None,
    listed: Annotated[bool, typer.Option("--list", help="Only say what would be run")] = False,
) -> None:
    """The tests that need a GPU, and the benchmarks, in a budget of time."""
    if unknown := set(only or ()) - {stage.name for stage in STAGES}:
        raise ConfigError(f"--only {min(unknown)}: choose among {', '.join(s.name for s in STAGES)}")
    wanted = [stage for stage in STAGES if not only or stage.name in only]
    console = Console()
    if listed:
        for stage in wanted:
            console.print(
                f"{stage.name:12} {stage.seconds:4} s  python {' '.join(stage.command)}", highlight=False
            )
        return
    end = time.monotonic() + seconds
    done: dict[str, Done] = {}
    for stage in wanted:
        left = end - time.monotonic()
        if left < 10:
            console.print(f"{stage.name}: no time is left")
            continue
        console.print(f"{stage.name} ...")
        done[stage.name] = run(stage, sys.executable, min(left, stage.seconds))
        console.print(done[stage.name].tail, markup=False, highlight=False)
        when = datetime.now(UTC).isoformat(timespec="seconds")
        found = {"date": when, "stages": {n: vars(d) | {"outcome": d.outcome} for n, d in done.items()}}
        durable.write_output(json, json_.dumps(found, indent=1) + "\n")
    console.print(table(done))
    console.print(f"all of it: {json}")
    if len(done) < len(wanted) or any(d.returned != 0 for d in done.values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(user_errors()(main))
