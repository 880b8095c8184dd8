"""Defines a sheet, and its values as plain Python, text, JSON and CSV.

Values of rows are plain: text, numbers (numpy's too), booleans, lists of these, or None.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import numpy as np

from megastable.base.text import make_visible
from megastable.report import safe
from megastable.run import directory

Kind = Literal["text", "count", "number", "share", "score"]
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """kind: how values are shown, a share (0 to 1) in per cent; wide: not in a terminal's table; limit: of scores, bad
    from here, very bad from twice as much (without one, colours scale to the sheet's largest). words: it renders as
    text a number under another key of the row, and programs get only that number."""

    key: str
    title: str
    kind: Kind = "text"
    help: str = ""
    wide: bool = False
    limit: float | None = None
    words: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"column {self.key}: no kind {self.kind!r}")

    @property
    def numeric(self) -> bool:
        return self.kind != "text"


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a text, such as a token. heat: 0 to 1, its colour; hint: details, such as its loss."""

    text: str
    heat: float | None = None
    hint: str = ""

    @property
    def level(self) -> int:
        """The heat in tenths, 0 to 9; 0 if there is none."""
        if self.heat is None or not self.heat > 0:
            return 0
        return int(min(10 * self.heat, 9))


@dataclass(frozen=True, slots=True)
class Passage:
    title: str
    spans: Sequence[Span]

    @property
    def text(self) -> str:
        return "".join(text_span.text for text_span in self.spans)


@dataclass(frozen=True, slots=True)
class Histogram:
    """counts: one fewer than edges, which ascend. marks: (value, label) such as a limit. column: the key of its column,
    so that a bar can select rows; the first and the last bar include what is beyond them."""

    title: str
    edges: Sequence[float]
    counts: Sequence[int]
    marks: Sequence[tuple[float, str]] = ()
    note: str = ""
    column: str = ""

    def __post_init__(self) -> None:
        if len(self.edges) != len(self.counts) + 1 or not self.counts:
            raise ValueError(
                f"histogram {self.title}: {len(self.counts)} counts between {len(self.edges)} edges"
            )
        edges_rise = all(low < upper_edge for low, upper_edge in zip(self.edges, self.edges[1:]))
        if not edges_rise or not all(map(math.isfinite, self.edges)):
            raise ValueError(f"histogram {self.title}: its edges do not rise, or are not finite")


class CommandNote(str):
    """A note that is a command to copy: a terminal has it on a line of its own, without breaks."""


@dataclass(frozen=True, slots=True)
class Sheet:
    """passages: texts of a row, by its index. Rows may have keys that no column shows: JSON has them, and with `shard`
    and `document` the page offers a plan. legend: the meaning of the texts' heat. counts: the key whose distinct values
    are counted, if one may have several rows, and their name: ("position", "sample"). facts: for people, name and text;
    data: the same for programs, with units in the keys."""

    title: str
    lead: Sequence[str] = ()
    facts: Sequence[tuple[str, str]] = ()
    columns: Sequence[Column] = ()
    rows: Sequence[Row] = ()
    passages: Mapping[int, Sequence[Passage]] = field(default_factory=dict)
    histograms: Sequence[Histogram] = ()
    notes: Sequence[str] = ()
    legend: str = "heat of a token"
    counts: tuple[str, str] | None = None
    data: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        keys = [sheet_column.key for sheet_column in self.columns]
        if len(set(keys)) != len(keys):
            raise ValueError(f"columns with the same key: {keys}")
        if beyond := [row_number for row_number in self.passages if not 0 <= row_number < len(self.rows)]:
            raise ValueError(f"passages of rows that there are not: {beyond[:5]}")


SAFE = 2**53 - 1  # larger integers are not exact in a browser or a spreadsheet


def make_plain(value: Any) -> Any:
    """None, a boolean, a number or a text; lists and trees of these. numpy types become Python's, all else its text."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(tree_key): make_plain(value_below) for tree_key, value_below in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [make_plain(value_part) for value_part in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def format_value(value: Any, column: Column) -> str:
    """A plain value as text, made visible; "" for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(format_value(value_part, column) for value_part in value)
    if isinstance(value, str) or column.kind == "text":
        return make_visible(value)
    if not math.isfinite(value):
        return str(value)
    return _number(value, column)


def find_tones(column: Column, rows: Iterable[Row]) -> tuple[float, float] | None:
    """The limits from which a score is bad, and very bad; None if there are none."""
    if column.kind != "score":
        return None
    if column.limit is not None:
        return column.limit, 2 * column.limit
    highest = max((v for v in (make_plain(row.get(column.key)) for row in rows) if _counts(v)), default=0.0)
    return (0.4 * highest, 0.75 * highest) if highest > 0 else None


def _counts(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _number(value: float, column: Column) -> str:
    if column.kind == "share":
        # Almost none or almost all must not look like none or all.
        if 0 < value < 0.001:
            return "<0.1%"
        return ">99.9%" if 0.999 < value < 1 else f"{100 * value:.1f}%"
    if abs(value) >= 1000 or column.kind == "count":
        return f"{round(value):,}" if abs(value) < 1e15 or isinstance(value, int) else f"{value:.3e}"
    digit_count = 2 if column.kind == "score" else 3
    if column.kind == "number" and 0 < abs(value) < 0.001:
        return f"{value:.2e}"
    return f"{value:.{digit_count}f}" if abs(value) < 100 else f"{value:.1f}"


def as_json(sheet: Sheet) -> str:
    """For programs. Texts are exact, in ASCII; non-finite numbers are text, which float() parses."""
    words = {column.key for column in sheet.columns if column.words}
    json_content = {
        "title": sheet.title, "lead": list(sheet.lead), "facts": dict(sheet.data),
        "columns": [asdict(column) for column in sheet.columns if not column.words],
        "rows": [{key: value for key, value in row.items() if key not in words} for row in sheet.rows],
        "passages": {
            str(row_number): [asdict(row_passage) for row_passage in passages]
            for row_number, passages in sorted(sheet.passages.items())
        },
        "histograms": [asdict(sheet_histogram) for sheet_histogram in sheet.histograms], "notes": list(sheet.notes),
    }  # fmt: skip
    # DEL is the only terminal control character that JSON leaves unescaped.
    return directory.as_json(make_plain(json_content), indent=1).replace("\x7f", "\\u007f") + "\n"


def as_csv(sheet: Sheet) -> str:
    """Every column of every row, without the texts, for a spreadsheet: no formulas."""
    head = [sheet_column.key for sheet_column in sheet.columns]
    return safe.write_csv(head, ([_cell(sheet_row.get(key)) for key in head] for sheet_row in sheet.rows))


def _cell(value: Any) -> Any:
    value = make_plain(value)
    if isinstance(value, list):
        return "; ".join("" if value_part is None else str(_cell(value_part)) for value_part in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value
