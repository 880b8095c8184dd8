"""A sheet in a real browser: ten thousand rows are searched, sorted, picked and read, and no text is obeyed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from megastable.base.text import visible
from megastable.report.sheet import Column, Histogram, Passage, Sheet, Span, as_html
from megastable.report.sheet.model import Kind
from megastable.report.sheet.values import SAFE, told
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
def large() -> Sheet:
    """Of texts as long as real ones: 20 MB."""
    return scan(ROWS, words=400, heated=False)


@pytest.fixture(scope="module")
def large_file(large: Sheet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(large, tmp_path_factory.mktemp("large") / "sheet.html")


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


def test_of_ten_thousand_rows_few_are_drawn(page: Pages, large_file: Path) -> None:
    page.open(large_file)
    page.until(lambda: page.shown == "10,000 rows")
    assert large_file.stat().st_size > 20e6
    assert page.run("return document.querySelectorAll('*').length") < 2500
    assert page.places()[0] == 0 and len(page.places()) < 60


def test_a_click_on_a_head_sorts(page: Pages, long_file: Path, long: Sheet) -> None:
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


def test_a_search_wants_all_words_in_the_row_or_its_texts(
    page: Pages, large_file: Path, large: Sheet
) -> None:
    page.open(large_file)
    repeated = [i for i, row in enumerate(large.rows) if row["kind"] == "repetition"]
    page.search("CLICK  win here", f"{len(repeated):,} of 10,000 rows")  # only in the texts
    assert page.rows()[0][1] == str(large.rows[repeated[0]]["document"])
    one = large.rows[repeated[7]]
    both = [i for i in repeated if large.rows[i]["shard"] == one["shard"]]
    page.search(f"click {one['shard']}", f"{len(both):,} of 10,000 rows")
    page.search("click qqqq", "0 of 10,000 rows")
    assert page.find(".tabulator-placeholder").is_displayed() and not page.find("#copy").is_enabled()
    page.find("#clear").click()
    assert page.shown == "10,000 rows" and page.find("#search").get_attribute("value") == ""


def test_chips_lists_and_bars_pick_rows(page: Pages, long_file: Path, long: Sheet) -> None:
    page.open(long_file)

    def count(wanted: Callable[[Any], bool]) -> str:
        return f"{sum(map(wanted, long.rows)):,} of 10,000 rows"

    chips = {page.run("return arguments[0].firstChild.data", chip): chip for chip in page.all(".chip")}
    chips["noise"].click()
    assert page.shown == count(lambda row: row["kind"] == "noise")
    chips["markup"].click()
    assert page.shown == count(lambda row: row["kind"] in ("noise", "markup"))
    chips["yes"].click()
    assert page.shown == count(lambda row: row["kind"] in ("noise", "markup") and row["read"])
    page.find(".pick select option[value='3']").click()
    shard = page.find(".pick select").find_elements(By.TAG_NAME, "option")[4].text.split()[0]
    assert page.shown == count(
        lambda row: row["kind"] in ("noise", "markup") and row["read"] and row["shard"] == shard
    )
    page.find("#clear").click()
    edges, bars = long.histograms[0].edges, page.all(".chart:first-child .bin")
    bars[18].click()
    assert page.shown == count(lambda row: edges[18] <= row["score"] < edges[19])
    assert bars[18].get_attribute("aria-pressed") == "true"
    ActionChains(page.driver, duration=50).click_and_hold(bars[20]).move_to_element(
        bars[32]
    ).release().perform()
    assert page.shown == count(lambda row: edges[20] <= row["score"])  # the last bar takes what is beyond
    bars[20].send_keys(Keys.ARROW_RIGHT, Keys.ENTER)
    assert page.shown == count(lambda row: edges[21] <= row["score"] < edges[22])
    page.driver.switch_to.active_element.send_keys(" ")
    assert page.shown == "10,000 rows"


def test_a_row_opens_and_the_next_one_is_a_key_away(page: Pages, write: Callable[[Sheet], Path]) -> None:
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


def test_what_was_searched_for_is_marked_in_the_text(page: Pages, write: Callable[[Sheet], Path]) -> None:
    spans = [
        Span("no\n" * 200),
        Span("so", 0.3),
        Span("Me", 0.9),
        Span("thing\x07 else"),
    ]  # a word of three tokens
    rows: list[dict[str, Any]] = [{"name": "a", "score": s} for s in (9.0, 5.0, 1.0)]
    columns = [Column("name", "name"), Column("score", "score", "score", limit=4)]
    page.open(write(Sheet("t", columns=columns, rows=rows, passages={0: [Passage("p", spans)]})), "#row=0")
    page.search("something", "1 of 3 rows")
    marked = "return [...CSS.highlights.get('found')].map(String)"
    assert page.run(marked) == ["soMething"]
    assert page.run("return document.querySelector('.reader .body').scrollTop") > 1000
    assert [page.all(f".score.{tone}") != [] for tone in ("bad", "warn")] == [True, False]


def test_heights_are_logarithms_where_some_bars_could_not_be_seen(
    page: Pages, write: Callable[[Sheet], Path]
) -> None:
    even, skewed = (
        Histogram("even", [0, 1, 2, 3], [40, 50, 3]),
        Histogram("skewed", [0, 1, 2, 3], [10**6, 10, 0]),
    )
    page.open(write(Sheet("t", histograms=[even, skewed])))
    buttons = page.all(".chart button")
    assert [button.get_attribute("aria-pressed") for button in buttons] == ["false", "true"]

    def heights() -> list[float]:
        return [float(str(bar.get_attribute("height"))) for bar in page.all(".chart:last-child .fill")]

    first, low, none = heights()
    assert first > low > first / 8 and none == 0
    buttons[1].click()
    first, low, none = heights()
    assert 0 < low < first / 50 and none == 0
    assert page.find(".chart .bin title").get_attribute("textContent") == "0 to 1: 40"


def test_the_address_keeps_what_was_asked(page: Pages, long_file: Path) -> None:
    page.open(long_file, "#search=click+now&sort=-copies&is.kind=repetition&bars.0=16-20&row=7")
    first, shown = page.rows(), page.shown
    assert page.find("#search").get_attribute("value") == "click now" and "of 10,000 rows" in shown
    assert page.all(".tabulator-col")[7].get_attribute("aria-sort") == "descending"
    assert page.find("#reader").is_displayed()
    fragment = "#" + page.driver.current_url.split("#")[1]
    page.find("#clear").click()
    assert "#" not in page.driver.current_url and page.shown == "10,000 rows"
    page.open(long_file, fragment)
    assert (page.rows(), page.shown) == (first, shown)
    page.open(long_file, "#sort=nothing&is.nothing=x&bars.0=9-999&bars.7=1-2&row=-4&%ff=%")
    assert page.shown == "10,000 rows" and not page.find("#reader").is_displayed()


def test_the_rows_that_are_shown_are_copied_as_a_plan(page: Pages, write: Callable[[Sheet], Path]) -> None:
    sheet = scan(60, words=5)
    page.open(write(sheet))
    page.search("boilerplate", f"{sum(row['kind'] == 'boilerplate' for row in sheet.rows)} of 60 rows")
    page.run(
        """navigator.clipboard.writeText = text => { window.copied = text; return Promise.resolve(); };"""
    )
    page.find("#copy").click()
    page.until(lambda: "copied" in page.find("#copy").text)
    wanted = [f"{row['shard']} {row['document']}" for row in sheet.rows if row["kind"] == "boilerplate"]
    assert page.run("return window.copied") == "\n".join(wanted) + "\n"


@BROWSERS
def test_hostile_texts_show_and_nothing_obeys_them(
    page: Pages, write: Callable[[Sheet], Path], trusted_types: bool
) -> None:
    sheet = hostile_sheet()
    page.open(hostile_file(write, trusted_types))
    assert page.driver.title == visible(sheet.title)
    assert [row[0] for row in page.rows()] == [visible(text) for text in HOSTILE]
    for number, text in enumerate(HOSTILE):
        page.run("document.getElementById(arguments[0]).click()", f"row-{number}")
        block = page.run("return document.querySelector('.reader pre').textContent")
        assert block == visible(text) + "\tplain\n" + visible(text)
        assert page.find(".reader .token").get_attribute("title") == visible(text)
    page.run("document.getElementById('row-4').click()")
    escapes = [element.text for element in page.all(".reader pre .esc")]
    assert escapes == ["\\x1b", "\\x1b", "\\x07"] * 2
    page.run("document.getElementById('row-12').click()")
    assert page.all(".reader pre .esc") == []  # typed by somebody, not a character that does not show
    page.search("\\x1b is typed", f"1 of {len(HOSTILE)} rows")
    page.search("<script>document", f"1 of {len(HOSTILE)} rows")
    assert page.driver.title == visible(sheet.title)
    assert (
        page.run("return document.querySelectorAll('img, main script, main svg[onload], b[onload]').length")
        == 0
    )
    assert page.run("return document.querySelectorAll('script').length") == 3
    page.find("#clear").click()
    shown = page.rows()
    assert page.printed() == shown
    assert page.find("thead th").get_attribute("textContent") == visible(sheet.columns[0].title)
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
def test_the_policy_keeps_everything_else_out(
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


def test_markup_that_a_script_sets_is_text(page: Pages, write: Callable[[Sheet], Path]) -> None:
    """Tabulator sets markup: whatever text comes to it, none of it becomes an element."""
    page.open(write(hostile_sheet()))
    page.run("document.querySelector('h1').innerHTML = arguments[0]", "<b>&lt;x&gt;<img src=x onerror=1>")
    assert page.find("h1").text == "<b><x><img src=x onerror=1>" and not page.all("h1 *")


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
            assert row[1:] == [told(value, column) for column in columns[1:]]
        else:
            assert row == [told(value, column) for column in columns]


def test_sorting_puts_what_has_no_value_last(page: Pages, write: Callable[[Sheet], Path]) -> None:
    values = [3.0, None, float("nan"), float("inf"), -1.0, float("-inf"), 2.0]
    names = ["part-10", "part-9", "a", "B", None, "b", "part-1"]
    rows = [{"x": x, "name": name, "i": i} for i, (x, name) in enumerate(zip(values, names))]
    columns = [Column("x", "x", "number"), Column("name", "name"), Column("i", "i", "count")]
    file = write(Sheet("order", columns=columns, rows=rows))
    for asked, order in [("x", "5460312"), ("-x", "3064512"), ("name", "2536104"), ("-name", "0163524")]:
        page.open(file, f"#sort={asked}")
        assert "".join(row[2] for row in page.rows()) == order


def test_a_phone_and_paper(page: Pages, long_file: Path) -> None:
    driver = page.driver
    try:
        size = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        page.open(long_file)
        assert page.run("return document.documentElement.scrollWidth") <= 390
        page.run("document.getElementById('row-2').click()")
        reader = page.find("#reader").rect
        assert reader["width"] == 390 and page.find(".reader pre").is_displayed()
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    page.open(long_file)
    page.run("document.querySelector('.tabulator-tableholder').scrollTop = 5000")
    page.until(lambda: page.places()[0] > 100)
    shown = page.rows()
    printed = page.printed()
    assert len(printed) == 2000 and printed[150] in shown and not page.find(".paper").is_displayed()
    page.run("dispatchEvent(new Event('afterprint'))")
    assert page.all(".paper") == []
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        page.printed()
        assert page.find(".paper").is_displayed() and not page.find("#grid").is_displayed()
        assert page.run("return document.querySelector('.paper').nextElementSibling.id") == "reader"
        page.run("dispatchEvent(new Event('afterprint'))")
    finally:
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    page.until(lambda: page.find(f"#row-{5000 // 34 + 2}").is_displayed())
    assert page.run("return document.querySelector('.tabulator-tableholder').scrollTop") == 5000


@pytest.mark.parametrize(
    "sheet", [Sheet("t"), Sheet("t", columns=[Column("a", "a")]), Sheet("t", rows=[{"a": 1}])]
)
def test_a_sheet_of_nothing_is_a_page(page: Pages, write: Callable[[Sheet], Path], sheet: Sheet) -> None:
    page.open(write(sheet))
    assert page.find("h1").text == "t"
