"""Keeps the columns of a run's step records in the user's cache, so that the next page of it is there at once.

One binary file per run directory. It is used only while the record files that it was made of are still the oldest ones
there; a file that is damaged or of another version is as none. Nothing is ever written into a run directory.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import numpy as np
import xxhash

from megastable.report.run_page.step_table import GrowingColumns, StepTable

log = logging.getLogger(__name__)
VERSION = 3
Broken = Mapping[str, tuple[str, tuple[int, int]]]
"""Damaged record files: why, and their size and time."""
MOST = 1 << 31  # bytes of a column


class RecordCache:
    """Of one run directory."""

    def __init__(self, run: Path, folder: Path | None = None) -> None:
        name = hashlib.sha256(os.fsencode(run.resolve())).hexdigest()[:32]
        self.path = (folder or default_folder()) / f"{name}.steps"

    def read(self, names: Sequence[str]) -> tuple[StepTable, int, Broken] | None:
        """The table of the first of the record files `names`, how many these are, and which of them were damaged."""
        try:
            with self.path.open("rb") as file:
                head = json.loads(file.readline(1 << 20))
                known = int(head["files"])
                if head["version"] != VERSION or not 0 < known <= len(names):
                    return None
                if head["names"] != digest(names[:known]):
                    return None
                table = StepTable()
                for columns, length in ((table.steps, head["steps"]), (table.looks, head["looks"])):
                    _fill(columns, int(length), file)
                table.recorded = len(table.steps)
                broken = {
                    str(name): (str(why), (int(a), int(b))) for name, (why, (a, b)) in head["broken"].items()
                }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return table, known, broken

    def write(self, table: StepTable, names: Sequence[str], broken: Broken) -> None:
        """Keep a table, all of which is recorded in the files `names`. If that fails, it is read again next time."""
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        head = {
            "version": VERSION, "files": len(names), "names": digest(names), "steps": table.recorded,
            "looks": len(table.looks), "broken": broken,
        }  # fmt: skip
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
                file.write(json.dumps(head).encode() + b"\n")
                for columns, length in ((table.steps, table.recorded), (table.looks, len(table.looks))):
                    for name in columns.types:
                        raw = columns[name][:length].data.cast("B") if length else b""
                        file.write(xxhash.xxh3_128_digest(raw))
                        file.write(raw)
            os.replace(temporary, self.path)
        except OSError as error:
            log.info("%s could not be written: %s", self.path, error)
            temporary.unlink(missing_ok=True)


def default_folder() -> Path:
    """Below the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    if not base or not os.path.isabs(base):
        base = os.path.expanduser("~/.cache")
    return Path(base) / "megastable" / "run_page"


def digest(names: Sequence[str]) -> str:
    return xxhash.xxh3_128_hexdigest("\n".join(names).encode("utf-8", "surrogateescape"))


def _fill(columns: GrowingColumns, length: int, file: IO[bytes]) -> None:
    """Read columns from a file. Raises ValueError for damaged ones."""
    found = {}
    for name, kind in columns.types.items():
        size = length * np.dtype(kind).itemsize
        if not 0 <= size <= MOST:
            raise ValueError(f"{size} bytes")
        wanted, raw = file.read(16), file.read(size)
        if len(raw) != size or xxhash.xxh3_128_digest(raw) != wanted:
            raise ValueError(f"column {name} is damaged")
        found[name] = np.frombuffer(raw, kind)
    columns.adopt(found)
