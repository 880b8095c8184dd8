"""The commands of `megastable bench` that train whole runs and compare them."""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from megastable.base.errors import ConfigError
from megastable.commands.app import App
from megastable.commands.checkout import find_beside
from megastable.commands.options import Json, JsonFile, Overrides, put_json

Candidates = Annotated[
    list[str] | None,
    typer.Option(
        "--of", help="Overrides of one candidate, spaces between; repeatable. Default: adamw and muon"
    ),
]
DEFAULT = ["optimizer.name=adamw", "optimizer.name=muon"]


def tuned(
    overrides: Overrides = None,
    candidates: Candidates = None,
    rates: Annotated[
        list[float] | None,
        typer.Option("--rate", help="A learning rate to try for each; repeatable. Default: 1, 2 and 4e-3"),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Extra seeds of each at its best rate")] = 3,
    recipe_path: Annotated[Path, typer.Option("--recipe", help="Model, data and length of every run")] = Path(
        "launch/recipes/quickstart.yaml"
    ),
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, one core each")] = 2,
    as_json: Json = False,
    output: JsonFile = None,
) -> None:
    """Count the steps to a loss, each recipe tuned over the same number of learning rates. Trains for real."""
    from rich.console import Console
    from rich.table import Column, Table

    from megastable.base.progress_bar import bar
    from megastable.config import recipe

    find_beside("benchmarks")
    from benchmarks.tuned import compare, spread, target_of

    chosen, tried = candidates or DEFAULT, sorted(rates or [1e-3, 2e-3, 4e-3])
    for candidate in chosen:  # mistakes show before hours of training
        recipe.load(recipe_path, [*(overrides or []), *candidate.split()])
    with (
        tempfile.TemporaryDirectory() as folder,
        bar("training", len(chosen) * (len(tried) + seeds), unit="runs") as progress,
    ):
        found = compare(
            recipe_path, chosen, tried, range(1, seeds + 2), overrides or [], Path(folder), jobs, progress
        )
    target = target_of(found[0])
    table = Table(
        Column("candidate", min_width=20),
        "best rate",
        "final loss",
        "validation",
        f"steps to {target:.3f}",
        "s a step",
    )
    for one in found:
        steps = len(one.measured[0].result.losses)
        table.add_row(
            one.overrides or "the recipe", f"{one.rate:g} of {len(tried)}",
            spread([run.final for run in one.measured]), spread([run.result.validation for run in one.measured]),
            ", ".join("never" if n is None else str(n) for n in one.steps_to(target)) + f" of {steps}",
            f"{sum(run.result.seconds for run in one.measured) / steps / len(one.measured):.3f}",
        )  # fmt: skip
    Console(quiet=as_json).print(table)
    put_json({"target": target, "candidates": [asdict(one) for one in found]}, as_json, output)


def optimizers(
    overrides: Overrides = None,
    candidates: Candidates = None,
    recipe_path: Annotated[Path, typer.Option("--recipe", help="Model, batch and precision")] = Path(
        "launch/recipes/quickstart.yaml"
    ),
    rounds: Annotated[int, typer.Option(min=1, help="Each runs one step of every candidate")] = 5,
    as_json: Json = False,
    output: JsonFile = None,
) -> None:
    """Measure what optimizers add to the time of a step, compared with the first candidate. On one rank."""
    from rich.console import Console
    from rich.table import Table

    from megastable.base.progress_bar import bar
    from megastable.config import recipe

    find_beside("benchmarks")
    chosen = candidates or DEFAULT
    configs = [(of, recipe.load(recipe_path, [*(overrides or []), *of.split()])) for of in chosen]
    for _, config in configs:
        if config.model.vocab_size is None:
            raise ConfigError(
                "model.vocab_size comes from a corpus, and none is opened: set model.vocab_size=..."
            )
    alone()
    from benchmarks.optimizer_speed import measure, steps_needed
    from megastable.engine import distributed

    distributed.start_distributed(configs[0][1].run.timeout, configs[0][1].run.deterministic)
    with bar("measuring", steps_needed(len(configs), rounds), unit="steps") as progress:
        found = measure(configs, rounds, progress)
    distributed.stop_distributed()
    table = Table(
        "candidate", "s a step", "s an update", "step", "update", title=f"{found.tokens:,} tokens a step"
    )
    for one in found.times:
        step, update = one.extra(found.times[0])
        table.add_row(
            one.name,
            f"{median(one.steps):.3f}",
            f"{median(one.updates):.3f}",
            f"{step:+.1%}",
            f"{update:+.1%}",
        )
    table.caption = "longer than the first, as shares of its step; medians"
    Console(quiet=as_json).print(table)
    put_json(asdict(found), as_json, output)


def alone() -> None:
    """A process group of this process alone, if none is started."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")


def add_training(app: App) -> None:
    """Add them to `megastable bench`."""
    app.add(
        examples="""
        megastable bench tuned --of optimizer.name=adamw --of optimizer.name=muon --rate 1e-3 --rate 2e-3 --rate 4e-3
        megastable bench tuned --of "" --of optimizer.clipping=zclip --rate 2e-3 --seeds 5 train.steps=300
        """
    )(tuned)
    app.add(
        examples="""
        megastable bench optimizers model.vocab_size=32000
        megastable bench optimizers --recipe launch/recipes/125m.yaml --rounds 3 model.vocab_size=32000
            train.global_batch=16 train.micro_batch=2
        """
    )(optimizers)
