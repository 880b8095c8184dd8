"""Whatever a journal holds, the incidents in it that can be told are told, and a long one is read once."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megastable.base import jsonl
from megastable.base.errors import DataError
from megastable.report.postmortem import evidence, incidents_of, pages, write_incidents
from megastable.report.postmortem.evidence import Gatherer, Run
from megastable.report.postmortem.facts import Evidence
from megastable.run.directory import RunDirectory, as_json
from tests.report.runs import Make, breakdown, note, tell
from tests.tiers import examples


@pytest.fixture
def bare(make: Make) -> Path:
    """A run with an incident, but without records: there is nothing to draw."""
    root = make(breakdown())
    shutil.rmtree(root / "steps")
    return root


def odd(**change: Any) -> dict[str, Any]:
    """An event of incident 2 with something odd in it."""
    summary = {
        "number": 2,
        "step": 31,
        "onset": 30,
        "verdict": "crash",
        "kind": "recoverable",
        "failure": "x",
    }
    return {"time": 1100.0, "event": "incident", "what": "opened", "number": 2, "summary": summary | change}


ODD: list[tuple[str | dict[str, Any], int]] = [
    ('{"time": NaN, "event": "warning", "text": "x"}', 0),
    ({"time": 1e18, "event": "warning", "text": "x"}, 0),
    ({"time": 10**400, "event": "warning", "text": "x"}, 0),
    ({"time": True, "event": ["a"]}, 0),
    ({"time": 1100.0, "event": {"a": 1}}, 0),
    ("[1]", 0),
    ("neither", 0),
    ({"time": 1100.0, "event": "warning", "text": "\udcff"}, 0),
    ({"time": 1100.0, "event": "incident", "what": ["x"], "suspects": 5, "summary": {"number": 2}}, 1),
    (odd(evidence=["a\0b"]), 1),
    (odd(evidence=["logs", "."]), 1),
    (odd(actions=[["a"]], positions=[[5, 2]], cause="data", failure="", verdict="spike"), 1),
    (odd(positions=[[-5, 2]], cause="data", failure="", verdict="spike"), 1),
    (odd(positions=[[0, 10**15]], cause="data", failure="", verdict="spike"), 1),
    (odd(step=-(10**30), onset=10**30), 1),
    (odd(number=-1), 0),
    (odd(number=10**30), 0),
]


@pytest.mark.quick("[[]1[]]-0", "event1-0")
@pytest.mark.parametrize(("event", "more"), ODD)
def test_an_odd_event_keeps_no_incident_from_being_told(
    bare: Path, event: str | dict[str, Any], more: int
) -> None:
    with (bare / "journal.jsonl").open("a") as file:
        file.write((event if isinstance(event, str) else json.dumps(event)) + "\n")
    assert len(write_incidents(bare)) == 1 + more


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda below: st.lists(below, max_size=2) | st.dictionaries(st.text(max_size=5), below, max_size=2),
    max_leaves=4,
)
KEYS = """what step to_step suspects number evidence positions documents actions reasons failure verdict cause outcome
seconds steps_lost loss_peak time silent waited world""".split()


@settings(
    max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["incident", "ended", "hang", "training", "launched", "discarded", "handover"]),
            st.dictionaries(st.sampled_from(KEYS), JUNK), st.dictionaries(st.sampled_from(KEYS), JUNK),
        ),
        max_size=4,
    )
)  # fmt: skip
def test_no_journal_is_too_strange(
    tmp_path: Path, events: list[tuple[str, dict[str, Any], dict[str, Any]]]
) -> None:
    lines = [
        {"time": 1.0, "event": kind, **fields, "summary": summary | {"number": 1}}
        for kind, fields, summary in events
    ]
    (tmp_path / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for found in incidents_of(tmp_path):
        pages.report(found, {}, [])
        pages.postmortem(found, [])


def test_what_cannot_be_told_is_named_and_the_others_are_told(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (2, 3):
        tell(RunDirectory(bare), breakdown(number=number))
    report = pages.report

    def broken(e: Evidence, *rest: Any) -> str:
        if e.incident.number == 2:
            raise OSError(28, "as if a disk were full")
        return report(e, *rest)

    monkeypatch.setattr(pages, "report", broken)
    with pytest.raises(DataError, match="incident 2 could not be told: OSError") as error:
        write_incidents(bare)
    assert "make room" not in str(error.value)
    assert [p.name for p in sorted(bare.glob("incidents/*"))] == ["0001", "0003", "index.html"]


@pytest.mark.slow
def test_a_long_journal_and_its_folders_are_read_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make()
    for number in range(1, 41):
        tell(RunDirectory(root), breakdown(number=number), 1000.0 + 20 * number)
    (known,) = [e for e in incidents_of(root) if e.incident.number == 1]
    run = Run(root)
    for number in run.incidents:  # as if they had been written
        case = Gatherer(run, number)
        copy = known.model_copy(update={"inputs": case.inputs, "incident": case.incident})
        folder = root / "incidents" / f"{number:04d}"
        folder.mkdir(parents=True)
        (folder / "evidence.json").write_text(as_json(copy.model_dump(mode="json")))
    calls: Counter[str] = Counter()
    read, glob, parse, gather = jsonl.content, Path.glob, json.loads, Gatherer.gather

    def counted(name: str, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            calls[name] += 1
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(jsonl, "content", counted("read", read))
    monkeypatch.setattr(Path, "glob", counted("glob", glob))
    monkeypatch.setattr(json, "loads", counted("parse", parse))
    monkeypatch.setattr(evidence.Gatherer, "gather", counted("gather", gather))
    assert write_incidents(root) == []
    lines = len((root / "journal.jsonl").read_bytes().splitlines())
    assert calls["parse"] <= lines + 2 and calls["read"] == 2 and calls["glob"] == 2 and not calls["gather"]


def test_only_what_is_near_an_incident_writes_it_again(bare: Path) -> None:
    run = RunDirectory(bare)
    note(run, 1100.0, "checkpoint", step=50, name="step-50")
    assert len(write_incidents(bare)) == 1
    for number in range(20):
        note(run, 1200.0 + number, "discarded", step=200 + number)
    run.skips.write_text('{"first": 900, "end": 901, "reason": "another one", "incident": 9}\n')
    assert write_incidents(bare) == []
