"""`megastable goodput`: show where the time of a run went, from its directory alone. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megastable.commands.app import App
from megastable.commands.options import Json, JsonFile, Plot, Rows, Run, put_json

if TYPE_CHECKING:
    from megastable.run.goodput.time_account import TimeAccount

app = App()


@app.add_command(
    examples="""
    megastable goodput runs/7b
    megastable goodput runs/7b --plot goodput.png
    megastable goodput runs/7b --json
    """,
    more="Of a run that is going on, the account ends now; of another one, with its last sign of life. What the kinds "
    "of time mean is in docs/goodput.md.\n\nJSON: seconds by kind, lost seconds by kind, cause, incident and host, all "
    "spans in order, and `smaller`: the share of the capacity that was missing while it trained on fewer ranks than "
    "wanted.\n\nExit codes: 0, or 2 if there is no run or no journal.",
)
def goodput(
    run: Run,
    as_json: Json = False,
    output: JsonFile = None,
    plot: Plot = None,
    rows: Rows = 20,
) -> None:
    """Account for every second of a run: training, or lost to which cause, incident and host."""
    from megastable.run.goodput.watching import read_account
    from megastable.supervise.locks import SUPERVISOR, TRAINING, is_held
    from megastable.supervise.status import require_run

    if not (run / "steps").is_dir():  # else it is a run that lost its journal, which `read_account` says
        require_run(run)
    is_alive = any(is_held(run / name) for name in (SUPERVISOR, TRAINING))
    time_account, problems = read_account(run, is_alive)
    for problem in problems:
        typer.echo(f"WARNING: {problem}", err=True)
    if not as_json:
        _show(run, time_account, rows)
    put_json(collect_facts(run, time_account, problems), as_json, output)
    if plot is not None:
        from megastable.report.figures import draw_goodput

        draw_goodput(time_account, run.resolve().name, plot)


def collect_facts(run: Path, account: TimeAccount, problems: list[str]) -> dict[str, Any]:
    """The account for programs; times in unix seconds."""
    names = ("kind", "cause", "incident", "host", "seconds", "spans")
    lost_rows = [dict(zip(names, (*key, *told), strict=True)) for key, told in account.sum_losses().items()]
    spans = [
        {
            "from": span.begin, "to": span.end, "kind": span.kind, "cause": span.cause, "incident": span.incident,
            "host": span.host, "attempt": span.attempt, "between_steps": span.between, "missing": span.missing,
        }
        for span in account.list_spans()
    ]  # fmt: skip
    time_bounds = {"begin_unix_seconds": account.begin, "end_unix_seconds": account.end}
    told = {"lost": lost_rows, "spans": spans, "problems": problems}
    return {"run": str(run), **time_bounds, **account.list_facts(), **told}


def _show(run: Path, account: TimeAccount, rows: int) -> None:
    from rich.console import Console
    from rich.table import Table

    from megastable.base.text import make_visible, show_duration

    console, wall_seconds = Console(markup=False, emoji=False, highlight=False), account.wall or 1.0
    console.print(
        f"{make_visible(run)}: {account.compute_goodput():.1%} of {show_duration(account.wall)} was training",
        soft_wrap=True,
    )
    kind_table = Table("kind", "time", "share")
    for kind, seconds in sorted(account.sum_seconds().items(), key=lambda entry: -entry[1]):
        if seconds > 0:
            name = kind.value.replace("_", " ")
            kind_table.add_row(name, show_duration(seconds), f"{seconds / wall_seconds:.2%}")
    kind_table.add_section()
    all_seconds = sum(account.sum_seconds().values())
    kind_table.add_row("all", show_duration(account.wall), f"{all_seconds / wall_seconds:.2%}")
    console.print(kind_table)
    if missing_share := account.measure_missing():
        console.print(
            f"While it trained, hosts were missing: {missing_share:.2%} of what all would have done. Of their time, "
            f"{account.compute_goodput() - missing_share:.1%} was training.",
            soft_wrap=True,
        )
    lost_rows = sorted(account.sum_losses().items(), key=lambda entry: -entry[1][0])
    if lost_rows and rows:
        heads = ("cause", "kind", "incident", "host", "spans", "time", "share")
        cause_table = Table(*heads, title="lost time by cause", title_justify="left")
        for (kind, cause, incident, host), (seconds, span_count) in lost_rows[:rows]:
            incident_text = "" if incident is None else str(incident)
            cause_table.add_row(
                make_visible(cause, 60), kind.value.replace("_", " "), incident_text, make_visible(host, 40),
                str(span_count),
                show_duration(seconds), f"{seconds / wall_seconds:.2%}",
            )  # fmt: skip
        console.print(cause_table)
        if len(lost_rows) > rows:
            console.print(f"{len(lost_rows) - rows} more rows: --rows {len(lost_rows)}, or --json")
