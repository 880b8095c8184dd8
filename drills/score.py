"""Score a drilled run from its run directory. Pure except for the reading."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from drills.exercise import Outcome
from drills.scenario import Scenario
from megastable.data.plant import Planted
from megastable.data.skips import numbers_of
from megastable.report.postmortem.sample_texts import Library
from megastable.run import records
from megastable.run.directory import RunDirectory
from megastable.run.events.event import Event
from megastable.run.events.reading import find_latest
from megastable.run.events.stability_events import (
    Discarded,
    Handover,
    IncidentEvent,
    Located,
    SettingsAdjusted,
    TrendEvent,
)
from megastable.run.events.supervisor_events import SupervisorEvent
from megastable.run.events.training_events import Training, Unstable, Warned
from megastable.warnings.routing import REMEDIES as ROUTING_SIGNALS
from megastable_guard.actions import Cause
from megastable_tools.forensics.history import History

REACH = 30  # steps after a fault in which an alarm may be its consequence: the verification time of an action
TARGET = 0.02  # nats: maximum excess over the clean run
WRONG = 12  # one in this many causes may be wrong
SMOOTH = 10  # steps of the exponential average of losses
SHOWS = 0.05  # nats above the undisturbed run's: then the loss shows a slow fault
ENOUGH = 20  # steps that a warning must come before that
WARNED = 100  # steps within which a bad start must cause a warning
# Faults from outside that affect the training numbers.
POISONED = {"poison_weight", "poison_moments"}

Summary = dict[str, Any]


class Fate(BaseModel):
    """Samples of the first pass over the corpus. planted: bad ones; skipped: those of them that are left out. lost:
    clean ones that are skipped. deferred: to be read later. documents: the planted ones; named: those of them
    that an incident names; wrong: others that one names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    planted: int = 0
    skipped: int = 0
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
    of `reference`, the clean run of the same seed. without: the loss with the guard off, or how that run ended if it
    has none. steps_lost: repeated or undone. discarded: batches
    whose update was refused. fate: of the samples. seconds_to_recover: from the fault, or for a fault inside a process
    from the decision to act, until training continues. incidents, rewinds, handovers, cuts (of the
    learning rate, caps included), alerts: of the whole run. warnings: in the journal; warned: one came near the start,
    if that is the expected answer. false_alarms: refused batches and incidents that the fault does not explain.
    kinds, causes: of the incidents that it explains. remedies: what the run did, of all incidents. placed: whether the
    journal names the place of the fault. signs: warnings of routers. wall_seconds: of the whole run. begin: of a slow
    fault; trend_at: step of the first warning of the signal that is expected; shows_at: the first step whose loss shows
    the fault; lead: steps between them, up to the end of the run if it never does. losses: smoothed, by step.
    """

    scenario: str
    seed: int
    ended: str
    step: int
    exit: int | None = None
    val_loss: float | None
    reference: str = "clean"
    excess: float | None = None
    without: float | str | None = None
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
    remedies: tuple[str, ...] = ()
    placed: bool | None = None
    signs: int = 0
    kind_right: bool
    cause_right: bool
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
        is_finished = self.ended == "finished" and self.val_loss is not None
        return f"{f'{self.val_loss:.4f}' if is_finished else self.describe_end()}, {self.wall_seconds:.0f} s"

    def describe_end(self) -> str:
        """Of a run without a loss."""
        return "not measured" if self.ended == "finished" else f"{self.ended} at step {self.step}"


def score_run(
    run: Path,
    scenario: Scenario,
    seed: int,
    fate: Fate = NOBODY,
    *,
    struck: float | None = None,
    code: int | None = None,
    wall_seconds: float = 0.0,
) -> Score:
    """fate: of the samples. struck: unix time of a fault from outside. code: the exit code."""
    run_directory = RunDirectory(run)
    events = list(run_directory.iterate_events())
    run_summary = json.loads(run_directory.summary.read_text()) if run_directory.summary.exists() else {}
    explained_events, unexplained_events = alarms(events, scenario, struck)
    incidents = _latest(explained_events)
    all_actions = [action for incident in _latest(events) for action in incident.get("actions", ())]
    warned_steps = [event.get("step", 0) for event in events if isinstance(event, Warned)]
    kinds, named_causes = [one_incident["kind"] for one_incident in incidents], causes_of(incidents, events)
    return Score(
        scenario=scenario.name,
        seed=seed,
        ended=ended(events, bool(run_summary)),
        step=run_summary.get("steps") or reached(run_directory, events),
        exit=code,
        val_loss=None if run_summary.get("val_loss") is None else float(run_summary["val_loss"]),
        reference=scenario.reference,
        steps_lost=steps_lost(events),
        discarded=sum(isinstance(event, Discarded) for event in events),
        fate=fate,
        seconds_to_recover=_recovery(incidents, events, struck),
        incidents=len(_latest(events)),
        rewinds=sum(_rewound(event) for event in events),
        handovers=sum(isinstance(event, Handover) for event in events),
        cuts=sum(action in ("cut_lr", "cap_lr") for action in all_actions),
        alerts=sum(action == "alert" for action in all_actions),
        warnings=len(warned_steps),
        warned=any(step <= WARNED for step in warned_steps) if scenario.warning else None,
        false_alarms=len(unexplained_events),
        kinds=sorted(kinds),
        causes=sorted(named_causes),
        remedies=tuple(_remedies(events, all_actions)),
        placed=_names(events, scenario.place) if scenario.place else None,
        signs=sum(
            isinstance(e, TrendEvent) and e.what == "warned" and e.signal in ROUTING_SIGNALS for e in events
        ),
        kind_right=set(kinds or [None]) <= scenario.kinds,
        cause_right=is_right(named_causes, scenario),
        wall_seconds=round(wall_seconds, 1),
        trend_at=_warned_of(events, scenario),
        begin=scenario.step if scenario.trend else None,
        losses=smoothed(run_directory),
    )


def _remedies(events: Iterable[Event], actions: Sequence[str]) -> list[str]:
    """What a run did, by the names of actions and of settings that were adjusted."""
    adjusted_settings = [
        setting for event in events if isinstance(event, SettingsAdjusted) for setting in event["settings"]
    ]
    return [*dict.fromkeys(action for action in actions if action != "adjust"), *adjusted_settings]


def _names(events: Iterable[Event], place: str) -> bool:
    """Whether a warning, the origin of a non-finite number or the reason of an incident names a part of the model."""
    told_events = (e for e in events if isinstance(e, TrendEvent | Located | IncidentEvent))
    return any(place in json.dumps(event.fields) for event in told_events)


def _warned_of(events: Iterable[Event], scenario: Scenario) -> int | None:
    """The first step, from the fault on, with a warning of the signal that is expected."""
    told = (e.get("step", 0) for e in events if isinstance(e, TrendEvent) and e.signal == scenario.trend)
    return next((step for step in told if step >= scenario.step), None)


def ended(events: Sequence[Event], finished: bool) -> str:
    """How a run ended, in a word."""
    if finished:
        return "finished"
    return "stopped" if any(isinstance(journal_event, Unstable) for journal_event in events) else "dead"


def is_right(named: Iterable[str], scenario: Scenario) -> bool:
    """Whether the named causes are the right ones; see scenario.py."""
    named_causes = {Cause(name) for name in named}
    if not scenario.causes:
        return named_causes <= scenario.tolerated
    return bool(named_causes & scenario.causes) and named_causes <= scenario.causes | scenario.tolerated


def alarms(
    events: Iterable[Event], scenario: Scenario, struck: float | None
) -> tuple[list[Event], list[Event]]:
    """Refused updates and events of incidents: those that the fault explains; and the unexplained alarms."""
    explained_events: list[Event] = []
    unexplained_events: list[Event] = []
    foreign_numbers: set[int] = set()  # numbers of unexplained incidents
    for journal_event in events:
        if not isinstance(journal_event, Discarded | IncidentEvent):
            continue
        is_incident = isinstance(journal_event, IncidentEvent)
        if is_incident and journal_event["what"] != "opened":
            if journal_event["number"] not in foreign_numbers:
                explained_events.append(journal_event)
        elif _explains(scenario, journal_event, struck):
            explained_events.append(journal_event)
        else:
            unexplained_events.append(journal_event)
            if is_incident:
                foreign_numbers.add(journal_event["number"])
    return explained_events, unexplained_events


def _explains(scenario: Scenario, event: Event, struck: float | None) -> bool:
    if scenario.outside is not None:
        # The training numbers are unaffected: any complaint of the trainer is unfounded.
        by_trainer = isinstance(event, Discarded) or "policy" in event
        disturbs_training = scenario.outside in POISONED
        return struck is not None and event["time"] >= struck and (disturbs_training or not by_trainer)
    if scenario.region is None and scenario.fault is None and not scenario.warning:
        return False
    event_step = event["step"] if "step" in event else event["summary"]["step"]
    return bool(scenario.step <= event_step < scenario.step + scenario.steps + REACH)


def _latest(events: Iterable[Event]) -> list[Summary]:
    """The latest state of each incident, in order."""
    return [summary for _, summary in sorted(find_latest(events).items())]


def causes_of(incidents: Sequence[Summary], events: Iterable[Event]) -> set[str]:
    """The named causes. Without an incident: the journal's finding on an examined refused update."""
    if incidents:
        return {incident["cause"] for incident in incidents}
    found_kinds = {located_event["kind"] for located_event in events if isinstance(located_event, Located)}
    return {Cause.HARDWARE.value for kind in found_kinds if kind in ("not reproduced", "state")}


