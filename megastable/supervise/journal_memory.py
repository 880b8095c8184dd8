"""What a supervisor knows of a run from its journal: all of it, so that it may die at any moment. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from megastable.stability.failures import Failure
from megastable.stability.incident import Breakdown, Incident

END = ("code", "signal", "hung", "what", "step", "cursor", "rank", "host", "failure", "certain", "trained")


class JournalMemory:
    """Told of every event in order.

    attempt: the newest, 0 = none; under_way: it was launched, and nobody noted its end. clock: the farthest step done.
    began: the step that the processes of now went on from; rejected: of the newest checkpoint that they passed over.
    failures: since a person started the run; failed: time of the last one, until training goes on; unmended: an `End`
    that nothing was done about yet; skipped: the positions that were skipped because of it. predecessor: (process,
    host) of a supervisor that ended without a word. number: of the newest incident. open: those of ours that nothing
    has proven to be over. since: what the training said of its end, in this attempt.
    """

    def __init__(self) -> None:
        self.attempt = 0
        self.under_way = False
        self.clock = 0
        self.began = 0
        self.rejected = 0
        self.failures: list[Failure] = []
        self.failed: float | None = None
        self.unmended: dict[str, Any] | None = None
        self.skipped: list[tuple[int, int]] = []
        self.predecessor: tuple[int, str] | None = None
        self.number = 0
        self.open: dict[int, Incident] = {}
        self.since: list[dict[str, Any]] = []

    def hear(self, event: Mapping[str, Any]) -> None:
        """Take in one event. What is not as it should be is left out: it is not for this process to mend."""
        handler = getattr(self, f"_{event.get('event')}", None)
        if handler is not None:
            try:
                handler(event)
            except (KeyError, TypeError, ValueError):
                return

    def _supervisor(self, event: Mapping[str, Any]) -> None:
        if event["what"] == "started":
            self.failures.clear()
        if event["what"] == "ended":
            self.unmended = None
        self.predecessor = None if event["what"] == "ended" else (int(event["pid"]), str(event["host"]))

    def _launched(self, event: Mapping[str, Any]) -> None:
        self.attempt, self.under_way = int(event["attempt"]), True
        self.rejected = 0
        self.since.clear()
        self.unmended = None

    def _restart(self, event: Mapping[str, Any]) -> None:
        self.unmended = None

    def _training(self, event: Mapping[str, Any]) -> None:
        self.began = int(event["step"])
        self.clock = max(self.clock, self.began)

    def _checkpoint(self, event: Mapping[str, Any]) -> None:
        self.clock = max(self.clock, int(event["step"]))

    def _checkpoint_rejected(self, event: Mapping[str, Any]) -> None:
        self.rejected = max(self.rejected, int(str(event["name"]).removeprefix("step-")))

    def _finished(self, event: Mapping[str, Any]) -> None:
        self.since.append(dict(event))

    _stopped = _handover = _unstable = _finished

    def _ended(self, event: Mapping[str, Any]) -> None:
        self.under_way = False
        self.clock = max(self.clock, int(event["clock"]))
        if event.get("what"):
            self.failed = float(event["time"])
            self.unmended = {key: event[key] for key in END if key in event}
            skipped = event.get("skipped")
            self.skipped = (
                [(int(first), int(end)) for first, end in skipped] if isinstance(skipped, list) else []
            )
            self.failures.append(
                Failure(
                    what=str(event["what"]), step=event["step"], host=event["host"], clock=self.clock,
                    skipped=bool(event.get("skipped")), code=event.get("code"),
                )
            )  # fmt: skip

    def _incident(self, event: Mapping[str, Any]) -> None:
        self.number = max(self.number, int(event["number"]))
        if event["what"] == "restarted":
            self.failed = None
        try:
            incident = Incident.model_validate(event["summary"])
        except ValidationError:
            return
        if isinstance(incident.verdict, Breakdown):
            self.open.pop(incident.number, None)
            if incident.outcome == "open":
                self.open[incident.number] = incident
