"""A sheet in a real browser: ten thousand rows are searched, sorted, picked and read, and no text is obeyed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from megastable.base.text import make_visible
from megastable.report.sheet import Column, Histogram, Passage, Sheet, Span, as_html
from megastable.report.sheet.model import SAFE, Kind, format_value
from tests.browser import MISSING, browser
from tests.report.sheets import scan

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=MISSING)]

ROWS = 10_000
# What runs if any of it is taken for markup changes the title, or asks for a file.
HOSTILE = (
    "<script>document.title='bad'</script>",
    '"><img src=x onerror="document.title=\'bad\'">', "</script><svg onload=1>x",
    "<!--<script>", "\x1b[31mred\x1b]0;bad\x07", "a\u202eb\u2066c", "x\u2028y\u2029z\ufeff", "\ud800", "{{7*7}}${7*7}",
    "&lt;b&gt;&#60;", "javascript:alert(1)", "'\"`\\", "\\x1b is typed", "\U0001f600 e\u0301 שלום",
)  # fmt: skip


class Pages:
    """The browser, and the page that it shows."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, file: Path, fragment: str = "") -> None:
        self.driver.get("about:blank")
        self.driver.get(f"{file.as_uri()}{fragment}")
        if self.all("#grid"):
            self.until(lambda: self.shown)  # Tabulator builds the grid a moment later

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def run(self, script: str, *given: Any) -> Any:
        return self.driver.execute_script(script, *given)

    def until(self, true: Callable[[], Any]) -> Any:
        return WebDriverWait(self.driver, 10, 0.02).until(lambda _: true())

    def rows(self) -> list[list[str]]:
        """The cells of the rows that are in the page, from the top."""
        return self.run("""
            const texts = (row) => [...row.querySelectorAll('.tabulator-cell')].map(cell => cell.textContent);
            return [...document.querySelectorAll('.tabulator-row')].map(texts);
        """)

    def places(self) -> list[int]:
        """Where they stand among those that are shown, from 0."""
        return self.run(
            "return [...document.querySelectorAll('.tabulator-row')].map(row => row.ariaRowIndex - 2)"
        )

    def printed(self) -> list[list[str]]:
        """The cells of the rows that paper gets."""
        page = "dispatchEvent(new Event('beforeprint')); return [...document.querySelectorAll('.paper tbody tr')]"
        return self.run(f"{page}.map(row => [...row.cells].map(cell => cell.textContent))")

    @property
    def shown(self) -> str:
        return self.find("#shown").text

    def search(self, text: str, shown: str) -> None:
        field = self.find("#search")
        field.send_keys(Keys.CONTROL + "a" + Keys.NULL, text or Keys.DELETE)
        self.until(lambda: self.shown == shown)

    def errors(self) -> list[Any]:
        return self.driver.get_log("browser")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    with browser(tmp_path_factory.mktemp("browser")) as driver:
        yield driver


@pytest.fixture
def page(driver: webdriver.Chrome) -> Iterator[Pages]:
    """Fails the test if the page logs anything: an error of its script, or what the policy refused."""
    pages = Pages(driver)
    pages.errors()
    yield pages
    assert pages.errors() == []


@pytest.fixture(scope="module")
def long() -> Sheet:
    """As many rows with short texts, which are read soon."""
    return scan(ROWS, words=28, heated=False)


@pytest.fixture(scope="module")
def long_file(long: Sheet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(long, tmp_path_factory.mktemp("long") / "sheet.html")


def written(sheet: Sheet, file: Path) -> Path:
    file.write_text(as_html(sheet), encoding="utf-8")
    return file


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Sheet], Path]:
    return lambda sheet: written(sheet, tmp_path / "a sheet.html")


def hostile_sheet() -> Sheet:
    everything = " ".join(HOSTILE)
    return Sheet(
        title=everything, lead=[everything], facts=[(everything, everything), ("short", "<b>x</b>")],
        columns=[Column("shard", everything, help=everything), Column("document", "document"),
                 Column("kind", "kind"), Column("n", "n", "count")],
        rows=[{"shard": text, "document": i, "kind": HOSTILE[i % 4], "n": i} for i, text in enumerate(HOSTILE)],
        passages={i: [Passage(text, [Span(text, 0.95, text), Span("\tplain\n" + text)])]
                  for i, text in enumerate(HOSTILE)},
        histograms=[Histogram(everything, [0, 5, 20], [5, 9], [(5, everything)], everything, "n")],
        notes=[everything], legend=everything,
    )  # fmt: skip


