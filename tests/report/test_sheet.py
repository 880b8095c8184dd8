"""A sheet says the same to a terminal, a spreadsheet, a program and a browser, whatever the text in it is."""

from __future__ import annotations

import csv
import hashlib
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
from rich.cells import cell_len
from rich.console import Console

from megastable.base.text import visible
from megastable.report.postmortem import safe
from megastable.report.sheet import (
    Column,
    CommandNote,
    Histogram,
    Passage,
    Sheet,
    Span,
    as_csv,
    as_html,
    as_json,
    console,
)
from megastable.report.sheet.page import (
    BEGIN,
    END,
    PART,
    SCRIPTS,
    VENDOR,
    _source,
    content,
    embed,
    marked,
    texts,
)
from megastable.report.sheet.values import plain, told
from tests.report.sheets import scan
from tests.report.test_safe import HOSTILE


def printed(sheet: Sheet, width: int = 100, colour: bool = False, **options: int) -> str:
    file = io.StringIO()
    system = "truecolor" if colour else None
    Console(file=file, width=width, force_terminal=colour, color_system=system, legacy_windows=False).print(  # type: ignore[arg-type]
        console(sheet, **options)
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


@pytest.mark.parametrize("width", [40, 80, 100, 120, 200])
def test_no_line_is_wider_than_the_terminal_and_no_number_is_cut(width: int) -> None:
    sheet = scan(60)
    lines = printed(sheet, width, most=10, texts=1).splitlines()
    assert max(map(cell_len, lines)) <= width
    head = next(i for i, line in enumerate(lines) if "─" in line and i > 5)
    rows = [line.split() for line in lines[head + 1 : head + 11]]
    for i, row in enumerate(sheet.rows[:4] if width >= 200 else []):
        assert rows[i][:3] == [row["shard"], str(row["document"]), told(row["score"], sheet.columns[2])]
    assert not re.search(r"\d…", "".join(lines).replace("… and", ""))


def test_a_terminal_names_what_it_leaves_out() -> None:
    sheet = scan(60)
    assert "… and 50 more; columns left out: bits/token (--csv or --html for all)" in printed(
        sheet, 200, most=10
    )
    narrow = printed(sheet, 60, most=60)
    assert "bits/token, copies, read, why" in " ".join(narrow.split()) and "more" not in narrow
    assert "--csv" not in printed(Sheet("t", columns=[Column("a", "a")], rows=[{"a": 1}]))


def test_a_command_to_copy_is_not_broken_and_a_caption_has_what_there_is() -> None:
    command = "megastable prune plan " + "data/a-long-name " * 9
    sheet = replace(small("x"), notes=["Kept:", CommandNote(command)], title="t")
    sheet = replace(sheet, rows=[{"document": 7, "n": 3}, *sheet.rows])
    file = io.StringIO()
    Console(file=file, width=60).print(console(sheet, texts=1), crop=False)
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    assert lines[-2:] == ["Kept:", command.rstrip()] and "1: document 7, tokens 3" in file.getvalue()


def test_numbers_stand_right_and_as_people_write_them() -> None:
    columns = [
        Column("n", "n", "count"),
        Column("s", "share", "share"),
        Column("x", "x", "number"),
        Column("b", "b"),
    ]
    rows: list[dict[str, Any]] = [
        {"n": np.int64(1234567), "s": 0.0004, "x": np.float32(0.5), "b": True},
        {"n": 5, "s": math.nan, "x": None},
    ]
    lines = [line.rstrip() for line in printed(Sheet("t", columns=columns, rows=rows)).splitlines()]
    assert lines[-2:] == ["1,234,567  <0.1%  0.500  yes", "        5    nan"]


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
def test_values_for_people(value: Any, kind: Any, text: str) -> None:
    assert told(value, Column("k", "t", kind)) == text


def test_scores_and_hot_tokens_are_coloured_and_read_without_colours() -> None:
    columns = [Column("score", "score", "score", limit=4)]
    sheet = Sheet("t", columns=columns, rows=[{"score": s} for s in (1.0, 5.0, 9.0)],
                  passages={1: [Passage("tokens", [Span("cold "), Span("hot", 0.95), Span("\x07")])]})  # fmt: skip
    coloured, bare = printed(sheet, colour=True, texts=2), printed(sheet, texts=2)
    assert "\x1b[33m 5.00" in coloured and "\x1b[1;31m 9.00" in coloured and "\n 1.00\n" in coloured
    assert "\x1b[1;31mhot" in coloured and "\x1b[36m\\x07" in coloured
    assert "cold hot\\x07" in bare and "\x1b" not in bare
    assert "cold" not in printed(sheet, texts=1)


def test_without_a_limit_the_largest_score_is_the_worst() -> None:
    rows = [{"s": value} for value in (1.0, 5.0, 10.0, math.nan, "nan", None)]
    (column,) = content(Sheet("t", columns=[Column("s", "s", "score")], rows=rows))["columns"]
    assert column["tones"] == (4.0, 7.5)
    rows = [{"s": 0.0}]
    assert content(Sheet("t", columns=[Column("s", "s", "score")], rows=rows))["columns"][0]["tones"] is None


@given(HOSTILE)
def test_nothing_in_a_terminal_obeys_a_text(text: str) -> None:
    shown = printed(small(text + "[red]x[/red]"), texts=1)
    assert all(c.isprintable() or c == "\n" for c in shown)
    assert "[red]x[/red]" in shown


# Programs


def test_json_has_all_of_it() -> None:
    sheet = scan(5)
    read = json.loads(as_json(sheet))
    assert list(read) == ["title", "lead", "facts", "columns", "rows", "passages", "histograms", "notes"]
    assert read["rows"] == [dict(row) for row in sheet.rows]
    assert read["passages"]["4"][0]["spans"][0] == {
        "text": sheet.passages[4][0].spans[0].text, "heat": sheet.passages[4][0].spans[0].heat,
        "hint": sheet.passages[4][0].spans[0].hint,
    }  # fmt: skip
    assert read["columns"][2]["limit"] == 8.0
    assert read["histograms"][0]["counts"] == sheet.histograms[0].counts


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


def test_csv_has_every_column() -> None:
    columns = [Column(key, f"the {key}") for key in "abcd"] + [Column("e", "e", "number", wide=True)]
    sheet = Sheet(
        "t", columns=columns, rows=[{"a": "=1+1", "b": [1, None, "x"], "c": False, "e": 0.1, "other": 1}]
    )
    assert list(csv.reader(io.StringIO(as_csv(sheet)))) == [
        list("abcde"),
        ["'=1+1", "1; ; x", "no", "", "0.1"],
    ]


@given(HOSTILE)
def test_csv_obeys_nothing(text: str) -> None:
    head, *rows = csv.reader(io.StringIO(as_csv(small(text))))
    assert head == ["shard", "document", "n", "tags"] and len(rows) == 3
    assert rows[0][0] == safe.cell(text) and rows[2][1:3] == ["2", "2000"]
    assert not any(value.startswith(("=", "+", "-", "@")) for value in (rows[0][0], rows[0][3]))


# A browser


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | HOSTILE.filter(
        lambda text: "\ud800" not in text) | st.text(),
    lambda below: st.lists(below, max_size=4) | st.dictionaries(st.text(max_size=4), below, max_size=4), max_leaves=12,
))  # fmt: skip
def test_embedded_data_is_read_back_and_cannot_end_its_element(value: Any) -> None:
    text = embed(value)
    assert json.loads(text) == value
    assert not set("<>&\u2028\u2029\x7f") & set(text)
    text.encode()


