"""What things cost, measured on this machine."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megastable import durable, recipe
from megastable.errors import ConfigError, user_errors
from megastable.rundir import as_json

EXAMPLES = """Examples:

BENCH stability

BENCH stability --rounds 100 --json cost.json

BENCH stability --recipe launch/recipes/125m.yaml model.vocab_size=32000 train.global_batch=32

BENCH checkpoint

BENCH checkpoint --recipe launch/recipes/125m.yaml --dir /scratch --rounds 9 --json checkpoint.json

BENCH data

BENCH data --only found --seeds 3 --json found.json""".replace("BENCH", "python tools/bench.py")
SHORT = ("train.global_batch=1", "train.micro_batch=1", "model.sequence_length=64")  # steps beside a save
app = typer.Typer(help=__doc__, epilog=EXAMPLES, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def benchmarks() -> None:
    """Commands that measure; each runs in this one process."""


@app.command(epilog=EXAMPLES)
@user_errors()
def stability(
    overrides: Annotated[list[str] | None, typer.Argument(help="KEY=VALUE ... of the recipe")] = None,
    recipe_path: Annotated[
        Path, typer.Option("--recipe", help="Whose model, batch and precision to measure with")
    ] = Path("launch/recipes/quickstart.yaml"),
    rounds: Annotated[int, typer.Option(min=2, help="Each does every kind of step once")] = 30,
    json: Annotated[Path | None, typer.Option(help="All numbers, and the machine")] = None,
) -> None:
    """What gate, detector, snapshots and statistics add to a step. On random tokens: no corpus is needed."""
    config = recipe.load(recipe_path, overrides or [])
    _alone()
    # Not above: --help and mistakes in a recipe need no DeepSpeed, which takes seconds to import.
    from megastable import engine
    from megastable.bench.costs import table
    from megastable.bench.stability import measure, steps_needed

    columns = TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    engine.start_distributed(config.run.timeout)
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=steps_needed(rounds))
        found = measure(config, rounds, lambda: progress.advance(task), progress.console.print)
    engine.stop_distributed()
    console = Console()
    console.print(table(found.costs))
    console.print(", ".join(f"{key} {value}" for key, value in (found.run | found.machine).items()))
    if found.disturbed:
        console.print(f"note: the guard did not simply pass {found.disturbed} steps: measure again")
    if json is not None:
        durable.write_output(json, as_json(asdict(found), indent=1) + "\n")


def _alone() -> None:
    """A process group of this process, if one is started."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")


@app.command(epilog=EXAMPLES)
@user_errors()
def checkpoint(
    overrides: Annotated[list[str] | None, typer.Argument(help="KEY=VALUE ... of all recipes")] = None,
    recipes: Annotated[
        list[Path] | None,
        typer.Option("--recipe", help="Whose model to save; repeatable. Quickstart's and 125M's if none is"),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Each saves in both ways, copies and resumes")] = 5,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="On the disk to measure; left as it was. Default: temporary files'"),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="All numbers, and the machine")] = None,
) -> None:
    """How long steps wait for a checkpoint, what is done behind them, and what it takes to go on from one.

    Steps are of one short sample, the state is that of the recipe's model; no corpus is needed. Six checkpoints must
    fit on the disk; 125M takes 5.5 GB of memory.
    """
    named = recipes or [Path("launch/recipes/quickstart.yaml"), Path("launch/recipes/125m.yaml")]
    configs = {str(path): recipe.load(path, [*SHORT, *(overrides or [])]) for path in named}
    _alone()
    from megastable.bench.checkpoint import measure_all
    from megastable.bench.saves import table

    stderr = Console(stderr=True)
    found = measure_all(configs, folder, rounds, lambda text: stderr.print(f"measuring: {text}"))
    for name, measurement in found.of.items():
        Console().print(table(name, measurement))
    if json is not None:
        durable.write_output(json, as_json(asdict(found), indent=1) + "\n")


@app.command(epilog=EXAMPLES)
@user_errors()
def data(
    corpus: Annotated[Path, typer.Option(help="Real text, which is scanned")] = Path("data/stdlib"),
    only: Annotated[list[str] | None, typer.Option(help="inspect, scan, prune or found; repeatable")] = None,
    tokens: Annotated[
        int, typer.Option(min=1000, help="Of the larger scan, and of what is pruned")
    ] = 80_000_000,
    seeds: Annotated[int, typer.Option(min=1, help="Times that corruption is planted")] = 2,
    json: Annotated[Path | None, typer.Option(help="All numbers, and the machine")] = None,
) -> None:
    """What it costs to inspect, scan and prune, and how much of planted corruption a scan finds; takes minutes."""
    import torch

    from megastable.bench.common import machine
    from megastable.bench.hunting import PARTS, hunt, tables

    if unknown := set(only or ()) - set(PARTS):
        raise ConfigError(f"--only {sorted(unknown)[0]}: choose among {', '.join(PARTS)}")
    stderr = Console(stderr=True)
    hunted = hunt(
        corpus, tuple(only or PARTS), tokens, seeds, lambda text: stderr.print(f"measuring: {text}")
    )
    for table in tables(hunted):
        Console().print(table)
    if json is not None:
        about = {"machine": machine(torch.device("cpu"))}
        durable.write_output(json, as_json(asdict(hunted) | about, indent=1) + "\n")


if __name__ == "__main__":
    app()
