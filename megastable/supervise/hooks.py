"""Notifies people of a run by the hooks of its recipe, in the background: a command, or a webhook (posted by our own
command, webhook.py). Failures here never stop the supervisor.

A hook gets a notice as JSON on standard input, and event, text and scalar facts in the environment (MEGASTABLE_EVENT,
MEGASTABLE_TEXT, MEGASTABLE_RUN, ...); no shell reads it. $VARIABLES in the recipe come from the environment at run
time, so that recipes hold no secrets; $$ is a dollar. A command should still read its secrets from the environment
itself: arguments are visible to other users, and the last output of a failing command is reported.
"""

from __future__ import annotations

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
from typing import Any
from urllib.parse import urlsplit

from megastable.base.errors import ConfigError
from megastable.base.text import make_visible
from megastable.cluster.child_process import ChildProcess, ChildResult
from megastable.config.supervise import REDACTED, SuperviseConfig, find_passwords
from megastable.run.directory import as_json

WEBHOOK = Path(__file__).with_name("webhook.py")


@dataclass(frozen=True)
class Hook:
    """kind: command or webhook, as in the recipe; text: its value there; seconds: time limit."""

    kind: str
    text: str
    seconds: float

    def check_hook(self) -> None:
        """Raises ConfigError if the hook cannot work, before an unattended run relies on it."""
        if REDACTED in self.text:
            raise ConfigError(
                f"supervise.{self.kind}: its password was left out when this recipe was written: give it again, best "
                f"as a variable of the environment (supervise.{self.kind}='$NAME'), or supervise.{self.kind}=null for "
                "none"
            )
        command_words, _ = self._resolved()
        if shutil.which(command_words[0]) is None:
            raise ConfigError(
                f"supervise.command: {make_visible(shlex.split(self.text)[0], 200)!r} is not a program that can be "
                "started: give its path, and make it executable"
            )

    def start_process(self, content: Mapping[str, Any]) -> ChildProcess:
        """Raises ConfigError, OSError or ValueError when it cannot be started."""
        command_words, hook_variables = self._resolved()
        child_environment = {**os.environ, **_variables(content), **hook_variables}
        return ChildProcess(command_words, self.seconds, as_json(content).encode(), child_environment)

    def describe_problem(self, result: ChildResult) -> str:
        """Why it failed, safe to show; "" if it did not."""
        is_webhook = self.kind == "webhook"
        host_prefix = f"{urlsplit(_address(self.text)).hostname}: " if is_webhook else ""
        exit_code, output_tail = result.code, result.tail
        if exit_code is None:
            return f"{host_prefix}not done after {self.seconds:g} s, and ended (supervise.hook_timeout)"
        if exit_code == 0:
            return ""
        if is_webhook and exit_code == 1:
            return self.redact_secrets(host_prefix + output_tail)
        ending = f"ended with code {exit_code}" if exit_code > 0 else f"was killed by signal {-exit_code}"
        return self.redact_secrets(f"{host_prefix}{ending}{': ' if output_tail else ''}{output_tail}")

    def redact_secrets(self, problem: str) -> str:
        """`describe_problem` without secrets: neither values of variables nor anything else that is redacted."""
        values = [os.environ.get(name, "") for name in Template(self.text).get_identifiers()]
        for used in [self.text, Template(self.text).safe_substitute(os.environ)]:
            parts = [
                used[range_begin:range_end] for range_begin, range_end in find_passwords(self.kind, used)
            ]
            values += [v for part in parts for v in (part, part.partition("?")[2])]
        for secret in sorted({v for v in values if len(v) > 3}, key=len, reverse=True):
            problem = problem.replace(secret, "…")
        return make_visible(problem, 500)

    def _resolved(self) -> tuple[list[str], dict[str, str]]:
        """The words of the command and the variables added to its environment. Raises ConfigError."""
        if self.kind == "webhook":
            webhook_words = [sys.executable, "-I", str(WEBHOOK), f"{self.seconds:.3f}"]
            return webhook_words, {"MEGASTABLE_WEBHOOK": _address(self.text)}
        try:
            command_words = shlex.split(self.text)
        except ValueError as error:
            raise ConfigError(f"supervise.command: {error}: close the quotes") from None
        if not command_words:
            raise ConfigError("supervise.command is empty: leave it out to have none")
        # Split first: a value with blanks or quotes stays one word.
        program_word, *other_words = [_expanded(command_word, "command") for command_word in command_words]
        return [os.path.expanduser(program_word), *other_words], {}


