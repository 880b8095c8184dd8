"""Score a drilled run from its run directory. Pure except for the reading."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from drills.exercise import Outcome
from drills.plan import Policy
from drills.scenario import Scenario
from megastable.data.plant import Planted
from megastable.data.skips import numbers_of
from megastable.report.postmortem.sample_texts import Library
from megastable.run import records
from megastable.run.directory import RunDirectory
from megastable.run.events.event import Event
from megastable.run.events.reading import latest
from megastable.run.events.stability_events import Discarded, Handover, IncidentEvent, Located, TrendEvent
from megastable.run.events.supervisor_events import SupervisorEvent
from megastable.run.events.training_events import Training, Unstable, Warned
from megastable_guard.actions import Cause
from megastable_tools.forensics.history import History

REACH = 30  # steps after a fault in which an alarm may be its consequence: the verification time of an action
TARGET = 0.02  # nats: maximum excess of ours over the clean run
WRONG = 12  # one in this many causes may be wrong
SMOOTH = 10  # steps of the exponential average of losses
SHOWS = 0.05  # nats above the undisturbed run's: then the loss shows a slow fault
ENOUGH = 20  # steps that a warning must come before that
WARNED = 100  # steps within which a bad start must cause a warning
# Faults from outside that affect the training numbers.
POISONED = {"poison_weight", "poison_moments"}

Summary = dict[str, Any]


class Fate(BaseModel):
    """Samples of the first pass over the corpus. planted: bad ones; convicted: those of them that are skipped. lost:
    clean ones that are skipped. deferred: to be read later. documents: the planted ones; named: those of them
    that an incident names; wrong: others that one names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    planted: int = 0
    convicted: int = 0
    lost: int = 0
    deferred: int = 0
    documents: int = 0
    named: int = 0
    wrong: int = 0


NOBODY = Fate()


class Score(Outcome):
    """A row of the table. Losses in nats per token; None: not applicable, or not reached.

    ended: "finished", "stopped" (by its own decision), "dead" (its processes ended or hung before the end). step: the
    last one reached. exit: the exit code of the started process. excess: validation loss minus that
    of `reference`, the same policy's clean run of the same seed. steps_lost: repeated or undone. discarded: batches
    whose update was refused. fate: of the samples. seconds_to_recover: from the fault, or for a fault inside a process
    from the decision to act, until training continues. incidents, rewinds, handovers, cuts (of the
    learning rate, caps included), alerts: of the whole run. warnings: in the journal; warned: one came near the start,
    if that is the expected answer. false_alarms: refused batches and incidents that the fault does not explain.
    kinds, causes: of the incidents that it explains. wall_seconds: of the whole run. begin: of a slow
    fault; trend_at: step of the first warning of the signal that is expected; shows_at: the first step whose loss shows
    the fault; lead: steps between them, up to the end of the run if it never does. losses: smoothed, by step.
    """

    scenario: str
    policy: Policy
    seed: int
    ended: str
    step: int
    exit: int | None = None
    val_loss: float | None
    reference: str = "clean"
    excess: float | None = None
    steps_lost: int
    discarded: int
    fate: Fate = Fate()
    seconds_to_recover: float | None
    incidents: int = 0
    rewinds: int = 0
    handovers: int = 0
    cuts: int = 0
    alerts: int = 0
    warnings: int = 0
    warned: bool | None = None
    false_alarms: int
    kinds: list[str]
    causes: list[str]
    kind_right: bool | None
    cause_right: bool | None
    wall_seconds: float
    trend_at: int | None = None
    shows_at: int | None = None
    lead: int | None = None
    begin: int | None = None
    losses: dict[int, float] = Field(default={}, exclude=True, repr=False)

    @property
    def clean(self) -> bool:
        """Whether it is a run to compare others with."""
        return self.scenario == self.reference

    def describe(self) -> str:
        finished = self.ended == "finished" and self.val_loss is not None
        return f"{f'{self.val_loss:.4f}' if finished else self.describe_end()}, {self.wall_seconds:.0f} s"

    def describe_end(self) -> str:
        """Of a run without a loss."""
        return "not measured" if self.ended == "finished" else f"{self.ended} at step {self.step}"


