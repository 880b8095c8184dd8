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
from megastable.supervise.hooks import check
from megastable.supervise.notices import KEPT, PROBLEMS, Notices
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
        hooks.notify("incident", text, {"run": "runs/x", "step": 7})
    hooks.close(timeout)
    return failures


def script(folder: Path, content: str) -> str:
    path = folder / "hook.sh"
    path.write_text(f"#!/bin/sh\n{content}\n")
    path.chmod(0o755)
    return str(path)


def test_nobody_to_tell() -> None:
    assert told(settings(), "hello") == []


def test_a_webhook_gets_the_whole_story() -> None:
    handler, got = receiver()
    with serving(handler) as url:
        failures: Failures = []
        hooks = Notices(settings(webhook=f"{url}/T0/secret"), lambda *f: failures.append(f))
        facts: dict[str, Any] = {"run": "<r>", "loss": float("nan"), "incident": {"number": 1}}
        hooks.notify("incident", "step 7: \x1b[31mred\nsecond <b>line</b> & <!channel>", facts)
        facts["incident"]["number"] = 2  # what is told is what was so
        hooks.close(30)
    assert failures == []
    (message,) = got
    # Slack and its relatives act on what stands between < and >.
    assert message["text"] == "step 7: \\x1b[31mred\nsecond &lt;b&gt;line&lt;/b&gt; &amp; &lt;!channel&gt;"
    assert message["event"] == "incident" and message["path"] == "/T0/secret"
    assert message["facts"] == {"run": "<r>", "loss": "nan", "incident": {"number": 1}}


def test_a_command_gets_it_on_standard_input_and_in_the_environment(tmp_path: Path) -> None:
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


def test_facts_that_no_environment_takes_are_no_obstacle(tmp_path: Path) -> None:
    command = script(tmp_path, f"cat > {tmp_path}/in.json")
    failures: Failures = []
    hooks = Notices(settings(command=command), lambda *f: failures.append(f))
    loop: dict[str, Any] = {}
    loop["loop"] = loop
    hooks.notify("incident", "loop", loop)
    hooks.close(30)
    assert json.loads((tmp_path / "in.json").read_text())["facts"] == {}
    hooks = Notices(settings(command=command), lambda *f: failures.append(f))
    hooks.notify(
        "incident", "x" * 500_000, {"a=b\0": "c\0d", "huge": ["x"] * 100_000, "step": 3, "ü": "\ud800"}
    )
    hooks.close(30)
    assert failures == []
    message = json.loads((tmp_path / "in.json").read_text())
    assert message["facts"]["step"] == 3 and "huge" not in message["facts"]
    assert len(message["text"]) < 2000


def test_what_comes_in_between_is_folded_into_the_next() -> None:
    handler, got = receiver()
    with serving(handler) as url:
        hooks = Notices(settings(webhook=url, notify_seconds=3600.0), lambda *_: None)
        hooks.notify("incident", "first", {})
        until(lambda: got)
        for text in ("second", "third", "fourth"):
            hooks.notify("restart", text, {"text": text})
        assert len(got) == 1
        hooks.close(30)
    assert [m["text"] for m in got] == ["first", "fourth\nand 2 more: second; third"]
    assert [m["text"] for m in got[1]["more"]] == ["second", "third"] and got[1]["facts"] == {
        "text": "fourth"
    }


def test_the_pause_ends_by_itself() -> None:
    handler, got = receiver()
    with serving(handler) as url:
        hooks = Notices(settings(webhook=url, notify_seconds=0.3), lambda *_: None)
        for n in range(3):
            hooks.notify("incident", str(n), {})
        until(lambda: got and got[-1]["text"].startswith("2"))
        assert len(got) <= 2
        hooks.close(30)
    assert got[-1]["text"].startswith("2")


def test_a_flood_keeps_the_last_and_the_count() -> None:
    handler, got = receiver()
    with serving(handler) as url:
        hooks = Notices(settings(webhook=url, notify_seconds=3600.0), lambda *_: None)
        hooks.notify("incident", "first", {})
        until(lambda: got)
        for n in range(1000):
            hooks.notify("incident", f"n{n}", {})
        hooks.close(30)
    assert len(got) == 2 and len(got[1]["more"]) == KEPT - 1
    assert got[1]["text"].startswith("n999\nand 999 more: ")


