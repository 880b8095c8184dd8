"""A browser, and a server of the page in a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium import webdriver

from megastable.report.run_page.page_server import PageGuard
from megastable.report.run_page.run_reader import RunReader
from tests.browser import MISSING, browser
from tests.patience import PATIENCE, until


@contextmanager
def serving(*runs: Path, token: str = "", loopback: bool = True) -> Iterator[str]:
    """The address of a server of these runs."""
    uvicorn = pytest.importorskip("uvicorn")
    from megastable.report.run_page.page_server import PageServer, open_socket

    readers = [RunReader(run) for run in runs]
    with open_socket("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
        page = PageServer(readers, PageGuard(loopback, token, port))
        config = uvicorn.Config(
            page.build_app(), log_level="error", access_log=False, timeout_graceful_shutdown=1, ws="none"
        )
        server = uvicorn.Server(config)
        page.ending = lambda: server.should_exit
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        until(lambda: server.started)
        try:
            yield f"http://localhost:{port}"
        finally:
            server.should_exit = True
            thread.join(PATIENCE)


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    if MISSING:
        pytest.skip(MISSING)
    with browser(tmp_path_factory.mktemp("browser")) as driver:
        yield driver
