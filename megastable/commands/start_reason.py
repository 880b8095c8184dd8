"""Asks why a run goes on with another recipe, where somebody is there to answer."""

from __future__ import annotations

import os
import select
import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from megastable.config.tree import RunConfig
    from megastable.run.events.people_events import Note

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
    from megastable.base.login import login_name
    from megastable.run.directory import RunDirectory
    from megastable.run.events.people_events import Note

    if config.run.dir is None or not (run := RunDirectory(config.run.dir)).recipe.exists():
        return None
    changed = run.compare(config)
    if not changed:
        return None
    told = "; ".join(changed[:SHOWN]) + (f"; {len(changed) - SHOWN} more" if len(changed) > SHOWN else "")
    if reason is None and _is_in_front():
        print(f"{run.root} goes on with another recipe than before: {told}")
        print(f"Why? One line for the journal; nothing, or {PATIENCE:.0f} s without an answer: no reason.")
        reason = _answer()
    reason = " ".join((reason or "").split())
    return Note(who=login_name(), text=f"the recipe changes ({told}): {reason}") if reason else None


def note_reason(config: RunConfig, reason: str | None) -> None:
    """Journal what `ask_reason` gives, just before the ranks of `config` start, unless others are at work in its
    directory: the ranks are refused then. Raises ConfigError as it does."""
    from megastable.run.directory import RunDirectory
    from megastable.run.log import RunLog
    from megastable.supervise.locks import nobody_works

    note = ask_reason(config, reason)
    if note is not None and config.run.dir is not None and nobody_works(run := RunDirectory(config.run.dir)):
        RunLog(run).emit(note)


def _is_in_front() -> bool:
    """Whether what is typed on the terminal is for this process. One in a shell's background that reads is stopped."""
    try:
        terminal = sys.stdin.isatty() and sys.stdout.isatty()
        return terminal and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):  # not this session's terminal
        return False


def _answer() -> str:
    try:
        answered, _, _ = select.select([sys.stdin], [], [], PATIENCE)
        return sys.stdin.readline() if answered and _is_in_front() else ""
    except (OSError, ValueError):  # a terminal that is gone
        return ""
