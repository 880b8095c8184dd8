"""A sheet says the same to a terminal, a spreadsheet, a program and a browser, whatever the text in it is."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from megastable.report import safe
from megastable.report.sheet import (
    Column,
    Histogram,
    Passage,
    Sheet,
    Span,
    as_csv,
    as_html,
    as_json,
    render_console,
)
from megastable.report.sheet.model import format_value
from megastable.report.sheet.page import (
    BEGIN,
    END,
    SCRIPTS,
    VENDOR,
    _source,
    build_content,
    embed_json,
    mark_escapes,
)
from tests.report.sheets import scan
from tests.report.test_safe import HOSTILE


def printed(sheet: Sheet, width: int = 100, colour: bool = False, **options: int) -> str:
    file = io.StringIO()
    system = "truecolor" if colour else None
    Console(file=file, width=width, force_terminal=colour, color_system=system, legacy_windows=False).print(  # type: ignore[arg-type]
        render_console(sheet, **options)
    )
    return file.getvalue()


def small(text: str) -> Sheet:
    """`text` wherever a sheet has text."""
    return Sheet(
        title=text, lead=[text], facts=[(text, text), ("what", text * 9)],
        columns=[Column("shard", text, help=text), Column("document", "document"), Column("n", "tokens", "count"),
                 Column("tags", "tags", wide=True)],
        rows=[{"shard": text, "document": i, "n": 1000 * i, "tags": [text, "b"]} for i in range(3)],
        passages={0: [Passage(text, [Span(text, 0.9, text), Span(text)])]},
        histograms=[Histogram(text, [0, 1, 2], [3, 4], [(1.0, text)], text, "n")],
        notes=[text], legend=text,
    )  # fmt: skip


class Page(HTMLParser):
    """The elements of a page, the text that shows, and what is in its script elements."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.open, self.text, self.scripts = list[str](), "", "", list[str]()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.open = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.open = ""

    def handle_data(self, data: str) -> None:
        if self.open == "script":
            self.scripts[-1] += data
        elif self.open != "style":
            self.text += data


# A terminal


def test_console_names_what_it_leaves_out() -> None:
    sheet = scan(60)
    assert "… and 50 more; columns left out: bits/token (--csv or --html for all)" in printed(
        sheet, 200, most=10
    )
    narrow = printed(sheet, 60, most=60)
    assert "bits/token, copies, read, why" in " ".join(narrow.split()) and "more" not in narrow
    assert "--csv" not in printed(Sheet("t", columns=[Column("a", "a")], rows=[{"a": 1}]))


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (None, "count", ""), (True, "text", "yes"), (1234, "text", "1234"), (1234, "count", "1,234"),
        (0, "score", "0.00"), (-0.5, "number", "-0.500"), (0.9999, "share", ">99.9%"), (1.0, "share", "100.0%"),
        (0.25, "share", "25.0%"), (1e-5, "number", "1.00e-05"), (12.345, "score", "12.35"),
        (1234.6, "score", "1,235"), (math.inf, "score", "inf"), (1e20, "number", "1.000e+20"),
        (150.25001, "number", "150.3"), (["a", 1, None], "text", "a, 1, "), ("\x1b[1m", "text", "\\x1b[1m"),
    ],
)  # fmt: skip
def test_told_formats_values(value: Any, kind: Any, text: str) -> None:
    assert format_value(value, Column("k", "t", kind)) == text


@given(HOSTILE)
def test_console_obeys_no_text(text: str) -> None:
    shown = printed(small(text + "[red]x[/red]"), texts=1)
    assert all(c.isprintable() or c == "\n" for c in shown)
    assert "[red]x[/red]" in shown


# Programs


def test_json_has_numbers_in_place_of_their_words() -> None:
    columns = [Column("size", "size", words=True), Column("bytes", "bytes", "count", wide=True)]
    given = Sheet(
        "t", facts=[("on the disk", "3 MB")], data={"bytes": np.int64(3_000_000)}, columns=columns,
        rows=[{"size": "3 MB", "bytes": 3_000_000}],
    )  # fmt: skip
    read = json.loads(as_json(given))
    assert read["facts"] == {"bytes": 3_000_000} and read["rows"] == [{"bytes": 3_000_000}]
    assert [column["key"] for column in read["columns"]] == ["bytes"]
    assert "3 MB" in printed(given) and "3 MB" in as_csv(given)


def test_json_is_finite_and_plain() -> None:
    row = {
        "a": np.float32(np.nan),
        "b": np.arange(2),
        "c": math.inf,
        "d": np.bool_(True),
        "e": np.uint64(2**63),
    }
    given = Sheet("t", rows=[row], histograms=[Histogram("h", np.array([0.0, 1]), np.array([7]))])  # type: ignore[arg-type]
    read = json.loads(as_json(given), parse_constant=pytest.fail)
    assert read["rows"] == [{"a": "nan", "b": [0, 1], "c": "inf", "d": True, "e": 2**63}]
    assert read["histograms"][0]["counts"] == [7] and read["histograms"][0]["edges"] == [0.0, 1.0]


