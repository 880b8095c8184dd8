"""What `megastable goodput` shows of a run: adding up, as a table, as JSON, as a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megastable.commands.goodput import app
from megastable.report.goodput_picture import thick
from tests.run.test_goodput import BEGIN, KILLED, at, run_of, steps
from tests.run.test_goodput_capacity import GROWN, GROWN_STEPS
from tests.tools.cli import call


@pytest.fixture
def run(tmp_path: Path) -> Path:
    last = [
        at(179, "finished", steps=30),
        at(180, "ended", attempt=2, clock=30, silent=2.0, code=0, what=""),
    ]
    return run_of(tmp_path / "killed", [*BEGIN, *KILLED, *last], [*steps(1, 15, 106), *steps(11, 30, 158.5)])


def test_the_table_adds_up(run: Path, tmp_path: Path) -> None:
    done = call(app, run, cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    lines = [" ".join(line.replace("│", " ").split()) for line in done.stdout.splitlines()]
    assert f"{run}: 38.8% of 1 min 20 s was training" in done.stdout
    assert "all 1 min 20 s 100.00%" in lines
    assert "training 31 s 38.75%" in lines and "waiting for hosts 16 s 20.00%" in lines
    assert "SIGKILL redone 1 b 1 10 s 12.50%" in lines
    short = call(app, run, "--rows", 1, cwd=tmp_path)
    assert "6 more rows: --rows 7, or --json" in short.stdout


def test_hosts_that_were_missing_are_told(tmp_path: Path) -> None:
    run = run_of(tmp_path / "grown", GROWN, GROWN_STEPS)
    done = call(app, run, "--json", "--output", "out.json", cwd=tmp_path)
    assert json.loads(done.stdout)["smaller"] == pytest.approx(0.08)
    told = "hosts were missing: 8.00% of what all would have done. Of their time, 32.0% was training"
    assert told in call(app, run, cwd=tmp_path).stdout


def test_json_holds_all_of_it_and_the_picture_is_drawn(run: Path, tmp_path: Path) -> None:
    done = call(app, run, "--json", "--output", "out.json", "--plot", "out.png", cwd=tmp_path)
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "out.json").read_text())
    assert sum(found["seconds"].values()) == pytest.approx(found["wall_seconds"]) == pytest.approx(80)
    spans = found["spans"]
    assert [s["from"] for s in spans[1:]] == [s["to"] for s in spans[:-1]] and spans[0]["from"] == 100
    assert {s["attempt"] for s in spans} == {1, 2}
    assert {entry["host"] for entry in found["lost"]} == {"", "b", "c"}
    assert (tmp_path / "out.png").read_bytes()[1:4] == b"PNG"


def test_damage_is_told_on_the_standard_error(run: Path, tmp_path: Path) -> None:
    file = sorted((run / "steps").iterdir())[0]
    file.write_bytes(b"torn")
    done = call(app, run, "--json", cwd=tmp_path)
    assert done.returncode == 0 and file.name in done.stderr and json.loads(done.stdout)["problems"]
    (run / "journal.jsonl").unlink()
    done = call(app, run, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "") and "journal.jsonl: no event of a run" in done.stderr


def test_what_is_short_is_still_seen() -> None:
    assert thick([(0, 0.1), (5, 7), (7.5, 8), (20, 20.5)], 1.0) == [(0, 1.0), (5, 8.5), (20, 21.0)]
