"""The benchmark of heartbeats, with a few ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_it_counts_what_arrives() -> None:
    command = [sys.executable, "-m", "benchmarks.heartbeats", "--ranks", "10", "--seconds", "6"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done
    assert "10 ranks connected at once" in done.stdout and " 0 heartbeats lost" in done.stdout, done
    assert "a real rank's heartbeats take 0." in done.stdout
