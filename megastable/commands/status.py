"""`megastable status`: show how a run stands, from its directory alone."""

from __future__ import annotations

from typing import Annotated

import typer

from megastable.base.errors import ConfigError
from megastable.commands.app import App
from megastable.commands.options import Json, JsonFile, Run, put_json

app = App()


@app.add_command(
    examples="""
    megastable status runs/7b
    megastable status runs/7b --watch
    megastable status runs/7b --json
    """,
    more="Exit codes: 0 while the run goes on or is complete, 75 where it was stopped or never started, else the code "
    "that it ended with, 1 where its processes vanished without one. All of them in docs/exit-codes.md.",
)
def status(
    run: Run,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C")] = False,
    as_json: Json = False,
    output: JsonFile = None,
) -> None:
    """Show the state of a run, who supervises it, and what to do next."""
    from rich.console import Console

    from megastable.supervise.status import RunWatch, collect_facts, exit_code, read_status
    from megastable.supervise.status_panel import print_status, show_live

    if watch and (as_json or output):
        raise ConfigError("--watch: not with --json and --output, which take one look")
    if watch:
        raise typer.Exit(exit_code(show_live(RunWatch(run), Console())))
    run_status = read_status(run)
    if not as_json:
        print_status(run_status, Console())
    put_json(collect_facts(run_status), as_json, output)
    raise typer.Exit(exit_code(run_status))
