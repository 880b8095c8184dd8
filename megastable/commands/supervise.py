"""`megastable supervise`: start the deepspeed launcher, watch it, and restart it. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Annotated

import typer

from megastable.commands.app import App, WithLauncherArguments
from megastable.commands.options import Overrides, Recipe
from megastable.commands.start_reason import StartReason, ask_reason

app = App()


@app.add(
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
    from megastable.base.spared_output import spare_output
    from megastable.cluster import agent
    from megastable.cluster.fleet import Fleet, Here
    from megastable.cluster.hosts import Hosts
    from megastable.cluster.launcher import TrainingCommand
    from megastable.cluster.placement import interface, placed
    from megastable.cluster.store import Store
    from megastable.config import recipe as recipes
    from megastable.run import directory
    from megastable.run.membership import check_alone
    from megastable.supervise import hooks
    from megastable.supervise.notifiers import Notifiers
    from megastable.supervise.supervisor import Supervisor

    spare_output()
    given = context.obj
    place = placed(given, os.environ)
    if not place.by_themselves:
        check_alone(os.environ)
    config = recipes.load(recipe, overrides or [])
    if place.node > 0:
        raise typer.Exit(agent.attend(config.run.dir, place.hosts[place.node].name))
    hooks.check(config.supervise)  # before anything is created
    address = interface(config.supervise.interface, place)
    run = directory.make(config, recipes.find(recipe))
    here = config.model_copy(update={"run": config.run.model_copy(update={"dir": run.root})})
    why = ask_reason(here, reason)
    notifiers = Notifiers(config, run)
    for text in config.supervise.exposed:
        notifiers.say(f"WARNING: {text}")
    training = TrainingCommand(recipe, overrides or [], given, module)
    placed_training = replace(training, given=place.given)  # without what says where
    try:

        def fleet(store: Store) -> Fleet:
            if not place.hosts:
                return Here(run, placed_training)
            silence = config.supervise.host_silence
            shares = not place.by_themselves
            return Hosts(run, store, place.hosts, place.reach, silence, shares, placed_training)

        supervisor = Supervisor(config, run, notifiers, training, fleet, address, why)
        raise typer.Exit(supervisor.supervise())
    finally:
        notifiers.close()
