"""Writes a sheet for programs: JSON with everything, CSV with its rows."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from megastable.report.postmortem import safe
from megastable.report.sheet.model import Sheet
from megastable.report.sheet.values import plain
from megastable.run import directory


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
