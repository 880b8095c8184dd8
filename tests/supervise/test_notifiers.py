"""Who hears of a supervised run: people, and the files of its incidents, written by a process of their own."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from megastable.run.directory import RunDirectory
from megastable.run.events.stability_events import AlertEvent
from megastable.supervise import notifiers
from megastable.supervise.notifiers import Notifiers
from tests.conftest import tiny
from tests.journal import note
from tests.patience import PATIENCE
from tests.supervise.runs import incident, journal


@pytest.fixture
def heard(corpus: Path, tmp_path: Path) -> Notifiers:
    run = RunDirectory(tmp_path)
    return Notifiers(tiny(corpus, tmp_path), run)


def test_people_are_told_of_an_alert(heard: Notifiers) -> None:
    """Once when it begins and once when it is over, with the reason; the reports are written anew."""
    told: list[tuple[str, str]] = []
    heard.notices.notify = lambda event, text, facts: told.append((event, text))  # type: ignore[method-assign]
    heard.event(AlertEvent(what="begun", step=7, reason="the 8 rewinds are spent"))
    heard.event(AlertEvent(what="over", step=70))
    assert [event for event, _ in told] == ["alert begun", "alert over"]
    assert told[0][1].endswith("training goes on: the 8 rewinds are spent") and "is over" in told[1][1]


def test_no_process_writes_the_files_of_no_incident(heard: Notifiers) -> None:
    run, reports = heard.run, heard.reports
    note(run, "launched", attempt=1, command=[], log="x")
    reports.finish()
    assert not list(run.root.rglob("reports.log"))
    journal(run.root, incident(1))
    reports.due()
    reports.finish()
    assert (run.incidents / "0001/report.html").exists()


@pytest.mark.slow
def test_the_files_of_an_incident_are_not_written_for_each_of_its_events(
    heard: Notifiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    class Counted(subprocess.Popen[bytes]):
        def __init__(self, *given: Any, **options: Any) -> None:
            if "megastable.report.postmortem" in given[0]:  # a supervisor starts other programs, too
                started.append(given)
            super().__init__(*given, **options)

    monkeypatch.setattr(subprocess, "Popen", Counted)
    monkeypatch.setattr(notifiers, "PAUSE", PATIENCE)  # however long they take
    reports = heard.reports
    for what in ("opened", "attributed", "closed"):
        journal(heard.run.root, incident(1, what))
        reports.due()
        reports.poll()
        if (child := reports._child) is not None:
            child.wait()
    assert not reports.poll()
    assert len(started) == 1
    reports.finish()
    assert len(started) == 2  # at the end nothing is waited for
