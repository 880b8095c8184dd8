"""A person's note: in the journal, on the run page, in the record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megastable.base.process import login_name
from megastable.commands.root import app
from megastable.report.publish.public_run import public_event
from megastable.report.publish.redaction import PublicNames, Redactor
from megastable.report.run_page.run_reader import select_lines
from megastable.run.changes import read_requests
from megastable.run.directory import RunDirectory
from megastable.run.events.people_events import ChangeMade, ChangeMeasured, Note
from megastable.run.log import RunLog
from megastable.run.run_history import HistoryReader
from megastable.supervise.locks import only_supervisor
from tests.conftest import tiny
from tests.report.run_page.made_runs import made_run
from tests.tools.cli import Done, call

TEXT = "the learning rate is too high since step 120"


def note(*arguments: object, cwd: Path) -> Done:
    return call(app, "note", *arguments, cwd=cwd)


def test_a_note_is_read_where_the_run_is_told(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", last=20, incidents=[])
    run.progress.write_text('{"step": 20}')
    done = note("run", f"  {TEXT}\n", cwd=tmp_path)
    assert done.returncode == 0 and f"step 20: note by {login_name()}: {TEXT}" in done.stdout
    done = note("run", "the dip", "--step", 7, "--json", cwd=tmp_path)
    assert json.loads(done.stdout) == {"event": "note", "step": 7, "who": login_name(), "text": "the dip"}
    first, second = run.iterate_events(Note)
    assert (first.step, first.text, second.step) == (20, TEXT, 7)
    seen = HistoryReader(run.journal, most_lines=9)
    seen.look_again()
    lines, _ = select_lines(seen.history.lines, group="people")
    assert [(line.step, line.text) for line in reversed(lines)] == [
        (20, f"note by {login_name()}: {TEXT}"), (7, f"note by {login_name()}: the dip"),
    ]  # fmt: skip
    # In the record: without the name, and without words that are not megastable's own.
    public = Note.from_fields(public_event(first.fields, Redactor(PublicNames())))
    assert public.who is None and public.format_sentence() == f"note: {TEXT}"


def test_a_change_and_its_effect_are_told_in_the_same_places(tmp_path: Path) -> None:
    run, told = made_run(tmp_path / "run", last=20, incidents=[]), RunLog(RunDirectory(tmp_path / "run"))
    values = {"old": {"optimizer.lr": 0.002}, "new": {"optimizer.lr": 0.001}}
    told.emit_event(
        ChangeMade(step=11, until=15, change="123", who="ann", reason="the loss swings", **values)
    )
    told.emit_event(ChangeMeasured(step=15, change="123", steps=5, new=values["new"], loss_before=2.5, loss_after=2.25,
                             norm_before=1.0))  # fmt: skip
    seen = HistoryReader(run.journal, most_lines=9)
    seen.look_again()
    lines, _ = select_lines(seen.history.lines, group="people")
    made, after = (line.text for line in reversed(lines))
    assert made == "optimizer.lr 0.002 -> 0.001 from this step on, up to step 15 by ann: the loss swings"
    assert after == (
        "after 5 steps with optimizer.lr=0.001: loss 2.5 before, 2.25 now; gradient norm 1 before, not known now"
    )
    assert [(step, text) for step, _, text in seen.history.rates] == [(11, made)]  # marked in the plots
    public = [
        public_event(event.fields, Redactor(PublicNames()))
        for event in run.iterate_events(ChangeMade, ChangeMeasured)
    ]
    assert [event.get("change") for event in public] == ["123", "123"] and "who" not in public[0]


def started(root: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run that a person may change; nobody waits for its answer."""
    monkeypatch.setattr("megastable.commands.change.PATIENCE", 0.0)
    run = RunDirectory(root)
    run.root.mkdir()
    run.freeze_recipe(tiny(root / "corpus", root), [], {})
    return run


def change(*arguments: object, cwd: Path) -> Done:
    return call(app, "change", "run", *arguments, "--reason", "because", cwd=cwd)


def test_between_two_attempts_of_a_supervisor_a_change_waits_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = started(tmp_path / "run", monkeypatch)
    assert "start it again" in change("optimizer.lr=1e-3", cwd=tmp_path).stderr
    with only_supervisor(run, "here"):
        done = change("optimizer.lr=1e-3", cwd=tmp_path)
    assert done.returncode == 0 and "has not answered it yet" in done.stdout, done
    [request] = read_requests(run.changes)[0]
    assert request.values == {"optimizer.lr": "1e-3"}
