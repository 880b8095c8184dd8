"""The list of a run's checkpoints: each as it stands, whatever has happened to it."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megastable.base.errors import CheckpointError
from megastable.checkpoint import markers, store
from megastable.checkpoint.store import DELETING
from megastable.run.directory import RunDirectory
from megastable.run.events.training_events import CheckpointSuspect
from megastable.run.log import RunLog
from megastable_tools.convert.catalogue import CatalogueEntry, list_entries
from tests.checkpoint.standins import LAYOUT, checkpoint, run_with
from tests.journal import note


def by_name(run: Path) -> dict[str, CatalogueEntry]:
    return {entry.name: entry for entry in list_entries(run)}


def test_entries_are_listed_by_step(tmp_path: Path) -> None:
    folder = run_with(tmp_path, 5, 100, 20)
    markers.mark_healthy(folder / "step-20", 70, 50)
    markers.pin_checkpoint(folder / "step-5", "the first")
    listed = list_entries(tmp_path)
    assert [(e.step, e.name, e.state) for e in listed] == [
        (5, "step-5", "fresh"), (20, "step-20", "healthy"), (100, "step-100", "fresh"),
    ]  # fmt: skip
    assert [e.latest for e in listed] == [False, True, False]
    assert listed[0].pinned is not None and listed[0].pinned.reason == "the first"
    assert listed[1].health is not None and listed[1].health.step == 70
    assert all(e.layout == LAYOUT and e.problem == "" and e.path == folder / e.name for e in listed)
    assert listed[2].bytes == sum(f.stat().st_size for f in (folder / "step-100").iterdir())
    # Time goes on between two looks.
    assert [replace(e, age=0.0) for e in list_entries(folder)] == [replace(e, age=0.0) for e in listed]


def test_entries_have_the_age_of_the_checkpoint_not_of_a_copy(tmp_path: Path) -> None:
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
def test_entries_name_the_problem_of_a_damaged_one(
    file: str, content: bytes | None, told: str, tmp_path: Path
) -> None:
    folder = run_with(tmp_path, 10, 20)
    path = folder / "step-20" / file
    if content == b"same size":
        content = b"[" * path.stat().st_size
    path.unlink() if content is None else path.write_bytes(content)
    good, bad = list_entries(tmp_path)
    assert (good.state, bad.state) == ("fresh", "damaged")
    assert bad.problem.startswith(f"{file}: ") and told in bad.problem and str(tmp_path) not in bad.problem
    assert (bad.layout is None) == (file == store.STATE)


def test_entries_say_what_does_not_count(tmp_path: Path) -> None:
    folder = run_with(tmp_path, 10)
    aside = "suspect-step-20", "rejected-step-30", ".saving-step-40", ".saving-replaced-step-10"
    for name in (*aside, f"{DELETING}step-5"):
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


def test_entries_of_a_suspect_keep_the_loss_of_its_own_past(tmp_path: Path) -> None:
    folder = run_with(tmp_path, 10, 30)
    checkpoint(folder, 30, "suspect-step-30")
    run = RunDirectory(tmp_path)
    note(run, "evaluated", step=30, loss=9.0, samples=8)
    RunLog(run).emit_event(CheckpointSuspect(name="step-30", reason="went back"))
    note(run, "evaluated", step=30, loss=4.0, samples=8)
    found = by_name(tmp_path)
    assert found["suspect-step-30"].validation == 9.0 and found["step-30"].validation == 4.0


def test_entries_refuse_what_is_no_run(tmp_path: Path) -> None:
    folder = run_with(tmp_path / "run", 10)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a checkpoint: give the directory of its run"):
        list_entries(folder / "step-10")
    for name in ("empty", "file", "none", "n" * 300):
        with pytest.raises(CheckpointError):
            list_entries(tmp_path / name)
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / store.RECIPE).write_text("")
    (tmp_path / "odd" / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match="cannot be read"):
        list_entries(tmp_path / "odd")
