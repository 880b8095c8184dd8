"""Tell people: a command, a webhook, or both, in the background. Whatever they do, the supervisor goes on.

A command gets the notification as JSON on standard input, and event, text and the plain facts in the environment
(MEGASTABLE_EVENT, MEGASTABLE_TEXT, MEGASTABLE_RUN, ...); no shell reads it. A webhook gets the same JSON by POST; its
"text" is what Slack and its relatives show, with &, < and > escaped as they want it. $VARIABLES in both come from the
environment when they are used, so that no secret stands in a recipe; $$ is a dollar. A command should still read its
secrets from the environment itself: arguments are visible to other users, and what a failing command prints last is
reported.
"""

from __future__ import annotations

import html
import json
import logging
import os
import re
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any, Protocol
from urllib.parse import urlsplit

from megastable.base.errors import ConfigError
from megastable.base.text import visible
from megastable.config.supervise import REDACTED, SECRETS, hidden
from megastable.run.directory import as_json
from megastable.supervise.child import Child

log = logging.getLogger(__name__)

KEPT = 20  # notifications that wait, at most; of older ones only the count is told
LONGEST = 1500  # characters of a text
SHORT = 200  # ... that is folded into another
LARGEST = 32_768  # characters of the facts in JSON; beyond that only the plain ones are told
TRIES = 3  # at a notification, before it waits for the next one
PROBLEMS = 20  # different ones that are reported of each kind


class Settings(Protocol):
    """The part of the configuration that is read here."""

    @property
    def command(self) -> str | None: ...
    @property
    def webhook(self) -> str | None: ...
    @property
    def notify_seconds(self) -> float: ...
    @property
    def hook_timeout(self) -> float: ...


def check(config: Settings) -> None:
    """Raises ConfigError when a hook cannot work: before a night begins at whose end nobody would be told."""
    for key in SECRETS:
        if REDACTED in (getattr(config, key) or ""):
            raise ConfigError(
                f"supervise.{key}: its password was left out when this recipe was written: give it again, best "
                f"as a variable of the environment (supervise.{key}='$NAME'), or supervise.{key}=null for "
                "none"
            )
    if config.command is not None:
        words = _command(config.command)
        if shutil.which(words[0]) is None:
            raise ConfigError(
                f"supervise.command: {visible(shlex.split(config.command)[0], 200)!r} is not a program that can be "
                "started: give its path, and make it executable"
            )
    if config.webhook is not None:
        _webhook(config.webhook)


def _command(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"supervise.command: {error}: close the quotes") from None
    if not words:
        raise ConfigError("supervise.command is empty: leave it out to have none")
    # Split first: a value with blanks or quotes stays one word.
    first, *rest = [_expanded(word, "command") for word in words]
    return [os.path.expanduser(first), *rest]


def _webhook(text: str) -> str:
    url = _expanded(text, "webhook")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    # Not shown: what a webhook's address says beyond the host is its password.
    if not host or parts.scheme not in ("http", "https") or port == 0:
        raise ConfigError(
            "supervise.webhook is not an address: it must begin with https:// or http:// and a host"
        )
    if parts.username is not None or not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError(
            f"supervise.webhook at {visible(host)}: no user, blanks or special characters may stand in the address: "
            "percent-encode them"
        )
    return url


def _expanded(text: str, key: str) -> str:
    try:
        return Template(text).substitute(os.environ)
    except KeyError as error:
        raise ConfigError(
            f"supervise.{key}: the environment has no variable {error.args[0]}: export it, or write it out"
        ) from None
    except ValueError:
        raise ConfigError(f"supervise.{key}: a $ without a name: write $$ for a dollar") from None


def _secrets(key: str, text: str) -> list[str]:
    """What must not be shown of a hook: the values of its variables, and what else is hidden of it, as it is used."""
    values = [os.environ.get(name, "") for name in Template(text).get_identifiers()]
    for used in [text, Template(text).safe_substitute(os.environ)]:
        parts = [used[begin:end] for begin, end in hidden(key, used)]
        values += [v for part in parts for v in (part, part.partition("?")[2])]
    return sorted({v for v in values if len(v) > 3}, key=len, reverse=True)


@dataclass(frozen=True)
class Notice:
    """One thing to tell. time: unix seconds."""

    event: str
    text: str
    facts: dict[str, Any]
    time: float


def folded(notices: Sequence[Notice], left_out: int) -> dict[str, Any]:
    """What is sent of several notices, oldest first: the newest, and the others in short."""
    *before, newest = notices
    more = len(before) + left_out
    text = newest.text
    if more:
        text += f"\nand {more} more: " + "; ".join(n.text[:SHORT] for n in before)
    return {"text": text, "event": newest.event, "time": newest.time, "facts": newest.facts} | {
        "more": [{"event": n.event, "text": n.text, "time": n.time} for n in before]
    }


