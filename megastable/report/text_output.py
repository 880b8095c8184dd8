"""Prints what a command answers: lines and tables, for a terminal and for a pipe. Imports nothing heavy."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from megastable.base.text import make_visible

WIDEST = 220  # characters of a table in a pipe


class TextOutput:
    """Prints lines that a terminal may wrap, and a pipe gets whole: commands are copied from them; and tables."""

    def __init__(self, quiet: bool) -> None:
        self._console = Console(markup=False, emoji=False, highlight=False, quiet=quiet)

    def say_lines(self, *lines: str) -> None:
        for line in lines:
            self._console.print(Text(make_visible(line, keep="\n")), soft_wrap=True)

    def show_table(self, table: RenderableType, whole: bool = False) -> None:
        """whole: as wide as it is, for a number that is cut off says nothing; so is it in a pipe."""
        console, width = self._console, self._console.width
        if whole or not console.is_terminal:
            widest_table = console.measure(table, options=console.options.update(max_width=WIDEST)).maximum
            console.width = max(width, widest_table)
        console.print(table)
        console.width = width


def make_table(*headings: str, title: str = "", caption: str = "") -> Table:
    """A table without a frame. ">" before a heading: a column of numbers, on the right."""
    rich_table = Table(
        box=SIMPLE_HEAD, pad_edge=False, title=title or None, title_justify="left", caption=caption or None
    )
    for heading in headings:
        right, name = heading.startswith(">"), heading.removeprefix(">")
        rich_table.add_column(name, justify="right" if right else "left", no_wrap=right, overflow="fold")
    return rich_table
