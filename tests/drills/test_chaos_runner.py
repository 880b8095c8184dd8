"""A quick round of chaos: the real supervisor on hosts of namespaces, and faults from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from drills.namespaces import missing
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(12 * PATIENCE)
def test_a_quick_round(corpus: Path, tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    words = [
        sys.executable,
        "tools/chaos.py",
        "--quick",
        "--json",
        "--corpus",
        str(corpus),
        "--keep",
        str(tmp_path),
    ]
    done = subprocess.run(
        words, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, capture_output=True
    )
    assert done.returncode in (0, 1), done.stderr
    rows = json.loads(done.stdout)
    assert len(rows) == 3 and all(row["right"] and row["same"] for row in rows), json.dumps(rows, indent=1)
    assert all(row["blamed"] == row["expected"] for row in rows)
