"""What `megastable goodput` shows of a run: adding up, as a table, as JSON, as a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megastable.commands.goodput import app
from tests.run.test_goodput import BEGIN, GROWN, GROWN_STEPS, KILLED, at, run_of, steps
from tests.tools.cli import call


@pytest.fixture
def run(tmp_path: Path) -> Path:
    last = [
        at(179, "finished", steps=30),
        at(180, "ended", attempt=2, clock=30, silent=2.0, code=0, what=""),
    ]
    return run_of(tmp_path / "killed", [*BEGIN, *KILLED, *last], [*steps(1, 15, 106), *steps(11, 30, 158.5)])


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
