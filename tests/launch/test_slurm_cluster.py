"""The private Slurm cluster as a command: what it starts ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.launch.slurm_cluster import missing
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _possible() -> None:
    if reason := missing():
        pytest.skip(reason)


def start(folder: Path, *command: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "tests.launch.slurm_cluster", "--nodes", "1", "--", *command]
    return subprocess.Popen(
        words, cwd=ROOT, env={**os.environ, "TMPDIR": str(folder)}, stdout=subprocess.PIPE, text=True
    )


def inside(folder: Path) -> set[str]:
    """Names of the processes in the cluster's namespaces, in which a file of its folder is mounted."""
    names = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if f"{folder}/slurm-" in Path(f"/proc/{process.pid}/mountinfo").read_text():
                names.add(process.name())
    return names


def gone(folder: Path) -> bool:
    end = time.monotonic() + PATIENCE
    while inside(folder) and time.monotonic() < end:
        time.sleep(0.1)
    return not inside(folder)


def test_the_command_runs_beside_the_controller(tmp_path: Path) -> None:
    process = start(tmp_path, "sh", "-c", "srun hostname; hostname; exit 7")
    said, _ = process.communicate(timeout=PATIENCE)
    assert said.split() == ["n1", "controller"]
    assert process.returncode == 7
    assert gone(tmp_path)


def test_nothing_outlives_a_killed_owner(tmp_path: Path) -> None:
    process = start(tmp_path, "sh", "-c", "srun sleep 1000 & echo ready; wait")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert {"munged", "slurmctld", "slurmd", "sleep"} <= inside(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait(PATIENCE)
    assert gone(tmp_path)
