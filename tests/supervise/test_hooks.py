"""People are told, whatever the command or the webhook does: real processes and real servers on loopback."""

from __future__ import annotations

import json
import os
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from megastable.base.errors import ConfigError
from megastable.config.supervise import SuperviseConfig
from megastable.supervise.hooks import Notices, check_hooks
from tests.patience import PATIENCE, until

Failures = list[tuple[str, str]]


@pytest.fixture(autouse=True)
def _direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def settings(**values: Any) -> SuperviseConfig:
    return SuperviseConfig(**{"notify_seconds": 0.0, "hook_timeout": 20.0} | values)


@contextmanager
def serving(handler: type[socketserver.BaseRequestHandler]) -> Iterator[str]:
    class Server(socketserver.ThreadingMixIn, HTTPServer):
        daemon_threads = True
        block_on_close = False

    with Server(("127.0.0.1", 0), handler) as server:  # type: ignore[arg-type]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def receiver(
    answer: Callable[[BaseHTTPRequestHandler], None] | None = None,
) -> tuple[type[BaseHTTPRequestHandler], list[dict[str, Any]]]:
    """A handler that keeps what it gets, then answers; 200 if nothing else is said."""
    got: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            got.append(json.loads(self.rfile.read(length)) | {"path": self.path})
            if answer is not None:
                answer(self)
            else:
                self.send_response(200)
                self.end_headers()

        def do_GET(self) -> None:
            self.send_error(500, "a POST must not arrive as a GET")

        def log_message(self, *_: object) -> None:
            pass

    return Handler, got


def told(config: SuperviseConfig, *texts: str, timeout: float = PATIENCE) -> Failures:
    failures: Failures = []
    hooks = Notices(config, lambda kind, problem: failures.append((kind, problem)))
    for text in texts:
        hooks.send_notice("incident", text, {"run": "runs/x", "step": 7})
    hooks.close(timeout)
    return failures


def script(folder: Path, content: str) -> str:
    path = folder / "hook.sh"
    path.write_text(f"#!/bin/sh\n{content}\n")
    path.chmod(0o755)
    return str(path)


def test_notices_reach_a_webhook_whole() -> None:
    handler, got = receiver()
    with serving(handler) as url:
        failures: Failures = []
        hooks = Notices(settings(webhook=f"{url}/T0/secret"), lambda *f: failures.append(f))
        facts: dict[str, Any] = {"run": "<r>", "loss": float("nan"), "incident": {"number": 1}}
        hooks.send_notice("incident", "step 7: \x1b[31mred\nsecond <b>line</b> & <!channel>", facts)
        facts["incident"]["number"] = 2  # what is told is what was so
        hooks.close(30)
    assert failures == []
    (message,) = got
    # Slack and its relatives act on what stands between < and >.
    assert message["text"] == "step 7: \\x1b[31mred\nsecond &lt;b&gt;line&lt;/b&gt; &amp; &lt;!channel&gt;"
    assert message["event"] == "incident" and message["path"] == "/T0/secret"
    assert message["facts"] == {"run": "<r>", "loss": "nan", "incident": {"number": 1}}


def test_notices_reach_a_command_on_standard_input_and_in_the_environment(tmp_path: Path) -> None:
    command = script(tmp_path, 'cat > "$1/in.json"; env > "$1/env"')
    assert told(settings(command=f"{command} '{tmp_path}'"), "it's; $(touch /tmp/no) `x` <b>&") == []
    assert json.loads((tmp_path / "in.json").read_text())["facts"] == {"run": "runs/x", "step": 7}
    environment = dict(
        line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines() if "=" in line
    )
    assert environment["MEGASTABLE_TEXT"] == "it's; $(touch /tmp/no) `x` <b>&"
    assert environment["MEGASTABLE_EVENT"] == "incident"
    assert environment["MEGASTABLE_RUN"] == "runs/x" and environment["MEGASTABLE_STEP"] == "7"
    assert environment["PATH"] == os.environ["PATH"]


def test_notices_fold_what_comes_in_between_into_the_next() -> None:
    handler, got = receiver()
    with serving(handler) as url:
        hooks = Notices(settings(webhook=url, notify_seconds=3600.0), lambda *_: None)
        hooks.send_notice("incident", "first", {})
        until(lambda: got)
        for text in ("second", "third", "fourth"):
            hooks.send_notice("restart", text, {"text": text})
        assert len(got) == 1
        hooks.close(30)
    assert [m["text"] for m in got] == ["first", "fourth\nand 2 more: second; third"]
    assert [m["text"] for m in got[1]["more"]] == ["second", "third"] and got[1]["facts"] == {
        "text": "fourth"
    }


