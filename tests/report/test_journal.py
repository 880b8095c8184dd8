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

from megastable.base import durable
from megastable.base.errors import DataError
from megastable.report.postmortem import incidents_of, pages, write_incidents
from megastable.report.postmortem.evidence import Gatherer, Run
from megastable.report.postmortem.facts import Evidence
from megastable.run.directory import RunDirectory, as_json
from tests.report.runs import Make, breakdown, tell
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


SPIKE = {"cause": "data", "failure": "", "verdict": "spike"}
ODD: list[tuple[str | dict[str, Any], int]] = [
    ('{"time": NaN, "event": "warning", "text": "x"}', 0),
    ({"time": 10**400, "event": "warning", "text": "x"}, 0),
    ({"time": 1100.0, "event": {"a": 1}}, 0),
    ("[1]", 0),
    ({"time": 1100.0, "event": "warning", "text": "\udcff"}, 0),
    ({"time": 1100.0, "event": "incident", "what": ["x"], "suspects": 5, "summary": {"number": 2}}, 1),
    (odd(evidence=["a\0b", "logs", "."]), 1),
    (odd(actions=[["a"]], positions=[[5, 2]], **SPIKE), 1),
    (odd(positions=[[0, 10**15]], **SPIKE), 1),
    (odd(step=-(10**30), onset="soon", kind=5, documents=[{"a": 1}]), 1),
    (odd(number=-1), 0),
]


def test_write_incidents_tells_all_that_can_be_told_beside_odd_events(bare: Path) -> None:
    journal = bare / "journal.jsonl"
    before = journal.read_text()
    for event, more in ODD:
        journal.write_text(f"{before}{event if isinstance(event, str) else json.dumps(event)}\n")
        shutil.rmtree(bare / "incidents", ignore_errors=True)
        assert len(write_incidents(bare)) == 1 + more, event
    assert write_incidents(bare) == []


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda below: st.lists(below, max_size=2) | st.dictionaries(st.text(max_size=5), below, max_size=2),
    max_leaves=4,
)
KEYS = """what step to_step suspects number evidence positions documents actions reasons failure verdict cause outcome
seconds steps_lost loss_peak time silent waited world""".split()
KINDS = "incident ended hang training launched discarded handover".split()
FIELDS = st.dictionaries(st.sampled_from(KEYS), JUNK)


@settings(
    max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(st.sampled_from(KINDS), FIELDS, FIELDS), max_size=4))
def test_incidents_of_any_journal_can_be_told(
    tmp_path: Path, events: list[tuple[str, dict[str, Any], dict[str, Any]]]
) -> None:
    lines = [
        {"time": 1.0, "event": kind, **fields, "summary": summary | {"number": 1}}
        for kind, fields, summary in events
    ]
    (tmp_path / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for found in incidents_of(tmp_path):
        pages.render_report(found, {}, [])
        pages.render_postmortem(found, [])


def test_write_incidents_names_what_cannot_be_told_and_tells_the_others(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (2, 3):
        tell(RunDirectory(bare), breakdown(number=number))
    report = pages.render_report

    def broken(e: Evidence, *rest: Any) -> str:
        if e.incident.number == 2:
            raise OSError(28, "as if a disk were full")
        return report(e, *rest)

    monkeypatch.setattr(pages, "render_report", broken)
    with pytest.raises(DataError, match="incident 2 could not be told: OSError") as error:
        write_incidents(bare)
    assert "make room" not in str(error.value)
    assert [p.name for p in sorted(bare.glob("incidents/*"))] == ["0001", "0003", "index.html"]


@pytest.mark.slow
def test_write_incidents_reads_a_long_journal_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make()
    for number in range(1, 41):
        tell(RunDirectory(root), breakdown(number=number), 1000.0 + 20 * number)
    known = next(incidents_of(root))
    run = Run(root)
    for number in list(run.journal.own):  # as if they had been written
        case = Gatherer(run, number)
        copy = known.model_copy(update={"inputs": case.inputs, "incident": case.incident})
        folder = root / "incidents" / f"{number:04d}"
        folder.mkdir(parents=True)
        (folder / "evidence.json").write_text(as_json(copy.model_dump(mode="json")))
    calls: Counter[str] = Counter()

    def counted(name: str, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            calls[name] += 1
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(durable, "read_content", counted("read", durable.read_content))
    monkeypatch.setattr(json, "loads", counted("parse", json.loads))
    monkeypatch.setattr(Gatherer, "gather_evidence", counted("gather", Gatherer.gather_evidence))
    assert write_incidents(root) == []
    lines = len((root / "journal.jsonl").read_bytes().splitlines())
    assert calls["parse"] <= lines + 2 and calls["read"] == 2 and not calls["gather"]
