"""The server: what it answers, to whom, and what it never serves."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from megastable.run.directory import RunDirectory
from tests.report.run_page.conftest import serving
from tests.report.run_page.made_runs import curve, made_run
from tests.report.run_page.run_files import progress

pytest.importorskip("uvicorn")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    run = made_run(tmp_path_factory.mktemp("made") / "run")
    folder = run.incidents / "0001"
    folder.mkdir(parents=True)
    (folder / "report.html").write_text("<h1>post-mortem</h1>")
    (folder / "evil.svg").write_text("<svg/>")
    (folder / "out.txt").symlink_to(run.recipe)
    (run.incidents / "index.html").write_text("all of them")
    return run


@pytest.fixture(scope="module")
def address(run: RunDirectory) -> Iterator[str]:
    with serving(run.root) as address:
        yield address


def ask(address: str, **headers: str) -> tuple[int, Any, bytes]:
    request = urllib.request.Request(address, headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=30) as answer:
            assert isinstance(answer, HTTPResponse)
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def test_server_gives_the_page_and_its_parts(address: str) -> None:
    for path, kind in (("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript")):
        status, headers, body = ask(address + path)
        assert status == 200 and headers["content-type"].startswith(kind) and body
        assert "script-src 'self'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-store"
    assert b"Leon Sorokin" in ask(address + "/page.js")[2]  # the licence goes along


def test_server_answers_in_json(address: str) -> None:
    for path in (
        "/heads",
        "/run/0/panel",
        "/run/0/plots?axis=time&columns=60",
        "/run/0/heat",
        "/run/0/machines?axis=tokens&from=5",
        "/run/0/journal?query=x",
    ):
        status, _, body = ask(address + path)
        assert status == 200
        json.loads(body, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))


def test_server_lets_an_incidents_page_run_nothing(address: str) -> None:
    status, headers, body = ask(address + "/run/0/incidents/0001/report.html")
    assert status == 200 and body == b"<h1>post-mortem</h1>"
    policy = headers["content-security-policy"]
    assert policy.startswith("sandbox") and "allow-scripts" not in policy and "default-src 'none'" in policy
    assert ask(address + "/run/0/incidents/index.html")[2] == b"all of them"


@pytest.mark.parametrize(
    "path",
    ["/run/1/panel", "/run/-1/panel", "/run/0/incidents/0001/evil.svg", "/run/0/incidents/0001/out.txt",
     "/run/0/incidents/0001/..%2f..%2frecipe.yaml", "/run/0/incidents/..%2frecipe.yaml",
     "/run/0/incidents/0002/report.html",
     "/run/0/incidents/0001/%00.html", "/run/0/incidents/%2e%2e/journal.jsonl", "/nothing"],
)  # fmt: skip
def test_server_gives_nothing_else(address: str, path: str) -> None:
    assert ask(address + path)[0] == 404


def test_server_turns_a_token_into_a_cookie(run: RunDirectory) -> None:
    with serving(run.root, token="tok", loopback=False) as address:
        assert ask(address)[0] == ask(address + "/heads")[0] == ask(address + "/?token=no")[0] == 401
        assert ask(address + "/heads?token=tok")[0] == 200
        request = urllib.request.Request(address + "/?token=tok")
        jar = urllib.request.HTTPCookieProcessor()
        with urllib.request.build_opener(urllib.request.ProxyHandler({}), jar).open(
            request, timeout=30
        ) as answer:
            assert answer.url == address + "/"  # the token is not in the address any more
        (cookie,) = jar.cookiejar
        assert cookie.has_nonstandard_attr("HttpOnly") and cookie.get_nonstandard_attr("SameSite") == "lax"


def test_server_sends_news_within_two_seconds(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", incidents=())
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with serving(run.root) as address, opener.open(address + "/events", timeout=30) as events:
        assert json.loads(events.readline().removeprefix(b"data: "))[0]["step"] == 150
        began = time.time()
        progress(run, 151, time.time(), curve(151))
        step = 0
        while step < 151:
            line = events.readline()
            step = json.loads(line.removeprefix(b"data: "))[0]["step"] if line.startswith(b"data") else step
        assert time.time() - began < 20  # 2 s on a quiet machine
