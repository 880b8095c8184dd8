"""Ranks die, and the run goes on from the copies of its newest rewind point in the memories of the hosts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megastable.checkpoint.held_points import HeldPart, PointKey
from megastable.checkpoint.memory_folder import MemoryFolder
from megastable.config.tree import RunConfig
from megastable.run.directory import RunDirectory
from megastable.run.events.event import Event
from tests.conftest import tiny
from tests.distributed import run_ranks
from tests.training.test_resume import identical

DIES = 15  # the step after which the ranks die
POINT = 12  # the newest point then
END = 20


def train(config: RunConfig, hosts: Sequence[str], dies: bool, action: str = "") -> dict[str, Any]:
    """Rank i sees the memory hosts[i]. dies: all ranks are killed after step `DIES`, once the point before is complete.
    action: what rank 0 sees happen just before."""
    import torch.distributed as dist

    from megastable.training import memory_copies
    from megastable.training.heartbeat import Heartbeat  # noqa: F401
    from megastable.train import train

    os.environ["MEMORY"] = hosts[dist.get_rank()]
    kept: list[memory_copies.MemoryCopies] = []
    heard, begun = memory_copies.MemoryCopies.heard, list[int]()
    begin = memory_copies.MemoryCopies.begin

    def dying(self: Any, idle: float, done: float, failed: float, step: int) -> None:
        kept[:] = [self]
        heard(self, idle, done, failed, step)
        while self._job is not None and not self._job.finished:
            time.sleep(0.005)  # however slow this machine is: the next vote says that it is done
        if dies and step == DIES:
            if action == "rewound":
                self.rewound(POINT - 2)
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)

    def beginning(self: Any, state: Any) -> None:
        begun.append(state.step)
        begin(self, state)

    memory_copies.MemoryCopies.heard, memory_copies.MemoryCopies.begin = dying, beginning  # type: ignore[method-assign]
    code = train(config, Path("recipe.yaml"))
    copies = kept[0] if kept else None
    return {
        "code": code, "begun": begun, "sent": copies.sent if copies else 0,
        "written": copies.written if copies else 0,
        "received": copies.hosts.server.received if copies and copies.hosts else 0,
    }  # fmt: skip


def recipe(corpus: Path, run: Path, copies: str = "always", **parts: Any) -> RunConfig:
    snapshots = {"interval": 4, "copies": {"mode": copies, "folder": "$MEMORY", "days": 1}}
    parts = {"stability": {"snapshots": snapshots}, "checkpoint": {"interval": 10}} | parts
    return tiny(corpus, run, **parts)


def memories(folder: Path, count: int, ranks: int) -> list[str]:
    """By rank, the folder that stands for its host's memory."""
    for i in range(count):
        (folder / f"host-{i}").mkdir(exist_ok=True)
    return [str(folder / f"host-{rank * count // ranks}") for rank in range(ranks)]


def killed(world: int, config: RunConfig, hosts: Sequence[str], action: str = "") -> None:
    with pytest.raises(AssertionError, match="ended"):
        run_ranks(world, train, config, hosts, True, action)


def events(run: Path, *names: str) -> list[Event]:
    return [event for event in RunDirectory(run).events() if event.event in names]


def spoil_checkpoints(run: Path) -> int:
    """Cut off all weights and moments of the checkpoints: who reads them, fails."""
    found = list((run / "checkpoints").glob("step-*/*.safetensors"))
    for path in found:
        path.write_bytes(b"")
    return len(found)


def held(memory: str, run: Path) -> list[HeldPart]:
    return MemoryFolder(Path(memory), run).held()


@pytest.fixture(scope="module")
def straight(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    run_ranks(2, train, recipe(corpus, folder / "run", "never"), memories(folder, 1, 2), False)
    return folder / "run/checkpoints" / f"step-{END}"


def test_killed_ranks_resume_from_their_hosts_memory(corpus: Path, tmp_path: Path, straight: Path) -> None:
    config, hosts = recipe(corpus, run := tmp_path / "run"), memories(tmp_path, 1, 2)
    killed(2, config, hosts)
    assert {(p.key.step, p.rank) for p in held(hosts[0], run)} == {(POINT, 0), (POINT, 1)}
    assert spoil_checkpoints(run) == 2
    answers = run_ranks(2, train, config, hosts, False)
    assert [a["code"] for a in answers] == [0, 0] and not any(a["sent"] for a in answers)
    (resumed,) = events(run, "resumed")
    assert (resumed["step"], resumed["origin"]) == (POINT, "memory")
    assert identical(straight, run / f"checkpoints/step-{END}") == 6
    assert not (tmp_path / "host-0").exists() or not any((tmp_path / "host-0").iterdir())  # at the end