def test_a_refusal_is_reported_once_without_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(request: BaseHTTPRequestHandler) -> None:
        request.send_response(500, "so \x1b[2J")
        request.end_headers()
        request.wfile.write(f"not {request.path} {'y' * 5000}".encode())

    handler, got = receiver(refuse)
    with serving(handler) as url:
        monkeypatch.setenv("HOOK_URL", f"{url}/T123/very-secret?token=also-secret")
        failures: Failures = []
        hooks = Notices(settings(webhook="$HOOK_URL"), lambda *f: failures.append(f))
        hooks.notify("incident", "one", {})
        until(lambda: len(got) == 3)  # it is tried again
        hooks.notify("incident", "two", {})
        hooks.close(30)
    assert (
        got[-1]["text"] == "two\nand 1 more: one"
    )  # the third try may have been under way: it is tried once more
    ((kind, problem),) = failures
    assert (kind, problem) == ("webhook", "127.0.0.1: answered 500 Internal Server Error")


def _quote(request: BaseHTTPRequestHandler) -> None:
    """Without what comes after the question mark, in the reason and in the body."""
    path = request.path.partition("?")[0]
    request.send_response(404, f"no {path}")
    request.end_headers()
    request.wfile.write(f"no such hook: {path}".encode())


def _cut_short(request: BaseHTTPRequestHandler) -> None:
    request.send_response(404)
    request.end_headers()
    request.wfile.write(f"{'x' * 150} {request.path}".encode())


def _escape(request: BaseHTTPRequestHandler) -> None:
    request.send_response(404)
    request.end_headers()
    request.wfile.write(json.dumps({"path": request.path}).replace("/", "\\/").encode())


def _echo(request: BaseHTTPRequestHandler) -> None:
    """Not HTTP at all."""
    request.wfile.write(f"got {request.path.partition('?')[0]}\r\n".encode())


@pytest.mark.parametrize("answer", [_quote, _cut_short, _escape, _echo])
def test_no_part_of_the_address_comes_back(answer: Callable[[BaseHTTPRequestHandler], None]) -> None:
    handler, _ = receiver(answer)
    with serving(handler) as url:
        ((_, problem),) = told(settings(webhook=f"{url}/services/T0/{'verysecret' * 8}?thread=1"), "x")
    assert problem in ("127.0.0.1: answered 404 Not Found", "127.0.0.1: no answer in HTTP (BadStatusLine)")


def test_a_redirect_is_not_followed() -> None:
    def redirect(request: BaseHTTPRequestHandler) -> None:
        request.send_response(307)
        request.send_header("Location", request.path)
        request.end_headers()

    handler, got = receiver(redirect)
    with serving(handler) as url:
        ((_, problem),) = told(settings(webhook=url), "x")
    assert "answered 307" in problem and "moved" in problem
    assert len(got) <= 3


def test_an_answer_without_end_is_an_answer() -> None:
    ended = threading.Event()

    def stream(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        try:
            while True:
                request.wfile.write(b"x" * 65536)
        except OSError:
            ended.set()

    handler, _ = receiver(stream)
    with serving(handler) as url:
        assert told(settings(webhook=url), "x") == []
        assert ended.wait(20)


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


def test_a_webhook_that_hangs_delays_nobody() -> None:
    with serving(Silent) as url:
        failures: Failures = []
        hooks = Notices(settings(webhook=url, hook_timeout=0.5), lambda *f: failures.append(f))
        begin = time.thread_time()
        for n in range(200):
            hooks.notify("incident", str(n), {})
        assert time.thread_time() - begin < 5
        hooks.close(30)
    assert failures == [("webhook", "127.0.0.1: not done after 0.5 s, and ended (supervise.hook_timeout)")]
    assert _children() == []


def test_nobody_listens() -> None:
    with socketserver.TCPServer(("127.0.0.1", 0), Silent) as server:
        port = server.server_address[1]
    ((_, problem),) = told(settings(webhook=f"http://127.0.0.1:{port}/secret"), "x")
    assert "127.0.0.1: could not be reached" in problem and "secret" not in problem


def test_closing_waits_only_so_long_and_leaves_nobody(tmp_path: Path) -> None:
    command = script(tmp_path, f"echo $$ > {tmp_path}/pid; sleep 600")
    failures: Failures = []
    hooks = Notices(settings(command=command, hook_timeout=600.0), lambda *f: failures.append(f))
    hooks.notify("incident", "x", {})
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip())
    hooks.close(0.1)
    assert failures[0] == ("command", "the last notification was not delivered in the time there was")
    until(lambda: _children() == [])
    hooks.notify("incident", "too late", {})
    hooks.close(0.1)