class Sender:
    """Tells one command or one webhook, in a thread of its own, not more often than every `pause` seconds."""

    def __init__(self, kind: str, text: str, pause: float, timeout: float) -> None:
        self.kind, self.text, self.pause, self.timeout = kind, text, pause, timeout
        self.problems: list[str] = []  # not yet fetched
        self._waiting: list[Notice] = []
        self._left_out = 0
        self._tries = 0  # in vain, at what is waiting
        self._closing = self._over = False
        self._change = threading.Condition()
        self._child: Child | None = None
        self._thread = threading.Thread(target=self._work, name=f"hook-{kind}", daemon=True)
        self._thread.start()

    def put(self, notice: Notice) -> None:
        with self._change:
            self._keep([*self._waiting, notice])
            self._tries = 0
            self._change.notify()

    def close(self, until: float) -> None:
        """Send what is waiting, and end, at `until` on the monotonic clock at the latest."""
        with self._change:
            self._closing = True
            self._change.notify()
        self._thread.join(max(0.0, until - time.monotonic()))
        with self._change:
            child, self._over = self._child, True
            if self._thread.is_alive():
                self.problems.append("the last notification was not delivered in the time there was")
        if child is not None:
            child.kill()

    def _keep(self, notices: list[Notice]) -> None:
        self._left_out += max(0, len(notices) - KEPT)
        self._waiting = notices[-KEPT:]

    def _work(self) -> None:
        ready = -float("inf")
        while True:
            with self._change:
                while not self._closing:
                    left = ready - time.monotonic()
                    due = bool(self._waiting) and self._tries < TRIES
                    if due and left <= 0:
                        break
                    self._change.wait(left if due else None)
                if not self._waiting:
                    return
                batch, left_out, last = self._waiting, self._left_out, self._closing
                self._waiting, self._left_out = [], 0
            problem = self._deliver(folded(batch, left_out))
            ready = time.monotonic() + self.pause
            with self._change:
                if problem:
                    self.problems.append(problem)
                    self._left_out += left_out
                    self._keep([*batch, *self._waiting])
                    self._tries += 1
            if last:
                return

    def _deliver(self, content: dict[str, Any]) -> str:
        """Why it failed, or ""."""
        try:
            if self.kind == "webhook":
                url = _webhook(self.text)
                # Else <!channel>, or <https://...|text>, of whoever wrote the data would act on the receivers.
                body = as_json(content | {"text": html.escape(content["text"], quote=False)})
                script = Path(__file__).with_name("webhook.py")
                words = [sys.executable, "-I", str(script), f"{self.timeout:.3f}"]
                given, environment = f"{url}\n{body}".encode(), dict(os.environ)
            else:
                words, given = _command(self.text), as_json(content).encode()
                environment = {**os.environ, **_variables(content)}
            child = Child(words, given, environment)
        except ConfigError as error:
            return str(error)
        except (OSError, ValueError) as error:
            return self._safe(f"could not be started: {error}")
        with self._change:
            self._child = child
            if self._over:
                child.kill()
        try:
            return self._outcome(child.wait(self.timeout), child.tail)
        finally:
            with self._change:
                self._child = None

    def _outcome(self, code: int | None, tail: str) -> str:
        where = f"{urlsplit(_webhook(self.text)).hostname}: " if self.kind == "webhook" else ""
        if code is None:
            return f"{where}not done after {self.timeout:g} s, and ended (supervise.hook_timeout)"
        if code == 0:
            return ""
        if self.kind == "webhook" and code == 1:
            return self._safe(where + tail)
        how = f"ended with code {code}" if code > 0 else f"was killed by signal {-code}"
        return self._safe(f"{where}{how}{': ' if tail else ''}{tail}")

    def _safe(self, problem: str) -> str:
        for secret in _secrets(self.kind, self.text):
            problem = problem.replace(secret, "…")
        return visible(problem, 500)


def _variables(content: Mapping[str, Any]) -> dict[str, str]:
    """The plain facts as environment variables."""
    plain = {k: v for k, v in content["facts"].items() if isinstance(v, str | int | float)}
    named = {
        re.sub(r"\W", "_", str(key), flags=re.ASCII).upper(): visible(v, 8000) for key, v in plain.items()
    }
    named |= {"EVENT": content["event"], "TEXT": content["text"]}
    return {f"MEGASTABLE_{key}": value for key, value in named.items()}


class Hooks:
    """All that is told about one run. Every method returns at once, but for `close`; none raises.

    failed(kind, problem): called once for every different problem, in the thread that calls notify, poll or close.
    """

    def __init__(self, config: Settings, failed: Callable[[str, str], None]) -> None:
        targets = {"command": config.command, "webhook": config.webhook}
        self._failed = failed
        self._told: set[tuple[str, str]] = set()
        self._senders = [
            Sender(kind, text, config.notify_seconds, config.hook_timeout)
            for kind, text in targets.items()
            if text is not None
        ]

    def notify(self, event: str, text: str, facts: Mapping[str, Any]) -> None:
        """Tell `text`, a sentence about an event; facts: what a program would like to know: run, step, incident, ..."""
        told = "\n".join(visible(line, LONGEST) for line in text.splitlines()) or event
        notice = Notice(event, told[:LONGEST], _copied(facts), round(time.time(), 3))
        for sender in self._senders:
            sender.put(notice)
        self.poll()

    def poll(self) -> None:
        """Report what has failed since."""
        for sender in self._senders:
            while sender.problems:
                self._report(sender.kind, sender.problems.pop(0))

    def close(self, timeout: float) -> None:
        """Send what is waiting without further pauses, for `timeout` seconds at most; then end what still runs."""
        until = time.monotonic() + timeout
        for sender in self._senders:
            sender.close(until)
        self.poll()
        self._senders = []

    def _report(self, kind: str, problem: str) -> None:
        of_kind = sum(known == kind for known, _ in self._told)
        if (kind, problem) in self._told or of_kind >= PROBLEMS:
            return
        self._told.add((kind, problem))
        try:
            self._failed(kind, problem)
        except Exception:  # whoever writes it down may meet a full disk: a hook is not worth a run
            log.warning("%s failed: %s", kind, problem, exc_info=True)


def _copied(facts: Mapping[str, Any]) -> dict[str, Any]:
    """As they are now, in what JSON has; only the plain ones where they are too many."""
    try:
        content = as_json(dict(facts))
    except (TypeError, ValueError, RecursionError):
        return {}
    copy: dict[str, Any] = json.loads(content)
    if len(content) <= LARGEST:
        return copy
    return {
        k: v[:LONGEST] if isinstance(v, str) else v for k, v in copy.items() if not isinstance(v, dict | list)
    }
