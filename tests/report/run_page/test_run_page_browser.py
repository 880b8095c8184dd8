"""The run page in a real browser: a run that goes on, zoom, incidents, several runs, hostile texts, the file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from megastable.report.run_page.page_file import write_page
from megastable.run.directory import RunDirectory
from megastable.run.records import Recorder
from tests.patience import until
from tests.report.run_page.conftest import serving
from tests.report.run_page.made_runs import curve, machines, made_run, summary
from tests.report.run_page.run_files import BEGIN, note, progress, record

pytestmark = pytest.mark.slow

HOSTILE = (
    "<img src=x onerror=document.title='bad'>\x1b[31m\u202e</script><script>document.title='bad'</script>"
)
# What the plot of the loss holds: the x of its axis, and the window that it shows.
LAST = "return Math.max(...document.querySelector('#plot-loss').plot().data[0])"
WINDOW = "const x = document.querySelector('#plot-%s').plot().scales.x; return [x.min, x.max]"


class Pages:
    """The browser, and the page that it shows."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, address: str) -> None:
        self.driver.get("about:blank")
        self.driver.get(address)
        until(lambda: self.run("return document.documentElement.dataset.ready"))

    def run(self, script: str, *given: Any) -> Any:
        return self.driver.execute_script(script, *given)

    def leave(self) -> None:
        """Before its server ends: else the page says that it cannot be reached."""
        self.driver.get("about:blank")

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """Of what is there in one moment: a page that is alive may replace what `find` has found."""
        return self.run("return document.querySelector(arguments[0]).innerText", selector)

    def texts(self, selector: str) -> list[str]:
        return self.run(
            "return [...document.querySelectorAll(arguments[0])].map(one => one.textContent)", selector
        )

    def window(self, plot: str = "loss") -> list[float]:
        return self.run(WINDOW % plot)

    def press(self, *keys: str) -> None:
        ActionChains(self.driver, duration=0).send_keys(*keys).perform()

    def errors(self) -> list[Any]:
        return self.driver.get_log("browser")


@pytest.fixture
def page(driver: webdriver.Chrome) -> Iterator[Pages]:
    """Fails the test if the page logs anything: an error of its script, or what its policy refused."""
    pages = Pages(driver)
    pages.errors()
    yield pages
    assert pages.errors() == []


def with_page(run: RunDirectory, number: int = 1) -> RunDirectory:
    """As if a post-mortem had been written."""
    folder = run.incidents / f"{number:04d}"
    folder.mkdir(parents=True)
    (folder / "report.html").write_text(
        "<!doctype html><style>h1 { color: red }</style><h1>What happened</h1>"
    )
    return run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return with_page(made_run(tmp_path_factory.mktemp("made") / "run"))


@pytest.fixture(scope="module")
def address(made: RunDirectory) -> Iterator[str]:
    with serving(made.root) as address:
        yield address