@pytest.mark.quick("*yes*")
@pytest.mark.parametrize(
    "how",
    ["sleep 600 & sleep 600", "sleep 600 & exit 0", "sleep 600 & yes & yes", "exec >&- 2>&-; sleep 600"],
)
def test_a_command_and_all_that_it_started_are_ended(how: str, tmp_path: Path) -> None:
    failures = told(settings(command=script(tmp_path, how), hook_timeout=0.5), "x")
    expected = (
        [] if "exit" in how else [("command", "not done after 0.5 s, and ended (supervise.hook_timeout)")]
    )
    assert failures == expected
    assert _children() == []


def test_a_child_that_left_the_group_holds_nobody_up(tmp_path: Path) -> None:
    command = script(
        tmp_path,
        f"setsid sh -c 'echo $$ > {tmp_path}/pid; exec yes' &\nwhile ! test -s {tmp_path}/pid; do :; done",
    )
    assert told(settings(command=command, hook_timeout=5.0), "x") == []
    # Its output is closed, which ends it.
    until(lambda: _gone(int((tmp_path / "pid").read_text())))


def test_a_failing_command_tells_its_last_words_but_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "s3cret value")
    command = script(tmp_path, 'echo "bad token $1" >&2; exit 3')
    failures = told(settings(command=f"{command} ${{TOKEN}}"), "x")
    assert failures == [("command", "ended with code 3: bad token …")]
    assert told(settings(command=script(tmp_path, "kill -9 $$")), "x") == [
        ("command", "was killed by signal 9")
    ]


def test_what_went_away_since_the_check_is_a_failure_not_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = script(tmp_path, "exit 0")
    config = settings(command=f"{command} $TOKEN", webhook="http://127.0.0.1:9/$TOKEN")
    monkeypatch.setenv("TOKEN", "abc")
    check(config)
    monkeypatch.delenv("TOKEN")
    kinds = dict(told(config, "x"))
    assert "no variable TOKEN" in kinds["command"] and "no variable TOKEN" in kinds["webhook"]
    monkeypatch.setenv("TOKEN", "abc")
    Path(command).unlink()
    assert "could not be started" in told(settings(command=command), "x")[0][1]


def test_a_report_that_fails_is_not_the_end(tmp_path: Path) -> None:
    def full(kind: str, problem: str) -> None:
        raise OSError("no space left")

    hooks = Notices(settings(command=script(tmp_path, "exit 1")), full)
    hooks.notify("incident", "x", {})
    hooks.close(30)


def test_ever_new_problems_are_reported_only_so_often(tmp_path: Path) -> None:
    failures: Failures = []
    hooks = Notices(settings(command="true"), lambda *f: failures.append(f))
    hooks._senders[0].problems += [f"problem {n}" for n in range(100)]
    hooks.poll()
    hooks.close(30)
    assert len(failures) == PROBLEMS


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
def test_what_cannot_work_is_said_before_the_run(key: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check(settings(**{key: value}))
    assert f"supervise.{key}" in str(caught.value) and "secret" not in str(caught.value)


def test_what_can_work_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK", "https://hooks.example.org/T0/x")
    check(settings(webhook="$HOOK", command="sh -c 'echo $$1' $HOOK"))
    check(settings())


def _gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def _children() -> list[str]:
    """Processes below this one that still run, zombies left out; and the server that other tests fork ranks from, whose
    command line names a path hook."""
    return [
        " ".join(p.cmdline()) for p in psutil.Process().children(recursive=True)
        if p.status() != psutil.STATUS_ZOMBIE and ("sleep" in p.name() or "hook" in " ".join(p.cmdline()))
        and "forkserver" not in " ".join(p.cmdline())
    ]  # fmt: skip
