"""`megastable backtest`: replay past runs through the stability system.

Thresholds are tuned on past runs, not on the next one.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megastable.base.errors import ConfigError, DataError
from megastable.commands.app import App
from megastable.commands.options import Json, JsonFile, Plot, put_json

if TYPE_CHECKING:
    from megastable.config.stability import StabilityConfig
    from megastable_guard.guard import BacktestDecision, Recorded

EVERY = 100  # steps between updates of the progress bar
app = App()


@app.add(
    examples="""
    megastable backtest runs/quickstart
    megastable backtest trace.csv --output out.json --plot out.png
    megastable backtest trace.csv stability.policy.discards=2 stability.snapshots.interval=20
    """,
    more="TRACE.csv has the columns step,loss,grad_norm and, where known, lr and data: the name of what was trained "
    "on. Where that changes, another level of the loss is no incident.",
)
def backtest(
    source: Annotated[Path, typer.Argument(metavar="RUN|TRACE.csv", help="A run directory, or a CSV file")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[stability.KEY=VALUE]", help="Other thresholds")
    ] = None,
    as_json: Json = False,
    output: JsonFile = None,
    plot: Plot = None,
) -> None:
    """Replay recorded losses through detector and policy, and show what they would have done, and when.

    JSON: every step as {step, verdict, action, reason, reset}.
    """
    from megastable.base.progress_bar import bar
    from megastable_guard.guard import simulate

    given = overrides or []
    if foreign := [item for item in given if not item.startswith("stability.")]:
        raise ConfigError(f"{foreign[0]}: only stability.KEY=VALUE has an influence on a backtest")
    rows, (config, fp8) = _read(source), _config(source, given)
    if not config.enabled:
        raise ConfigError(
            f"stability.enabled=false: nothing would be decided; say stability.enabled=true to try {source}"
        )
    judged = []
    with bar("replaying", len(rows), as_json, "steps") as progress:
        snapshots = config.snapshots
        for step in simulate(rows, config, fp8, interval=snapshots.interval, keep=snapshots.keep):
            judged.append(step)
            if not len(judged) % EVERY:
                progress(EVERY)
    if not as_json:
        _show(source, judged)
    put_json([asdict(step) for step in judged], as_json, output)
    if plot is not None:
        from megastable.report.plot import backtest_plot

        backtest_plot(rows, judged, source.name, plot)


def _config(source: Path, overrides: list[str]) -> tuple[StabilityConfig, bool]:
    """The run's thresholds, or the defaults, with the overrides; and whether it computed in FP8."""
    from megastable.config import recipe
    from megastable.config.recipe import override

    if source.is_dir():
        config = recipe.load(source / "recipe.yaml", overrides)
        return config.stability, config.precision.fp8 is not None
    tree: dict[str, Any] = {}
    for assignment in overrides:
        override(tree, assignment)
    return recipe.validate(tree, "the overrides").stability, False


def _read(source: Path) -> list[Recorded]:
    from megastable.report.traces import read_trace
    from megastable.run import records
    from megastable_guard.guard import Recorded

    if not source.is_dir():
        return read_trace(source, lambda line: typer.echo(line, err=True))
    # As first met: a step repeated after a rewind looks harmless the second time.
    table = records.read(source / "steps", newest=False).to_pylist()
    if not table:
        raise DataError(
            f"{source}: no step records in {source / 'steps'}: give a run directory, or a CSV file"
        )
    # fp16 overflows are not judged: the loss scale is reduced.
    judged = [row for row in table if row["finite"] or row["loss_scale"] <= 1]
    # A change of length was announced to the detector like one of the data.
    return [
        Recorded(row["step"], row["loss"], row["grad_norm"], row["lr"], row["piece"] and str(row["piece"]))
        for row in judged
    ]


def _show(source: Path, judged: list[BacktestDecision]) -> None:
    from rich.console import Console
    from rich.table import Table

    from megastable.report.traces import episodes
    from megastable_guard.actions import Action

    console = Console(markup=False, emoji=False, highlight=False)
    table = Table("steps", "verdict", "action", "reason", title=str(source), title_justify="left")
    for first, last, count in episodes(judged):
        steps = str(first.step) if count == 1 else f"{first.step}-{last}"
        table.add_row(steps, first.verdict, "reset" if first.reset else first.action, first.reason)
    if table.row_count:
        console.print(table)
    counts = {action: sum(step.action is action for step in judged) for action in Action}
    done = [f"{n} {a.value}" for a, n in counts.items() if n and a is not Action.APPLY]
    if resets := sum(step.reset for step in judged):
        done.append(f"{resets} reset of the baseline")
    acted = ", ".join(done)
    console.print(f"{source}: {len(judged)} steps; {acted or 'nothing would have been done'}", soft_wrap=True)
