"""A training in a job of launch/slurm.sbatch, for tests: from sbatch on, with what it wrote."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from megastable.run.directory import RunDirectory, read_object
from megastable.run.events.event import Event
from tests.launch.slurm_cluster import SlurmCluster
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]


def checkout(folder: Path) -> Path:
    """A repository for jobs: this one, with this interpreter in .venv."""
    python = folder / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    for name in ("launch", "megastable", "ds_configs"):
        (folder / name).symlink_to(ROOT / name)
    return folder


class SlurmRun:
    """A job that trains `recipe` on two nodes with a rank each. folder: a checkout.

    What happens is printed, with the seconds since sbatch.
    """

    def __init__(self, cluster: SlurmCluster, folder: Path, recipe: Path, *overrides: str) -> None:
        self.cluster, self.run, self.log = cluster, RunDirectory(folder / "run"), folder / "log"
        self._began = time.monotonic()
        words = ["--gpus-per-node=1", f"--output={self.log}", "launch/slurm.sbatch"]
        self.number = cluster.submit(
            *words, recipe, f"run.dir={self.run.root}", *overrides, cwd=folder, DS_ACCELERATOR="cpu",
            PYTHONPATH=str(ROOT),
        )  # fmt: skip

    def tell(self, what: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f} s  {what}", flush=True)

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def events(self, *kinds: type[Event]) -> list[Event]:
        with suppress(OSError):
            return list(self.run.events(*kinds))
        return []

    def step(self, attempt: int) -> int:
        """Steps done, if that attempt is the one that trains; else 0."""
        progress: dict[str, Any] = read_object(self.run.root / "progress.json")
        return int(progress.get("step") or 0) if progress.get("attempt") == attempt else 0

    def until(self, what: str, holds: Callable[[], bool]) -> None:
        """Waits for it. Raises AssertionError if it does not come, or the job fails before."""
        end, asked = time.monotonic() + PATIENCE, time.monotonic()
        while not holds():
            late = time.monotonic() > end
            if time.monotonic() > asked + 2:
                asked = time.monotonic()
                late = late or self.job()["JobState"] in ("FAILED", "CANCELLED")
            assert not late, f"{what}: {self.job()}\n{self.said()[-8000:]}"
            time.sleep(0.02)
        self.tell(what)

    def job(self) -> dict[str, str]:
        return self.cluster.job(self.number)

    def rank(self, node: str) -> psutil.Process:
        """The rank on that node: of the processes with a RANK the oldest, as children inherit it."""
        found = []
        for process in self.cluster.processes(node):
            with suppress(psutil.Error):
                if process.environ().get("RANK", "").isdecimal():
                    found.append(process)
        return min(found, key=lambda process: process.create_time())
