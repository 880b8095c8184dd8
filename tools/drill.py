"""Fire drills: real small training runs with planted faults, and what each policy makes of them."""

from __future__ import annotations

import signal
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.status import Status

from megastable import durable
from megastable.drills import scenarios
from megastable.drills.plan import Policy
from megastable.drills.runner import drill
from megastable.drills.score import Score, compare, met
from megastable.drills.stage import Stage
from megastable.drills.table import console, outcome, table, verdict
from megastable.errors import FAILED, ConfigError, user_errors
from megastable.rundir import as_json

LIST = "\n\n".join(f"{scenario.name}: {scenario.title}" for scenario in scenarios.SCENARIOS)
EXAMPLES = f"""Examples:

DRILL all --json drills.json

DRILL random-tokens flipped-bit --policy ours --policy skipping

DRILL --quick

{LIST}

A run takes about 40 s on two cores, all scenarios under all policies about 35 minutes.

Exit codes: 0 all runs of ours end within 0.02 nat of the clean one and at most one cause in 12 is wrong; 1 not so; 2
bad input.""".replace("DRILL", "python tools/drill.py")
app = typer.Typer(help=__doc__, add_completion=False, pretty_exceptions_enable=False)


@app.command(epilog=EXAMPLES)
@user_errors()
def main(
    names: Annotated[list[str] | None, typer.Argument(metavar="[SCENARIO]...|all", help="Which; all")] = None,
    policy: Annotated[list[Policy] | None, typer.Option(help="Repeatable; all four")] = None,
    json: Annotated[Path | None, typer.Option(help="The numbers of every run")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two scenarios, ours alone, short runs")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of model, data and faults")] = 1,
    keep: Annotated[Path | None, typer.Option(help="Where corpora and runs are left to look at")] = None,
) -> None:
    """Train with a fault under each policy, two ranks on the CPU, and compare with a run without it."""
    chosen = scenarios.choose(names or (list(scenarios.QUICK) if quick else []))
    policies = [p for p in Policy if p in (policy or ([Policy.OURS] if quick else list(Policy)))]
    if json is not None and not json.parent.is_dir():
        raise ConfigError(f"--json {json}: there is no directory {json.parent}")
    if keep is not None and keep.exists() and not keep.is_dir():
        raise ConfigError(f"--keep {keep} is no directory: choose another name")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    steps = scenarios.QUICK_STEPS if quick else scenarios.STEPS
    if quick:
        chosen = [scenario.at(scenarios.QUICK_FAULT_STEP) for scenario in chosen]
    with ExitStack() as stack:
        where = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="drill-")))
        scores = run(Stage(where.resolve(), seed, steps), chosen, policies)
    console().print(table(scores))
    console().print(verdict(scores), soft_wrap=True)
    if json is not None:
        durable.write_output(json, as_json([s.model_dump(mode="json") for s in scores], indent=1) + "\n")
    raise SystemExit(0 if met(scores) else FAILED)


def run(stage: Stage, chosen: list[scenarios.Scenario], policies: list[Policy]) -> list[Score]:
    """The clean runs first, then every scenario under every policy."""
    out, scores = console(), list[Score]()
    todo = [(s, p) for s in (*scenarios.references(chosen), *chosen) for p in policies]
    with out.status("preparing the corpus") as status:
        stage.prepare()
        for number, (scenario, policy) in enumerate(todo, start=1):
            head = f"{number}/{len(todo)} {scenario.name}, {policy}"
            status.update(head)
            show = partial(show_step, status, head)
            scores = compare([*scores, drill(stage, scenario, policy, show)])
            out.print(f"{head}: {outcome(scores[-1])}, {scores[-1].wall_seconds:.0f} s")
    return scores


def show_step(status: Status, head: str, step: int) -> None:
    status.update(f"{head}: step {step}")


if __name__ == "__main__":
    app()
