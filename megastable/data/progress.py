"""How far the preparation of a corpus is: a bar on a terminal, a line now and then elsewhere, on stderr."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS_PER_LINE = 10.0


class Meter:
    """Shows bytes read out of `total_bytes`, documents/s and tokens/s; a context manager."""

    def __init__(self, total_bytes: int, silent: bool) -> None:
        self._total, self._silent = total_bytes, silent
        self._begin = self._last_line = time.monotonic()
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("preparing"),
            BarColumn(),
            DownloadColumn(),
            TextColumn("{task.fields[rates]}"),
            TimeRemainingColumn(),
            console=console,
            disable=silent or not console.is_terminal,
        )
        self._lines = not silent and not console.is_terminal
        self._task = self._bar.add_task("", total=total_bytes, rates="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, read_bytes: int, documents: int, tokens: int) -> None:
        """Totals so far."""
        now = time.monotonic()
        seconds = max(now - self._begin, 1e-9)
        rates = f"{documents / seconds:,.0f} documents/s {tokens / seconds:,.0f} tokens/s"
        self._bar.update(self._task, completed=read_bytes, rates=rates)
        if self._lines and now - self._last_line >= SECONDS_PER_LINE:
            self._last_line = now
            share = f"{decimal(read_bytes)} of {decimal(self._total)}"
            print(f"prepared {share}, {rates}", file=sys.stderr, flush=True)
