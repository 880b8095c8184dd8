"""Converts the values of a sheet's rows to plain Python, and to text for a person, as rows.js does."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np

from megastable.base.text import visible
from megastable.report.postmortem import safe
from megastable.report.sheet.model import Column, Row, Sheet
from megastable.run import directory

SAFE = 2**53 - 1  # larger integers are not exact in a browser or a spreadsheet


def plain(value: Any) -> Any:
    """None, a boolean, a number or a text; lists of these. numpy types become Python's, all else its text."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(part) for part in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def told(value: Any, column: Column) -> str:
    """A plain value as text, made visible; "" for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(told(part, column) for part in value)
    if isinstance(value, str) or column.kind == "text":
        return visible(value)
    if not math.isfinite(value):
        return str(value)
    return _number(value, column)


def tones(column: Column, rows: Iterable[Row]) -> tuple[float, float] | None:
    """The limits from which a score is bad, and very bad; None if there are none."""
    if column.kind != "score":
        return None
    if column.limit is not None:
        return column.limit, 2 * column.limit
    highest = max((v for v in (plain(row.get(column.key)) for row in rows) if _counts(v)), default=0.0)
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
    digits = 2 if column.kind == "score" else 3
    if column.kind == "number" and 0 < abs(value) < 0.001:
        return f"{value:.2e}"
    return f"{value:.{digits}f}" if abs(value) < 100 else f"{value:.1f}"


def as_json(sheet: Sheet) -> str:
    """For programs. Texts are exact, in ASCII; non-finite numbers are text, which float() parses."""
    words = {column.key for column in sheet.columns if column.words}
    content = {
        "title": sheet.title,
        "lead": list(sheet.lead),
        "facts": dict(sheet.data),
        "columns": [asdict(column) for column in sheet.columns if not column.words],
        "rows": [{key: plain(value) for key, value in row.items() if key not in words} for row in sheet.rows],
        "passages": {
            str(number): [asdict(passage) for passage in passages]
            for number, passages in sorted(sheet.passages.items())
        },
        "histograms": [asdict(histogram) for histogram in sheet.histograms],
        "notes": list(sheet.notes),
    }
    # DEL is the only terminal control character that JSON leaves unescaped.
    return directory.as_json(_numbers(content), indent=1).replace("\x7f", "\\u007f") + "\n"


def as_csv(sheet: Sheet) -> str:
    """Every column of every row, without the texts, for a spreadsheet: no formulas."""
    head = [column.key for column in sheet.columns]
    return safe.table(head, ([_cell(row.get(key)) for key in head] for row in sheet.rows))


def _cell(value: Any) -> Any:
    value = plain(value)
    if isinstance(value, list):
        return "; ".join("" if part is None else str(_cell(part)) for part in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value


def _numbers(value: Any) -> Any:
    """The tree with numpy's numbers as Python's."""
    if isinstance(value, dict):
        return {str(key): _numbers(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_numbers(below) for below in value]
    return plain(value)