def test_embedded_surrogates_can_be_written() -> None:
    assert embed("\ud800</") == '"\\ud800\\u003c/"'


@given(HOSTILE | st.text())
def test_marked_text_is_the_visible_text_with_its_escapes_set_apart(text: str) -> None:
    shown = marked(text)
    assert shown.replace(BEGIN, "").replace(END, "") == safe.block(text)
    outside = re.sub(f"{BEGIN}[^{END}]*{END}", "", shown)
    assert outside == "".join(c for c in text if c.isprintable() or c in "\n\t")


@pytest.mark.slow
@given(HOSTILE)
def test_a_page_shows_the_text_and_has_no_element_of_it(text: str) -> None:
    dots = "." * 12  # too long for a card, whatever the text is
    text += dots
    written = as_html(small(text))
    written.encode()
    page, harmless = Page(written), Page(as_html(small("plain" + dots)))
    assert page.tags == harmless.tags
    data, texts, script = page.scripts
    assert script == harmless.scripts[2] and "</" not in data + texts
    assert json.loads(data)["columns"][0]["values"] == [marked(text)] * 3
    assert json.loads(texts)["0"][0]["spans"] == [marked(text)] * 2
    assert all(c.isprintable() or c in f"\n\t{BEGIN}{END}" for c in written)
    assert safe.block(text).strip() in page.text


def test_the_page_needs_nothing_and_allows_nothing() -> None:
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


def test_tabulator_is_the_one_that_its_readme_names() -> None:
    readme = (VENDOR / "README.md").read_text()
    for name in ("tabulator.min.js", "tabulator.entry.js", "LICENSE"):
        assert f"{hashlib.sha256((VENDOR / name).read_bytes()).hexdigest()}  {name}" in readme


def test_the_data_of_the_page() -> None:
    sheet = scan(3)
    data = content(sheet)
    assert data["plan"] == [f"{row['shard']} {row['document']}" for row in sheet.rows]
    assert [column["key"] for column in data["columns"]][:2] == ["shard", "document"]
    assert data["columns"][4]["values"] == [row["tokens"] for row in sheet.rows]
    assert [h["column"] for h in data["histograms"]] == [2, 4]
    (passage,) = texts(sheet)[0]["2"]
    assert (
        len(passage["heat"])
        == len(passage["spans"])
        == len(passage["hints"])
        == len(sheet.passages[2][0].spans)
    )


def test_texts_come_in_parts() -> None:
    rows = [{"i": i} for i in range(3 * PART)]
    passages = {i: [Passage("p", [Span(str(i))])] for i in (0, PART - 1, 2 * PART)}
    parts = texts(Sheet("t", rows=rows, passages=passages))
    assert {part: list(rows) for part, rows in parts.items()} == {0: ["0", str(PART - 1)], 2: [str(2 * PART)]}


