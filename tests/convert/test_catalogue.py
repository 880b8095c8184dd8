"""The list of a run's checkpoints: each as it stands, whatever has happened to it."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megastable.base.errors import CheckpointError
from megastable.checkpoint import markers, store
from megastable.checkpoint.store import DELETING
from megastable.report.sheet import as_csv, as_html, as_json
from megastable.run.directory import RunDirectory
from megastable.run.events.reading import event_of
from megastable.run.log import RunLog
from megastable_tools.convert.catalogue import CatalogueEntry, entries, sheet
from tests.checkpoint.standins import LAYOUT, checkpoint, run_with


def by_name(run: Path) -> dict[str, CatalogueEntry]:
    return {entry.name: entry for entry in entries(run)}


def test_what_stands_is_listed_by_step(tmp_path: Path) -> None:
    folder = run_with(tmp_path, 5, 100, 20)
    markers.mark_healthy(folder / "step-20", 70, 50)
    markers.pin(folder / "step-5", "the first")
    listed = entries(tmp_path)
    assert [(e.step, e.name, e.state) for e in listed] == [
        (5, "step-5", "fresh"), (20, "step-20", "healthy"), (100, "step-100", "fresh"),
    ]  # fmt: skip
    assert [e.latest for e in listed] == [False, True, False]
    assert listed[0].pinned is not None and listed[0].pinned.reason == "the first"
    assert listed[1].health is not None and listed[1].health.step == 70
    assert all(e.layout == LAYOUT and e.problem == "" and e.path == folder / e.name for e in listed)
    assert listed[2].bytes == sum(f.stat().st_size for f in (folder / "step-100").iterdir())
    # Time goes on between two looks.
    assert [replace(e, age=0.0) for e in entries(folder)] == [replace(e, age=0.0) for e in listed]


def test_the_age_is_that_of_the_manifest(tmp_path: Path) -> None:
    folder = run_with(tmp_path, 10, 20)
    os.utime(folder / "step-10" / store.MANIFEST, (0, time.time() - 3600))
    os.utime(folder / "step-20" / store.MANIFEST, (0, time.time() + 3600))  # another host's clock
    (folder / "suspect-step-7").mkdir()
    ages = {name: entry.age for name, entry in by_name(tmp_path).items()}
    assert ages["step-10"] == pytest.approx(3600, abs=60) and ages["step-20"] == 0.0
    assert ages["suspect-step-7"] == pytest.approx(0, abs=60)


def test_the_age_of_a_copy_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    """A copy's files are new; the journal, which is copied along, says when it was written."""
    run_with(tmp_path, 10, 20)
    saved = {"event": "checkpoint", "name": "step-10", "step": 10, "time": time.time() - 7200}
    (tmp_path / "journal.jsonl").write_text(json.dumps(saved) + "\n")
    ages = {name: entry.age for name, entry in by_name(tmp_path).items()}
    assert ages["step-10"] == pytest.approx(7200, abs=60) and ages["step-20"] == pytest.approx(0, abs=60)


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        (store.MANIFEST, None, "did not finish"),
        (store.MANIFEST, b"{", "damaged"),
        (store.MANIFEST, b"[" * 100_000, "damaged"),
        (store.STATE, None, "No such file"),
        (store.STATE, b"{}", "2 bytes, the manifest says"),
        (store.STATE, b"same size", "damaged"),
        ("rank-00000.safetensors", b"short", "5 bytes, the manifest says"),
        ("rank-00000.safetensors", None, "No such file"),
    ],
)
def test_a_damaged_one_is_listed_with_its_problem(
    file: str, content: bytes | None, told: str, tmp_path: Path
) -> None:
    folder = run_with(tmp_path, 10, 20)
    path = folder / "step-20" / file
    if content == b"same size":
        content = b"[" * path.stat().st_size
    path.unlink() if content is None else path.write_bytes(content)
    good, bad = entries(tmp_path)
    assert (good.state, bad.state) == ("fresh", "damaged")
    assert bad.problem.startswith(f"{file}: ") and told in bad.problem and str(tmp_path) not in bad.problem
    assert (bad.layout is None) == (file == store.STATE)


def test_one_under_the_name_of_another_step_is_damaged(tmp_path: Path) -> None:
    folder = run_with(tmp_path, 10)
    (folder / "step-10").rename(folder / "step-30")
    [entry] = entries(tmp_path)
    assert (entry.step, entry.state) == (30, "damaged") and "step 10" in entry.problem


def test_what_does_not_count_says_what_it_is(tmp_path: Path) -> None:
    folder = run_with(tmp_path, 10)
    for name in (
        "suspect-step-20",
        "rejected-step-30",
        ".saving-step-40",
        ".saving-replaced-step-10",
        f"{DELETING}step-5",
    ):
        checkpoint(folder, int(name.rpartition("-")[2]), name)
    markers.mark_healthy(folder / "suspect-step-20", 25, 5)
    (folder / "rejected-step-30" / store.STATE).unlink()
    (folder / "step-x").mkdir()
    (folder / "step-50").write_text("a file")
    found = by_name(tmp_path)
    assert {name: entry.state for name, entry in found.items()} == {
        "step-10": "fresh", "suspect-step-20": "suspect", "rejected-step-30": "rejected",
        ".saving-step-40": "incomplete", ".saving-replaced-step-10": "incomplete", ".deleting-step-5": "incomplete",
    }  # fmt: skip
    assert found["suspect-step-20"].problem == "" and found["suspect-step-20"].health is not None
    assert store.STATE in found["rejected-step-30"].problem
    assert "interrupted" in found[".saving-step-40"].problem