def hooks_of(config: SuperviseConfig) -> list[Hook]:
    hook_texts = {"command": config.command, "webhook": config.webhook}
    return [
        Hook(hook_text, text, config.hook_timeout)
        for hook_text, text in hook_texts.items()
        if text is not None
    ]


def check_hooks(config: SuperviseConfig) -> None:
    """Raises ConfigError if a hook cannot work."""
    for hook in hooks_of(config):
        hook.check_hook()


def _address(text: str) -> str:
    url = _expanded(text, "webhook")
    try:
        url_parts = urlsplit(url)
        host, port = url_parts.hostname, url_parts.port
    except ValueError:
        host, port = None, None
    # Not shown: beyond the host, a webhook's address is a password.
    if not host or url_parts.scheme not in ("http", "https") or port == 0:
        raise ConfigError(
            "supervise.webhook is not an address: it must begin with https:// or http:// and a host"
        )
    if url_parts.username is not None or not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError(
            f"supervise.webhook at {make_visible(host)}: no user, blanks or special characters may stand in the "
            "address: percent-encode them"
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


def _variables(content: Mapping[str, Any]) -> dict[str, str]:
    """Scalar facts as environment variables."""
    named_values = {
        re.sub(r"\W", "_", str(fact_name), flags=re.ASCII).upper(): make_visible(fact_value, 8000)
        for fact_name, fact_value in content["facts"].items()
        if isinstance(fact_value, str | int | float)
    }
    named_values |= {"EVENT": content["event"], "TEXT": content["text"]}
    return {f"MEGASTABLE_{fact_key}": value for fact_key, value in named_values.items()}


log = logging.getLogger(__name__)

KEPT = 20  # most waiting notices; older ones are only counted
LONGEST = 1500  # characters of a text
SHORT = 200  # ... that is folded into another
LARGEST = 32_768  # characters of the facts in JSON; beyond that only the plain ones are told
TRIES = 3  # per notice, before it waits for the next one
PROBLEMS = 20  # distinct ones reported of each kind


Notice = dict[str, Any]
"""One thing to report: its event, text and facts, and its time in unix seconds."""


def fold_notices(notices: Sequence[Notice], left_out: int) -> dict[str, Any]:
    """Several notices, oldest first, as one message: the newest in full, the others in short."""
    *before, newest = notices
    text = newest["text"]
    if more := len(before) + left_out:
        text += f"\nand {more} more: " + "; ".join(notice["text"][:SHORT] for notice in before)
    others = [{key: notice[key] for key in ("event", "text", "time")} for notice in before]
    return {**newest, "text": text, "more": others}


class Sender:
    """Sends to one hook, in its own thread, at most once every `pause` seconds.

    The thread begins with the first notice: made while this process holds signals back (base/stop_signals.py), it would
    do so for ever, and so would the hook's processes.
    """

    def __init__(self, hook: Hook, pause: float) -> None:
        self.hook, self.pause = hook, pause
        self.problems: list[str] = []  # not fetched yet
        self._waiting: list[Notice] = []
        self._left_out = 0
        self._tries = 0  # failed tries to send what is waiting
        self._closing = self._over = False
        self._change = threading.Condition()
        self._child: ChildProcess | None = None
        self._thread: threading.Thread | None = None

    def add_notice(self, notice: Notice) -> None:
        with self._change:
            self._keep([*self._waiting, notice])
            self._tries = 0
            self._change.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"hook-{self.hook.kind}", daemon=True)
            self._thread.start()

    def close(self, until: float) -> None:
        """Send what is waiting, and end by `until` on the monotonic clock."""
        with self._change:
            self._closing = True
            self._change.notify()
        if self._thread is None:
            return
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
        ready_time = -float("inf")
        while True:
            with self._change:
                while not self._closing:
                    seconds_left = ready_time - time.monotonic()
                    is_due = bool(self._waiting) and self._tries < TRIES
                    if is_due and seconds_left <= 0:
                        break
                    self._change.wait(seconds_left if is_due else None)
                if not self._waiting:
                    return
                notice_batch, left_out, is_last = self._waiting, self._left_out, self._closing
                self._waiting, self._left_out = [], 0
            delivery_problem = self._deliver(fold_notices(notice_batch, left_out))
            ready_time = time.monotonic() + self.pause
            with self._change:
                if delivery_problem:
                    self.problems.append(delivery_problem)
                    self._left_out += left_out
                    self._keep([*notice_batch, *self._waiting])
                    self._tries += 1
            if is_last:
                return

    def _deliver(self, content: dict[str, Any]) -> str:
        """Why it failed, or ""."""
        try:
            child = self.hook.start_process(content)
        except ConfigError as error:
            return str(error)
        except (OSError, ValueError) as error:
            return self.hook.redact_secrets(f"could not be started: {error}")
        with self._change:
            self._child = child
            if self._over:
                child.kill()
        try:
            return self.hook.describe_problem(child.wait())
        finally:
            with self._change:
                self._child = None


