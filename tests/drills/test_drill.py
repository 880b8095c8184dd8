"""The tool as a user calls it: real runs, nothing left behind, clear refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from drills.learning import NAMES, QUICK
from drills.scenario import VARIABLE
from tests.drills.refusals import refusal
from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "megastable", "drill", *arguments], cwd=folder, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True, env={**os.environ, "TMPDIR": str(folder)},
    )  # fmt: skip


def left(folder: Path) -> list[Sequence[str]]:
    """Processes of drills whose files lie in `folder`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(VARIABLE, "").startswith(str(folder)):
                found.append(process.cmdline())
        except psutil.Error:
            continue
    return found


def shared_memory() -> set[str]:
    """Segments; semaphores come and go with the tests of other processes."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE + 60)
def test_drill_quick_meets_its_targets(tmp_path: Path) -> None:
    shared = shared_memory()
    # Two ranks on one core wait more than they compute.
    quick = "--quick", "--control", "--ranks", "1", "--set", "logging.interval=7", "--keep", "kept"
    tool = start(tmp_path, *quick, "--output", "drills.json")
    out, errors = tool.communicate(timeout=PATIENCE)
    assert tool.returncode == 0, out + errors
    assert left(tmp_path) == [] and shared_memory() <= shared
    scores = {s["scenario"]: s for s in json.loads((tmp_path / "drills.json").read_text())}
    assert list(scores) == ["clean", *QUICK]
    assert scores["clean"]["false_alarms"] == scores["clean"]["discarded"] == 0
    bad, killed = (scores[name] for name in QUICK)
    assert bad["causes"] == ["data"]
    assert bad["fate"]["skipped"] == bad["fate"]["planted"] == 40 and bad["fate"]["lost"] == 0
    assert bad["fate"]["named"] == bad["fate"]["documents"] > 20 and bad["fate"]["wrong"] == 0
    assert bad["exit"] == killed["exit"] == 0
    assert killed["causes"] == ["process"] and killed["steps_lost"] > 0
    usual = scores["clean"]["val_loss"]
    # Of a killed rank nothing is to be seen.
    assert killed["val_loss"] == killed["without"] == scores["clean"]["without"] == usual
    assert bad["without"] > bad["val_loss"] + 0.01  # with the guard off it trains on the noise
    assert "2 of 2 at most 0.02 nat worse than the clean run" in out
    assert "cause right in 2 of 2, 0 clean samples lost for good, 0 false alarms" in out
    assert "  interval: 7\n" in (tmp_path / "kept/runs/killed-rank-1/recipe.yaml").read_text()
    journal = tmp_path / "kept/runs/killed-rank-1/journal.jsonl"
    before = journal.stat().st_mtime_ns

    # Called again, it has nothing to do but to tell it again.
    again = start(tmp_path, *quick, "--output", "again.json")
    out, errors = again.communicate(timeout=PATIENCE)
    assert again.returncode == 0, out + errors
    assert (tmp_path / "again.json").read_text() == (tmp_path / "drills.json").read_text()
    assert journal.stat().st_mtime_ns == before


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE + 60)
def test_drill_interrupted_leaves_no_process(tmp_path: Path) -> None:
    tool = start(tmp_path, "--quick", NAMES[0], "--keep", "kept", "--text", str(ROOT / "megastable"))
    end = time.monotonic() + PATIENCE
    while not any("--local_rank=1" in command for command in left(tmp_path)):
        assert tool.poll() is None and time.monotonic() < end, tool.communicate()
        time.sleep(0.2)
    tool.send_signal(signal.SIGTERM)  # as Ctrl-C
    _, errors = tool.communicate(timeout=PATIENCE)
    assert (tool.returncode, errors) == (130, "interrupted\n")
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "1,x"], "--seeds 1,x: give different whole numbers, e.g. --seeds 1,2,3"),
        (["--seeds", "1,1"], "--seeds 1,1: give different whole numbers"),
        (["--ranks", "3"], "--ranks 3: a step's 16 samples are shared evenly; choose 1, 2 or 4"),
        (["--text", "none.txt"], "--text none.txt: there is no such file or folder"),
        (["--output", "no/such/folder/x.json"], "--output no/such/folder/x.json: there is no directory"),
        (["--keep", "file"], "--keep file is no directory"),
    ],
)
def test_drill_refuses_bad_input(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert message in refusal(arguments, tmp_path, monkeypatch)
