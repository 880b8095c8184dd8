"""How far a command is through the bytes of a corpus: a bar on a terminal, nothing elsewhere, on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


@contextmanager
def bar(what: str, total: int, silent: bool = False) -> Iterator[Callable[[int], None]]:
    """A function to be told of bytes as they are done. total: how many there are."""
    console = Console(stderr=True)
    columns = BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    shown = Progress(TextColumn(what), *columns, console=console, disable=silent or not console.is_terminal)
    with shown:
        task = shown.add_task("", total=total)
        yield lambda count: shown.update(task, advance=count)
