"""What `megastable profile` shows of a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
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


def test_the_table(run: Path, tmp_path: Path) -> None:
    done = call(app, run, cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == "" and "\x1b" not in done.stdout
    lines = [" ".join(line.replace("│", " ").split()) for line in done.stdout.splitlines()]
    assert "100 steps, from 1 to 99" in done.stdout
    assert "forward 25.9% 300.00 300.00 300.00" in lines and "step 100.0% 1160.00 1000.00 9000.00" in lines
    assert "other 22.4% 260.00 100.00 8100.00" in lines and not any("exchange" in line for line in lines)
    assert "rank 0, steps 5, 0.000 s on cpu" in done.stdout and "idle 40.0%" in done.stdout
    assert "aten::mm 1 0.06 60.0%" in lines and "host b" in done.stdout
    assert "out-of-memory-rank-0.pickle" in done.stdout
    assert "from 98 to 99" in call(app, run, "--last", 2, cwd=tmp_path).stdout


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


def test_a_run_without_phases(run: Path, tmp_path: Path) -> None:
    journal(run, {"event": "host_slow", "what": "over", "attempt": 1, "host": "b", "reason": "as the others"})
    for path in (run / "profiles").iterdir():
        path.unlink()
    told = call(app, run, cwd=tmp_path).stdout
    assert "No trace: start or resume it with logging.profile" in told and "host b" not in told
    for path in (run / "steps").iterdir():
        table = pq.read_table(path)
        pq.write_table(table.drop_columns([c for c in COLUMNS.values() if c != "data_seconds"]), path)
    done = call(app, run, cwd=tmp_path)
    assert done.returncode == 2 and "100 steps, none with phases" in done.stderr
    shutil.rmtree(run / "steps")
    assert "no step records" in call(app, run, cwd=tmp_path).stderr
    assert "no such directory" in call(app, run / "none", cwd=tmp_path).stderr
