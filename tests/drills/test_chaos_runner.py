"""A round of faults, end to end: as `megastable chaos --quick`, by its own command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from drills import namespaces
from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(4 * 420 + PATIENCE)  # for the wait of each of its runs
@pytest.mark.skipif(namespaces.missing() is not None, reason=str(namespaces.missing()))
def test_every_fault_is_blamed_on_the_right_host_and_the_bytes_are_the_same(
    corpus: Path, tmp_path: Path
) -> None:
    words = ["--quick", "--json", "--corpus", str(corpus), "--keep", str(tmp_path / "kept")]
    told = subprocess.run(
        [sys.executable, "-m", "megastable", "chaos", *words], capture_output=True, text=True, cwd=ROOT
    )
    rows = json.loads(told.stdout)
    assert [row["planned"]["kind"] for row in rows] and len(rows) == 3
    assert all(row["right"] and row["same"] and row["exit"] == 0 for row in rows), told.stdout
    assert told.returncode == 0
    for row in rows:
        assert row["blamed"] == row["planned"]["host"]
    assert len(list((tmp_path / "kept").glob("0*/journal.jsonl"))) == 3
