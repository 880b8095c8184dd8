from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner


def refusal(arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What `drill` says of bad input, in an empty folder but for "file": it ends with 2, and leaves nothing there. In
    this process: starting one takes longer than what it does."""
    from megastable_tools.commands.drill import app

    (folder / "file").write_text("")
    monkeypatch.chdir(folder)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        done = CliRunner().invoke(app, arguments)
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert (done.exit_code, done.stdout) == (2, "") and isinstance(done.exception, SystemExit)
    assert os.listdir(folder) == ["file"]
    return " ".join(done.stderr.replace("│", "").split())
