"""A headless browser, for tests of pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = (
    "" if CHROMIUM and DRIVER else "no chromium and chromedriver: apt-get install chromium chromium-driver"
)
FLAGS = """--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --disable-dev-shm-usage --disable-extensions --disable-crash-reporter
    --window-size=1400,1200 --force-device-scale-factor=1"""


@contextmanager
def browser(home: Path) -> Iterator[webdriver.Chrome]:
    """One that keeps its log. home: an empty folder for its files."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in [*FLAGS.split(), f"--user-data-dir={home}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    names = ("NO_PROXY", "no_proxy")  # the driver is on this machine
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "localhost,127.0.0.1"))
    try:
        driver = webdriver.Chrome(options, Service(str(DRIVER), env={**os.environ, "TMPDIR": str(home)}))
        try:
            yield driver
        finally:
            driver.quit()
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({name: value} if value is not None else {})
