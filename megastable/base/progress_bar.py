"""Progress bar of a command on stderr: shown on a terminal, silent elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from megastable.base.text import visible


@contextmanager
def bar(
    what: str, total: int, silent: bool = False, unit: Literal["bytes", "files"] = "bytes"
) -> Iterator[Callable[[int], None]]:
    """A function to call with the bytes or files just done, from any thread. total: how many there are."""
    console = Console(stderr=True)
    columns: list[ProgressColumn] = [TextColumn(visible(what), markup=False), BarColumn()]
    columns += [DownloadColumn(), TransferSpeedColumn()] if unit == "bytes" else [MofNCompleteColumn()]
    columns.append(TimeRemainingColumn())
    shown = Progress(*columns, console=console, disable=silent or not console.is_terminal)
    with shown:
        task = shown.add_task("", total=total)
        yield lambda count: shown.update(task, advance=count)