def hostile_file(write: Callable[[Sheet], Path], trusted_types: bool) -> Path:
    """The page of a hostile sheet, as it is or as a browser takes it that knows no trusted types."""
    file = write(hostile_sheet())
    text = file.read_text()
    other = text.replace("; require-trusted-types-for 'script'; trusted-types default", "")
    assert other != text
    if not trusted_types:
        file.write_text(other)
    return file


BROWSERS = pytest.mark.parametrize(
    "trusted_types", [True, False], ids=["trusted-types", "browser-without-them"]
)


def test_head_sorts_by_a_click(page: Pages, long_file: Path, long: Sheet) -> None:
    page.open(long_file)
    tokens = [row["tokens"] for row in long.rows]
    head = page.all(".tabulator-col")[4]
    head.find_element(By.TAG_NAME, "button").click()
    assert head.get_attribute("aria-sort") == "descending"
    down = sorted(range(ROWS), key=lambda i: -tokens[i])
    assert [row[1] for row in page.rows()[:20]] == [str(long.rows[i]["document"]) for i in down[:20]]
    head.find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)
    assert head.get_attribute("aria-sort") == "ascending"
    up = sorted(range(ROWS), key=lambda i: tokens[i])  # stable: equal ones stay as they were
    assert [row[1] for row in page.rows()[:20]] == [str(long.rows[i]["document"]) for i in up[:20]]
    assert "sort=tokens" in page.driver.current_url
    head.find_element(By.TAG_NAME, "button").click()
    assert head.get_attribute("aria-sort") == "none" and page.rows()[0][1] == str(long.rows[0]["document"])


def test_search_wants_all_words_in_the_row_or_its_texts(page: Pages, long_file: Path, long: Sheet) -> None:
    page.open(long_file)
    repeated = [i for i, row in enumerate(long.rows) if row["kind"] == "repetition"]
    page.search("CLICK  win here", f"{len(repeated):,} of 10,000 rows")  # only in the texts
    assert page.rows()[0][1] == str(long.rows[repeated[0]]["document"])
    one = long.rows[repeated[7]]
    both = [i for i in repeated if long.rows[i]["shard"] == one["shard"]]
    page.search(f"click {one['shard']}", f"{len(both):,} of 10,000 rows")
    page.search("click qqqq", "0 of 10,000 rows")
    assert page.find(".tabulator-placeholder").is_displayed() and not page.find("#copy").is_enabled()
    page.find("#clear").click()
    assert page.shown == "10,000 rows" and page.find("#search").get_attribute("value") == ""


def test_row_opens_and_the_next_one_is_a_key_away(page: Pages, write: Callable[[Sheet], Path]) -> None:
    sheet = scan(60, words=50)
    page.open(write(sheet))
    page.find("#row-3").click()
    (passage,) = sheet.passages[3]
    assert page.run("return document.querySelector('.reader pre').textContent") == passage.text
    assert page.find(".reader h3").text == passage.title
    tokens = page.all(".reader .token")
    assert [token.get_attribute("title") for token in tokens] == [span.hint for span in passage.spans]
    hot = max(range(50), key=lambda i: passage.spans[i].heat or 0)
    assert f"h{passage.spans[hot].level}" in str(tokens[hot].get_attribute("class"))
    assert "loss of a token" in page.find(".reader .legend").text
    page.find("#grid").send_keys(Keys.ARROW_DOWN)
    assert page.find(".reader .head b").text == "row 5 of 60"
    assert page.run("return document.querySelector('.reader pre').textContent") == sheet.passages[4][0].text
    assert page.find(".tabulator-row[aria-selected=true]").get_attribute("id") == "row-4"
    page.find("#grid").send_keys(Keys.END)
    assert page.find(".reader .head b").text == "row 60 of 60" and page.places()[-1] == 59
    other = "noise" if sheet.rows[-1]["kind"] != "noise" else "markup"
    page.search(other, f"{sum(row['kind'] == other for row in sheet.rows)} of 60 rows")
    assert page.find(".reader .head b").text.startswith("row 1 of ")
    page.search("qqqq", "0 of 60 rows")
    assert page.find(".reader .head b").text == "a row that is not shown"
    page.search("", "60 rows")
    page.find("body").send_keys(Keys.ESCAPE)
    assert not page.find("#reader").is_displayed()
    page.find("#grid").send_keys(Keys.ENTER)
    assert page.find("#reader").is_displayed()


