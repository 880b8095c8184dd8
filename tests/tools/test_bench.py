"""`megastable bench stability`: it measures on this machine, whatever the numbers are, and its sums are sums."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.costs import COMPONENTS, MEANING
from megastable_tools.commands.bench import app
from tests.tools.cli import call

ROOT = Path(__file__).parents[2]
TINY = (
    "model.layers=2 model.hidden=32 model.heads=2 model.kv_heads=2 model.ffn=64 model.sequence_length=32 "
    "model.vocab_size=250 model.vocab_multiple=64 train.global_batch=4 train.micro_batch=2 logging.norms_interval=20"
).split()


def bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "90", "OMP_NUM_THREADS": "1", "TERM": "dumb"}
    command = [sys.executable, "-m", "megastable", "bench", *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """What was written and printed; the recipe's corpus does not exist."""
    file = tmp_path_factory.mktemp("bench") / "cost.json"
    missing = "data.corpora=[{path: no/such/folder}]"
    done = bench("stability", "--rounds", 2, "--output", file, missing, *TINY)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text()), done.stdout


@pytest.mark.slow
def test_it_measures_and_tells_where(measured: tuple[dict[str, Any], str]) -> None:
    found, printed = measured
    assert found["rounds"] == 2 and found["disturbed"] == 0
    assert found["machine"].keys() >= {"device", "threads", "torch", "deepspeed", "date", "load_average"}
    assert found["run"]["global_batch"] == 4 and found["run"]["precision"] == "bf16"
    costs = found["costs"]
    assert all(e["median"] > 0 for e in costs["steps_ms"].values())
    intervals = {c["name"]: c["every"] for c in costs["components"]}
    assert intervals == {
        "gate": 1, "guard": 1, "hardware": 1, "snapshot": 10, "norms": 20, "layers": 100, "trends": 25, "tensors": 25,
        "probe": 25, "records": 50,
    }  # fmt: skip
    # Each of these takes time, or it was not reached.
    parts = {name: ms for c in costs["components"] for name, ms in c["parts"].items()}
    assert all(ms > 0 for ms in parts.values()), parts
    assert all(MEANING[name] in printed for name in (*COMPONENTS, "everything"))


SECONDS = {
    "bare": 1.0, "gate": 1.01, "guard": 1.03, "hardware": 1.04, "snapshot": 1.13, "layers": 2.03,
    "norm": 0.001, "collect": 0.002,
    "finite": 0.0, "losses": 0.0, "counters": 0.0, "rest": 0.001, "judge": 0.003, "settle": 0.001, "take": 0.05,
    "samples": 0.001, "signs": 0.001, "statistics": 0.2, "look": 0.5, "tell": 0.1, "write": 0.01,
    "ballot": 0.002, "seal": 0.001, "tensors": 0.01, "probe": 0.02,
}  # fmt: skip
INTERVALS = {"snapshot": 10, "norms": 0, "layers": 100, "trends": 0, "tensors": 25, "probe": 0, "records": 10}


def test_false_alarms_beside_planted_faults(tmp_path: Path) -> None:
    file = tmp_path / "noise.json"
    options = "--steps", 200, "--faults", 1, "--kind", "white", "--no-norms", "--output", file
    done = call(app, "noise", *options, cwd=ROOT, columns=90)
    assert done.returncode == 0, done.stderr
    alarms, *faults = json.loads(file.read_text())
    assert (alarms["kind"], alarms["steps"], alarms["rewinds"]) == ("white", 200, 0)
    assert {fault["fault"]: fault["planted"] for fault in faults} == {
        "spike-6": 1, "spike-10": 1, "spike-20": 1, "climb-0.25": 1
    }  # fmt: skip
    assert "rewinds" in done.stdout and "climb-0.25" in done.stdout