def _rewound(event: Event) -> bool:
    return isinstance(event, IncidentEvent) and event.what == "rewound"


def steps_lost(events: Iterable[Event]) -> int:
    """By rewinds in memory, and by restarts from a checkpoint."""
    lost = reached = 0
    for journal_event in events:
        if _rewound(journal_event):
            lost, reached = lost + max(0, reached - journal_event["to_step"]), journal_event["to_step"]
        elif isinstance(journal_event, Training):
            lost, reached = lost + max(0, reached - journal_event["step"]), journal_event["step"]
        elif isinstance(step := journal_event.get("step"), int):
            reached = max(reached, step)
    return lost


def reached(run: RunDirectory, events: Iterable[Event]) -> int:
    """The last step known to have been done."""
    try:
        told_step = json.loads(run.progress.read_text())["step"]
    except (OSError, ValueError, KeyError):
        told_step = None
    return told_step or max((e["step"] for e in events if isinstance(e.get("step"), int)), default=0)


def _recovery(incidents: Sequence[Summary], events: Iterable[Event], struck: float | None) -> float | None:
    if struck is None:
        return round(sum(incident["seconds"] for incident in incidents), 1)
    later_events = [e for e in events if e["time"] > struck]
    times_again = [e["time"] for e in later_events if isinstance(e, Training)]
    # If training outlived its supervisor, the next one takes over.
    watched = [e["time"] for e in later_events if isinstance(e, SupervisorEvent) and e.what == "took over"]
    return round((times_again or watched)[0] - struck, 1) if times_again or watched else None