def score(
    run: Path,
    scenario: Scenario,
    policy: Policy,
    seed: int,
    fate: Fate = NOBODY,
    *,
    struck: float | None = None,
    code: int | None = None,
    wall_seconds: float = 0.0,
) -> Score:
    """fate: of the samples. struck: unix time of a fault from outside. code: the exit code."""
    directory = RunDirectory(run)
    events = list(directory.events())
    summary = json.loads(directory.summary.read_text()) if directory.summary.exists() else {}
    ours = policy is Policy.OURS
    # Only ours undoes a fault; under the others anything later may be its consequence.
    explained, unexplained = alarms(events, scenario, struck, REACH if ours else math.inf)
    incidents = _latest(explained)
    actions = [action for incident in _latest(events) for action in incident.get("actions", ())]
    warnings = [event.get("step", 0) for event in events if isinstance(event, Warned)]
    kinds, causes = [i["kind"] for i in incidents], causes_of(incidents, events)
    return Score(
        scenario=scenario.name,
        policy=policy,
        seed=seed,
        ended=ended(events, bool(summary)),
        step=summary.get("steps") or reached(directory, events),
        exit=code,
        val_loss=None if summary.get("val_loss") is None else float(summary["val_loss"]),
        reference=scenario.reference,
        steps_lost=steps_lost(events),
        discarded=sum(isinstance(event, Discarded) for event in events),
        fate=fate,
        seconds_to_recover=_recovery(incidents, events, struck) if ours else None,
        incidents=len(_latest(events)),
        rewinds=sum(_rewound(event) for event in events),
        handovers=sum(isinstance(event, Handover) for event in events),
        cuts=sum(action in ("cut_lr", "cap_lr") for action in actions),
        alerts=sum(action == "alert" for action in actions),
        warnings=len(warnings),
        warned=any(step <= WARNED for step in warnings) if ours and scenario.warning else None,
        false_alarms=len(unexplained),
        kinds=sorted(kinds),
        causes=sorted(causes),
        kind_right=set(kinds or [None]) <= scenario.kinds if ours else None,
        cause_right=is_right(causes, scenario) if ours else None,
        wall_seconds=round(wall_seconds, 1),
        trend_at=_warned_of(events, scenario),
        begin=scenario.step if scenario.trend else None,
        losses=smoothed(directory),
    )


def _warned_of(events: Iterable[Event], scenario: Scenario) -> int | None:
    """The first step, from the fault on, with a warning of the signal that is expected."""
    told = (e.get("step", 0) for e in events if isinstance(e, TrendEvent) and e.signal == scenario.trend)
    return next((step for step in told if step >= scenario.step), None)


def ended(events: Sequence[Event], finished: bool) -> str:
    """How a run ended, in a word."""
    if finished:
        return "finished"
    return "stopped" if any(isinstance(event, Unstable) for event in events) else "dead"


def is_right(named: Iterable[str], scenario: Scenario) -> bool:
    """Whether the named causes are the right ones; see scenario.py."""
    found = {Cause(name) for name in named}
    if not scenario.causes:
        return found <= scenario.tolerated
    return bool(found & scenario.causes) and found <= scenario.causes | scenario.tolerated


def alarms(
    events: Iterable[Event], scenario: Scenario, struck: float | None, reach: float = REACH
) -> tuple[list[Event], list[Event]]:
    """Refused updates and events of incidents: those that the fault explains; and the unexplained alarms.

    reach: steps after it in which they may be its consequence.
    """
    explained: list[Event] = []
    unexplained: list[Event] = []
    foreign: set[int] = set()  # numbers of unexplained incidents
    for event in events:
        if not isinstance(event, Discarded | IncidentEvent):
            continue
        incident = isinstance(event, IncidentEvent)
        if incident and event["what"] != "opened":
            if event["number"] not in foreign:
                explained.append(event)
        elif _explains(scenario, event, struck, reach):
            explained.append(event)
        else:
            unexplained.append(event)
            if incident:
                foreign.add(event["number"])
    return explained, unexplained


def _explains(scenario: Scenario, event: Event, struck: float | None, reach: float) -> bool:
    if scenario.outside is not None:
        # The training numbers are unaffected: any complaint of the trainer is unfounded.
        by_trainer = isinstance(event, Discarded) or "policy" in event
        disturbs = scenario.outside in POISONED
        return struck is not None and event["time"] >= struck and (disturbs or not by_trainer)
    if scenario.region is None and scenario.fault is None and not scenario.warning:
        return False
    step = event["step"] if "step" in event else event["summary"]["step"]
    return bool(scenario.step <= step < scenario.step + scenario.steps + reach)


def _latest(events: Iterable[Event]) -> list[Summary]:
    """The latest state of each incident, in order."""
    return [summary for _, summary in sorted(latest(events).items())]


def causes_of(incidents: Sequence[Summary], events: Iterable[Event]) -> set[str]:
    """The named causes. Without an incident: the journal's finding on an examined refused update."""
    if incidents:
        return {incident["cause"] for incident in incidents}
    found = {event["kind"] for event in events if isinstance(event, Located)}
    return {Cause.HARDWARE.value for kind in found if kind in ("not reproduced", "state")}


def _rewound(event: Event) -> bool:
    return isinstance(event, IncidentEvent) and event.what == "rewound"


