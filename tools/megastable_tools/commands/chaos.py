"""`megastable chaos`: faults of hosts, links, processes and storage under the real supervisor, on one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megastable.base.errors import ConfigError
from megastable.commands.app import App
from megastable.commands.options import Json, JsonFile
from megastable_tools.commands.drill import conduct_drill, import_from_checkout

app = App()
STEPS, QUICK_STEPS, QUICK_FAULTS = 400, 200, 3
QUICK = ("killed-rank", "killed-host", "stopped-rank")
# So that a quick round fits in minutes; the full one has the supervisor's own limits.
IMPATIENT = ("supervise.hang_floor=8", "supervise.host_silence=8")
LIMITS = ("supervise.wait_for_hosts=60", "supervise.shrink_after=null")


@app.add_command(
    examples="""
    megastable chaos --quick
    megastable chaos --hosts 3 --faults 12 --seed 7 --output chaos.json
    megastable chaos --only flapping-link,stalled-disk --seconds 60
    megastable chaos --list
    """,
    more="The hosts are namespaces: each has its own processes, network, name and sshd; a switch joins them, and a "
    "shared disk can stall and fill up. That needs root, iproute2 and openssh. Each fault has a run of its own "
    "of about a minute; its expected end is written down before.\n\n"
    "Exit codes: 0 every fault was found, blamed on the right host and ended as it should; 1 not so; 2 bad input, or "
    "hosts cannot be made here.",
)
def run_chaos(
    hosts: Annotated[int, typer.Option(min=2, max=6, help="Hosts that train")] = 2,
    spares: Annotated[int, typer.Option(min=0, max=2, help="Spare hosts")] = 0,
    faults: Annotated[
        int | None, typer.Option(min=1, help="Number of faults. Default: 12; with --quick 3")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=50, help="Steps of a run. Default: 400; with --quick 200"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of kinds, hosts and times")] = 1,
    seconds: Annotated[
        float | None, typer.Option(min=0, max=300, help="Duration of the faults that last. Default: drawn")
    ] = None,
    only: Annotated[str, typer.Option(metavar="KIND,...", help="Kinds of faults. Default: all")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Three faults, short runs, short timeouts")] = False,
    corpus: Annotated[
        Path | None, typer.Option(help="Prepared corpus. Default: Python's standard library")
    ] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep logs and journals here")] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the faults and exit")] = False,
    as_json: Json = False,
    output: JsonFile = None,
) -> None:
    """Make hosts, links, processes and storage fail under the supervisor. Needs a checkout.

    The table says what was found after how long, which host was blamed, and whether the run ended with the bytes of an
    undisturbed one. JSON: a row per fault.
    """
    import_from_checkout("drills")
    from drills import cluster_faults
    from drills.chaos import ChaosDrill, ClusterSetup, plan_faults
    from drills.hosts import NAMES
    from drills.namespaces import find_missing

    fault_kinds = cluster_faults.choose_kinds(
        [kind_name for kind_name in only.split(",") if kind_name] or (list(QUICK) if quick else [])
    )
    if listed:
        for fault_kind in fault_kinds:
            print(f"{fault_kind.name}: {fault_kind.title}")
        return
    if missing_reason := find_missing():
        raise ConfigError(f"hosts cannot be made here: {missing_reason}")
    fault_count = faults or (QUICK_FAULTS if quick else 12)
    if steps is None:
        steps = QUICK_STEPS if quick else STEPS
    planned_faults = plan_faults(fault_kinds, NAMES[:hosts], seed, fault_count, steps, seconds=seconds)
    cluster_setup = ClusterSetup(corpus, steps, hosts, spares, [*LIMITS, *(IMPATIENT if quick else ())])
    conduct_drill(ChaosDrill(cluster_setup, fault_kinds, planned_faults), keep, as_json, output)
