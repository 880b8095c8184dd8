"""The processes of a layout: used again as long as they can be, replaced after an error, a death and a hang."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from drills import corruption_crew
from drills.corruption_crew import ABANDONED, DIED, HUNG, Crew
from drills.corruption_plan import LAYOUTS, Planned
from drills.corruption_ranks import Ended
from drills.corruption_stage import config
from tests.distributed import run_ranks

TROUBLE = {"finishes": 22, "raises": 23, "dies": 24, "hangs": 25}  # by the step of the fault


def nothing() -> None:
    """Starts the server of processes as the other tests do."""


def serve(rank: int, world: int, pipe: Connection) -> None:
    """As `corruption_ranks.serve`, but the runs are made up: `text` is the process."""
    os.setpgid(0, 0)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            os._exit(0)
        trouble = {step: name for name, step in TROUBLE.items()}[job.fault.step]
        if rank == job.fault.rank and trouble == "dies":
            os._exit(9)
        if trouble == "hangs" or (trouble != "finishes" and rank != job.fault.rank):
            time.sleep(1000)  # in a collective that a rank never reaches
        pipe.send(Ended("ValueError" if trouble == "raises" else "", str(os.getpid())))


@pytest.fixture
def crew(monkeypatch: pytest.MonkeyPatch) -> Iterator[Crew]:
    run_ranks(1, nothing)
    monkeypatch.setattr(corruption_crew, "serve", serve)
    monkeypatch.setattr(corruption_crew, "GRACE", 0.2)
    with Crew(2) as made:
        yield made


def run(crew: Crew, trouble: str, limit: float = 60.0) -> list[Ended]:
    fault = Planned(layout="dp2", kind="weight/sign", position=0, seed=1, step=TROUBLE[trouble], rank=1)
    settings: Any = config(Path("corpus"), Path("run"), LAYOUTS["dp2"], 1)
    return crew.run(settings, fault, Path("log"), limit)


@pytest.mark.slow
def test_processes_are_used_again_until_there_is_trouble(crew: Crew) -> None:
    first, second = run(crew, "finishes"), run(crew, "finishes")
    assert first == second and [end.error for end in first] == ["", ""]
    assert [end.error for end in run(crew, "raises")] == [ABANDONED, "ValueError"]
    third = run(crew, "finishes")
    assert not {end.text for end in third} & {end.text for end in first}
    assert not any(psutil.pid_exists(int(end.text)) for end in first)
    assert [end.error for end in run(crew, "dies")] == [ABANDONED, DIED]
    assert [end.error for end in run(crew, "hangs", limit=0.5)] == [HUNG, HUNG]
    assert not any(psutil.pid_exists(int(end.text)) for end in third)
    assert [end.error for end in run(crew, "finishes")] == ["", ""]


def test_processes_are_replaced_after_many_runs(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corruption_crew, "RUNS", 2)
    pids = [run(crew, "finishes")[0].text for _ in range(5)]
    assert pids[0] == pids[1] != pids[2] == pids[3] != pids[4]
    assert not psutil.pid_exists(int(pids[0])) and psutil.pid_exists(int(pids[4]))


def test_none_is_left(crew: Crew) -> None:
    with Crew(2) as other:
        pids = [int(end.text) for end in run(other, "finishes")]
        assert all(psutil.pid_exists(pid) for pid in pids)
    assert not any(psutil.pid_exists(pid) for pid in pids)