def steps_lost(events: Iterable[Event]) -> int:
    """By rewinds in memory, and by restarts from a checkpoint."""
    lost = reached = 0
    for event in events:
        if _rewound(event):
            lost, reached = lost + max(0, reached - event["to_step"]), event["to_step"]
        elif isinstance(event, Training):
            lost, reached = lost + max(0, reached - event["step"]), event["step"]
        elif isinstance(step := event.get("step"), int):
            reached = max(reached, step)
    return lost


def reached(run: RunDirectory, events: Iterable[Event]) -> int:
    """The last step known to have been done."""
    try:
        told = json.loads(run.progress.read_text())["step"]
    except (OSError, ValueError, KeyError):
        told = None
    return told or max((e["step"] for e in events if isinstance(e.get("step"), int)), default=0)


def _recovery(incidents: Sequence[Summary], events: Iterable[Event], struck: float | None) -> float | None:
    if struck is None:
        return round(sum(incident["seconds"] for incident in incidents), 1)
    after = [e for e in events if e["time"] > struck]
    again = [e["time"] for e in after if isinstance(e, Training)]
    # If training outlived its supervisor, the next one takes over.
    watched = [e["time"] for e in after if isinstance(e, SupervisorEvent) and e.what == "took over"]
    return round((again or watched)[0] - struck, 1) if again or watched else None


def compare(scores: Sequence[Score]) -> list[Score]:
    """The scores with `excess`, if they include a clean run of the same policy and seed."""
    references = {(s.policy, s.scenario, s.seed): s for s in scores if s.clean}
    clean = {key: s.val_loss for key, s in references.items()}

    def excess(s: Score) -> float | None:
        usual = clean.get((s.policy, s.reference, s.seed))
        return None if usual is None or s.val_loss is None else s.val_loss - usual

    return [_led(s.model_copy(update={"excess": excess(s)}), references) for s in scores]


def _led(s: Score, references: Mapping[tuple[Policy, str, int], Score]) -> Score:
    reference = references.get((s.policy, s.reference, s.seed))
    if s.begin is None or reference is None:
        return s
    at = shows(s.losses, reference.losses, s.begin)
    lead = None if s.trend_at is None else (s.step if at is None else at) - s.trend_at
    return s.model_copy(update={"shows_at": at, "lead": lead})


def smoothed(run: RunDirectory) -> dict[int, float]:
    """Exponential average of the training losses by step; empty without records."""
    found, level = dict[int, float](), None
    for row in records.read(run.steps).to_pylist() if run.steps.exists() else ():
        level = row["loss"] if level is None else level + (row["loss"] - level) / SMOOTH
        found[row["step"]] = level
    return found


def shows(losses: Mapping[int, float], undisturbed: Mapping[int, float], begin: int) -> int | None:
    """The first step from `begin` on whose smoothed loss is `SHOWS` above the undisturbed run's; None: none is."""
    above = (step for step in sorted(losses) if losses[step] - undisturbed.get(step, losses[step]) > SHOWS)
    return next((step for step in above if step >= begin), None)


def within(s: Score) -> bool:
    """Whether a run ends no worse than the clean one; or caused a warning in time, if that is the expected answer."""
    if s.warned is not None:
        return s.warned
    if s.begin is not None:
        return s.lead is not None and s.lead >= ENOUGH
    return s.excess is not None and s.excess <= TARGET


def better(s: Score) -> bool:
    """Whether a run ends better than the clean one, by more than equivalent runs differ. A slow fault is not about how
    it ends."""
    return s.begin is None and s.excess is not None and s.excess < -TARGET


def fate(run: Path, planted: Planted | None) -> Fate:
    """The fate of a started run's samples, by its own ledger and order, as the next process would read them, and the
    planted corruption. A sample is its sequence in the corpus, wherever it is read: a deferred one is not lost.
    Raises DataError if its directory or corpus cannot be read."""
    history = History(run)
    library = history.library()
    order = library.source.order
    positions = np.arange(order.sequences[0])
    out = positions[history.selection(library).mask(positions)]
    left_out = set(order.locate(out).sequence.tolist())
    bad = set[int]()
    if planted is not None:
        # In the corpus's own order, before any deferral.
        bad = set(
            Library(history.config).source.order.locate(numbers_of(planted.positions)).sequence.tolist()
        )
    incidents = list(latest(history.run.events(IncidentEvent)).values())
    deferred = sum(end - first for i in incidents for first, end in i.get("deferred", ()))
    named = _documents(document for i in incidents for document in i.get("documents", ()))
    guilty = _documents(d.model_dump() for d in planted.documents) if planted is not None else set()
    return Fate(
        planted=len(bad),
        convicted=len(left_out & bad),
        lost=len(left_out - bad),
        deferred=deferred,
        documents=len(guilty),
        named=len(named & guilty),
        wrong=len(named - guilty),
    )


def _documents(told: Iterable[dict[str, Any]]) -> set[tuple[str, str, int]]:
    return {(d["corpus"], d["shard"], d["document"]) for d in told}
