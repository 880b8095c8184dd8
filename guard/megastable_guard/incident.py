"""Record of one incident, from the first anomalous step to the proof that it is over: for the journal and the
summary."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from megastable_guard.actions import Action, Cause, Verdict


class Breakdown(StrEnum):
    """Failures that only the supervisor notices."""

    CRASH = "crash"  # a process ended unexpectedly
    HANG = "hang"  # no step for far longer than usual
    DAMAGE = "damaged_checkpoint"


Kind = Literal["recoverable", "lingering", "divergent"]
Outcome = Literal["open", "healed", "handed over", "stopped"]


class LeftOutSamples(BaseModel):
    """The samples that the last action skipped or deferred: positions [first, end), `count` of them, at `step`."""

    model_config = ConfigDict(extra="ignore")

    step: int
    first: int
    end: int
    count: int


class IncidentFields(BaseModel):
    """The fields of an incident, as journals have them.

    Text for people identifies an incident by its number and its onset; docs/stability.md has these definitions once.

    onset: the first step that belongs to it; step: at which it was acted on. positions: skipped ranges [first, end).
    deferred: ranges whose samples were deferred, returns: where they are read instead, each by the order of its time;
    lost: samples of `positions` that could not be deferred for lack of space before the end of the run. released:
    samples that are no longer skipped. steps_lost: undone and repeated, refused ones included. batches_discarded:
    updates refused. seconds: spent on finding and undoing it, until training continues; the total time lost is more
    (Cost, in report/postmortem). loss_before, loss_after: median of the last steps (up to 20) when it was opened and
    closed; loss_peak: the highest of a step; nats per token. norm_peak: before clipping. failure: of a process or
    checkpoint, a sentence; evidence: paths of logs and stacks, relative to the run directory. warnings: slow signals
    that were warned of before it was opened and were not over, a sentence each. kernels: names of those that were left.
    """

    number: int
    step: int = 0
    onset: int = 0
    verdict: str = "unknown"
    kind: str = "unknown"
    cause: str = "unknown"
    actions: Sequence[str] = []
    reasons: list[str] = []
    positions: list[tuple[int, int]] = []
    deferred: list[tuple[int, int]] = []
    returns: list[tuple[int, int]] = []
    lost: int = 0
    released: int = 0
    documents: Sequence[Any] = []
    steps_lost: int = 0
    batches_discarded: int = 0
    seconds: float = 0.0
    loss_before: float | None = None
    loss_peak: float | None = None
    norm_peak: float | None = None
    loss_after: float | None = None
    outcome: str = "open"
    failure: str = ""
    evidence: list[str] = []
    warnings: list[str] = []
    kernels: list[str] = []


class Incident(IncidentFields):
    """One of this run."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    step: int
    onset: int
    verdict: Verdict | Breakdown
    kind: Kind
    cause: Cause = Cause.UNKNOWN
    actions: list[Action] = []
    documents: list[dict[str, Any]] = []
    outcome: Outcome = "open"


def classify_incident(verdict: Verdict, recurrences: int) -> Kind:
    """Recoverable: a jump that one rewind undoes. Lingering: it settles higher, oscillates, or comes back. Divergent:
    it moves away from the trend, or keeps coming back."""
    if verdict is Verdict.DRIFT or recurrences > 1:
        return "divergent"
    if verdict in (Verdict.PLATEAU, Verdict.OSCILLATION) or recurrences:
        return "lingering"
    return "recoverable"
