"""Tell from a run's journal what was found of its fault. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from drills.corruption_plan import Change, Planned
from drills.exercise import Outcome

# Events that say that hardware lied, or that its copies do.
FINDINGS = (
    "replicas_differ", "gradients_doubted", "messages_differ", "state_changed", "replay_differs", "snapshot_rejected",
    "wrong_copy",
)  # fmt: skip
TARGET = 0.95  # of the faults that must be found; of those found, with the right rank
Entry = Mapping[str, Any]

Ending = Literal["finished", "handed over", "unstable", "hung", "failed"]
ENDINGS: dict[str, Ending] = {"HandoverError": "handed over", "UnstableError": "unstable", "hung": "hung"}
# named: the right rank alone; suspected: among others; unknown: no rank; wrong: others.
Naming = Literal["named", "suspected", "unknown", "wrong"]


class Clean(BaseModel):
    """A run without a fault. findings: names of events that it must not have; incidents: their causes."""

    model_config = ConfigDict(extra="forbid")

    layout: str
    seed: int
    findings: list[str]
    incidents: list[str]
    seconds: float


class FaultOutcome(Outcome):
    """What became of a fault.

    expected: whether it must be found. changes: what it changed; nothing: it did not happen. ended: how its run did,
    with the error, if any. same: whether the last checkpoint has the bytes of the clean run's; None without one. found:
    by which event, empty if by none; verdict: of that; steps: that were done with the fault by then; naming, ranks: of
    all such events; reason: of the first. early: events from before the fault. guard: causes of incidents, and refused
    updates, where nothing was found.
    """

    planned: Planned
    expected: bool
    changes: list[Change]
    ended: Ending
    error: str = ""
    same: bool | None
    found: str
    verdict: str = ""
    steps: int | None = None
    naming: Naming | None = None
    ranks: list[list[int]] = Field(default_factory=list)
    reason: str = ""
    early: list[str] = Field(default_factory=list)
    guard: list[str] = Field(default_factory=list)
    seconds: float

    @property
    def harmless(self) -> bool:
        """Whether it left no trace, although nobody undid it: it corrupted nothing."""
        return not self.found and self.same is True and bool(self.changes)

    @property
    def counts(self) -> bool:
        """Whether it must be found."""
        return self.expected and not self.harmless

    @property
    def right(self) -> bool:
        """Whether the right rank was named, or is among those that were."""
        return self.naming in ("named", "suspected")

    @property
    def undone(self) -> bool | None:
        """Whether the run ends as the clean one does, because the fault was found; None: a fault that lasts cannot be
        undone, and one that was not found is not."""
        return self.same is True if self.found and not self.planned.lasts else None

    @property
    def finder(self) -> str:
        """By what it was found."""
        name = self.found.replace("_", " ")
        return f"{name} ({self.verdict})" if self.verdict else name

    @property
    def instead(self) -> str:
        """What became of a fault that was not found."""
        if not self.changes and self.ended != "hung":
            return "did not happen"
        if self.harmless:
            return "left no trace"
        if self.ended != "finished":
            return self.ended
        return f"guard: {', '.join(dict.fromkeys(self.guard))}" if self.guard else ""

    def describe(self) -> str:
        if not self.found:
            return f"not found{', ' if self.instead else ''}{self.instead}, {self.seconds:.0f} s"
        undone = {True: ", undone", False: ", not undone", None: ""}[self.undone]
        return f"found by {self.finder} after {self.steps} steps, rank {self.naming}{undone}, {self.seconds:.0f} s"


def is_finding(event: Entry) -> bool:
    """A gradient that only its data made stand out is none."""
    name = event.get("event")
    return name in FINDINGS and not (name == "gradients_doubted" and event.get("verdict") == "data")


def findings(events: Sequence[Entry]) -> list[str]:
    return [str(event["event"]) for event in events if is_finding(event)]


def incidents(events: Sequence[Entry]) -> list[str]:
    """The causes of incidents, as they were known in the end."""
    causes = {}
    for event in events:
        if event.get("event") == "incident":
            summary = event.get("summary") or {}
            causes[event.get("number")] = str(summary.get("cause"))
    return list(causes.values())


def ending(errors: Sequence[str]) -> Ending:
    """Of a run, from what was raised on its ranks; empty: nothing."""
    raised = [error for error in errors if error]
    if not raised:
        return "finished"
    known = {ENDINGS.get(error, "failed") for error in raised}
    return known.pop() if len(known) == 1 else "failed"


def naming(told: Sequence[Sequence[int]], rank: int) -> Naming:
    """What several events together say of the rank that is at fault."""
    some = [ranks for ranks in told if ranks]
    if not some:
        return "unknown"
    if any(rank not in ranks for ranks in some):
        return "wrong"
    return "named" if any(list(ranks) == [rank] for ranks in some) else "suspected"


def judge(
    planned: Planned,
    expected: bool,
    changes: Sequence[Change],
    events: Sequence[Entry],
    errors: Sequence[str],
    same: bool | None,
    seconds: float,
    struck: float | None,
    text: str = "",
) -> FaultOutcome:
    """events: of the run's journal; errors: what was raised on its ranks, text: of the first of them. struck: when the
    fault did, in unix time."""
    told = [event for event in events if is_finding(event)]
    known = struck is not None or not any(errors)  # of a run that was ended, when the fault struck is not
    late = [event for event in told if struck is not None and event["time"] >= struck]
    # A snapshot that is rejected is of an earlier step.
    first = min(late, key=lambda event: event["event"] == "snapshot_rejected") if late else {}
    ranks = [[int(rank) for rank in event.get("ranks") or []] for event in late]
    refused = ["refused" for event in events if event.get("event") == "discarded"][:1]
    return FaultOutcome(
        planned=planned,
        expected=expected,
        changes=list(changes),
        ended=ending(errors),
        error=text,
        same=same,
        found=str(first.get("event", "")),
        verdict=str(first.get("verdict", "")),
        # Copies that differ are noticed in the step after the one that the event names.
        steps=max(0, int(first.get("step") or 0) - planned.step) if late else None,
        naming=naming(ranks, planned.rank) if late else None,
        ranks=ranks,
        reason=str(first.get("reason", "")),
        early=[str(event["event"]) for event in told if event not in late] if known else [],
        guard=[] if late else incidents(events) + refused,
        seconds=round(seconds, 1),
    )


class Total(BaseModel):
    """Numbers of faults. counted: that must be found; found: of those; found_at_all: of all. right: of these, those
    whose rank was named, alone or among others; undone: of those that can_be_undone, to the bytes of the clean run.
    harmless: left no trace, unfound; absent: did not happen. false_alarms: runs with a finding without a fault, or
    before it."""

    model_config = ConfigDict(extra="forbid")

    faults: int
    counted: int
    found: int
    found_at_all: int
    right: int
    can_be_undone: int
    undone: int
    harmless: int
    hung: int
    absent: int
    clean: int
    false_alarms: int

    @property
    def met(self) -> bool:
        """Whether the targets are."""
        enough = self.found >= TARGET * self.counted and self.right >= TARGET * self.found_at_all
        return enough and not self.false_alarms and not self.absent

    def describe(self) -> str:
        """In a sentence."""
        extra = [f"{self.hung} hung"] if self.hung else []
        extra += [f"{self.absent} did not happen"] if self.absent else []
        others = self.faults - self.counted
        return (
            f"{self.found} of {self.counted} faults that must be found were"
            f"{f', and {self.found_at_all - self.found} of {others} others' if others else ''}; "
            f"the right rank named in {self.right} of {self.found_at_all}, "
            f"{self.undone} of {self.can_be_undone} undone to the bytes of the clean run; "
            f"{self.harmless} left no trace{''.join(f', {text}' for text in extra)}; "
            f"{self.false_alarms} false alarms, with {self.clean} clean runs"
        )


def total(outcomes: Sequence[FaultOutcome], clean: Sequence[Clean]) -> Total:
    found = [o for o in outcomes if o.found]
    undone = [o.undone for o in found if o.undone is not None]
    return Total(
        faults=len(outcomes),
        counted=sum(o.counts for o in outcomes),
        found=sum(o.counts and bool(o.found) for o in outcomes),
        found_at_all=len(found),
        right=sum(o.right for o in found),
        can_be_undone=len(undone),
        undone=sum(undone),
        harmless=sum(o.harmless for o in outcomes),
        hung=sum(o.ended == "hung" for o in outcomes),
        absent=sum(not o.changes and o.ended != "hung" for o in outcomes),
        clean=len(clean),
        false_alarms=sum(bool(c.findings) for c in clean) + sum(bool(o.early) for o in outcomes),
    )
