"""`megastable backtest`: replay past runs through the stability system.

Thresholds are tuned on past runs, not on the next one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megastable.base.errors import ConfigError, DataError
from megastable.commands.app import App
from megastable.commands.options import Json, JsonFile, Plot, put_json

if TYPE_CHECKING:
    from megastable.config.stability import StabilityConfig
    from megastable_guard.step_judge import BacktestDecision, Recorded

EVERY = 100  # steps between updates of the progress bar
app = App()


@app.add_command(
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
    from megastable.base.progress_bar import show_bar
    from megastable_guard.step_judge import simulate_guard

    for override_text in overrides or []:
        if not override_text.startswith("stability."):
            raise ConfigError(f"{override_text}: only stability.KEY=VALUE has an influence on a backtest")
    recorded_steps, (config, fp8) = _read(source), _config(source, overrides or [])
    if not config.enabled:
        off_text = "stability.enabled=false: nothing would be decided"
        raise ConfigError(f"{off_text}; say stability.enabled=true to try {source}")
    judged_steps, interval, keep = (
        list["BacktestDecision"](),
        config.snapshots.interval,
        config.snapshots.keep,
    )
    with show_bar("replaying", len(recorded_steps), as_json, "steps") as progress:
        for step in simulate_guard(recorded_steps, config, fp8, interval=interval, keep=keep):
            judged_steps.append(step)
            if not len(judged_steps) % EVERY:
                progress(EVERY)
    if not as_json:
        _show(source, judged_steps)
    put_json([asdict(judged_step) for judged_step in judged_steps], as_json, output)
    if plot is not None:
        from megastable.report.traces import backtest_plot

        backtest_plot(recorded_steps, judged_steps, source.name, plot)


def _config(source: Path, overrides: list[str]) -> tuple[StabilityConfig, bool]:
    """The run's thresholds, or the defaults, with the overrides; and whether it computed in FP8."""
    from megastable.config import recipe
    from megastable.config.recipe import override_key

    if source.is_dir():
        recipe_config = recipe.load_recipe(source / "recipe.yaml", overrides)
        return recipe_config.stability, recipe_config.precision.fp8 is not None
    config_tree: dict[str, Any] = {}
    for assignment in overrides:
        override_key(config_tree, assignment)
    return recipe.validate_tree(config_tree, "the overrides").stability, False


def _read(source: Path) -> list[Recorded]:
    from megastable.report.traces import read_csv_trace
    from megastable.run import records
    from megastable_guard.step_judge import Recorded

    if not source.is_dir():
        return read_csv_trace(source, lambda line: typer.echo(line, err=True))
    # As first met: a step repeated after a rewind looks harmless the second time.
    record_rows = records.read_newest_records(source / "steps", newest=False).to_pylist()
    if not record_rows:
        raise DataError(
            f"{source}: no step records in {source / 'steps'}: give a run directory, or a CSV file"
        )
    # fp16 overflows are not judged: the loss scale is reduced.
    judged_rows = [
        record_row for record_row in record_rows if record_row["finite"] or record_row["loss_scale"] <= 1
    ]
    # A change of length was announced to the detector like one of the data.
    return [
        Recorded(
            judged_row["step"],
            judged_row["loss"],
            judged_row["grad_norm"],
            judged_row["lr"],
            judged_row["piece"] and str(judged_row["piece"]),
        )
        for judged_row in judged_rows
    ]


def _show(source: Path, judged: list[BacktestDecision]) -> None:
    from rich.console import Console
    from rich.table import Table

    from megastable.report.traces import list_episodes
    from megastable_guard.actions import Action

    console = Console(markup=False, emoji=False, highlight=False)
    episode_table = Table("steps", "verdict", "action", "reason", title=str(source), title_justify="left")
    for first, last_step, count in list_episodes(judged):
        steps = str(first.step) if count == 1 else f"{first.step}-{last_step}"
        episode_table.add_row(steps, first.verdict, "reset" if first.reset else first.action, first.reason)
    if episode_table.row_count:
        console.print(episode_table)
    counts = Counter[Action](step.action for step in judged)
    shown_actions = [action for action in Action if counts[action] and action is not Action.APPLY]
    action_texts = [f"{counts[shown_action]} {shown_action.value}" for shown_action in shown_actions]
    if resets := sum(step.reset for step in judged):
        action_texts.append(f"{resets} reset of the baseline")
    acted = ", ".join(action_texts)
    console.print(f"{source}: {len(judged)} steps; {acted or 'nothing would have been done'}", soft_wrap=True)