class Notices:
    """All notifications of one run. Every method but `close` returns at once; none raises.

    failed(kind, problem): called once per distinct problem, in the thread that calls notify, poll or close.
    """

    def __init__(self, config: SuperviseConfig, failed: Callable[[str, str], None]) -> None:
        self._failed = failed
        self._told: set[tuple[str, str]] = set()
        self._senders = [Sender(hook, config.notify_seconds) for hook in hooks_of(config)]

    def send_notice(self, event: str, text: str, facts: Mapping[str, Any]) -> None:
        """Send `text`, a sentence about an event; facts: for programs: run, step, incident, ..."""
        visible_text = "\n".join(make_visible(line, LONGEST) for line in text.splitlines()) or event
        notice = {"text": visible_text[:LONGEST], "event": event, "time": round(time.time(), 3)}
        for sender in self._senders:
            sender.add_notice({**notice, "facts": _copied(facts)})
        self.report_failures()

    def report_failures(self) -> None:
        """Report new failures."""
        for sender in self._senders:
            while sender.problems:
                self._report(sender.hook.kind, sender.problems.pop(0))

    def close(self, timeout: float) -> None:
        """Send what is waiting without pauses, for at most `timeout` seconds; then end what still runs."""
        end_time = time.monotonic() + timeout
        for sender in self._senders:
            sender.close(end_time)
        self.report_failures()
        self._senders = []

    def _report(self, kind: str, problem: str) -> None:
        of_kind = sum(known_kind == kind for known_kind, _ in self._told)
        if (kind, problem) in self._told or of_kind >= PROBLEMS:
            return
        self._told.add((kind, problem))
        try:
            self._failed(kind, problem)
        except Exception:  # the callback may meet a full disk: a hook is not worth a run
            log.warning("%s failed: %s", kind, problem, exc_info=True)


def _copied(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts as they are now, as JSON types; only scalars if they are too large."""
    try:
        json_text = as_json(dict(facts))
    except (TypeError, ValueError, RecursionError):
        return {}
    facts_copy: dict[str, Any] = json.loads(json_text)
    if len(json_text) <= LARGEST:
        return facts_copy
    return {
        fact_name: fact_value[:LONGEST] if isinstance(fact_value, str) else fact_value
        for fact_name, fact_value in facts_copy.items()
        if not isinstance(fact_value, dict | list)
    }
