"""Train under a supervisor: it starts the deepspeed launcher, watches, starts again from a good checkpoint after a
crash or a hang, and leaves incidents/ for people to read. Or ask how a run stands.

    python launch/supervise.py RECIPE [key=value ...] [-- arguments of deepspeed]
    python launch/supervise.py status RUN [--json] [--watch]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from megastable.base.errors import user_errors
from megastable.config import recipe
from megastable.run import directory
from megastable.run.membership import check_alone
from megastable.supervise import hooks
from megastable.supervise.notifiers import Notifiers
from megastable.supervise.status import RunWatch, as_json, exit_code, read_status
from megastable.supervise.status_panel import live, panel
from megastable.supervise.supervisor import Supervisor

MODULE = "megastable.train"
EXAMPLES = """examples:
  python launch/supervise.py launch/recipes/quickstart.yaml run.dir=runs/mine -- --num_gpus 2
  python launch/supervise.py launch/recipes/7b.yaml run.dir=runs/7b -- --hostfile hostfile
  python launch/supervise.py status runs/7b --watch

The same command again goes on where the run stopped, takes over what a killed supervisor left running, and does
nothing when the run is complete. SIGTERM and Ctrl-C end in a checkpoint; once more ends at once.

Exit codes: 0 complete, 2 bad input, 75 stopped with a checkpoint, 76 needs a person (budgets are spent), 77 no space;
all of them in docs/clusters.md. `status` ends with 0 while the run goes on or is complete, 75 where it was stopped,
else with the code that it ended with."""


def supervise(arguments: Sequence[str], given: Sequence[str]) -> int:
    """`given`: what came after --."""
    parser = _parser("RECIPE [key=value ...] [-- DEEPSPEED ARGUMENT ...]")
    parser.add_argument("recipe", help="a YAML file, e.g. launch/recipes/quickstart.yaml")
    parser.add_argument(
        "overrides", nargs="*", default=[], help="dotted overrides, e.g. train.steps=20 run.dir=runs/x"
    )
    parser.add_argument("--module", default=MODULE, help="what every rank runs (%(default)s)")
    args = parser.parse_intermixed_args(arguments)
    check_alone(os.environ)
    config = recipe.load(args.recipe, args.overrides)
    hooks.check(config.supervise)  # before anything is made
    run = directory.make(config, recipe.find(args.recipe))
    run.compare(config)
    notifiers = Notifiers(config, run)
    for text in config.supervise.exposed:
        notifiers.say(f"WARNING: {text}")
    try:
        supervisor = Supervisor(config, run, notifiers, args.recipe, args.overrides, given, args.module)
        return supervisor.supervise()
    finally:
        notifiers.close()


def status(arguments: Sequence[str]) -> int:
    """Show how a run stands."""
    parser = _parser("status RUN [--json] [--watch]")
    parser.add_argument("run", type=Path, help="the directory of a run, e.g. runs/quickstart")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="everything, for programs")
    how.add_argument("--watch", action="store_true", help="again and again, until Ctrl-C")
    args = parser.parse_args(arguments)
    console = Console()
    if args.watch:
        return exit_code(live(RunWatch(args.run), console))
    found = read_status(args.run)
    if args.json:
        print(as_json(found))
    else:
        console.print(panel(found))
    return exit_code(found)


def _parser(usage: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog="supervise.py", usage=f"python launch/supervise.py {usage}", description=__doc__, epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    with user_errors():
        if list(arguments[:1]) == ["status"]:
            raise SystemExit(status(arguments[1:]))
        own, given = list(arguments), list[str]()
        if "--" in own:
            own, given = own[: own.index("--")], own[own.index("--") + 1 :]
        raise SystemExit(supervise(own, given))


if __name__ == "__main__":
    main(sys.argv[1:])
