"""What the stability system would have done with past runs: thresholds are tuned on those, not on the next one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from megastable.base import durable
from megastable.base.errors import ConfigError, DataError, user_errors
from megastable.config import recipe
from megastable.config.stability import StabilityConfig
from megastable.report.plot import backtest_plot
from megastable.run import records
from megastable.run.directory import as_json
from megastable.stability.actions import Action
from megastable.stability.backtest import BacktestDecision, Recorded, episodes, read_trace, simulate

EXAMPLES = """Examples:

BACKTEST runs/quickstart

BACKTEST trace.csv --json out.json --plot out.png

BACKTEST trace.csv stability.policy.discards=2 stability.snapshots.interval=20

TRACE.csv has the columns step,loss,grad_norm and, where known, lr and data: the name of what was trained on. Where
that changes, another level of the loss is no incident.""".replace("BACKTEST", "python tools/backtest.py")
PICTURES = (".png", ".svg", ".pdf")
app = typer.Typer(help=__doc__, add_completion=False, pretty_exceptions_enable=False)


@app.command(epilog=EXAMPLES)
@user_errors()
def backtest(
    source: Annotated[Path, typer.Argument(metavar="RUN|TRACE.csv", help="A run directory, or a CSV file")],
    overrides: Annotated[list[str] | None, typer.Argument(help="stability.KEY=VALUE ...")] = None,
    json: Annotated[
        Path | None, typer.Option(help="Every step as {step, verdict, action, reason, reset}")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="A picture of it: .png, .svg or .pdf")] = None,
) -> None:
    """Replay recorded losses and gradient norms through detector and policy: what would have been done, and when."""
    given = overrides or []
    if foreign := [item for item in given if not item.startswith("stability.")]:
        raise ConfigError(f"{foreign[0]}: only stability.KEY=VALUE has an influence on a backtest")
    if plot is not None and (plot.suffix not in PICTURES or not plot.parent.is_dir()):
        raise ConfigError(
            f"--plot {plot}: a name ending in {', '.join(PICTURES)}, in a directory that exists"
        )
    rows, (config, fp8) = _read(source), _config(source, given)
    if not config.enabled:
        raise ConfigError(
            f"stability.enabled=false: nothing would be decided; say stability.enabled=true to try {source}"
        )
    judged = list(simulate(rows, config, fp8))
    _show(source, judged)
    if json is not None:
        durable.write_output(json, as_json([asdict(step) for step in judged], indent=1) + "\n")
    if plot is not None:
        backtest_plot(rows, judged, source.name, plot)


def _config(source: Path, overrides: list[str]) -> tuple[StabilityConfig, bool]:
    """The run's own thresholds, or the defaults, with the overrides; and whether it computed in FP8."""
    if source.is_dir():
        config = recipe.load(source / "recipe.yaml", overrides)
        return config.stability, config.precision.fp8 is not None
    tree: dict[str, Any] = {}
    for assignment in overrides:
        recipe.override(tree, assignment)
    return recipe.validate(tree, "the overrides").stability, False


def _read(source: Path) -> list[Recorded]:
    if not source.is_dir():
        return read_trace(source, lambda line: typer.echo(line, err=True))
    # As they were first met: a step that was done again after a rewind looks harmless the second time.
    table = records.read(source / "steps", newest=False).to_pylist()
    if not table:
        raise DataError(
            f"{source}: no step records in {source / 'steps'}: give a run directory, or a CSV file"
        )
    # An overflow of fp16 is not judged: a smaller loss scale mends it.
    judged = [row for row in table if row["finite"] or row["loss_scale"] <= 1]
    return [Recorded(row["step"], row["loss"], row["grad_norm"], row["lr"]) for row in judged]


def _show(source: Path, judged: list[BacktestDecision]) -> None:
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


if __name__ == "__main__":
    app()