def test_a_marker_that_does_not_count_is_told(tmp_path: Path) -> None:
    folder = run_with(tmp_path, 10)
    (folder / "step-10" / markers.HEALTH).write_text("{}")
    (folder / "step-10" / markers.PINNED).write_text("{}")
    [entry] = entries(tmp_path)
    assert entry.state == "fresh" and entry.pinned is not None
    assert entry.problem.startswith("health.json: damaged") and "; pinned.json: damaged" in entry.problem


@pytest.mark.parametrize(
    ("losses", "mean"),
    [
        ([2.0, 4.0], 3.0),
        ([2.0, math.nan, 4.0, math.inf], 3.0),
        ([], None),
        ([math.nan], None),
        ([1e308] * 20, 1e308),
    ],
)
def test_the_loss_is_the_mean_of_those_that_are_numbers(
    losses: list[float], mean: float | None, tmp_path: Path
) -> None:
    checkpoint(tmp_path / "checkpoints", 10, recent_losses=losses)
    [entry] = entries(tmp_path)
    assert entry.loss == pytest.approx(mean)


def note(run: Path, *events: dict[str, Any]) -> None:
    journal = RunLog(RunDirectory(run))
    for event in events:
        journal.emit(event_of(event))


def evaluated(step: int, loss: Any) -> dict[str, Any]:
    return {"event": "evaluated", "step": step, "loss": loss, "samples": 8}


def test_the_validation_loss_is_the_last_one_up_to_it(tmp_path: Path) -> None:
    run_with(tmp_path, 10, 20, 25, 40)
    note(tmp_path, evaluated(20, 5.0), evaluated(30, 4.0), evaluated(40, 3.0), evaluated(40, 2.5))
    assert [e.validation for e in entries(tmp_path)] == [None, 5.0, 5.0, 2.5]


def test_a_suspect_keeps_the_loss_of_its_own_past(tmp_path: Path) -> None:
    folder = run_with(tmp_path, 10, 30)
    checkpoint(folder, 30, "suspect-step-30")
    suspect = {"event": "checkpoint_suspect", "name": "step-30", "reason": "went back"}
    note(tmp_path, evaluated(30, 9.0), suspect, evaluated(30, 4.0))
    found = by_name(tmp_path)
    assert found["suspect-step-30"].validation == 9.0 and found["step-30"].validation == 4.0


def test_a_journal_that_is_damaged_costs_only_what_it_would_have_told(tmp_path: Path) -> None:
    run_with(tmp_path, 8, 10, 20)
    odd: list[Any] = [
        [], None, {"event": "evaluated"}, evaluated(True, 1.0), evaluated(5, "x"), evaluated(6, None),
        evaluated(7, 10**400), {"event": "checkpoint_suspect", "name": 5},
        {"event": "checkpoint_suspect", "name": "step-²"},
    ]  # fmt: skip
    lines = [json.dumps(one).encode() for one in [*odd, evaluated(10, 4.0), evaluated(20, "nan")]]
    (tmp_path / "journal.jsonl").write_bytes(b"\n".join([b"{", b"\xff", b"[" * 100_000, *lines, b'{"torn']))
    none, first, second = entries(tmp_path)
    assert none.validation is None and first.validation == 4.0
    assert second.validation is not None and math.isnan(second.validation)
    (tmp_path / "journal.jsonl").unlink()
    (tmp_path / "journal.jsonl").mkdir()
    assert [e.validation for e in entries(tmp_path)] == [None] * 3


def test_the_paths_that_name_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    folder = run_with(run, 10)
    note(run, evaluated(10, 4.0))
    copied = tmp_path / "copied"
    copied.mkdir()
    checkpoint(copied, 20)
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / store.RECIPE).write_text("config: {}")
    assert entries(tmp_path / "begun") == []
    assert [e.name for e in entries(copied)] == ["step-20"]
    monkeypatch.chdir(folder)
    for path in (run, folder, Path(".")):
        [entry] = entries(path)
        assert entry.validation == 4.0


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    folder = run_with(tmp_path / "run", 10)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a checkpoint: give the directory of its run"):
        entries(folder / "step-10")
    for name in ("empty", "file", "none", "n" * 300):
        with pytest.raises(CheckpointError):
            entries(tmp_path / name)
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / store.RECIPE).write_text("")
    (tmp_path / "odd" / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match="cannot be read"):
        entries(tmp_path / "odd")


def test_the_sheet_shows_all_of_it_and_nothing_obeys_a_reason(tmp_path: Path) -> None:
    folder = run_with(tmp_path, 10, 20)
    markers.pin(folder / "step-10", "\x1b]0;title\x07 =1+1")
    markers.mark_healthy(folder / "step-10", 15, 5)
    (folder / "step-20" / store.STATE).unlink()
    made = sheet(tmp_path, entries(tmp_path))
    assert dict(made.facts)["newest healthy"] == "step-10" and dict(made.facts)["latest"] == "step-20"
    assert made.notes == ["1 checkpoint cannot be used: see its problem"]
    told = json.loads(as_json(made))
    assert [row["state"] for row in told["rows"]] == ["healthy", "damaged"]
    assert told["rows"][0]["path"] == str(folder / "step-10") and told["rows"][0]["bytes"] > 100
    assert told["rows"][0]["pinned"] == "\x1b]0;title\x07 =1+1" and told["rows"][1]["pinned"] is None
    for text in (as_json(made), as_csv(made), as_html(made)):
        assert "\x1b" not in text and "\x07" not in text
