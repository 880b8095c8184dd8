"""Renders a sheet as one self-contained page that needs no network; its script and style are named by hash.

Content is passed as data and inserted as text: `mark_escapes` makes it visible, so that no control characters reach the
browser, and marks escapes; `embed_json` keeps it from ending its element. Tabulator (vendor/) shows the rows; it sets
markup, so a trusted-types policy in page.js admits no elements.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from megastable.base.text import escape_character
from megastable.report import safe
from megastable.report.sheet.model import SAFE, Column, Histogram, Passage, Sheet, find_tones, make_plain

VENDOR = Path(__file__).with_name("vendor")
SCRIPTS = ("rows.js", "histogram.js", "reader.js", "grid.js", "page.js")
CARDS = 6  # facts shown as cards above the others
FIRST = 2  # charts above the rows
PART = 256  # rows whose texts are loaded together, when one of them is needed
SHORT = 11  # characters of a fact that fit a card
# Around an escape. Private characters do not show, so `mark_escapes` leaves none of a text's own.
BEGIN, END = "\ue000", "\ue001"

_UNSAFE = re.compile("[<>&\u2028\u2029\x7f\ud800-\udfff]")


def as_html(sheet: Sheet) -> str:
    """The page: histograms, and rows to search, sort, select and read."""
    style, script = _style(), _script()
    cards = [fact for fact in sheet.facts if len(fact[1]) <= SHORT][:CARDS]
    return _environment().get_template("sheet.html.jinja").render(
        sheet=sheet, first=FIRST, cards=cards, facts=[fact for fact in sheet.facts if fact not in cards],
        style=Markup(style), script=Markup(script), style_hash=hash_source(style), script_hash=hash_source(script),
        data=Markup(embed_json(build_content(sheet))),
        parts={n: Markup(embed_json(text_part)) for n, text_part in group_texts(sheet).items()},
    )  # fmt: skip


def build_content(sheet: Sheet) -> dict[str, Any]:
    """The data for the script: columns with their values, and histograms."""
    column_keys = [sheet_column.key for sheet_column in sheet.columns]
    return {
        "columns": [_column(sheet_column, sheet) for sheet_column in sheet.columns], "rows": len(sheet.rows),
        "units": _units(sheet), "plan": _plan(sheet), "part": PART, "first": FIRST,
        "histograms": [_histogram(sheet_histogram, column_keys) for sheet_histogram in sheet.histograms],
        "legend": mark_escapes(sheet.legend),
    }  # fmt: skip


def _units(sheet: Sheet) -> dict[str, Any] | None:
    """The unit that is counted, and the one of each row; None if that is the rows themselves."""
    if sheet.counts is None:
        return None
    key, name = sheet.counts
    seen: dict[Any, int] = {}
    of = [seen.setdefault(make_plain(row.get(key)), len(seen)) for row in sheet.rows]
    return None if len(seen) == len(of) else {"name": mark_escapes(name), "of": of}


def group_texts(sheet: Sheet) -> dict[int, dict[str, Any]]:
    """The passages by the index of their row, in parts of PART rows, so that a browser opens fast."""
    parts: dict[int, dict[str, Any]] = {}
    for number, passages in sheet.passages.items():
        parts.setdefault(number // PART, {})[str(number)] = [_passage(passage) for passage in passages]
    return parts


def embed_json(value: Any) -> str:
    """JSON for the inside of a script element; its reader gets `value` back."""
    json_text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", json_text)


def mark_escapes(text: str) -> str:
    """`text` as safe.block shows it, every escape between BEGIN and END."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in "\n\t" else f"{BEGIN}{escape_character(c)}{END}" for c in text
    )


def _column(column: Column, sheet: Sheet) -> dict[str, Any]:
    return {
        "key": column.key, "title": mark_escapes(column.title), "kind": column.kind, "help": mark_escapes(column.help),
        "wide": column.wide, "tones": find_tones(column, sheet.rows),
        "values": [_value(sheet_row.get(column.key)) for sheet_row in sheet.rows],
    }  # fmt: skip


def _value(value: Any) -> Any:
    value = make_plain(value)
    if isinstance(value, list):
        return [_value(value_part) for value_part in value]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return value if abs(value) <= SAFE else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return mark_escapes(value)


def _plan(sheet: Sheet) -> list[str | None] | None:
    """For every row the line "SHARD DOCUMENT", with FIRST:END for a part of it; None if the shard's name could not be
    pasted verbatim, or the row was found to be harmless."""
    if not sheet.rows or not all("shard" in row and "document" in row for row in sheet.rows):
        return None
    plan_lines = list[str | None]()
    for row in sheet.rows:
        shard, document = str(make_plain(row["shard"])), str(make_plain(row["document"]))
        token_span = f" {row['first']}:{row['end']}" if {"first", "end"} <= row.keys() else ""
        is_wanted = shard.isprintable() and document.isdecimal() and row.get("bad") is not False
        plan_lines.append(f"{shard} {document}{token_span}" if is_wanted else None)
    return plan_lines


def _passage(passage: Passage) -> dict[str, Any]:
    """Short keys and a digit per token: there may be millions."""
    passage_fields: dict[str, Any] = {
        "title": mark_escapes(passage.title),
        "spans": [mark_escapes(text_span.text) for text_span in passage.spans],
    }
    heat_levels = "".join(str(text_span.level) for text_span in passage.spans)
    if heat_levels.strip("0"):
        passage_fields["heat"] = heat_levels
    if any(text_span.hint for text_span in passage.spans):
        passage_fields["hints"] = [mark_escapes(text_span.hint) for text_span in passage.spans]
    return passage_fields


def _histogram(histogram: Histogram, keys: Sequence[str]) -> dict[str, Any]:
    return {
        "title": mark_escapes(histogram.title), "edges": list(map(float, histogram.edges)),
        "counts": make_plain(histogram.counts),
        "marks": [[float(at), mark_escapes(mark_label)] for at, mark_label in histogram.marks if math.isfinite(at)],
        "note": mark_escapes(histogram.note),
        "column": keys.index(histogram.column) if histogram.column in keys else None,
    }  # fmt: skip


@cache
def _environment() -> Environment:
    return safe.html_environment("megastable.report.sheet")


@cache
def _style() -> str:
    """The post-mortem's style, and the sheet's additions."""
    report_style = _source("megastable.report.postmortem", "style.css")
    return f"\n{report_style}{_source('megastable.report.sheet', 'sheet.css')}"


@cache
def _script() -> str:
    """Tabulator, with the licence text it requires, and our script."""
    licence = (VENDOR / "LICENSE").read_text(encoding="utf-8")
    library_code = (VENDOR / "tabulator.min.js").read_text(encoding="utf-8")
    own_scripts = "\n".join(_source("megastable.report.sheet", script_name) for script_name in SCRIPTS)
    return f'\n/* Tabulator\n{licence}\n*/\n{library_code}(() => {{\n"use strict";\n{own_scripts}}})();\n'


def _source(package: str, name: str) -> str:
    return PackageLoader(package).get_source(_environment(), name)[0]


def hash_source(text: str) -> str:
    """The hash of an element in a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
