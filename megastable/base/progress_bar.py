"""Progress bars on stderr, with rate and time left: shown on a terminal, silent elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from megastable.base.text import make_visible


class _Rate(ProgressColumn):
    """Units per second."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        task_speed = task.finished_speed or task.speed
        return Text("" if task_speed is None else f"{task_speed:.3g} {self._unit}/s")


def make_progress(*middle: ProgressColumn, silent: bool = False) -> Progress:
    """Bars on stderr, of any number of tasks: what is done, the bar, the columns `middle`, time left."""
    console = Console(stderr=True)
    description_column = TextColumn("{task.description}", markup=False)
    return Progress(
        description_column, BarColumn(), *middle, TimeRemainingColumn(), console=console,
        disable=silent or not console.is_terminal,
    )  # fmt: skip


def count_columns(unit: str) -> list[ProgressColumn]:
    """Columns: how many of how many, and how many a second."""
    return (
        [DownloadColumn(), TransferSpeedColumn()] if unit == "bytes" else [MofNCompleteColumn(), _Rate(unit)]
    )


class Bar:
    """To be told of what is done; any thread may."""

    def __init__(self, shown: Progress, what: str, total: int) -> None:
        self._shown, self._task = shown, shown.add_task(make_visible(what), total=total)

    def __call__(self, count: int = 1) -> None:
        self._shown.update(self._task, advance=count)

    def extend_total(self, count: int) -> None:
        """There is more to do than was known."""
        self._shown.update(self._task, total=(self._shown.tasks[0].total or 0) + count)

    def set_description(self, what: str) -> None:
        self._shown.update(self._task, description=make_visible(what))

    def print_line(self, text: object) -> None:
        """A line above the bar, also where there is none."""
        self._shown.console.print(text)


@contextmanager
def show_bar(what: str, total: int, silent: bool = False, unit: str = "bytes") -> Iterator[Bar]:
    """A bar of `total` bytes, files, steps or the like, which are to be told to it as they are done."""
    with make_progress(*count_columns(unit), silent=silent) as shown_progress:
        yield Bar(shown_progress, what, total)
