"""The commands of the court, in a process that is a rank already."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tests.distributed import run_ranks
from tests.tools.cli import Done, call


def _command(words: tuple[object, ...], folder: Path) -> Done:
    from megastable.commands.root import app

    return call(app, *words, cwd=folder)


def megastable(*words: object, folder: Path) -> Done:
    """`megastable WORDS` in a folder."""
    (done,) = run_ranks(1, _command, words, folder)
    return done


def hash_files(folder: Path) -> dict[str, str]:
    """Every file below a folder, and the hash of its bytes."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
