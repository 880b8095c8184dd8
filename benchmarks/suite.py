"""Run the tests and benchmarks of a GPU host in sequence within a time budget, and collect everything in one JSON.

    python -m benchmarks.suite --output bench_gpu.json       (bash launch/bench_gpu.sh finds the Python for it)

Every stage is a separate command, ended when its time is over; then the next one starts. Its whole output is a file in
bench_gpu.logs, its end is in the JSON, which is rewritten after every stage, so that results survive the loss of the
host.
"""

from __future__ import annotations

import json as json_
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from megastable.base import durable
from megastable.base.errors import ConfigError, DataError, user_errors

ROOT = Path(__file__).parents[1]
TAIL = 4000  # characters of a stage's output in the JSON
LEAST = 10  # minimum seconds to start a stage
MARGIN = 20  # seconds between a benchmark's own deadline and its end: imports, exit
VOCABULARY = "model.vocab_size=32000"


@dataclass(frozen=True)
class Stage:
    """command: after the Python; {seconds} becomes its time. seconds: maximum, which also grows by the unused time of
    earlier stages. json: whether it takes --output FILE; for pytest every test's outcome is kept."""

    name: str
    command: tuple[str, ...]
    seconds: int
    json: bool = True


def _train(size: str, rounds: int, peers: Sequence[str], *overrides: str) -> tuple[str, ...]:
    options = ["--recipe", f"launch/recipes/{size}.yaml", "--rounds", str(rounds), "--seconds", "{seconds}"]
    peer_words = [word for peer in peers for word in ("--peers", peer)]
    command = "-m megastable bench train --device cuda".split()
    return (*command, *options, *peer_words, VOCABULARY, *overrides)


# Four at a time on one GPU: most of their time is compilation and setup, on the CPU.
_TESTS = ("-m", "pytest", "tests/gpu", "-v", "-n4", "--timeout=90", "-p", "no:cacheprovider")
STAGES = (
    Stage("tests", (*_TESTS, "-m", "not exact"), 70, json=False),
    # With the environment of run.deterministic, which is read when CUDA starts.
    Stage("tests-exact", (*_TESTS, "-m", "exact"), 50, json=False),
    # By value: stages skipped for lack of time come last.
    # The important peers first: compiled whole, a model of 24 blocks takes a minute to warm up.
    Stage("350m", _train("350m", 6, ["megastable-unwatched", "bare", "transformers", "plain"]), 80),
    Stage("1.3b", _train("1.3b", 4, ["megastable-unwatched", "bare", "transformers"]), 65),
    # As many kernels as 350m and next to no work in them: what the host needs to launch a step. Where this is less
    # than a step of 350m, CUDA graphs have nothing to gain (docs/benchmarks.md, "CUDA graphs").
    Stage(
        "350m-launches",
        _train(
            "350m", 6, ["bare"], "model.hidden=64", "model.ffn=64", "model.heads=1", "model.kv_heads=1",
            "model.sequence_length=64", "train.micro_batch=1", "train.global_batch=4",
        ),
        30,
    ),
    # FP8 over our own bf16 is the ratio of the row megastable-bf16: ours is in FP8 in these.
    Stage("1.3b-fp8", _train("1.3b", 4, ["megastable-bf16"], "precision.fp8=current"), 50),
    Stage(
        # As many blocks as fit: 12 into 80 GB, 64 GB by the planner, where all 32 need 130 even with bf16 moments.
        # Built once: drawing the weights takes long on one core.
        "7b-fp8",
        _train(
            "7b", 4, ["megastable-fp8-off"], "parallel.recompute=none", "precision.fp8=current", "--together",
        ),
        70,
    ),
    # The planner's formulas beside torch's allocator.
    Stage(
        "memory",
        ("-m", "benchmarks.footprint", "--layout", "one", "--layout", "one, selective", "--layout",
         "one, full", "--layout", "one, compiled", "--layout", "one, FP8 current"),
        40,
    ),
    Stage(
        "stability",
        ("-m", "megastable", "bench", "stability", "--recipe", "launch/recipes/350m.yaml", "--rounds", "4", VOCABULARY,
         "train.global_batch=16"),
        50,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Done:
    """A stage's outcome. returned: its exit code, None if its time was over. result: its JSON, possibly partial;
    for pytest, every test's outcome. tail: the end of its output. log: the file with all of it. left_out: the reason if
    it was not started."""

    command: str
    returned: int | None
    seconds: float
    result: Any
    tail: str
    log: str = ""
    left_out: str = ""

    @property
    def outcome(self) -> str:
        if self.left_out:
            return f"left out: {self.left_out}"
        if self.returned is None:
            return "its time was over"
        return "passed" if self.returned == 0 else f"failed with {self.returned}"


def allowed(stage: Stage, later: Sequence[Stage], left: float) -> float:
    """Seconds that a stage gets of those left: its own, and those that later ones do not need."""
    return min(left, max(stage.seconds, left - sum(later_stage.seconds for later_stage in later)))


def run_stage(stage: Stage, python: str, seconds: float, output: Path) -> Done:
    """A stage in a separate process group, ended as a whole after `seconds`. output: a file for what it prints."""
    with tempfile.TemporaryDirectory(prefix="megastable-bench-") as folder:
        found_path = Path(folder) / "found.json"
        seconds_text = str(max(1, round(seconds - MARGIN)))
        command = [python, *(part.replace("{seconds}", seconds_text) for part in stage.command)]
        if stage.json:
            command += ["--output", str(found_path)]
        exit_code: int | None = None
        begin_time = time.perf_counter()
        # Into a file: a pipe stays open as long as any remaining child holds it.
        with output.open("wb") as said:
            process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True
            )
            try:
                exit_code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                pass
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        took = time.perf_counter() - begin_time
        said_all = output.read_text(errors="replace")
        stage_result = tests_of(said_all) if "pytest" in command else read(found_path)
    return Done(" ".join(command[1:]), exit_code, round(took, 1), stage_result, said_all[-TAIL:], str(output))


def read(file: Path) -> Any:
    """A stage's JSON; None if there is none."""
    try:
        return json_.loads(file.read_text())
    except (OSError, ValueError):
        return None


PERCENT, OUTCOME = r"\[ *\d+%\]", "[A-Z]+"
LINE = re.compile(  # of a process of several, or of the only one
    rf"^\[gw\d+\] {PERCENT} (?P<outcome>{OUTCOME}) (?P<test>\S.*?)\s*$"
    rf"|^(?P<own_test>\S+::.*?) (?P<own_outcome>{OUTCOME})(?: \(.*\))? +{PERCENT}\s*$",
    re.M,
)


def tests_of(output: str) -> dict[str, str]:
    """Outcomes by test, as `pytest -v` tells them one by one, with several processes or one."""
    found_groups = [m.groupdict() for m in LINE.finditer(output)]
    return {m["test"] or m["own_test"]: (m["outcome"] or m["own_outcome"]).lower() for m in found_groups}


def write(path: Path, done: dict[str, Done]) -> None:
    """Write the results so far. Raises DataError."""
    when = datetime.now(UTC).isoformat(timespec="seconds")
    found = {"date": when, "stages": {n: vars(d) | {"outcome": d.outcome} for n, d in done.items()}}
    durable.write_output(path, json_.dumps(found, indent=1) + "\n")


def _log_folder(output: Path) -> Path:
    """Beside `output`. Raises DataError."""
    folder = output.with_suffix(".logs")
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder}, for the stages' logs: {error.strerror}; give another --output") from error
    return folder


