"""Sends a sheet to the outputs that a command's options name; renders it for a terminal of any width."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from megastable.base.durable import write_output
from megastable.base.errors import DataError
from megastable.base.text import make_visible
from megastable.report import safe
from megastable.report.sheet.model import (
    Column,
    CommandNote,
    Passage,
    Row,
    Sheet,
    as_csv,
    as_json,
    find_tones,
    format_value,
    make_plain,
)
from megastable.report.sheet.page import as_html

LONGEST = 240  # characters of a cell
NARROW = 14  # cells below which a column of text is not squeezed
GAP = 2  # cells between columns, one of them the divider's
HEAT = ("", "", "", "yellow", "yellow", "dark_orange", "dark_orange", "red", "bold red", "bold red")
BAD, WORSE, SOFT, ESCAPE = "yellow", "bold red", "bright_black", "cyan"


def render_console(sheet: Sheet, most: int = 20, texts: int = 0) -> RenderableType:
    """The first `most` rows as a table of the columns that fit, and the passages of the first `texts` rows."""
    rendered_parts: list[RenderableType] = [Text(make_visible(sheet.title), style="bold")]
    rendered_parts += [Text(make_visible(lead_line)) for lead_line in sheet.lead]
    if sheet.facts:
        rendered_parts += [Text(), _facts(sheet.facts)]
    if sheet.columns and sheet.rows:
        rendered_parts += [Text(), _Rows(sheet, min(most, len(sheet.rows)))]
    for row_number in [n for n in sorted(sheet.passages) if n < texts]:
        rendered_parts += _passages(_where(sheet, row_number), sheet.passages[row_number])
    if sheet.notes:
        rendered_parts += [Text(), *map(_note, sheet.notes)]
    return Group(*rendered_parts)


def _note(note: str) -> Text:
    """A command is wider than the terminal rather than broken: it is printed without cropping."""
    if isinstance(note, CommandNote):
        return Text(make_visible(note), no_wrap=True, overflow="ignore")
    return Text(make_visible(note), style=SOFT)


def _facts(facts: Sequence[tuple[str, str]]) -> Table:
    fact_grid = Table.grid(padding=(0, 2))
    for fact_name, fact_value in facts:
        fact_grid.add_row(Text(make_visible(fact_name), style=SOFT), Text(make_visible(fact_value)))
    return fact_grid


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
                Text(make_visible(column.title)), justify="right" if column.numeric else "left", vertical="top",
                no_wrap=column.numeric or _width(column, texts[column.key]) <= NARROW, overflow="fold",
            )  # fmt: skip
        limits = {column.key: find_tones(column, self.sheet.rows) for column in columns}
        for number, row in enumerate(rows):
            table.add_row(*(
                Text(texts[column.key][number], style=_tone(row, column, limits[column.key])) for column in columns
            ))  # fmt: skip
        yield table
        rest = len(self.sheet.rows) - self.most
        told = [f"… and {rest:,} more"] if rest else []
        if left_out := [make_visible(column.title) for column in self.sheet.columns if column not in columns]:
            told.append(f"columns left out: {', '.join(left_out)}")
        if told:
            yield Text(f"{'; '.join(told)} (--csv or --html for all)", style=SOFT)


def _cell(row: Row, column: Column) -> str:
    return make_visible(format_value(make_plain(row.get(column.key)), column), LONGEST)


def _width(column: Column, texts: Iterable[str]) -> int:
    return max(map(cell_len, [make_visible(column.title), *texts]))


def _fitting(columns: Sequence[Column], texts: dict[str, list[str]], width: int) -> list[Column]:
    """The columns that fit side by side, from the first on; text may be wrapped to `NARROW`."""
    chosen, used_cells = list[Column](), 0
    for column in columns:
        needed_cells = _width(column, texts[column.key])
        used_cells += (needed_cells if column.numeric else min(needed_cells, NARROW)) + (GAP if chosen else 0)
        if chosen and used_cells > width:
            break
        chosen.append(column)
    return chosen


def _tone(row: Row, column: Column, limits: tuple[float, float] | None) -> str:
    plain_value = make_plain(row.get(column.key))
    if limits is None or isinstance(plain_value, bool | str | list) or plain_value is None:
        return ""
    return WORSE if plain_value >= limits[1] else BAD if plain_value >= limits[0] else ""


def _where(sheet: Sheet, number: int) -> str:
    """A row on one line: those of its first values that it has."""
    row = sheet.rows[number]
    first = [column for column in sheet.columns if not column.wide][:3]
    told = [f"{make_visible(column.title)} {text}" for column in first if (text := _cell(row, column))]
    return f"{number + 1}: {', '.join(told)}"


def _passages(where: str, passages: Sequence[Passage]) -> Iterable[RenderableType]:
    yield Text()
    yield Rule(Text(where, style="bold"), align="left", style=SOFT)
    for passage in passages:
        yield Text(make_visible(passage.title), style=SOFT)
        text = Text(overflow="fold", tab_size=4)
        for span in passage.spans:
            for text_piece, is_escape in safe.split_escapes(safe.show_block(span.text)):
                heat = HEAT[span.level]
                text.append(text_piece, style=ESCAPE if is_escape and not heat else heat)
        yield Padding(text, (0, 0, 0, 2))


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
        return [output_path for output_path in (self.csv, self.html, self.output) if output_path is not None]

    @property
    def _on_stdout(self) -> list[Path]:
        return [output_path for output_path in self._files if str(output_path) in STDOUT]

    def put_sheet(self, sheet: Sheet) -> None:
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
        rich_console = Console()
        if not rich_console.is_terminal:
            rich_console = Console(width=160)  # the width of a file or a pipe is unknown
        rich_console.print(render_console(sheet, self.rows, self.texts), crop=False)
        for output_path in self._files:
            print(f"written: {output_path}")
