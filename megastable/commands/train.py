"""`megastable train`: start the deepspeed launcher on a recipe, as the supervisor does, but unsupervised."""

from __future__ import annotations

import os
from contextlib import suppress

import typer

from megastable.commands.app import App, WithLauncherArguments
from megastable.commands.options import Overrides, Recipe, StartReason, note_reason

app = App()


@app.add_command(
    cls=WithLauncherArguments,
    examples="""
    megastable train launch/recipes/quickstart.yaml run.dir=runs/mine -- --num_gpus 2
    megastable train launch/recipes/7b.yaml run.dir=runs/7b -- --hostfile hostfile
    megastable train launch/recipes/7b.yaml run.dir=runs/7b optimizer.lr=2e-4 --reason "the loss swings"
    srun megastable train launch/recipes/7b.yaml run.dir=/shared/runs/7b
    """,
    more="The same command again resumes the run in run.dir (without it a new run begins, in runs/RECIPE-NNN); "
    "`megastable supervise` resumes by itself. What a "
    "launcher has started as a rank (torchrun --no-python, srun with MASTER_ADDR and MASTER_PORT) starts no other. "
    "Exit codes of a rank: docs/exit-codes.md; the deepspeed launcher passes on that of the first rank that failed.",
)
def train(
    context: typer.Context, recipe: Recipe, overrides: Overrides = None, reason: StartReason = None
) -> None:
    """Train without a supervisor, by the deepspeed launcher."""
    from megastable.base.errors import ConfigError
    from megastable.base.process import hold_stops
    from megastable.run.membership import find_membership, is_rank

    launcher_arguments = context.obj
    if is_rank(os.environ):
        hold_stops()  # before the imports, which take seconds
        from megastable.config import recipe as recipes
        from megastable.train import main

        if launcher_arguments:
            is_rank_text = "this process is a rank already: say it to what has started it"
            raise ConfigError(f"{launcher_arguments[0]}: {is_rank_text}")
        if reason and {**os.environ, **find_membership(os.environ)}["RANK"] == "0":
            with suppress(ConfigError):  # which all ranks raise together below
                note_reason(recipes.load_recipe(recipe, overrides or []), reason)
        main([recipe, *(overrides or [])])
        return
    from megastable.cluster.launcher import build_launcher_command
    from megastable.config import recipe as recipes

    # Reports mistakes before a process starts.
    note_reason(recipes.load_recipe(recipe, overrides or []), reason)
    launcher_words = build_launcher_command("megastable.train", recipe, overrides or [], launcher_arguments)
    os.execv(launcher_words[0], launcher_words)
