"""Who hears of a supervised run: the terminal, people far away, Prometheus, and the files of its incidents."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from megastable.base.errors import MegastableError
from megastable.base.text import visible
from megastable.config.tree import RunConfig
from megastable.run.directory import RunDirectory
from megastable.run.events.data_events import LookAheadFailed, LookAheadSpent
from megastable.run.events.event import Event, tree
from megastable.run.events.stability_events import AlertEvent, IncidentEvent
from megastable.run.events.supervisor_events import Ended, HookFailed, SupervisorEvent
from megastable.run.log import RunLog
from megastable.supervise import hooks
from megastable.supervise.metrics import Metrics
from megastable.supervise.status import RunWatch, Status
from megastable.supervise.view import panel

REFRESH = 1.0  # seconds between two looks of the panel and the metrics
REPORT_SECONDS = 300.0  # that the files of the incidents may take
REPORT_PAUSE = (
    5.0  # seconds from one start to the next: an incident is told in several events within a second
)
NEWS = ("opened", "attributed", "rewound", "restarted", "handed over", "closed")
# The launcher reports them as errors.
ORDERLY = re.compile(r"launch\.py.* exits with return code = (75|78|79)$")
GOODBYE = 20.0  # seconds for the last notifications


class Reports:
    """Writes incidents/ in a process of its own: whatever it meets, the supervisor goes on."""

    def __init__(self, run: RunDirectory, say: Callable[[str], None]) -> None:
        self.run, self.say = run, say
        self._due, self._began = True, -REPORT_PAUSE
        self._child: subprocess.Popen[bytes] | None = None

    def due(self) -> None:
        """There is something new."""
        self._due = True

    def poll(self, at_once: bool = False) -> bool:
        """Begin, or look whether it is done. Whether all is written. at_once: without a pause after the last time."""
        if self._child is not None:
            code = self._child.poll()
            if code is None and time.monotonic() - self._began > REPORT_SECONDS:
                self._child.kill()
                code = self._child.wait()
            if code is None:
                return False
            self._child = None
            if code:
                self.say(f"WARNING: the incidents' files could not be written (code {code}): see {self._log}")
        if self._due and self.run.journal.exists():
            if not at_once and time.monotonic() - self._began < REPORT_PAUSE:
                return False
            self._due, self._began = False, time.monotonic()
            if not self._has_incidents():
                return True
            command = [sys.executable, "-m", "megastable.report.postmortem", str(self.run.root)]
            with suppress(OSError):
                self.run.logs.mkdir(exist_ok=True)
                with self._log.open("ab") as log:
                    self._child = subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )  # fmt: skip
                    os.setpriority(os.PRIO_PROCESS, self._child.pid, 10)
            return self._child is None
        return True

    def finish(self) -> None:
        """Wait until all is written."""
        while not self.poll(at_once=True):
            time.sleep(0.05)

    def _has_incidents(self) -> bool:
        """Most runs have none for long. Of the bytes: what is wrong with a journal is the other process's to say."""
        try:
            return b'"incident"' in self.run.journal.read_bytes()
        except OSError:
            return True

    @property
    def _log(self) -> Path:
        return self.run.logs / "reports.log"


class Audience:
    """All of them. Raises ConfigError where a port cannot be used."""

    def __init__(self, config: RunConfig, run: RunDirectory) -> None:
        self.config, self.run = config, run
        c = config.supervise
        self.console = Console(highlight=False)
        log = RunLog(run)
        self.hooks = hooks.Hooks(c, lambda kind, problem: log.emit(HookFailed(kind=kind, problem=problem)))
        self.metrics = Metrics(c.metrics_port) if c.metrics_port else None
        self.reports = Reports(run, self.say)
        self.live: Live | None = None
        self._watch: RunWatch | None = None
        self._looked = 0.0

    def event(self, event: Event) -> None:
        """Something was written into the journal."""
        name, what = event.event, event.get("what")
        if isinstance(event, Ended | AlertEvent) or (isinstance(event, IncidentEvent) and what in NEWS):
            self.reports.due()  # once more at the end: by then the steps after it are known
        if text := news(event):
            self.hooks.notify(
                f"{name} {what}" if what else name, f"{self.run.root.name}: {text}", _facts(event, self.run)
            )

    def output(self, text: str) -> None:
        """What launcher and ranks print."""
        self.say("\n".join(visible(line) for line in text.splitlines() if not ORDERLY.search(line)))

    def say(self, text: str) -> None:
        """A line of the supervisor's own."""
        with suppress(OSError):  # a terminal that is gone, or a file on a full disk
            self.console.print(text, markup=False, highlight=False, soft_wrap=True, emoji=False)

    def tick(self) -> None:
        """Called at every look."""
        self.reports.poll()
        self.hooks.poll()
        if (
            self.metrics is None and not self.console.is_terminal
        ) or time.monotonic() - self._looked < REFRESH:
            return
        self._looked = time.monotonic()
        with suppress(MegastableError, OSError):
            self._watch = self._watch or RunWatch(self.run.root)
            status = self._watch.status()
            if self.metrics is not None:
                self.metrics.update(status)
            if self.console.is_terminal:
                self._show(status)

    def _show(self, status: Status) -> None:
        if self.live is None:
            self.live = Live(console=self.console, auto_refresh=False, transient=True)
            self.live.start()
        self.live.update(panel(status), refresh=True)

    def close(self) -> None:
        """The last words."""
        self.reports.finish()
        if self.live is not None:
            with suppress(OSError):
                self.live.stop()
        self.hooks.close(GOODBYE)
        if self.metrics is not None:
            self.metrics.close()


def news(event: Event) -> str:
    """What people want to be told of an event; "" = nothing."""
    match event:
        case IncidentEvent(what="opened" | "handed over" | "closed"):
            summary = event.summary
            what = f"closed ({summary.get('outcome')})" if event.what == "closed" else event.what
            text = f"incident {event.get('number')} (step {summary.get('onset', summary.get('step'))}) {what}"
            more = (
                summary.get("failure") or "; ".join(summary.get("reasons") or []) or event.get("reason") or ""
            )
            return f"{text}: {more}" if more else text
        case LookAheadSpent() | LookAheadFailed() | AlertEvent():
            return event.sentence()
        case SupervisorEvent(what="ended"):
            if event.get("code") in (None, 0):
                return "the run is complete"
            return f"the run ended with code {event['code']}: {event.get('reason')}"
    return ""


def _facts(event: Event, run: RunDirectory) -> dict[str, Any]:
    summary = tree(event.get("summary"))
    names = ("step", "onset", "cause", "kind", "verdict", "outcome", "steps_lost", "batches_discarded")
    rest: dict[str, Any] = {key: event[key] for key in ("number", "code", "reason") if key in event}
    return {"run": str(run.root), **{n: summary[n] for n in names if n in summary}, **rest}
