"""Progress of a data command on stderr: a bar on a terminal, an occasional line elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Literal, Self

from rich.filesize import decimal
from rich.progress import TextColumn

from megastable.base.progress_bar import progress

SECONDS_PER_LINE = 10.0


class Meter:
    """Shows how much of `total` bytes or tokens was read, documents/s and tokens/s; a context manager.

    doing, done: labels before these figures.
    """

    def __init__(
        self,
        total: int,
        silent: bool,
        doing: str = "preparing",
        done: str = "prepared",
        unit: Literal["bytes", "tokens"] = "bytes",
    ) -> None:
        self._total, self._silent, self._done, self._unit = total, silent, done, unit
        self._begin = self._last_line = time.monotonic()
        self._bar = progress(
            TextColumn("{task.fields[share]}"), TextColumn("{task.fields[rates]}"), silent=silent
        )
        self._lines = not silent and not self._bar.console.is_terminal
        self._task = self._bar.add_task(doing, total=total, rates="", share="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, read: int, documents: int, tokens: int, note: str = "") -> None:
        """Totals so far; `read` in the unit of the total, bytes or tokens, the others for the rates, which `note`
        follows."""
        now = time.monotonic()
        seconds = max(now - self._begin, 1e-9)
        rates = (
            f"{documents / seconds:,.0f} documents/s {tokens / seconds:,.0f} tokens/s" + f" {note}".rstrip()
        )
        show = decimal if self._unit == "bytes" else lambda n: f"{n / 1e6:,.1f} M"
        share = f"{show(read)} of {show(self._total)}" + (" tokens" if self._unit == "tokens" else "")
        self._bar.update(self._task, completed=read, rates=rates, share=share)
        if self._lines and now - self._last_line >= SECONDS_PER_LINE:
            self._last_line = now
            print(f"{self._done} {share}, {rates}", file=sys.stderr, flush=True)
