"""`megastable supervise`: start the deepspeed launcher, watch it, and restart it. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Annotated

import typer

from megastable.commands.app import App, WithLauncherArguments
from megastable.commands.options import Overrides, Recipe, StartReason, ask_reason

app = App()


@app.add_command(
    cls=WithLauncherArguments,
    examples="""
    megastable supervise launch/recipes/quickstart.yaml run.dir=runs/mine -- --num_gpus 2
    megastable supervise launch/recipes/7b.yaml run.dir=runs/7b -- --hostfile hostfile
    """,
    more="The same command again resumes the run in run.dir, takes over what a killed supervisor left running, and "
    "does nothing when the run is complete. Without run.dir it begins a new run, in runs/RECIPE-NNN. SIGTERM and "
    "Ctrl-C end in a checkpoint; once more ends at once.\n\n"
    "Exit codes: 0 complete, 2 bad input, 75 stopped with a checkpoint, 76 needs a person (budgets are spent), 77 no "
    "space; all of them in docs/exit-codes.md.",
)
def supervise(
    context: typer.Context,
    recipe: Recipe,
    overrides: Overrides = None,
    reason: StartReason = None,
    module: Annotated[str, typer.Option(help="The module that every rank runs")] = "megastable.train",
) -> None:
    """Train under a supervisor, which restarts the run from a good checkpoint after a crash or a hang.

    It leaves incidents/ in the run directory, for people to read. `megastable status RUN` says how a run stands.
    """
    from megastable.base.process import spare_output
    from megastable.cluster import agent
    from megastable.cluster.fleet import Fleet
    from megastable.cluster.hosts import Hosts
    from megastable.cluster.launcher import TrainingCommand, choose_hosts, choose_interface
    from megastable.cluster.store import Store
    from megastable.cluster.this_host import Here
    from megastable.config import recipe as recipes
    from megastable.run import directory
    from megastable.run.membership import check_alone
    from megastable.run.run_image import restore_records
    from megastable.supervise import hooks
    from megastable.supervise.notifiers import Notifiers
    from megastable.supervise.supervisor import Supervisor

    spare_output()
    launcher_arguments = context.obj
    host_choice = choose_hosts(launcher_arguments, os.environ)
    if not host_choice.by_themselves:
        check_alone(os.environ)
    recipe_config = recipes.load_recipe(recipe, overrides or [])
    if host_choice.node > 0:
        raise typer.Exit(agent.attend_host(recipe_config.run.dir, host_choice.hosts[host_choice.node].name))
    hooks.check_hooks(recipe_config.supervise)  # before anything is created
    store_address = choose_interface(recipe_config.supervise.interface, host_choice)
    if recipe_config.checkpoint.upload is not None and recipe_config.run.dir is not None:
        restore_records(recipe_config.run.dir, recipe_config.checkpoint.upload, partial(print, flush=True))
    run = directory.make_directory(recipe_config, recipes.find_recipe(recipe))
    run_config = recipe_config.model_copy(
        update={"run": recipe_config.run.model_copy(update={"dir": run.root})}
    )
    start_reason = ask_reason(run_config, reason)
    notifiers = Notifiers(recipe_config, run)
    for exposed_text in recipe_config.supervise.exposed:
        notifiers.print_line(f"WARNING: {exposed_text}")
    training_command = TrainingCommand(recipe, overrides or [], launcher_arguments, module)
    placed_training = replace(training_command, given=host_choice.given)  # without what says where
    try:

        def fleet(store: Store) -> Fleet:
            if not host_choice.hosts:
                return Here(run, placed_training)
            hosts, reach, shares = host_choice.hosts, host_choice.reach, not host_choice.by_themselves
            return Hosts(
                run, store, hosts, reach, recipe_config.supervise.host_silence, shares, placed_training
            )

        supervisor = Supervisor(
            recipe_config, run, notifiers, training_command, fleet, store_address, start_reason
        )
        raise typer.Exit(supervisor.supervise_run())
    finally:
        notifiers.close()
