"""Defines options shared by several commands, writes their JSON, and asks why a run goes on with another recipe."""

from __future__ import annotations

import os
import select
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megastable.base.errors import ConfigError

if TYPE_CHECKING:
    from megastable.config.tree import RunConfig
    from megastable.run.events.people_events import Note

PICTURES = (".png", ".svg", ".pdf")


def _in_a_folder(parameter: typer.CallbackParam, path: Path | None) -> Path | None:
    """Refuse an output file whose folder does not exist, before any work begins."""
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(f"{parameter.opts[0]} {path}: there is no directory {path.parent}")
    return path


def _picture(parameter: typer.CallbackParam, path: Path | None) -> Path | None:
    if path is not None and path.suffix not in PICTURES:
        raise ConfigError(f"{parameter.opts[0]} {path}: a name ending in {', '.join(PICTURES)}")
    return _in_a_folder(parameter, path)


Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else")]
JsonFile = Annotated[
    Path | None,
    typer.Option("--output", metavar="FILE", callback=_in_a_folder, help="Write the JSON to a file"),
]
Csv = Annotated[Path | None, typer.Option("--csv", help="Write all rows as a table")]
Html = Annotated[
    Path | None, typer.Option("--html", help="Write a page for a browser, to sort, search and read")
]
Plot = Annotated[
    Path | None, typer.Option("--plot", callback=_picture, help="Write a picture: .png, .svg or .pdf")
]
Picture = Annotated[
    Path | None,
    typer.Option(
        "--picture", callback=_picture, help="Where to draw it. Default: picture.png in the directory"
    ),
]
Drawing = Annotated[
    Path | None, typer.Option("--picture", callback=_picture, help="Draw it to a file: .png, .svg or .pdf")
]
Rows = Annotated[int, typer.Option(min=0, help="Rows to print")]
Texts = Annotated[int, typer.Option(min=0, help="Rows whose text is printed")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run, e.g. runs/quickstart")]
Recipe = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A YAML file, e.g. launch/recipes/quickstart.yaml")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]", help="Overrides of the recipe's keys, e.g. train.steps=1000"),
]


def put_json(facts: Any, as_json: bool, file: Path | None) -> None:
    """Print `facts`, or write them to a file, or both, as --json and --output say. Raises DataError."""
    from megastable.base import durable
    from megastable.run.directory import as_json as to_json

    json_text = to_json(facts, indent=1) + "\n"
    if file is not None:
        durable.write_output(file, json_text)
    if as_json:
        typer.echo(json_text, nl=False)


PATIENCE = 60.0  # seconds: nobody may be at the terminal of a supervisor
SHOWN = 8  # changes

StartReason = Annotated[
    str | None,
    typer.Option(
        "--reason", help="Why the recipe has changed, for the journal. Asked for on a terminal if it has"
    ),
]


def ask_reason(config: RunConfig, reason: str | None) -> Note | None:
    """Why a run goes on with a recipe that has changed, for its journal once it is locked: `reason`, or else what is
    answered on a terminal within `PATIENCE`. Raises ConfigError if the directory belongs to another run."""
    from megastable.base.process import login_name
    from megastable.run.directory import RunDirectory
    from megastable.run.events.people_events import Note

    if config.run.dir is None or not (run := RunDirectory(config.run.dir)).recipe.exists():
        return None
    changed_keys = run.compare_recipe(config)
    if not changed_keys:
        return None
    more_changes = [f"{len(changed_keys) - SHOWN} more"] if len(changed_keys) > SHOWN else []
    changes_text = "; ".join([*changed_keys[:SHOWN], *more_changes])
    if reason is None and _is_in_front():
        print(f"{run.root} goes on with another recipe than before: {changes_text}")
        print(f"Why? One line for the journal; nothing, or {PATIENCE:.0f} s without an answer: no reason.")
        reason = _answer()
    reason = " ".join((reason or "").split())
    return Note(who=login_name(), text=f"the recipe changes ({changes_text}): {reason}") if reason else None


def note_reason(config: RunConfig, reason: str | None) -> None:
    """Journal what `ask_reason` gives, just before the ranks of `config` start, unless others are at work in its
    directory: the ranks are refused then. Raises ConfigError as it does."""
    from megastable.run.directory import RunDirectory
    from megastable.run.log import RunLog
    from megastable.supervise.locks import nobody_works

    note = ask_reason(config, reason)
    if note is not None and config.run.dir is not None and nobody_works(run := RunDirectory(config.run.dir)):
        RunLog(run).emit_event(note)


def _is_in_front() -> bool:
    """Whether what is typed on the terminal is for this process. One in a shell's background that reads is stopped."""
    try:
        is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        return is_terminal and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):  # not this session's terminal
        return False


def _answer() -> str:
    try:
        ready_streams, _, _ = select.select([sys.stdin], [], [], PATIENCE)
        return sys.stdin.readline() if ready_streams and _is_in_front() else ""
    except (OSError, ValueError):  # a terminal that is gone
        return ""