def test_a_shard_that_cannot_be_pasted_is_not_in_a_plan() -> None:
    rows = [{"shard": "a", "document": 1}, {"shard": "a\nb", "document": 2}, {"shard": "a", "document": -1}]
    assert content(Sheet("t", rows=rows))["plan"] == ["a 1", None, None]
    parts = [{**row, "first": 5, "end": 9} for row in rows]
    assert content(Sheet("t", rows=parts))["plan"] == ["a 1 5:9", None, None]
    assert content(Sheet("t", rows=[*rows, {"shard": "a"}]))["plan"] is None
    assert content(Sheet("t"))["plan"] is None


def test_numbers_that_a_browser_would_round_are_text() -> None:
    sheet = Sheet(
        "t", columns=[Column("a", "a")], rows=[{"a": v} for v in (2**53 - 1, 2**53, math.nan, [math.inf])]
    )
    assert content(sheet)["columns"][0]["values"] == [2**53 - 1, "9007199254740992", "nan", ["inf"]]


@pytest.mark.parametrize(
    "sheet", [Sheet("t"), Sheet("t", columns=[Column("a", "a")]), Sheet("t", rows=[{"a": 1}])]
)
def test_a_sheet_of_nothing(sheet: Sheet) -> None:
    assert "t" in printed(sheet) and json.loads(as_json(sheet))["title"] == "t"
    assert "<h1>t</h1>" in as_html(sheet) and isinstance(as_csv(sheet), str)


@pytest.mark.parametrize(
    ("edges", "counts"),
    [([0, 1], []), ([0], []), ([0, 1, 1], [1, 2]), ([0, math.inf], [1]), ([0, math.nan], [1])],
)
def test_a_histogram_has_rising_edges_and_a_count_between_two(edges: list[float], counts: list[int]) -> None:
    with pytest.raises(ValueError, match="histogram h"):
        Histogram("h", edges, counts)


def test_what_a_sheet_cannot_be() -> None:
    with pytest.raises(ValueError, match="same key"):
        Sheet("t", columns=[Column("a", "a"), Column("a", "b")])
    with pytest.raises(ValueError, match="no kind"):
        Column("a", "a", "money")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rows that there are not"):
        Sheet("t", passages={0: []})


@pytest.mark.parametrize(
    ("heat", "level"), [(None, 0), (math.nan, 0), (-1, 0), (0.05, 0), (0.5, 5), (1, 9), (7, 9), (math.inf, 9)]
)
def test_heat_in_tenths(heat: float | None, level: int) -> None:
    assert Span("x", heat).level == level


def test_plain_values() -> None:
    given = [np.int64(1), (np.float64(0.5), None), np.array([True]), {"x"}, b"x"]
    assert plain(given) == [1, [0.5, None], [True], ["x"], "b'x'"]
    assert visible("x") == "x"


NODE = shutil.which("node")
SAMPLES = Sheet(
    "t", columns=[Column("guilty", "guilty"), Column("n", "n", "count")], counts=("position", "sample"),
    rows=[{"guilty": g, "position": p, "n": 1} for g, p in ((True, 7), (True, 7), (True, 8), (False, 9))],
)  # fmt: skip


def test_a_sample_of_several_documents_counts_once() -> None:
    """Three rows are guilty, of two samples: the page says two, as its first lines do."""
    assert content(SAMPLES)["units"] == {"name": "sample", "of": [0, 0, 1, 2]}
    alone = replace(SAMPLES, rows=SAMPLES.rows[1:])
    assert content(alone)["units"] is None and content(Sheet("t"))["units"] is None


@pytest.mark.skipif(NODE is None, reason="no node: the page's script is run by it")
def test_the_chips_of_the_page_count_samples() -> None:
    script = _source("megastable.report.sheet", "rows.js")
    ask = "const r = new Rows(JSON.parse(process.argv[1]), () => undefined);"
    ask += "console.log(JSON.stringify([r.categories(0, 9), r.counted([0, 1, 2, 3])]))"
    for sheet, expected in (
        (SAMPLES, [[["yes", 2], ["no", 1]], "3 samples"]),
        (replace(SAMPLES, counts=None), [[["yes", 3], ["no", 1]], "4 rows"]),
    ):
        given = embed(content(sheet))
        done = subprocess.run([str(NODE), "-e", script + ask, given], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == expected


def test_a_page_with_the_texts_of_some_rows_says_of_which() -> None:
    rows = [{"a": n} for n in range(5)]
    passages = {n: [Passage("p", [Span("x")])] for n in range(5)}
    some, columns = {n: passages[n] for n in range(3)}, [Column("a", "a")]
    assert "shows its text, of the first 3</span>" in as_html(
        Sheet("t", columns=columns, rows=rows, passages=some)
    )
    assert "shows its text</span>" in as_html(Sheet("t", columns=columns, rows=rows, passages=passages))
    assert "shows its text" not in as_html(Sheet("t", columns=columns, rows=rows))
