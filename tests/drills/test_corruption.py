"""The drill of silent corruption as a user calls it: real runs with faults, nothing left behind, clear refusals."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from drills.corruption_plan import KINDS, QUICK
from megastable_tools.commands.drill import app
from tests.drills.refusals import refusal
from tests.drills.test_drill import shared_memory, start
from tests.patience import PATIENCE


def family(folder: Path) -> list[psutil.Process]:
    """Processes whose files for a while lie in `folder`: the tool, the server of ranks, the ranks."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE + 60)
def test_quick_faults_are_found_named_and_undone(tmp_path: Path) -> None:
    shared = shared_memory()
    tool = start(tmp_path, "sdc", "--quick", "--json", "--output", "sdc.json", "--keep", "kept")
    out, errors = tool.communicate(timeout=2 * PATIENCE)
    assert tool.returncode == 0, out + errors
    report = json.loads(out)
    assert report == json.loads((tmp_path / "sdc.json").read_text())
    assert {
        (o["planned"]["layout"], o["planned"]["kind"]): o["planned"]["position"] for o in report["faults"]
    } == QUICK
    for o in report["faults"]:
        told = o["planned"], o["found"], o["naming"], o["ended"], o["reason"], o["error"]
        assert o["changes"] and o["ended"] == "finished" and o["steps"] == 0, told
        assert o["found"] and o["naming"] == "named", told
        assert {*map(tuple, o["ranks"])} == {(o["planned"]["rank"],)}, told  # by one watch or several
        assert o["same"] and not o["early"], told
    assert [(c["layout"], c["findings"], c["incidents"]) for c in report["clean"]] == [
        ("dp2", [], []), ("dp3", [], []),
    ]  # fmt: skip
    assert report["seeds"] == [1] and report["torch"] and report["deepspeed"] and report["cpu"]
    assert report["date"][:2] == "20" and report["total"]["undone"] == len(QUICK)
    assert shared_memory() <= shared and family(tmp_path) == []


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE + 60)
def test_an_interrupted_drill_leaves_no_process(tmp_path: Path) -> None:
    tool = start(tmp_path, "sdc", "dp2", "weight", "--keep", "kept")
    end = time.monotonic() + PATIENCE
    while not list(tmp_path.glob("kept/runs/dp2-1/clean/progress.json")):
        assert tool.poll() is None and time.monotonic() < end, tool.communicate()
        time.sleep(0.2)
    tool.send_signal(signal.SIGTERM)  # as Ctrl-C
    _, errors = tool.communicate(timeout=PATIENCE)
    assert tool.returncode == 130 and "interrupted" in errors and "Traceback" not in errors
    end = time.monotonic() + PATIENCE
    while family(tmp_path) and time.monotonic() < end:  # the server of ranks notices that the tool is gone
        time.sleep(0.1)
    assert family(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sdc", "thin"], "thin: there is no such layout or kind of fault: dp2, dp3, tp2"),
        (
            ["sdc", "--policy", "ours", "--jobs", "2"],
            "--policy, --jobs: drill sdc has its own models and layouts",
        ),
        (["sdc", "--text", "file"], "--text: drill sdc has its own models and layouts: leave it out"),
        (["sdc", "norm", "dp2"], "norm/scaled: makes no sense in dp2"),
        (["sdc", "dp2", "--quick"], "--quick has faults of its own: leave out dp2, or --quick"),
        (["sdc", "--seeds", "x"], "--seeds x: give different whole numbers"),
        (["sdc", "--keep", "file"], "--keep file is no directory"),
        (["thin", "sdc"], "sdc: there is no such scenario"),
    ],
)
def test_bad_input_is_told_before_anything_begins(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert message in refusal(arguments, tmp_path, monkeypatch)


def test_the_list_has_every_kind_with_its_layouts() -> None:
    done = CliRunner().invoke(app, ["sdc", "--list"])
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == list(KINDS)
    assert "norm/scaled: tp2, tp2-dp2" in lines
    assert "gradients/zero: dp2, dp3, tp2, pp2, zero2, zero3, tp2-dp2" in lines
