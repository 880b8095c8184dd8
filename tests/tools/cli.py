"""A tool's command line without a process of its own: starting one takes longer than what it does."""

from __future__ import annotations

import contextlib
import signal
from dataclasses import dataclass
from pathlib import Path

from typer import Typer
from typer.testing import CliRunner


@dataclass(frozen=True)
class Done:
    """As subprocess.CompletedProcess tells it."""

    returncode: int
    stdout: str
    stderr: str


def call(app: Typer, *arguments: object, cwd: Path, columns: int = 200, given: bytes = b"") -> Done:
    """given: as standard input. What ends it must be what would end a process without a traceback."""
    environment = {"COLUMNS": str(columns), "TERM": "dumb"}
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with contextlib.chdir(cwd):
            done = CliRunner().invoke(app, [str(a) for a in arguments], input=given, env=environment)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Done(done.exit_code, done.stdout, done.stderr)
