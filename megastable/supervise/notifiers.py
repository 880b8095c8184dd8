"""Passes a supervised run's events on: terminal, hooks, Prometheus and incident reports."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.live import Live

from megastable.base.errors import MegastableError
from megastable.base.text import make_visible
from megastable.cluster.child_process import ChildProcess, start_in_background
from megastable.config.tree import RunConfig
from megastable.run.directory import RunDirectory
from megastable.run.events.data_events import LookAheadFailed, LookAheadSpent
from megastable.run.events.event import Event, read_tree
from megastable.run.events.stability_events import AlertEvent, IncidentEvent, IncidentLater
from megastable.run.events.supervisor_events import Ended, HookFailed, SupervisorEvent
from megastable.run.log import RunLog
from megastable.supervise.hooks import Notices
from megastable.supervise.metrics import Metrics
from megastable.supervise.status import RunWatch
from megastable.supervise.status_panel import build_panel

REFRESH = 1.0  # seconds between updates of panel and metrics
NEWS = ("opened", "attributed", "rewound", "restarted", "handed over", "closed")
# The launcher reports them as errors.
ORDERLY = re.compile(r"launch\.py.* exits with return code = (75|78|79)$")
GOODBYE = 20.0  # seconds for the last notifications
SECONDS = 300.0  # time limit for writing the incident files
PAUSE = 5.0  # seconds between two starts of that: an incident has several events within a second


class Notifiers:
    """All of them. Raises ConfigError if a port cannot be used."""

    def __init__(self, config: RunConfig, run: RunDirectory) -> None:
        self.config, self.run = config, run
        c = config.supervise
        self.console = Console(highlight=False)
        log = RunLog(run)
        self.notices = Notices(c, lambda kind, text: log.emit_event(HookFailed(kind=kind, problem=text)))
        self.metrics = Metrics(c.metrics_port, c.metrics_address, run.machines) if c.metrics_port else None
        self.reports = ReportProcess(run, self.print_line)
        self.live: Live | None = None
        self._watch: RunWatch | None = None
        self._looked = 0.0

    def handle_event(self, event: Event) -> None:
        event_name, event_what = event.event, event.get("what")
        if isinstance(event, Ended | AlertEvent | IncidentLater) or (
            isinstance(event, IncidentEvent) and event_what in NEWS
        ):
            self.reports.mark_due()  # once more at the end, when the later steps are known
        if news_text := describe_news(event):
            self.notices.send_notice(
                f"{event_name} {event_what}" if event_what else event_name,
                f"{self.run.root.name}: {news_text}",
                _facts(event, self.run),
            )

    def show_output(self, text: str) -> None:
        self.print_line(
            "\n".join(make_visible(line) for line in text.splitlines() if not ORDERLY.search(line))
        )

    def print_line(self, text: str) -> None:
        with suppress(OSError):  # a terminal that is gone, or a file on a full disk
            self.console.print(text, markup=False, highlight=False, soft_wrap=True, emoji=False)

    def poll_all(self) -> None:
        self.reports.poll()
        self.notices.report_failures()
        nobody_looks = self.metrics is None and not self.console.is_terminal
        if nobody_looks or time.monotonic() - self._looked < REFRESH:
            return
        self._looked = time.monotonic()
        with suppress(MegastableError, OSError):
            self._watch = self._watch or RunWatch(self.run.root)
            status = self._watch.read_status()
            if self.metrics is not None:
                self.metrics.update(status)
            if self.console.is_terminal:
                if self.live is None:
                    self.live = Live(console=self.console, auto_refresh=False, transient=True)
                    self.live.start()
                self.live.update(build_panel(status), refresh=True)

    def close(self) -> None:
        """Send what is left, and close."""
        self.reports.wait_until_written()
        if self.live is not None:
            with suppress(OSError):
                self.live.stop()
        self.notices.close(GOODBYE)
        if self.metrics is not None:
            self.metrics.close()


def describe_news(event: Event) -> str:
    """The notification for an event; "" = none."""
    match event:
        case IncidentEvent(what="opened" | "handed over" | "closed"):
            summary = event.summary
            what_happened = f"closed ({summary.get('outcome')})" if event.what == "closed" else event.what
            onset = summary.get("onset", summary.get("step"))
            incident_text = f"incident {event.get('number')} (step {onset}) {what_happened}"
            reasons = "; ".join(summary.get("reasons") or [])
            reason_text = summary.get("failure") or reasons or event.get("reason")
            return f"{incident_text}: {reason_text}" if reason_text else incident_text
        case LookAheadSpent() | LookAheadFailed() | AlertEvent():
            return event.format_sentence()
        case SupervisorEvent(what="ended"):
            if event.get("code") in (None, 0):
                return "the run is complete"
            return f"the run ended with code {event['code']}: {event.get('reason')}"
    return ""


def _facts(event: Event, run: RunDirectory) -> dict[str, Any]:
    summary = read_tree(event.get("summary"))
    summary_keys = ("step", "onset", "cause", "kind", "verdict", "outcome", "steps_lost", "batches_discarded")
    event_fields: dict[str, Any] = {key: event[key] for key in ("number", "code", "reason") if key in event}
    return {"run": str(run.root), **{n: summary[n] for n in summary_keys if n in summary}, **event_fields}


class ReportProcess:
    """Runs the process that writes incidents/ (report/postmortem), again whenever there is something new. Its failures
    never stop the supervisor. say: prints a line of it."""

    def __init__(self, run: RunDirectory, say: Callable[[str], None]) -> None:
        self.run, self.say = run, say
        self._log = run.logs / "reports.log"
        self._due, self._began = True, -PAUSE
        self._child: ChildProcess | None = None

    def mark_due(self) -> None:
        self._due = True

    def poll(self, at_once: bool = False) -> bool:
        """Start it, or check whether it has ended. Returns whether all is written. at_once: skip the pause."""
        if self._child is not None:
            if (child_result := self._child.poll()) is None:
                return False
            self._child = None
            if child_result.code:
                self._failed(f"code {child_result.code}")
            elif child_result.code is None:
                self._failed(f"not done after {SECONDS:.0f} s")
        if not self._due or not self.run.journal.exists():
            return True
        if not at_once and time.monotonic() - self._began < PAUSE:
            return False
        self._due, self._began = False, time.monotonic()
        with suppress(OSError):
            # A search of bytes: the other process reports a broken journal.
            if b'"incident"' in self.run.journal.read_bytes():
                self._child = start_in_background(
                    self._log, "megastable.report.postmortem", str(self.run.root), seconds=SECONDS
                )
        return self._child is None

    def wait_until_written(self) -> None:
        while not self.poll(at_once=True):
            time.sleep(0.05)

    def _failed(self, why: str) -> None:
        self.say(f"WARNING: the incidents' files could not be written ({why}): see {self._log}")