def main(
    output: Annotated[Path, typer.Option(help="Where everything goes, as JSON")] = Path("bench_gpu.json"),
    seconds: Annotated[int, typer.Option(min=1, help="For all stages together")] = 540,
    only: Annotated[list[str] | None, typer.Option(help="A stage; repeatable")] = None,
    listed: Annotated[bool, typer.Option("--list", help="Only say what would be run")] = False,
) -> None:
    """Run the tests that need a GPU, and the benchmarks, within a time budget."""
    if unknown_names := set(only or ()) - {stage.name for stage in STAGES}:
        raise ConfigError(f"--only {min(unknown_names)}: choose among {', '.join(s.name for s in STAGES)}")
    wanted_stages = [stage for stage in STAGES if not only or stage.name in only]
    if listed:
        for stage in wanted_stages:
            print(f"{stage.name:12} {stage.seconds:4} s  python {' '.join(stage.command)}")
        return
    console = Console()
    end_time = time.monotonic() + seconds
    done_stages: dict[str, Done] = {}
    write(output, done_stages)  # fail now for an unwritable path
    log_folder = _log_folder(output)
    for number, stage in enumerate(wanted_stages):
        seconds_left = end_time - time.monotonic()
        if seconds_left < LEAST:
            left_text = f"no time is left ({seconds_left:.0f} s; it takes {stage.seconds})"
            done_stages[stage.name] = Done(" ".join(stage.command), None, 0.0, None, "", left_out=left_text)
            write(output, done_stages)
            continue
        console.print(f"{stage.name} ...")
        time_left = allowed(stage, wanted_stages[number + 1 :], seconds_left)
        done_stages[stage.name] = run_stage(
            stage, sys.executable, time_left, log_folder / f"{stage.name}.log"
        )
        console.print(done_stages[stage.name].tail, markup=False, highlight=False)
        write(output, done_stages)
    table = Table("stage", "seconds", "outcome", title="GPU", title_justify="left")
    for name, done_stage in done_stages.items():
        table.add_row(name, f"{done_stage.seconds:.0f}", done_stage.outcome)
    console.print(table)
    console.print(f"all of it: {output}; whole logs: {log_folder}")
    if any(done_stage.returned != 0 for done_stage in done_stages.values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(user_errors()(main))
