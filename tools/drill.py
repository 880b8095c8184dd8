"""Fire drills: real small training runs with planted faults, and what each policy makes of them."""

from __future__ import annotations

import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

# drills/ is no part of the installed package: it lies beside this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from drills import batch, scenarios
from drills.batch import Task
from drills.plan import Policy
from drills.scenario import GLOBAL_BATCH, STEPS
from drills.score import Score, met
from drills.stage import LAYERS, RANKS, Stage
from drills.table import console, outcome, table, verdict
from megastable.base import durable
from megastable.base.errors import FAILED, ConfigError, user_errors
from megastable.run.directory import as_json

LIST = "\n\n".join(f"{scenario.name}: {scenario.title}" for scenario in scenarios.SCENARIOS)
EXAMPLES = f"""Examples:

DRILL all --json drills.json

DRILL thin --policy ours --seeds 1,2,3 --keep drills --json drills.json

DRILL trickle rate-x10 --policy ours --ranks 1 --layers 3 --text my.txt

DRILL --quick

Groups: all, gross (what stands out), thin (what hardly does). Called again with the same --keep, the runs that are
finished there, by the same code, are not done again.

{LIST}

A run takes about 40 s on two cores with two ranks, and 25 s with one.

Exit codes: 0 all runs of ours end within 0.02 nat of the clean one, no clean sample is lost for good, and at most one
cause in 12 is wrong; 1 not so; 2 bad input.""".replace("DRILL", "python tools/drill.py")
app = typer.Typer(help=__doc__, add_completion=False, pretty_exceptions_enable=False)


@app.command(epilog=EXAMPLES)
@user_errors()
def main(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[SCENARIO|GROUP]...", help="Which; all")
    ] = None,
    policy: Annotated[list[Policy] | None, typer.Option(help="Repeatable; all four")] = None,
    json: Annotated[Path | None, typer.Option(help="The numbers of every run")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two scenarios, ours alone, short runs")] = False,
    seeds: Annotated[str, typer.Option(help="Of model, data and faults, e.g. 1,2,3")] = "1",
    text: Annotated[
        Path | None, typer.Option(help="To train on, file or folder; else the standard library")
    ] = None,
    ranks: Annotated[int, typer.Option(help=f"Processes of a run; a divisor of {GLOBAL_BATCH}")] = RANKS,
    layers: Annotated[int, typer.Option(min=1, help="Of the model")] = LAYERS,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at the same time")] = 1,
    keep: Annotated[
        Path | None, typer.Option(help="Where corpora and runs are left, and found again")
    ] = None,
) -> None:
    """Train with a fault under each policy, on the CPU, and compare with a run without it."""
    chosen = scenarios.choose(names or (list(scenarios.QUICK) if quick else []))
    policies = [p for p in Policy if p in (policy or ([Policy.OURS] if quick else list(Policy)))]
    if json is not None and not json.parent.is_dir():
        raise ConfigError(f"--json {json}: there is no directory {json.parent}")
    if keep is not None and keep.exists() and not keep.is_dir():
        raise ConfigError(f"--keep {keep} is no directory: choose another name")
    if text is not None and not text.exists():
        raise ConfigError(f"--text {text}: there is no such file or folder")
    if ranks < 1 or GLOBAL_BATCH % ranks:
        raise ConfigError(
            f"--ranks {ranks}: a step's {GLOBAL_BATCH} samples are shared evenly; choose 1, 2 or 4"
        )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    steps = scenarios.QUICK_STEPS if quick else STEPS
    if quick:
        chosen = [scenario.at(scenarios.QUICK_FAULT_STEP) for scenario in chosen]
    with ExitStack() as stack:
        where = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="drill-")))
        text = text and text.resolve()
        stages = [Stage(where.resolve(), seed, steps, ranks, layers, text) for seed in numbers(seeds)]
        scores = run(batch.tasks(stages, chosen, policies), jobs)
    console().print(table(scores))
    console().print(verdict(scores), soft_wrap=True)
    if json is not None:
        durable.write_output(json, as_json([s.model_dump(mode="json") for s in scores], indent=1) + "\n")
    raise SystemExit(0 if met(scores) else FAILED)


def numbers(seeds: str) -> list[int]:
    """The seeds of a list. Raises ConfigError."""
    parts = [part.strip() for part in seeds.split(",")]
    if not all(part.isdecimal() for part in parts) or len(set(parts)) < len(parts):
        raise ConfigError(f"--seeds {seeds}: give different whole numbers, e.g. --seeds 1,2,3")
    return [int(part) for part in parts]


def run(todo: list[Task], jobs: int) -> list[Score]:
    """Do `todo` with a bar for all of it, and one for every run at work."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console(), transient=True) as progress:
        bars = Bars(progress, len(todo))
        for stage in dict.fromkeys(task.stage for task in todo):
            stage.prepare()
        return batch.run(todo, jobs, bars)


class Bars:
    """A bar for every run at work; a line for every finished one."""

    def __init__(self, progress: Progress, runs: int) -> None:
        self.progress, self.runs, self.done = progress, runs, 0
        self.total = progress.add_task("preparing the corpus", total=runs)
        self.bars: dict[Task, TaskID] = {}

    def begins(self, task: Task) -> None:
        self.progress.update(self.total, description="all runs")
        self.bars[task] = self.progress.add_task(str(task), total=task.stage.steps)

    def step(self, task: Task, step: int) -> None:
        if task in self.bars:
            self.progress.update(self.bars[task], completed=step)

    def ends(self, task: Task, score: Score | None) -> None:
        self.progress.remove_task(self.bars.pop(task))
        if score is None:
            return
        self.done += 1
        self.progress.advance(self.total)
        self.progress.console.print(
            f"{self.done}/{self.runs} {task}: {outcome([score])}, {score.wall_seconds:.0f} s"
        )


if __name__ == "__main__":
    app()
