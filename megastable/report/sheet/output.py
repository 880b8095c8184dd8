"""Sends a sheet to the outputs that a command's options name."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from megastable.base.durable import write_output
from megastable.base.errors import DataError
from megastable.report.sheet.model import Sheet
from megastable.report.sheet.page import as_html
from megastable.report.sheet.terminal import console
from megastable.report.sheet.values import as_csv, as_json

STDOUT = ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")


@dataclass(frozen=True)
class Output:
    """json: print everything as JSON, instead of a table; csv, html, output: files to write as well, `output` as JSON.
    rows, texts: how many a terminal shows. on_page: rows whose text a page shows."""

    json: bool = False
    csv: Path | None = None
    html: Path | None = None
    rows: int = 20
    texts: int = 1
    on_page: int = 2_000
    output: Path | None = None

    @property
    def wanted_texts(self) -> int:
        """How many rows need a text."""
        return max(self.texts, self.on_page if self.html is not None else 0)

    def __post_init__(self) -> None:
        if self.json + len(self._on_stdout) > 1:
            raise DataError("only one of --json, --csv and --html can go to the standard output: name a file")

    @property
    def _files(self) -> list[Path]:
        return [path for path in (self.csv, self.html, self.output) if path is not None]

    @property
    def _on_stdout(self) -> list[Path]:
        return [path for path in self._files if str(path) in STDOUT]

    def put(self, sheet: Sheet) -> None:
        """Raises DataError if a file, or the standard output, cannot be written."""
        if self.csv is not None:
            write_output(self.csv, as_csv(sheet))
        if self.html is not None:
            write_output(self.html, as_html(sheet))
        if self.output is not None:
            write_output(self.output, as_json(sheet))
        if self._on_stdout:  # its reader expects nothing else
            return
        try:
            self._print(sheet)
            sys.stdout.flush()
        except BrokenPipeError:  # | head has exited
            raise
        except OSError as error:
            # Bytes left in the buffer would fail again when the process ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise DataError(f"the standard output could not be written: {error.strerror}") from None

    def _print(self, sheet: Sheet) -> None:
        if self.json:
            print(as_json(sheet), end="")
            return
        terminal = Console()
        if not terminal.is_terminal:
            terminal = Console(width=160)  # the width of a file or a pipe is unknown
        terminal.print(console(sheet, self.rows, self.texts), crop=False)
        for path in self._files:
            print(f"written: {path}")