def compare_scores(scores: Sequence[Score]) -> list[Score]:
    """The scores with `excess`, if they include a clean run of the same seed."""
    reference_by_key = {(s.scenario, s.seed): s for s in scores if s.clean}
    clean_losses = {key: s.val_loss for key, s in reference_by_key.items()}

    def excess(s: Score) -> float | None:
        usual_loss = clean_losses.get((s.reference, s.seed))
        return None if usual_loss is None or s.val_loss is None else s.val_loss - usual_loss

    return [_led(s.model_copy(update={"excess": excess(s)}), reference_by_key) for s in scores]


def _led(s: Score, references: Mapping[tuple[str, int], Score]) -> Score:
    clean_score = references.get((s.reference, s.seed))
    if s.begin is None or clean_score is None:
        return s
    shown_step = shows(s.losses, clean_score.losses, s.begin)
    lead_steps = None if s.trend_at is None else (s.step if shown_step is None else shown_step) - s.trend_at
    return s.model_copy(update={"shows_at": shown_step, "lead": lead_steps})


def smoothed(run: RunDirectory) -> dict[int, float]:
    """Exponential average of the training losses by step; empty without records."""
    loss_by_step, level = dict[int, float](), None
    for step_record in records.read_newest_records(run.steps).to_pylist() if run.steps.exists() else ():
        level = step_record["loss"] if level is None else level + (step_record["loss"] - level) / SMOOTH
        loss_by_step[step_record["step"]] = level
    return loss_by_step


def shows(losses: Mapping[int, float], undisturbed: Mapping[int, float], begin: int) -> int | None:
    """The first step from `begin` on whose smoothed loss is `SHOWS` above the undisturbed run's; None: none is."""
    above = (step for step in sorted(losses) if losses[step] - undisturbed.get(step, losses[step]) > SHOWS)
    return next((step for step in above if step >= begin), None)


def is_within(s: Score) -> bool:
    """Whether a run ends no worse than the clean one; or caused a warning in time, if that is the expected answer; and
    tells where the fault is, if it must."""
    if s.placed is False:
        return False
    if s.warned is not None:
        return s.warned
    if s.begin is not None:
        return s.lead is not None and s.lead >= ENOUGH
    return s.excess is not None and s.excess <= TARGET


def is_better(s: Score) -> bool:
    """Whether a run ends better than the clean one, by more than equivalent runs differ. A slow fault is not about how
    it ends."""
    return s.begin is None and s.excess is not None and s.excess < -TARGET


def find_fate(run: Path, planted: Planted | None) -> Fate:
    """The fate of a started run's samples, by its own ledger and order, as the next process would read them, and the
    planted corruption. A sample is its sequence in the corpus, wherever it is read: a deferred one is not lost.
    Raises DataError if its directory or corpus cannot be read."""
    run_history = History(run)
    library = run_history.library_at()
    run_order = library.source.order
    all_positions = np.arange(run_order.sequences[0])
    positions_out = all_positions[run_history.select_from(library).mask_skipped(all_positions)]
    left_out = set(run_order.locate_samples(positions_out).sequence.tolist())
    bad_sequences = set[int]()
    if planted is not None:
        # In the corpus's own order, before any deferral.
        bad_sequences = set(
            Library(run_history.config)
            .source.order.locate_samples(numbers_of(planted.positions))
            .sequence.tolist()
        )
    all_incidents = list(find_latest(run_history.run.iterate_events(IncidentEvent)).values())
    deferred_count = sum(end - first for i in all_incidents for first, end in i.get("deferred", ()))
    named_documents = _documents(document for i in all_incidents for document in i.get("documents", ()))
    planted_documents = (
        _documents(d.model_dump() for d in planted.documents) if planted is not None else set()
    )
    return Fate(
        planted=len(bad_sequences),
        skipped=len(left_out & bad_sequences),
        lost=len(left_out - bad_sequences),
        deferred=deferred_count,
        documents=len(planted_documents),
        named=len(named_documents & planted_documents),
        wrong=len(named_documents - planted_documents),
    )


def _documents(told: Iterable[dict[str, Any]]) -> set[tuple[str, str, int]]:
    return {(d["corpus"], d["shard"], d["document"]) for d in told}
