"""Journal events in words, and text from outside made safe to show: it may hold anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megastable.errors import HANDOVER, NO_SPACE, STOPPED, UNSTABLE

Event = dict[str, Any]


def visible(text: object, most: int = 2000) -> str:
    """Text on one line in which nothing acts on a terminal: control and direction characters are shown as escapes."""
    cut = str(text)
    cut = cut if len(cut) <= most else cut[: most - 1] + "…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


def kind_of_end(event: Event) -> str:
    """Why an attempt ended, of an `ended` event: one of a handful of words, for counting."""
    if event.get("hung"):
        return "hang"
    if event.get("signal"):
        return "killed"
    code = event.get("code")
    known = {0: "done", STOPPED: "stopped", UNSTABLE: "unstable", NO_SPACE: "no_space", HANDOVER: "handover"}
    return known.get(code, "crash") if isinstance(code, int) else "crash"


def say(event: Event) -> str:
    """An event in a line, made visible; "" for those that tell a person nothing new."""
    tell = TOLD.get(str(event.get("event")))
    return visible(tell(event)) if tell is not None else ""


def number(value: object, form: str = ".3f") -> str:
    """A number of an event as text; what is none is a question mark ("nan" and "inf" are numbers)."""
    try:
        return format(float(value), form)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return "?"


def size(of: object) -> str:
    """Bytes as text."""
    if not isinstance(of, int | float):
        return "?"
    unit = "GB" if of >= 1e9 else "MB"
    return f"{of / (1e9 if unit == 'GB' else 1e6):.3g} {unit}"


def duration(seconds: float) -> str:
    """A time span as text: 0.4 s, 59 s, 12 min, 3 h 20 min, 4 d 3 h."""
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def _checkpoint(e: Event) -> str:
    return f"checkpoint {e.get('name')}: {size(e.get('bytes'))} in {number(e.get('seconds'), '.1f')} s"


def _incident(e: Event) -> str:
    """Openings by the trainer carry a reason, those by the supervisor only the summary."""
    what, head = e.get("what"), f"incident {e.get('number')}"
    told = e.get("summary")
    summary: Event = told if isinstance(told, dict) else {}
    if what == "opened":
        about = e.get("reason") or summary.get("failure") or summary.get("verdict")
        return f"{head} at step {summary.get('step', e.get('step'))}: {about}"
    if what == "attributed":
        return f"{head}: cause {e.get('cause')}, {e.get('remedy') or e.get('action')}"
    if what == "rewound":
        return f"{head}: went back to step {e.get('to_step')}"
    if what == "restarted":
        return f"{head}: goes on from step {e.get('step')}"
    if what == "closed":
        return f"{head}: {summary.get('outcome')}"
    return f"{head}: {what}"


def _ended(e: Event) -> str:
    if failure := e.get("failure"):
        return f"attempt {e.get('attempt')}: {failure}"
    how = f"signal {e.get('signal')}" if e.get("signal") else f"code {e.get('code')}"
    return f"attempt {e.get('attempt')} ended with {how}"


def _hang(e: Event) -> str:
    return (
        f"no progress for {number(e.get('waited'), '.0f')} s in {e.get('phase')} after step {e.get('step')}"
    )


def _supervisor(e: Event) -> str:
    how = "" if e.get("code") is None else f" with {e.get('code')}"
    reason = f": {e.get('reason')}" if e.get("reason") else ""
    return f"supervisor {e.get('what')}{how}{reason}"


def _discarded(e: Event) -> str:
    return f"step {e.get('step')} refused: {e.get('reason')}"


TOLD: dict[str, Callable[[Event], str]] = {
    "training": lambda e: f"training from step {e.get('step')} on {e.get('world')} ranks",
    "resumed": lambda e: f"resumed from {e.get('checkpoint')}",
    "evaluated": lambda e: f"step {e.get('step')}: validation loss {number(e.get('loss'))}",
    "checkpoint": _checkpoint,
    "checkpoint_failed": lambda e: f"no checkpoint of step {e.get('step')}: {e.get('problem')}",
    "checkpoint_rejected": lambda e: f"checkpoint {e.get('name')} is damaged: {e.get('problem')}",
    "checkpoint_suspect": lambda e: f"checkpoint {e.get('name')} set aside: {e.get('reason')}",
    "discarded": _discarded,
    "would": lambda e: f"step {e.get('step')}: would {e.get('action')}: {e.get('reason')}",
    "warning": lambda e: f"step {e.get('step')}: {e.get('text')}",
    "config_changed": lambda e: f"recipe changed: {e.get('changes')}",
    "incident": _incident,
    "handover": lambda e: f"handed over at step {e.get('step')}: {e.get('reason')}",
    "unstable": lambda e: f"gave up at step {e.get('step')}: {e.get('reason') or 'not finite, or refused on and on'}",
    "stopped": lambda e: f"stopped at step {e.get('step')} as asked",
    "finished": lambda e: f"finished after {e.get('steps')} steps, validation loss {number(e.get('val_loss'))}",
    "supervisor": _supervisor,
    "launched": lambda e: f"attempt {e.get('attempt')} started",
    "ended": _ended,
    "hang": _hang,
    "restart": lambda e: f"restart in {number(e.get('delay'), '.0f')} s: {e.get('reason')}",
    "hook_failed": lambda e: f"{e.get('kind')} failed: {e.get('problem')}",
}  # fmt: skip
