"""Measure the price of the watch over memory where it is paid: in train.py, run with it and without in turns.

    found = measure_watch(recipe, overrides, WatchCase(rounds=3, steps=30), device)    `megastable bench watch`

Every round is two whole runs of one rank on a random corpus, in an order that alternates; a ratio is of the medians of
their step records, of the steps after the first `WARM`. Everything else is as the recipe says, but nothing is evaluated
or saved.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich import box
from rich.table import Table

from benchmarks.common import describe_machine, write_random_corpus
from megastable.base.errors import ConfigError, MegastableError
from megastable.base.process import ROOT
from megastable.config import recipe
from megastable.run.records import read_newest_records
from megastable.run.step_phases import COLUMNS

WARM = 5  # steps that compile, and fill caches
VOCABULARY = 4096  # if the recipe leaves it to the tokenizer
RUN = (
    "train.eval_samples=0", "checkpoint.at_end=false", "checkpoint.interval=1000000", "logging.trackers=[]",
    "logging.flush_steps=1",
)  # fmt: skip


@dataclass(frozen=True)
class WatchCase:
    """rounds: pairs of runs; steps: of each."""

    rounds: int = 3
    steps: int = 30


@dataclass(frozen=True)
class WatchFound:
    """ratios: of a step with the watch to one without, by round. milliseconds: of a step, and of its phases: with the
    watch, and without; the phases in the order of a step."""

    machine: dict[str, Any]
    ratios: list[float]
    milliseconds: dict[str, tuple[float, float]]

    @property
    def price(self) -> float:
        """Share of a step that the watch adds."""
        return median(self.ratios) - 1


def measure_watch(
    recipe_path: Path,
    overrides: Sequence[str],
    case: WatchCase,
    device: str,
    advance: Callable[[], None] = lambda: None,
) -> WatchFound:
    """Run the recipe on one rank. advance: called after every run.

    Raises ConfigError for too few steps, and MegastableError if a run fails, with the end of what it said.
    """
    if case.steps <= WARM:
        raise ConfigError(f"--steps {case.steps}: the first {WARM} are not measured: give it more")
    config = recipe.load_recipe(recipe_path, list(overrides))
    with tempfile.TemporaryDirectory(prefix="megastable-bench-") as folder:
        step_tokens = config.train.global_batch * (config.model.sequence_length + 1)
        corpus_folder = Path(folder) / "corpus"
        # A twentieth is validation.
        write_random_corpus(
            corpus_folder, config.model.vocab_size or VOCABULARY, int(1.1 * case.steps * step_tokens)
        )
        rounds = list[dict[bool, dict[str, float]]]()
        for round_number in range(case.rounds):
            measured_runs = dict[bool, dict[str, float]]()
            for is_watched in (True, False) if round_number % 2 == 0 else (False, True):
                run_folder = Path(folder) / f"run-{round_number}-{is_watched}"
                told = [
                    *overrides, f"data.corpora=[{{path: {corpus_folder}}}]", f"run.dir={run_folder}",
                    f"train.steps={case.steps}", f"stability.hardware.state={str(is_watched).lower()}", *RUN,
                ]  # fmt: skip
                _train([str(recipe_path), *told], device)
                measured_runs[is_watched] = _read_phases(run_folder)
                advance()
            rounds.append(measured_runs)
    names = ["step", *(name for name in COLUMNS if name in rounds[0][True] and name in rounds[0][False])]
    return WatchFound(
        describe_machine(torch.device(device)),
        [measured[True]["step"] / measured[False]["step"] for measured in rounds],
        {
            name: (median(m[True][name] for m in rounds), median(m[False][name] for m in rounds))
            for name in names
        },
    )


def _train(arguments: Sequence[str], device: str) -> None:
    """A run of one rank, in a process of its own."""
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        port = free_socket.getsockname()[1]
    environment = os.environ | {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "DS_ACCELERATOR": device,
    }  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-m", "megastable.train", *arguments], cwd=ROOT, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    if ended.returncode:
        last_lines = "\n".join(ended.stdout.splitlines()[-20:])
        raise MegastableError(f"a run ended with exit code {ended.returncode}:\n{last_lines}")


def _read_phases(run_folder: Path) -> dict[str, float]:
    """Median milliseconds of a step and of its phases, those that were measured."""
    table = read_newest_records(run_folder / "steps")
    columns = {"step": "seconds", **COLUMNS}
    values = {name: table.column(column).to_pylist()[WARM:] for name, column in columns.items()}
    known = {name: [second for second in of if second is not None] for name, of in values.items()}
    return {name: 1e3 * median(seconds) for name, seconds in known.items() if seconds}


def watch_table(found: WatchFound) -> Table:
    """Milliseconds with and without the watch, and their ratio."""
    title = f"The watch over memory adds {found.price:+.2%} to a step of train.py"
    shown_table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, min_width=len(title))
    shown_table.add_column("ms")
    for heading in ("with", "without", "difference"):
        shown_table.add_column(heading, justify="right")
    for name, (watched, unwatched) in found.milliseconds.items():
        shown_table.add_row(name, f"{watched:.2f}", f"{unwatched:.2f}", f"{watched - unwatched:+.2f}")
    ratio_text = ", ".join(f"{ratio:.4f}" for ratio in found.ratios)
    shown_table.caption = f"ratios of the rounds: {ratio_text}"
    return shown_table
