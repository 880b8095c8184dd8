"""`megastable plan`: estimate memory, time and cost of a run, and find faster layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megastable.base.errors import FAILED
from megastable.commands.app import App
from megastable.commands.options import Json, JsonFile, Overrides, Plot, put_json

app = App()


@app.add_command(
    examples="""
    megastable plan launch/recipes/70b.yaml --gpus 512
    megastable plan launch/recipes/7b.yaml parallel.zero=3 --gpus 64 --fixed
    megastable plan launch/recipes/405b.yaml --gpus 8192 --tokens 15T --top 10 --output plan.json --plot plan.png
    megastable plan launch/recipes/7b.yaml --vocab 32000 --cluster launch/clusters/a100.yaml --gpus 64
    megastable plan launch/recipes/70b.yaml --gpus 512 --fp8
    """,
    more="Exit codes: 0 something fits (with --fixed: the recipe's own layout), 1 nothing does, 2 bad input.",
)
def plan_recipe(
    recipe_path: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe, or a run's recipe.yaml")],
    overrides: Overrides = None,
    cluster_path: Annotated[
        Path,
        typer.Option(
            "--cluster", help="Description of the cluster: GPUs, memory, links, price. Write one for yours"
        ),
    ] = Path("launch/clusters/h100.yaml"),
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1, max=1_000_000, help="Number of GPUs. Default: the fewest on which the recipe's layout fits"
        ),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Tokens to train on, e.g. 15T or 300B. Default: the recipe's steps")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of suggestions")] = 5,
    vocab: Annotated[
        int | None,
        typer.Option(
            min=1, help="Size of the vocabulary. Default: the recipe's, else the corpus's, else an assumption"
        ),
    ] = None,
    fixed: Annotated[
        bool, typer.Option("--fixed", help="Only the recipe's own layout, without suggestions")
    ] = False,
    fp8: Annotated[bool, typer.Option("--fp8", help="Compare with and without FP8")] = False,
    as_json: Json = False,
    output: JsonFile = None,
    plot: Plot = None,
) -> None:
    """Estimate memory, time and cost of a recipe on a cluster, and suggest faster layouts.

    Nothing is started. --plot draws memory and time.
    """
    from megastable_tools.plan.answer import answer_plan, draw_answer

    plan_answer = answer_plan(
        recipe_path, overrides or [], cluster_path, gpus, tokens, top, vocab, fixed, fp8, quiet=as_json
    )
    put_json(plan_answer.facts, as_json, output)
    if plot is not None:
        draw_answer(plan_answer, str(recipe_path), plot)
    raise typer.Exit(0 if plan_answer.fits else FAILED)
