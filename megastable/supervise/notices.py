"""Notifies people of a run by its hooks, in the background. Failures here never stop the supervisor."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megastable.base.errors import ConfigError
from megastable.base.text import visible
from megastable.cluster.child_process import ChildProcess
from megastable.config.supervise import SuperviseConfig
from megastable.run.directory import as_json
from megastable.supervise.hooks import Hook, hooks_of

log = logging.getLogger(__name__)

KEPT = 20  # most waiting notices; older ones are only counted
LONGEST = 1500  # characters of a text
SHORT = 200  # ... that is folded into another
LARGEST = 32_768  # characters of the facts in JSON; beyond that only the plain ones are told
TRIES = 3  # per notice, before it waits for the next one
PROBLEMS = 20  # distinct ones reported of each kind


@dataclass(frozen=True)
class Notice:
    """One thing to report. time: unix seconds."""

    event: str
    text: str
    facts: dict[str, Any]
    time: float


def folded(notices: Sequence[Notice], left_out: int) -> dict[str, Any]:
    """Several notices, oldest first, as one message: the newest in full, the others in short."""
    *before, newest = notices
    more = len(before) + left_out
    text = newest.text
    if more:
        text += f"\nand {more} more: " + "; ".join(n.text[:SHORT] for n in before)
    return {"text": text, "event": newest.event, "time": newest.time, "facts": newest.facts} | {
        "more": [{"event": n.event, "text": n.text, "time": n.time} for n in before]
    }


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

    def put(self, notice: Notice) -> None:
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
            child = self.hook.start(content)
        except ConfigError as error:
            return str(error)
        except (OSError, ValueError) as error:
            return self.hook.safe(f"could not be started: {error}")
        with self._change:
            self._child = child
            if self._over:
                child.kill()
        try:
            return self.hook.problem(child.wait())
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

    def notify(self, event: str, text: str, facts: Mapping[str, Any]) -> None:
        """Send `text`, a sentence about an event; facts: for programs: run, step, incident, ..."""
        told = "\n".join(visible(line, LONGEST) for line in text.splitlines()) or event
        notice = Notice(event, told[:LONGEST], _copied(facts), round(time.time(), 3))
        for sender in self._senders:
            sender.put(notice)
        self.poll()

    def poll(self) -> None:
        """Report new failures."""
        for sender in self._senders:
            while sender.problems:
                self._report(sender.hook.kind, sender.problems.pop(0))

    def close(self, timeout: float) -> None:
        """Send what is waiting without pauses, for at most `timeout` seconds; then end what still runs."""
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
        except Exception:  # the callback may meet a full disk: a hook is not worth a run
            log.warning("%s failed: %s", kind, problem, exc_info=True)


def _copied(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts as they are now, as JSON types; only scalars if they are too large."""
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
