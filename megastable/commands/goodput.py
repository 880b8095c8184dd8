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


@app.add(
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
    alive = any(is_held(run / name) for name in (SUPERVISOR, TRAINING))
    account, problems = read_account(run, alive)
    for problem in problems:
        typer.echo(f"WARNING: {problem}", err=True)
    if not as_json:
        _show(run, account, rows)
    put_json(facts(run, account, problems), as_json, output)
    if plot is not None:
        from megastable.report.goodput_picture import goodput_picture

        goodput_picture(account, run.resolve().name, plot)


def facts(run: Path, account: TimeAccount, problems: list[str]) -> dict[str, Any]:
    """The account for programs; times in unix seconds."""
    lost = [
        {"kind": kind, "cause": cause, "incident": incident, "host": host, "seconds": seconds, "spans": count}
        for (kind, cause, incident, host), (seconds, count) in account.lost().items()
    ]
    spans = [
        {
            "from": span.begin, "to": span.end, "kind": span.kind, "cause": span.cause, "incident": span.incident,
            "host": span.host, "attempt": span.attempt, "between_steps": span.between, "missing": span.missing,
        }
        for span in account.spans()
    ]  # fmt: skip
    times = {"begin_unix_seconds": account.begin, "end_unix_seconds": account.end}
    return {"run": str(run), **times, **account.facts(), "lost": lost, "spans": spans, "problems": problems}


def _show(run: Path, account: TimeAccount, rows: int) -> None:
    from rich.console import Console
    from rich.table import Table

    from megastable.base.text import duration, visible

    console, wall = Console(markup=False, emoji=False, highlight=False), account.wall or 1.0
    console.print(
        f"{visible(run)}: {account.goodput():.1%} of {duration(account.wall)} was training", soft_wrap=True
    )
    table = Table("kind", "time", "share")
    for kind, seconds in sorted(account.seconds().items(), key=lambda entry: -entry[1]):
        if seconds > 0:
            table.add_row(kind.value.replace("_", " "), duration(seconds), f"{seconds / wall:.2%}")
    table.add_section()
    table.add_row("all", duration(account.wall), f"{sum(account.seconds().values()) / wall:.2%}")
    console.print(table)
    if smaller := account.smaller():
        console.print(
            f"While it trained, hosts were missing: {smaller:.2%} of what all would have done. Of their time, "
            f"{account.goodput() - smaller:.1%} was training.",
            soft_wrap=True,
        )
    lost = sorted(account.lost().items(), key=lambda entry: -entry[1][0])
    if lost and rows:
        table = Table(
            "cause",
            "kind",
            "incident",
            "host",
            "spans",
            "time",
            "share",
            title="lost time by cause",
            title_justify="left",
        )
        for (kind, cause, incident, host), (seconds, count) in lost[:rows]:
            number = "" if incident is None else str(incident)
            table.add_row(
                visible(cause, 60), kind.value.replace("_", " "), number, visible(host, 40), str(count),
                duration(seconds), f"{seconds / wall:.2%}",
            )  # fmt: skip
        console.print(table)
        if len(lost) > rows:
            console.print(f"{len(lost) - rows} more rows: --rows {len(lost)}, or --json")
