"""What `megastable profile` shows of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megastable.commands.profile import app
from megastable.run.step_phases import COLUMNS
from tests.report.test_trace_summary import event
from tests.report.test_trace_summary import write as write_trace
from tests.run.test_records import record, write
from tests.supervise.runs import journal
from tests.tools.cli import call

PHASES = dict.fromkeys(COLUMNS.values(), 0.0) | {"forward_seconds": 0.3, "backward_seconds": 0.6}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "a [bold]\x1b[31mrun"
    (run / "profiles").mkdir(parents=True)
    (run / "steps").mkdir()
    steps = [record(n, seconds=1.0, **PHASES | {"other_seconds": 0.1}) for n in range(1, 99)]
    slow = [
        record(n, 2e9 + n, seconds=9.0, **PHASES | {"other_seconds": 8.1}) for n in (98, 99)
    ]  # 98 was done twice
    write(run / "steps", [*steps, *slow])
    found = {"attempt": 1, "host": "b", "rank": 9, "ratio": 1.4, "cost": 0.2, "seconds": 1.0}
    journal(
        run,
        {
            "event": "host_slow",
            "what": "begun",
            **found,
            "parts": {"forward": 1.0},
            "reason": "host b is slow",
        },
    )
    trace = [event("megastable: step 5", 0, 100, "user_annotation"), event("aten::mm", 0, 60)]
    write_trace(run / "profiles/step-00000005-rank-0.json.gz", *trace)
    (run / "profiles/out-of-memory-rank-0.pickle").touch()
    return run


def test_json(run: Path, tmp_path: Path) -> None:
    (run / "profiles/step-00000009-rank-0.json.gz").write_bytes(b"torn")
    (run / "steps/0.parquet").write_bytes(b"torn")
    done = call(app, run, "--json", "--output", "out.json", cwd=tmp_path)
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "out.json").read_text())
    assert sum(one["share"] for one in found["phases"]) == pytest.approx(1, abs=0.01)
    assert found["slowest"] == {"host": "b", "rank": 9, "ratio": 1.4, "cost": 0.2}
    assert found["traces"][0]["idle"] == pytest.approx(0.4) and found["snapshots"]
    assert len(found["problems"]) == 2 and done.stderr.count("WARNING") == 2
