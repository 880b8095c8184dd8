"""What runs and is told beside a supervised run: people, files of incidents, and the look ahead in the data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megastable.cluster.child_process import ChildProcess
from megastable.config.tree import RunConfig
from megastable.run.directory import RunDirectory
from megastable.run.events.stability_events import AlertEvent
from megastable.supervise import side_process
from megastable.supervise.notifiers import Notifiers
from megastable.supervise.side_process import build_look_ahead
from tests.conftest import tiny
from tests.forensics.test_ahead import clean, left_out, planted
from tests.forensics.test_history import events_of, positions_of
from tests.journal import note
from tests.supervise.runs import incident, journal
from tests.supervise.test_supervisor import Supervised


@pytest.fixture
def heard(corpus: Path, tmp_path: Path) -> Notifiers:
    run = RunDirectory(tmp_path)
    return Notifiers(tiny(corpus, tmp_path), run)


def test_notifiers_tell_people_of_an_alert(heard: Notifiers) -> None:
    """Once when it begins and once when it is over, with the reason; the reports are written again."""
    told: list[tuple[str, str]] = []
    heard.notices.send_notice = lambda event, text, facts: told.append((event, text))  # type: ignore[method-assign]
    heard.handle_event(AlertEvent(what="begun", step=7, reason="the 8 rewinds are spent"))
    heard.handle_event(AlertEvent(what="over", step=70))
    assert [event for event, _ in told] == ["alert begun", "alert over"]
    assert told[0][1].endswith("training goes on: the 8 rewinds are spent") and "is over" in told[1][1]


def test_report_process_writes_the_files_of_incidents_only(heard: Notifiers) -> None:
    run, reports = heard.run, heard.reports
    note(run, "launched", attempt=1, command=[], log="x")
    reports.wait_until_written()
    assert not list(run.root.rglob("reports.log"))
    journal(run.root, incident(1))
    reports.mark_due()
    reports.wait_until_written()
    assert (run.incidents / "0001/report.html").exists()


__all__ = ["clean"]  # the fixture


@pytest.mark.slow
def test_look_ahead_keeps_a_run_from_what_was_planted(clean: Path, tmp_path: Path) -> None:
    config, bad = planted(clean, tmp_path, "random", 20)
    given = Supervised(config, tmp_path, steps=32)
    given.start()
    assert given.finish() == 0, given.output.read_text()
    run = given.run
    skipped = left_out(config, run)
    assert skipped.count() >= 18 and all(bad.contains(p) for a, b in skipped.ranges for p in range(a, b))
    trained = positions_of(run.root)
    assert not [p for p in trained if skipped.contains(p)] and max(trained) > 19 * 16 + 20
    told = events_of(run.root)
    assert {"looked_ahead"} <= {e["event"] for e in told} and not [
        e for e in told if e["event"] == "incident"
    ]
    assert "ahead of the run: " in given.output.read_text()
    assert not json.loads(run.summary.read_text())["incidents"]


def _refuse(*arguments: object) -> ChildProcess:
    raise OSError("no more processes")


def test_side_process_gives_up_what_cannot_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_process, "start_in_background", _refuse)
    said: list[str] = []
    config = RunConfig.model_validate({"data": {"look_ahead": {"steps": 5}}})
    process = build_look_ahead(config, RunDirectory(tmp_path), "x", [], said.append)
    process.wait_until_done(lambda: None, lambda: False)
    assert len(said) == side_process.TRIES and "cannot be started: no more processes" in said[0]