@BROWSERS
def test_page_shows_hostile_texts_and_obeys_none(
    page: Pages, write: Callable[[Sheet], Path], trusted_types: bool
) -> None:
    sheet = hostile_sheet()
    page.open(hostile_file(write, trusted_types))
    assert page.driver.title == make_visible(sheet.title)
    assert [row[0] for row in page.rows()] == [make_visible(text) for text in HOSTILE]
    for number, text in enumerate(HOSTILE):
        page.run("document.getElementById(arguments[0]).click()", f"row-{number}")
        block = page.run("return document.querySelector('.reader pre').textContent")
        assert block == make_visible(text) + "\tplain\n" + make_visible(text)
        assert page.find(".reader .token").get_attribute("title") == make_visible(text)
    page.run("document.getElementById('row-4').click()")
    escapes = [element.text for element in page.all(".reader pre .esc")]
    assert escapes == ["\\x1b", "\\x1b", "\\x07"] * 2
    page.run("document.getElementById('row-12').click()")
    assert page.all(".reader pre .esc") == []  # typed by somebody, not a character that does not show
    page.search("\\x1b is typed", f"1 of {len(HOSTILE)} rows")
    page.search("<script>document", f"1 of {len(HOSTILE)} rows")
    assert page.driver.title == make_visible(sheet.title)
    assert (
        page.run("return document.querySelectorAll('img, main script, main svg[onload], b[onload]').length")
        == 0
    )
    assert page.run("return document.querySelectorAll('script').length") == 3
    page.find("#clear").click()
    shown = page.rows()
    assert page.printed() == shown
    assert page.find("thead th").get_attribute("textContent") == make_visible(sheet.columns[0].title)
    assert page.all(".paper :not(thead, tbody, tr, th, td, .esc)") == []


INTRUDERS = """
    const script = document.createElement('script'), image = new Image(), thrown = [];
    for (const act of [
        () => { script.textContent = 'window.ran = 1'; },
        () => { document.body.setAttribute('onclick', 'window.ran = 1'); },
    ]) try { act(); } catch (error) { thrown.push(error.message); }
    document.body.append(script, image);
    document.body.setAttribute('style', 'color: red');
    document.body.click();
    image.onerror = () => { window.kept = 1; };
    image.src = 'http://127.0.0.1:9/x.png';
    return thrown;
"""


@BROWSERS
def test_policy_keeps_everything_else_out(
    page: Pages, write: Callable[[Sheet], Path], trusted_types: bool
) -> None:
    page.open(hostile_file(write, trusted_types))
    thrown = page.run(INTRUDERS)
    page.until(lambda: page.run("return window.kept"))
    refused = [entry["message"] for entry in page.errors()]
    assert len(thrown) == (2 if trusted_types else 0)
    assert all("requires 'TrustedScript' assignment" in message for message in thrown)
    assert len([message for message in refused if "TrustedScript" not in message]) == 4 - len(thrown)
    assert all("Content Security Policy" in m for m in refused if "TrustedScript" not in m)
    assert page.run("return window.ran") is None


def test_numbers_read_as_in_a_terminal(page: Pages, write: Callable[[Sheet], Path]) -> None:
    """rows.js against values.py."""
    random = np.random.default_rng(0)
    values: list[Any] = (random.normal(size=60) * 10.0 ** random.integers(-9, 12, 60)).tolist()
    values += random.random(20).tolist()
    values += [0, 0.0, 1, 1.0, -1, 999.99, 1000.2, 99.999, 0.99951, 2**53 - 1, 2**53, 2**60, 10**20]
    values += [float("nan"), float("inf"), None, True, False, "text", [1, 2.75, None]]
    kinds: tuple[Kind, ...] = ("text", "count", "number", "share", "score")
    columns = [Column(kind, kind, kind) for kind in kinds]
    page.open(write(Sheet("n", columns=columns, rows=[dict.fromkeys(kinds, value) for value in values])))
    for value, row in zip(values, page.printed(), strict=True):
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) > SAFE:
            assert row == [str(value)] * 5
        elif isinstance(value, float):
            assert row[1:] == [format_value(value, column) for column in columns[1:]]
        else:
            assert row == [format_value(value, column) for column in columns]
