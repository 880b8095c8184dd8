"""What the journal says around an incident, an event a line, in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from megastable.report.postmortem.texts import Facts

EARLIER, LATER = 30, 12  # events before and after those of the incident that are looked at
MARKS = (
    "checkpoint",
    "evaluated",
    "training",
    "finished",
    "stopped",
)  # between two of them a stretch is whole
MOST = 80  # lines
# Of the policy's memory and the whole incident every event has a copy.
LEFT_OUT = {"time", "event", "step", "summary", "policy", "number", "what"}


class Entry(Facts):
    """An event. time: Unix seconds; step: None where it belongs to none; own: of the incident itself."""

    time: float
    step: int | None
    text: str
    own: bool

    @property
    def moment(self) -> str:
        return datetime.fromtimestamp(self.time, UTC).strftime("%Y-%m-%d %H:%M:%S")


def nearby(events: Sequence[dict[str, Any]], begin: int, end: int) -> list[dict[str, Any]]:
    """Those between the last mark before events[begin] and the first one after events[end], marks included."""
    first = begin
    while first > max(0, begin - EARLIER) and (first == begin or events[first]["event"] not in MARKS):
        first -= 1
    last = end
    while last < min(len(events) - 1, end + LATER) and (last == end or events[last]["event"] not in MARKS):
        last += 1
    return list(events[first : last + 1])


def timeline(events: Sequence[dict[str, Any]], begin: int, end: int, number: int) -> list[Entry]:
    """The events of incident `number`, events[begin] to events[end], and those around them."""
    entries = [_entry(event, number) for event in nearby(events, begin, end)]
    if len(entries) <= MOST:
        return entries
    half = MOST // 2
    between = Entry(
        time=entries[half].time, step=None, text=f"{len(entries) - 2 * half} more events", own=False
    )
    return [*entries[:half], between, *entries[-half:]]


def _entry(event: dict[str, Any], number: int) -> Entry:
    kind, step = event["event"], event.get("step")
    key = f"incident {event.get('what')}" if kind == "incident" else kind
    own = kind == "incident" and event.get("number") == number
    try:
        text = SENTENCES[key](event) if key in SENTENCES else _plain(event, key)
    except (KeyError, TypeError, ValueError):  # of another version
        text = _plain(event, key)
    if kind == "incident" and not own:
        text = f"(incident {event.get('number')}) {text}"
    return Entry(time=event["time"], step=step if isinstance(step, int) else None, text=text, own=own)


def _plain(event: dict[str, Any], key: str) -> str:
    """An event that has no sentence of its own: its fields, as far as they are short."""
    fields = {k: v for k, v in event.items() if k not in LEFT_OUT and len(str(v)) < 200}
    return key.replace("_", " ") + "".join(f"; {name}: {value}" for name, value in fields.items())


def _opened(e: dict[str, Any]) -> str:
    action = f"; action: {e['action']}" if "action" in e else ""
    return f"opened: {e.get('reason') or e['summary']['failure'] or e['summary']['verdict']}{action}"


def _attributed(e: dict[str, Any]) -> str:
    return f"cause: {e['cause']}: {e['reason']}; action: {e['action']}, {e['remedy']}"


def _ended(e: dict[str, Any]) -> str:
    return f"attempt {e['attempt']} ended: {e['failure'] or 'as it should'}"


SENTENCES: dict[str, Callable[[dict[str, Any]], str]] = {
    "training": lambda e: f"training from position {e['cursor']} on {e['world']} ranks",
    "resumed": lambda e: f"resumed from {e['checkpoint']}",
    "evaluated": lambda e: f"validation loss {float(e['loss']):.4f}",
    "checkpoint": lambda e: f"checkpoint {e['name']} saved",
    "checkpoint_rejected": lambda e: f"checkpoint {e['name']} rejected: {e['problem']}",
    "discarded": lambda e: (
        f"update refused, loss {float(e['loss']):.3f}, gradient norm {float(e['grad_norm']):.3g}: {e['reason']}"
    ),
    "finished": lambda e: "the run is complete",
    "stopped": lambda e: "the run was asked to stop",
    "handover": lambda e: f"handed over to a checkpoint from before step {e['before']}: {e['reason']}",
    "launched": lambda e: f"attempt {e['attempt']} started",
    "ended": _ended,
    "hang": lambda e: (
        f"nothing for {float(e['waited']):.0f} s in phase {e['phase']}, at most {float(e['limit']):.0f} s are usual"
    ),
    "restart": lambda e: f"to be started again in {float(e['delay']):.0f} s: {e['reason']}",
    "incident opened": _opened,
    "incident attributed": _attributed,
    "incident rewound": lambda e: f"back at step {e['to_step']}, going on from position {e['cursor']}",
    "incident restarted": lambda e: f"going on from step {e['step']} in a new process",
    "incident handed over": lambda e: "handed over to the next process",
    "incident closed": lambda e: f"closed: {e['summary']['outcome']}",
}
