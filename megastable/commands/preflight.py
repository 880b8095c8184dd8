"""`megastable preflight`: check every host before a run. Imports no torch."""

from __future__ import annotations

import math
import os
import secrets
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megastable.base.errors import BAD_INPUT, OK, ConfigError
from megastable.commands.app import App, WithLauncherArguments
from megastable.commands.options import Json, JsonFile, Overrides, put_json

if TYPE_CHECKING:
    from megastable.cluster.host_survey import BurnInOrder
    from megastable.config.tree import RunConfig

app = App()
ASSUMED_VOCABULARY = 128_000  # where the recipe leaves it to a tokenizer
STATE = 12  # bytes of a checkpoint per parameter: fp32 weights and two fp32 moments


@app.add_command(
    cls=WithLauncherArguments,
    examples="""
    megastable preflight
    megastable preflight launch/recipes/7b.yaml run.dir=runs/7b -- --hostfile hostfile
    megastable preflight --quick -- --hostfile hostfile --exclude node-07
    megastable preflight --burn-in 30 -- --hostfile hostfile
    megastable preflight --json -- --hostfile hostfile
    megastable preflight launch/recipes/7b.yaml run.dir=runs/7b -- --launcher slurm --num_gpus 8
    """,
    more="Hosts are those that the launcher would use. They are reached over ssh (with --launcher slurm over srun, "
    "inside an allocation); without a hostfile only this one is checked. This folder must be at the same path on every "
    "host. Without a recipe the current folder stands for the run directory.\n\n"
    "--burn-in looks for devices that compute wrong: by DCGM's diagnosis where it is installed, and by matrix products "
    "and sums whose answers are known bit for bit, on every device of every host at the same time. A device that is "
    "wrong once is refused, with the element and the bits.\n\n"
    "Exit codes: 0 nothing stands against a run, 2 a host is refused, or bad input.",
)
def preflight(
    context: typer.Context,
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE", help="Recipe of the run: for its run directory and the size of its checkpoints"
        ),
    ] = None,
    overrides: Overrides = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out the matrix products and all-reduces")
    ] = False,
    burn_in: Annotated[
        float | None,
        typer.Option(
            "--burn-in", metavar="MINUTES", help="Minutes to compute what has a known result, e.g. 30 or 0.5"
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            "--burn-in-seed",
            metavar="N",
            min=0,
            max=2**63 - 1,
            help="Seed of the burn-in's inputs, to repeat an earlier one. Default: random",
        ),
    ] = None,
    as_json: Json = False,
    output: JsonFile = None,
) -> None:
    """Check every host before a run: code, versions, disks, GPUs, speed, and the shared run directory.

    No training is started. Every host reports within seconds, or after its burn-in; what differs, is broken, slow or
    wrong is named, with what to do.
    """
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, TimeElapsedColumn

    from megastable.base.progress_bar import Bar, make_progress
    from megastable.cluster.host_survey import as_facts, find_existing_folder, survey_hosts
    from megastable.cluster.launcher import read_launch_placement
    from megastable.cluster.preflight import (
        Wanted,
        compare_reports,
        describe_findings,
        summarize_findings,
        tabulate_reports,
    )
    from megastable.cluster.reach import Local, Reach, Srun, Ssh, list_allocated_nodes
    from megastable.config import recipe as recipes

    burn_in_order = _order(burn_in, seed)
    config = None if recipe is None else recipes.load_recipe(recipe, overrides or [])
    launcher_arguments: list[str] = context.obj
    by_slurm = any(one_word.lower() in ("slurm", "--launcher=slurm") for one_word in launcher_arguments)
    slurm_nodes = list_allocated_nodes(os.environ) if by_slurm else None
    placement = read_launch_placement(launcher_arguments, os.environ, slurm_nodes)
    hosts = list(placement.hosts)
    host_reach: Reach = Local()
    if placement.no_ssh:
        hosts = [placement.hosts[placement.node_rank]]
    elif placement.several:
        host_reach = Srun() if placement.launcher == "slurm" else Ssh(placement.ssh_port)
    host_names = [host.name for host in hosts]
    run_folder = find_existing_folder(Path() if config is None else config.run.dir or Path("runs"))
    progress_text = "asking the hosts"
    if burn_in_order is not None:
        progress_text = f"burn-in of {burn_in:g} minutes, seed {burn_in_order.seed}"
    with make_progress(MofNCompleteColumn(), TimeElapsedColumn(), silent=as_json) as progress_display:
        progress_bar = Bar(progress_display, progress_text, len(host_names))
        host_survey = survey_hosts(
            host_names, host_reach, run_folder, not quick, burn_in_order, told=lambda host: progress_bar()
        )
    if host_survey.unwritten:
        raise ConfigError(host_survey.unwritten)
    wanted_state = Wanted(
        {host.name: host.slots for host in hosts}, host_survey.token, host_survey.offsets, _checkpoint(config),
        cpu=os.environ.get("DS_ACCELERATOR") == "cpu",
    )  # fmt: skip
    findings = compare_reports(host_survey.reports, wanted_state)
    if not as_json:
        console = Console()
        host_table = tabulate_reports(host_survey.reports, findings, not quick, burn_in_order is not None)
        if not console.is_terminal:  # a pipe has 80 columns: no name of a host is to be cut there
            console.width = max(console.width, console.measure(host_table).maximum)
        console.print(host_table)
        for finding_line in describe_findings(findings):
            console.print(finding_line, soft_wrap=True)
        if placement.no_ssh and len(placement.hosts) > 1:
            console.print("--no_ssh: only this host was checked; give a hostfile to compare all")
        console.print(summarize_findings(len(host_names), findings), highlight=False)
        if burn_in_order is not None:
            console.print(f"burn-in: seed {burn_in_order.seed}", highlight=False)
    json_facts = {
        "hosts": {host: as_facts(report) for host, report in host_survey.reports.items()},
        "clock_offsets": host_survey.offsets,
        "findings": [asdict(host_finding) for host_finding in findings],
    }
    put_json(json_facts, as_json, output)
    raise typer.Exit(BAD_INPUT if any(host_finding.severity == "refuse" for host_finding in findings) else OK)


def _order(minutes: float | None, seed: int | None) -> BurnInOrder | None:
    """Raises ConfigError."""
    from megastable.cluster.host_survey import BurnInOrder

    if minutes is None:
        if seed is not None:
            raise ConfigError("--burn-in-seed without --burn-in MINUTES: give the minutes, too")
        return None
    if not (math.isfinite(minutes) and minutes > 0):
        raise ConfigError(f"--burn-in {minutes}: minutes above 0, e.g. 30, or 0.5")
    return BurnInOrder(60 * minutes, secrets.randbits(32) if seed is None else seed)


def _checkpoint(config: RunConfig | None) -> float | None:
    """About the bytes of a checkpoint."""
    if config is None:
        return None
    from megastable.model.sizes import count_parameters

    model = config.model
    if model.vocab_size is None:
        model = model.model_copy(update={"vocab_size": ASSUMED_VOCABULARY})
    return float(STATE * count_parameters(model))
