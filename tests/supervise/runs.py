"""Run directories for tests, as a trainer and a supervisor would leave them."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megastable.run.events.event import Event


def journal(run: Path, *events: dict[str, Any], begin: float = 1000.0) -> None:
    """Append events, a second apart where they have no time."""
    with (run / "journal.jsonl").open("a") as file:
        for number, event in enumerate(events):
            file.write(json.dumps({"time": begin + number, **event}) + "\n")


def incident(number: int, what: str = "opened", **summary: Any) -> dict[str, Any]:
    told = {
        "number": number, "step": 10 * number, "onset": 10 * number - 1, "verdict": "spike", "kind": "recoverable",
        "cause": "unknown", "actions": [], "outcome": "open", "steps_lost": 0, "batches_discarded": 0,
        "loss_before": 2.0, "loss_peak": 9.0,
    }  # fmt: skip
    return {"event": "incident", "what": what, "number": number, "summary": told | summary}


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold a lock as a living process does."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


class Quiet:
    """A listener to whom nothing is told but what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def handle_event(self, event: Event) -> None: ...

    def show_output(self, text: str) -> None:
        self.said.append(text)

    def print_line(self, text: str) -> None:
        self.said.append(text)

    def poll_all(self) -> None: ...
