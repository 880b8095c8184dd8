"""What a run does after an incident is told 100 and 500 steps later and at its end, once, by any process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megastable.run.directory import RunDirectory
from megastable.run.events.people_events import ChangeMade, ChangeMeasured
from megastable.run.events.stability_events import Handover, IncidentEvent, IncidentLater
from megastable.run.events.training_events import Resumed, RolledBack, Training
from megastable.run.log import RunLog
from megastable.training.effects import Effects, _recall
from megastable.training.live_changes import Level


def done(step: int, loss: float, applied: bool = True) -> Any:
    measured = SimpleNamespace(loss=loss, grad_norm=1.0)
    return SimpleNamespace(state=SimpleNamespace(step=step), measured=measured, applied=applied)


def test_the_level_is_that_of_the_last_applied_steps_that_were_not_undone() -> None:
    level = Level()
    assert level.since() is None
    for step in range(1, 31):
        level.stepped(done(step, float(step)))
    level.stepped(done(31, 99.0, applied=False))
    level.stepped(done(31, float("nan")))
    assert level.since() == (20.5, 1.0) and level.since(29) == (29.5, 1.0) and level.since(31) is None
    level.stepped(done(29, 0.0))  # back after step 28
    assert level.since(28) == (14.0, 1.0)


def test_effects_are_told_once_over_restarts_and_rewinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megastable.training.effects.first", lambda action: action())
    run = RunDirectory(tmp_path)
    log = RunLog(run)

    def closes(number: int, step: int, outcome: str = "healed", verdict: str = "spike") -> None:
        summary = {"number": number, "outcome": outcome, "verdict": verdict}
        log.emit(IncidentEvent(what="closed", step=step, number=number, summary=summary))

    def process(first: int, last: int, closed: dict[int, int], ends: bool = False) -> None:
        incidents: Any = SimpleNamespace(closed={})
        changes: Any = SimpleNamespace(level=Level(), made=list(run.events(ChangeMade)))
        effects = Effects(run, changes, incidents, log)
        for step in range(first, last + 1):
            incidents.closed |= {number: at for number, at in closed.items() if at == step}
            effects.stepped(done(step, 1000.0 - step))
        if ends:
            effects.finish(last)

    for change, until in (("a", {}), ("b", {"until": 70}), ("c", {})):
        log.emit(
            ChangeMade(step=699 if change == "c" else 61, change=change, loss=2.0, new={"k": 1}, **until)
        )
    closes(1, 50)
    closes(2, 60, outcome="open")
    closes(3, 61, verdict="crash")
    process(51, 149, {})
    process(120, 400, {4: 130})  # from an older checkpoint
    closes(4, 130)
    process(380, 700, {}, ends=True)
    process(690, 700, {}, ends=True)
    changed = [(e.change, e.step, e.steps, e.loss_after) for e in run.events(ChangeMeasured)]
    assert changed == [("b", 70, 10, 1000 - 65.5), ("a", 160, 100, 1000 - 150.5), ("c", 700, 2, 1000 - 699.5)]
    told = [(e.number, e.step, e.after, bool(e.at_end)) for e in run.events(IncidentLater)]
    assert told == [
        (1, 150, 100, False), (4, 230, 100, False), (1, 550, 500, False), (4, 630, 500, False),
        (1, 700, 650, True), (4, 700, 570, True),
    ]  # fmt: skip
    assert next(e.loss for e in run.events(IncidentLater)) == 1000 - 140.5


def test_what_was_over_in_steps_that_were_undone_on_purpose_is_not_told_of(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    log = RunLog(run)

    def closes(*numbers: int) -> None:
        for number in numbers:
            summary = {"number": number, "outcome": "healed", "verdict": "spike"}
            log.emit(IncidentEvent(what="closed", step=100 * number, number=number, summary=summary))

    def starts(step: int) -> None:
        if step:
            log.emit(Resumed(step=step, checkpoint=f"step-{step}", cursor=0, changes={}))
        log.emit(Training(step=step, cursor=0, world=1, seconds=0.0, software={}))

    closes(1, 2, 3, 4)
    log.emit(IncidentEvent(what="rewound", to_step=350, number=5))  # in memory
    starts(150)  # after a crash
    assert _recall(run)[0] == {1: 100, 2: 200, 3: 300}
    log.emit(RolledBack(step=250, reason="because"))
    starts(250)
    starts(50)
    assert _recall(run)[0] == {1: 100, 2: 200}
    log.emit(Handover(before=180))
    starts(150)
    closes(4)
    assert _recall(run)[0] == {1: 100, 4: 400}
    log.emit(Handover(before=50))
    starts(0)
    assert _recall(run)[0] == {}