@given(HOSTILE)
def test_json_is_exact_and_harmless_in_a_terminal(text: str) -> None:
    written = as_json(small(text))
    assert written.isascii() and all(c.isprintable() or c == "\n" for c in written)
    read = json.loads(written)
    assert read["passages"]["0"][0]["spans"][1]["text"] == json.loads(json.dumps(text))
    assert read["rows"][0]["tags"][0] == read["title"]


@given(HOSTILE)
def test_csv_obeys_nothing(text: str) -> None:
    head, *rows = csv.reader(io.StringIO(as_csv(small(text))))
    assert head == ["shard", "document", "n", "tags"] and len(rows) == 3
    assert rows[0][0] == safe.escape_cell(text) and rows[2][1:3] == ["2", "2000"]
    assert not any(value.startswith(("=", "+", "-", "@")) for value in (rows[0][0], rows[0][3]))


# A browser


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | HOSTILE.filter(
        lambda text: "\ud800" not in text) | st.text(),
    lambda below: st.lists(below, max_size=4) | st.dictionaries(st.text(max_size=4), below, max_size=4), max_leaves=12,
))  # fmt: skip
def test_embed_is_read_back_and_cannot_end_its_element(value: Any) -> None:
    text = embed_json(value)
    assert json.loads(text) == value
    assert not set("<>&\u2028\u2029\x7f") & set(text)
    text.encode()


@given(HOSTILE | st.text())
def test_marked_sets_the_escapes_of_visible_text_apart(text: str) -> None:
    shown = mark_escapes(text)
    assert shown.replace(BEGIN, "").replace(END, "") == safe.show_block(text)
    outside = re.sub(f"{BEGIN}[^{END}]*{END}", "", shown)
    assert outside == "".join(c for c in text if c.isprintable() or c in "\n\t")


@pytest.mark.slow
@given(HOSTILE)
def test_page_shows_the_text_and_has_no_element_of_it(text: str) -> None:
    dots = "." * 12  # too long for a card, whatever the text is
    text += dots
    written = as_html(small(text))
    written.encode()
    page, harmless = Page(written), Page(as_html(small("plain" + dots)))
    assert page.tags == harmless.tags
    data, texts, script = page.scripts
    assert script == harmless.scripts[2] and "</" not in data + texts
    assert json.loads(data)["columns"][0]["values"] == [mark_escapes(text)] * 3
    assert json.loads(texts)["0"][0]["spans"] == [mark_escapes(text)] * 2
    assert all(c.isprintable() or c in f"\n\t{BEGIN}{END}" for c in written)
    assert safe.show_block(text).strip() in page.text


def test_page_needs_nothing_and_allows_nothing() -> None:
    page = as_html(scan(3))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert (
        policy
        and policy[1].startswith("default-src 'none'; style-src 'sha256-")
        and "unsafe" not in policy[1]
    )
    assert "; require-trusted-types-for 'script'; trusted-types default" in policy[1]
    assert not re.search(
        r'(?:src|href)="(?!data:)|https?://(?!www\.w3\.org/2000/svg)|@import|[^.]url\(', page
    )
    for word in ("outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", " Function("):
        assert word not in page
    assert "innerHTML" not in "".join(_source("megastable.report.sheet", name) for name in SCRIPTS)
    assert as_html(scan(3)) == page
    assert page.count((VENDOR / "LICENSE").read_text()) == 1


def test_plan_leaves_out_a_shard_that_cannot_be_pasted() -> None:
    rows = [{"shard": "a", "document": 1}, {"shard": "a\nb", "document": 2}, {"shard": "a", "document": -1}]
    assert build_content(Sheet("t", rows=rows))["plan"] == ["a 1", None, None]
    parts = [{**row, "first": 5, "end": 9} for row in rows]
    assert build_content(Sheet("t", rows=parts))["plan"] == ["a 1 5:9", None, None]
    assert build_content(Sheet("t", rows=[*rows, {"shard": "a"}]))["plan"] is None
    assert build_content(Sheet("t"))["plan"] is None


NODE = shutil.which("node")
SAMPLES = Sheet(
    "t", columns=[Column("bad", "bad"), Column("n", "n", "count")], counts=("position", "sample"),
    rows=[{"bad": g, "position": p, "n": 1} for g, p in ((True, 7), (True, 7), (True, 8), (False, 9))],
)  # fmt: skip


@pytest.mark.skipif(NODE is None, reason="no node: the page's script is run by it")
def test_chips_of_the_page_count_samples() -> None:
    script = _source("megastable.report.sheet", "rows.js")
    ask = "const r = new Rows(JSON.parse(process.argv[1]), () => undefined);"
    ask += "console.log(JSON.stringify([r.categories(0, 9), r.counted([0, 1, 2, 3])]))"
    for sheet, expected in (
        (SAMPLES, [[["yes", 2], ["no", 1]], "3 samples"]),
        (replace(SAMPLES, counts=None), [[["yes", 3], ["no", 1]], "4 rows"]),
    ):
        given = embed_json(build_content(sheet))
        done = subprocess.run([str(NODE), "-e", script + ask, given], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == expected
