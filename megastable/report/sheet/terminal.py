"""Renders a sheet for a terminal of any width: columns that do not fit are named, not squeezed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from megastable.base.text import visible
from megastable.report.postmortem import safe
from megastable.report.sheet.model import Column, CommandNote, Passage, Row, Sheet
from megastable.report.sheet.values import plain, told, tones

LONGEST = 240  # characters of a cell
NARROW = 14  # cells below which a column of text is not squeezed
GAP = 2  # cells between columns, one of them the divider's
HEAT = ("", "", "", "yellow", "yellow", "dark_orange", "dark_orange", "red", "bold red", "bold red")
BAD, WORSE, SOFT, ESCAPE = "yellow", "bold red", "bright_black", "cyan"


def console(sheet: Sheet, most: int = 20, texts: int = 0) -> RenderableType:
    """The first `most` rows as a table of the columns that fit, and the passages of the first `texts` rows."""
    parts: list[RenderableType] = [Text(visible(sheet.title), style="bold")]
    parts += [Text(visible(line)) for line in sheet.lead]
    if sheet.facts:
        parts += [Text(), _facts(sheet.facts)]
    if sheet.columns and sheet.rows:
        parts += [Text(), _Rows(sheet, min(most, len(sheet.rows)))]
    for number in [n for n in sorted(sheet.passages) if n < texts]:
        parts += _passages(_where(sheet, number), sheet.passages[number])
    if sheet.notes:
        parts += [Text(), *map(_note, sheet.notes)]
    return Group(*parts)


def _note(note: str) -> Text:
    """A command is wider than the terminal rather than broken: it is printed without cropping."""
    if isinstance(note, CommandNote):
        return Text(visible(note), no_wrap=True, overflow="ignore")
    return Text(visible(note), style=SOFT)


def _facts(facts: Sequence[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for name, value in facts:
        grid.add_row(Text(visible(name), style=SOFT), Text(visible(value)))
    return grid


@dataclass(frozen=True)
class _Rows:
    """The table, whose columns depend on its width."""

    sheet: Sheet
    most: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = self.sheet.rows[: self.most]
        candidates = [column for column in self.sheet.columns if not column.wide]
        texts = {column.key: [_cell(row, column) for row in rows] for column in candidates}
        columns = _fitting(candidates, texts, options.max_width)
        table = Table(
            box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0), header_style="bold"
        )
        for column in columns:
            table.add_column(
                Text(visible(column.title)), justify="right" if column.numeric else "left", vertical="top",
                no_wrap=column.numeric or _width(column, texts[column.key]) <= NARROW, overflow="fold",
            )  # fmt: skip
        limits = {column.key: tones(column, self.sheet.rows) for column in columns}
        for number, row in enumerate(rows):
            table.add_row(*(
                Text(texts[column.key][number], style=_tone(row, column, limits[column.key])) for column in columns
            ))  # fmt: skip
        yield table
        yield from self._left_out([column for column in self.sheet.columns if column not in columns])

    def _left_out(self, columns: Sequence[Column]) -> Iterable[Text]:
        rest = len(self.sheet.rows) - self.most
        told = [f"… and {rest:,} more"] if rest else []
        if columns:
            told.append(f"columns left out: {', '.join(visible(column.title) for column in columns)}")
        if told:
            yield Text(f"{'; '.join(told)} (--csv or --html for all)", style=SOFT)


def _cell(row: Row, column: Column) -> str:
    return visible(told(plain(row.get(column.key)), column), LONGEST)


def _width(column: Column, texts: Iterable[str]) -> int:
    return max(map(cell_len, [visible(column.title), *texts]))


def _fitting(columns: Sequence[Column], texts: dict[str, list[str]], width: int) -> list[Column]:
    """The columns that fit side by side, from the first on; text may be wrapped to `NARROW`."""
    chosen, used = list[Column](), 0
    for column in columns:
        needed = _width(column, texts[column.key])
        used += (needed if column.numeric else min(needed, NARROW)) + (GAP if chosen else 0)
        if chosen and used > width:
            break
        chosen.append(column)
    return chosen


def _tone(row: Row, column: Column, limits: tuple[float, float] | None) -> str:
    value = plain(row.get(column.key))
    if limits is None or isinstance(value, bool | str | list) or value is None:
        return ""
    return WORSE if value >= limits[1] else BAD if value >= limits[0] else ""


def _where(sheet: Sheet, number: int) -> str:
    """A row on one line: those of its first values that it has."""
    row = sheet.rows[number]
    first = [column for column in sheet.columns if not column.wide][:3]
    told = [f"{visible(column.title)} {cell}" for column in first if (cell := _cell(row, column))]
    return f"{number + 1}: {', '.join(told)}"


def _passages(where: str, passages: Sequence[Passage]) -> Iterable[RenderableType]:
    yield Text()
    yield Rule(Text(where, style="bold"), align="left", style=SOFT)
    for passage in passages:
        yield Text(visible(passage.title), style=SOFT)
        yield Padding(_heated(passage), (0, 0, 0, 2))


def _heated(passage: Passage) -> Text:
    text = Text(overflow="fold", tab_size=4)
    for span in passage.spans:
        for piece, special in safe.split_escapes(safe.block(span.text)):
            text.append(piece, style=ESCAPE if special and not HEAT[span.level] else HEAT[span.level])
    return text
