"""What the events of a run's journal say."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def latest(events: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """By number, what the last of `events` says of each incident: every one carries all that was known by then."""
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        summary = event.get("summary") if event.get("event") == "incident" else None
        if isinstance(summary, dict) and isinstance(summary.get("number"), int):
            found[summary["number"]] = summary
    return found