@pytest.fixture(scope="module")
def file(made: RunDirectory, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("file") / "a page.html"
    write_page([made.root], path)
    return path.as_uri()


def test_a_run_that_goes_on(page: Pages, tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", incidents=())
    with serving(run.root) as address:
        page.open(address)
        assert page.run(LAST) == 150 and "step 150 of 200" in page.text(".figures")
        # A step that is in no file yet.
        progress(run, 151, time.time(), 3.21)
        until(lambda: page.run(LAST) == 151)
        assert "step 151 of 200" in page.text(".figures")
        # Its record, more, an event, and an incident that is not over.
        recorder = Recorder(run.steps, 100)
        for step in range(151, 161):
            recorder.add_records(record(step, BEGIN + 400 + 2 * step, curve(step)))
        recorder.flush_records()
        told = summary(1, 158, outcome="open", actions=[])
        note(run, time.time(), "incident", what="opened", number=1, step=159, reason="loss up", summary=told)
        until(lambda: page.run(LAST) == 160)
        until(lambda: page.texts(".flags .flag.open") == ["1"])
        until(lambda: "incident 1: opened: loss up" in page.texts("#journal .text")[0])
        page.leave()


@pytest.mark.parametrize("kind", ["address", "file"])
def test_a_drag_zooms_all_plots(page: Pages, kind: str, request: pytest.FixtureRequest) -> None:
    page.open(request.getfixturevalue(kind))
    whole = page.window()
    assert whole == [1, 150] == page.window("grad_norm")
    over = page.find("#plot-grad_norm .u-over")
    width = over.size["width"]
    drag = ActionChains(page.driver, duration=20).move_to_element_with_offset(over, -width // 4, 0)
    drag.click_and_hold().move_by_offset(width // 4, 3).release().perform()
    low, high = page.window()
    assert low == pytest.approx(38, abs=3) and high == pytest.approx(76, abs=3)
    assert page.window("lr") == page.window("seconds") == [low, high] and "from=" in page.driver.current_url
    page.press("a")  # the same steps, by tokens
    assert page.window() == pytest.approx([low * 256, high * 256], rel=0.02)
    page.press("a", "a", Keys.ESCAPE)
    assert page.window() == whole and "#" not in page.driver.current_url
    page.press("+")
    low, high = page.window()
    assert high - low == pytest.approx((whole[1] - whole[0]) / 2)
    page.press(Keys.ARROW_RIGHT)
    assert page.window()[0] > low
    ActionChains(page.driver, duration=0).double_click(page.find("#plot-loss .u-over")).perform()
    assert page.window() == whole


@pytest.mark.parametrize("kind", ["address", "file"])
def test_an_incident_opens_its_post_mortem(page: Pages, kind: str, request: pytest.FixtureRequest) -> None:
    page.open(request.getfixturevalue(kind))
    assert page.texts(".flags .flag") == ["1", "2"]
    page.find(".flags .flag").click()
    assert page.find("dialog").is_displayed() and "At step 60" in page.text("dialog h2")
    page.driver.switch_to.frame(page.find("dialog iframe"))
    heading = until(lambda: page.all("h1"))[0]
    assert heading.text == "What happened" and heading.value_of_css_property("color") == "rgba(255, 0, 0, 1)"
    page.driver.switch_to.default_content()
    page.press("n")  # the next one has no page: what the journal says
    assert "At step 110" in page.text("dialog h2") and not page.all("dialog iframe")
    assert "incident 2: back at step 107" in page.text("dialog .timeline")
    page.press(Keys.ESCAPE)
    assert not page.find("dialog").is_displayed() and page.window() == [1, 150]
    page.press("p")
    low, high = page.window()
    assert low < 60 < high < 130


@pytest.mark.parametrize("served", [True, False], ids=["served", "file"])
def test_no_text_of_a_run_is_obeyed(page: Pages, tmp_path: Path, served: bool) -> None:
    run = with_page(made_run(tmp_path / HOSTILE.replace("/", "|"), last=80))
    told = summary(
        3,
        70,
        reasons=[HOSTILE],
        cause=HOSTILE,
        verdict=HOSTILE,
        actions=[HOSTILE],
        outcome=HOSTILE,
        failure=HOSTILE,
    )
    note(run, BEGIN + 900, "incident", what="opened", number=3, step=71, reason=HOSTILE, summary=told)
    note(run, BEGIN + 901, "evaluated", step=HOSTILE, loss=HOSTILE)
    note(run, BEGIN + 902, "warning", step=70, text=HOSTILE)
    note(run, BEGIN + 903, "launched", attempt=2, hosts=[HOSTILE])
    note(run, BEGIN + 904, "ended", attempt=2, failure=HOSTILE, code=1)
    note(run, BEGIN + 905, "checkpoint", step=70, name=HOSTILE, bytes=1, seconds=1.0, blocked=0.0)

    def look(address: str) -> None:
        page.open(address)
        page.find("#incidents li:first-child button").click()
        assert HOSTILE[:20] in page.text("dialog h2")
        page.press("p")
        page.press(Keys.ESCAPE)
        assert any(HOSTILE[:20] in text for text in page.texts("#journal .text"))
        assert HOSTILE[:20] in page.text(".bar .name")
        assert page.all("main img, main script, main svg") == [] and page.driver.title != "bad"
        assert "\u202e" not in page.run("return document.body.textContent")

    if served:
        with serving(run.root) as address:
            look(address)
            page.leave()
    else:
        write_page([run.root], tmp_path / "run.html")
        look((tmp_path / "run.html").as_uri())


def test_the_policy_of_the_page_refuses_scripts(driver: webdriver.Chrome, address: str, file: str) -> None:
    page = Pages(driver)
    for where in (address, file):
        page.open(where)
        page.errors()
        page.run(
            "const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s)"
        )
        assert page.run("return window.ran") is None
        assert any("Content Security Policy" in entry["message"] for entry in page.errors())


def test_ranks_gpus_and_hosts(page: Pages, tmp_path: Path) -> None:
    """Recorded while the page is open; without any, there is no such part."""
    run = made_run(tmp_path / "run")
    with serving(run.root) as address:
        page.open(address)
        assert page.run("return document.querySelector('#hosts').hidden")
        machines(run)
        until(lambda: page.all("#heat-machine-own"))
        row = page.text("#hosts tbody tr")
        assert "host-1" in row and "hardware slowdown" in row
        page.run("document.querySelector('#hosts').scrollIntoView()")
        colours = page.run("""
            const canvas = document.querySelector('#heat-machine-own canvas'), pen = canvas.getContext('2d');
            const row = (canvas.height - 20) / 4, column = pen.getImageData(300, 0, 1, canvas.height).data;
            const at = (n) => 4 * Math.floor((n + 0.5) * row);
            return [0, 2].map((n) => [...column.slice(at(n), at(n) + 3)]);
        """)
        # The slow rank in the brightest colour.
        assert colours[0] != colours[1] and colours[1] == [253, 231, 37]
        page.leave()


def test_loads_of_experts(page: Pages, tmp_path: Path) -> None:
    """The last moment first, its worst layer over time, an expert without tokens named and marked; in both themes."""

    def loads(step: int) -> list[list[float]]:
        return [[1.0, 1.0, 1.0, 1.0], [0.0, 0.8, 2.2, 1.0] if step > 100 else [0.9, 1.1, 1.0, 1.0]]

    write_page([made_run(tmp_path / "run", loads=loads).root], tmp_path / "page.html")
    page.open((tmp_path / "page.html").as_uri())
    colours_of = """const canvas = document.querySelector('#loads-layers canvas'), wide = canvas.width - 66;
        const all = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        return [...arguments].map(([r, c]) => {
            const pixel = 4 * (canvas.width * (18 * r + 9) + Math.round(58 + wide * (c + 0.5) / 4));
            return [...all.slice(pixel, pixel + 3)];
        })"""
    ink = "return getComputedStyle(document.documentElement).getPropertyValue('--ink').trim()"
    for theme in ("light", "dark"):
        dead, even, full = page.run(colours_of, (1, 0), (0, 0), (1, 2))
        assert "#" + bytes(dead).hex() == page.run(ink)
        assert (
            sum(map(abs, np.subtract(full, even))) > 60 and full[0] > full[2]
        )  # the warm hue, above the mean
        last = page.text("#loads .note")
        assert last.startswith("Step 150: the largest load is 2.2 times the mean, of expert 2 in block 1.")
        assert "1 of 8 experts got no token: 0 of block 1." in last
        assert page.run("return document.querySelector('#loads-layers canvas').ariaLabel") in last
        assert page.text("#loads-time b") == "Experts of block 1"
        if theme == "light":
            page.run(
                "[...document.querySelectorAll('.bar button')].find(one => one.innerText === '◐').click()"
            )
    page.run(
        "const one = document.querySelector('#loads input'); one.value = 8; one.dispatchEvent(new Event('input'))"
    )
    assert page.text("#loads .note").startswith(
        "Step 90: the largest load is 1.1 times the mean, of expert 1 in block 1. Every expert got tokens."
    )
    page.run("document.querySelector('#loads-layers canvas').scrollIntoView({block: 'center'})")
    ActionChains(page.driver).move_to_element_with_offset(
        page.find("#loads-layers canvas"), 0, -18
    ).click().perform()
    assert page.text("#loads-time b") == "Experts of block 0"
