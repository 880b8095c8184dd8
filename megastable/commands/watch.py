"""`megastable watch`: a page of whole runs, live or as a file. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megastable.base.errors import ConfigError
from megastable.commands.app import App

app = App()


@app.add_command(
    examples="""
    megastable watch runs/7b
    megastable watch runs/7b runs/7b-lr2 --port 9000
    megastable watch runs/7b --output run.html
    megastable watch runs/7b --host 0.0.0.0
    """,
    more="The page follows a live run. On the default address it needs no password; "
    "from elsewhere use ssh -L 8765:localhost:8765 HOST, or --host with the token that is printed. It writes nothing "
    "into the run's directory. What each part of the page means: docs/watch.md.\n\nExit codes: 0, or 2 if there is no "
    "run, the address is taken, or the file cannot be written.",
)
def watch(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Directories of runs, e.g. runs/quickstart")
    ],
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the page as one self-contained file, and exit")
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on. Any but a loopback address requires the token in the printed link"
        ),
    ] = ("127.0.0.1"),
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Port; 0: any free one. Default: the first free one from 8765 on"
        ),
    ] = None,
    token: Annotated[
        bool,
        typer.Option(
            "--token",
            help="Require the token on a loopback address, too: other users of this machine can reach it",
        ),
    ] = False,
) -> None:
    """Serve the run page, or write it to a file: every curve, incident and second of one or more runs."""
    if output is not None:
        if not output.absolute().parent.is_dir():
            raise ConfigError(f"--output {output}: there is no directory {output.parent}")
        from megastable.report.run_page.page_file import write_page

        for problem in write_page(runs, output):
            typer.echo(f"WARNING: {problem}", err=True)
        return
    from megastable.report.run_page.page_server import serve_pages

    serve_pages(runs, host, port, token, lambda address: typer.echo(f"{address}   (Ctrl-C ends it)"))