def test_notices_report_a_refusal_once_without_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(request: BaseHTTPRequestHandler) -> None:
        request.send_response(500, "so \x1b[2J")
        request.end_headers()
        request.wfile.write(f"not {request.path} {'y' * 5000}".encode())

    handler, got = receiver(refuse)
    with serving(handler) as url:
        monkeypatch.setenv("HOOK_URL", f"{url}/T123/very-secret?token=also-secret")
        failures: Failures = []
        hooks = Notices(settings(webhook="$HOOK_URL"), lambda *f: failures.append(f))
        hooks.send_notice("incident", "one", {})
        until(lambda: len(got) == 3)  # it is tried again
        hooks.send_notice("incident", "two", {})
        hooks.close(30)
    assert (
        got[-1]["text"] == "two\nand 1 more: one"
    )  # the third try may have been under way: it is tried once more
    ((kind, problem),) = failures
    assert (kind, problem) == ("webhook", "127.0.0.1: answered 500 Internal Server Error")


def test_webhook_follows_no_redirect() -> None:
    def redirect(request: BaseHTTPRequestHandler) -> None:
        request.send_response(307)
        request.send_header("Location", request.path)
        request.end_headers()

    handler, got = receiver(redirect)
    with serving(handler) as url:
        ((_, problem),) = told(settings(webhook=url), "x")
    assert "answered 307" in problem and "moved" in problem
    assert len(got) <= 3


class Silent(socketserver.BaseRequestHandler):
    """Takes the connection and sends a header that never ends, a byte now and then."""

    def handle(self) -> None:
        try:
            self.request.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            while True:
                self.request.sendall(b"x")
                time.sleep(0.05)
        except OSError:
            pass


def test_notices_are_delayed_by_no_webhook_that_hangs() -> None:
    with serving(Silent) as url:
        failures: Failures = []
        hooks = Notices(settings(webhook=url, hook_timeout=0.5), lambda *f: failures.append(f))
        begin = time.thread_time()
        for n in range(200):
            hooks.send_notice("incident", str(n), {})
        assert time.thread_time() - begin < 5
        hooks.close(30)
    assert failures == [("webhook", "127.0.0.1: not done after 0.5 s, and ended (supervise.hook_timeout)")]
    assert _children() == []


@pytest.mark.quick("*yes*")
@pytest.mark.parametrize(
    "how",
    ["sleep 600 & sleep 600", "sleep 600 & exit 0", "sleep 600 & yes & yes", "exec >&- 2>&-; sleep 600"],
)
def test_notices_end_a_command_and_all_that_it_started(how: str, tmp_path: Path) -> None:
    failures = told(settings(command=script(tmp_path, how), hook_timeout=0.5), "x")
    expected = (
        [] if "exit" in how else [("command", "not done after 0.5 s, and ended (supervise.hook_timeout)")]
    )
    assert failures == expected
    assert _children() == []


def test_notices_tell_last_words_of_a_command_but_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "s3cret value")
    command = script(tmp_path, 'echo "bad token $1" >&2; exit 3')
    failures = told(settings(command=f"{command} ${{TOKEN}}"), "x")
    assert failures == [("command", "ended with code 3: bad token …")]
    assert told(settings(command=script(tmp_path, "kill -9 $$")), "x") == [
        ("command", "was killed by signal 9")
    ]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("webhook", "ftp://host/x", "must begin with https"),
        ("webhook", "hooks.example.org/T0/secret", "must begin with https"),
        ("webhook", "https:///secret", "must begin with https"),
        ("webhook", "https://host:99999/secret", "must begin with https"),
        ("webhook", "https://[::1/secret", "must begin with https"),
        ("webhook", "https://me:secret@host/", "no user"),
        ("webhook", "https://host/secret\nX: y", "no user, blanks"),
        ("webhook", "https://host/secret ä", "no user, blanks"),
        ("webhook", "$MEGASTABLE_NOT_SET", "no variable MEGASTABLE_NOT_SET"),
        ("webhook", "https://host/$", "write \\$\\$"),
        ("command", "", "is empty"),
        ("command", "echo 'open", "close the quotes"),
        ("command", "no-such-program-here --x", "'no-such-program-here' is not a program"),
        ("command", "/etc/passwd", "is not a program"),
        ("command", "echo $MEGASTABLE_NOT_SET", "no variable MEGASTABLE_NOT_SET"),
    ],
)  # fmt: skip
def test_check_refuses_what_cannot_work(key: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_hooks(settings(**{key: value}))
    assert f"supervise.{key}" in str(caught.value) and "secret" not in str(caught.value)


def _children() -> list[str]:
    """Processes below this one that still run, zombies left out; and the server that other tests fork ranks from, whose
    command line names a path hook."""
    return [
        " ".join(p.cmdline()) for p in psutil.Process().children(recursive=True)
        if p.status() != psutil.STATUS_ZOMBIE and ("sleep" in p.name() or "hook" in " ".join(p.cmdline()))
        and "forkserver" not in " ".join(p.cmdline())
    ]  # fmt: skip
