"""Ranks die, and the run goes on from the copies of its newest snapshot in the memories of the hosts."""

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

from megastable.checkpoint.held_points import HeldPart, MemoryFolder, PointKey
from megastable.config.tree import RunConfig
from megastable.run import records
from tests.conftest import tiny
from tests.distributed import run_ranks
from tests.journal import events
from tests.training.test_resume import identical

DIES = 15  # the step after which the ranks die
POINT = 12  # the newest point then
END = 20


def train(config: RunConfig, hosts: Sequence[str], dies: bool) -> dict[str, Any]:
    """Rank i sees the memory hosts[i]. dies: all are killed after step `DIES`, once the point before is complete."""
    import torch.distributed as dist

    from megastable.train import train
    from megastable.training import memory_copies

    os.environ["MEMORY"] = hosts[dist.get_rank()]
    kept: list[memory_copies.MemoryCopies] = []
    heard, begun = memory_copies.MemoryCopies.hear_ballot, list[int]()
    begin = memory_copies.MemoryCopies.begin_copy

    def dying(self: Any, sums: Any, step: int) -> None:
        kept[:] = [self]
        heard(self, sums, step)
        while self._job is not None and not self._job.finished:
            time.sleep(0.005)  # however slow this machine is: the next ballot says that it is done
        if dies and step == DIES:
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)

    def beginning(self: Any, state: Any, pending: Any) -> None:
        begun.append(state.step)
        begin(self, state, pending)

    memory_copies.MemoryCopies.hear_ballot, memory_copies.MemoryCopies.begin_copy = dying, beginning  # type: ignore[method-assign]
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


def killed(world: int, config: RunConfig, hosts: Sequence[str]) -> None:
    with pytest.raises(AssertionError, match="ended"):
        run_ranks(world, train, config, hosts, True)


def spoil_checkpoints(run: Path) -> int:
    """Cut off all weights and moments of the checkpoints: who reads them, fails."""
    found = list((run / "checkpoints").glob("step-*/*.safetensors"))
    for path in found:
        path.write_bytes(b"")
    return len(found)


def held(memory: str, run: Path) -> list[HeldPart]:
    return MemoryFolder(Path(memory), run).list_parts()


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
    # Those after the checkpoint of step 10 were in the memory of a process that was killed.
    assert records.read_newest_records(run / "steps").column("step").to_pylist() == list(range(1, END + 1))
    assert not (tmp_path / "host-0").exists() or not any((tmp_path / "host-0").iterdir())  # at the end


LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {  # ranks, hosts
    "zero3-dp3": (3, 3, {"parallel": {"zero": 3}}),
    "tp2-dp2": (4, 2, {"parallel": {"tensor": 2}}),
    "pp2-tied": (4, 3, {"parallel": {"pipeline": 2}, "model": {"tied": True}}),
    "replicas2": (4, 2, {"parallel": {"replicas": 2}}),
    "experts2": (
        4,
        2,
        {"parallel": {"expert": 2}, "model": {"experts": {"count": 4, "top_k": 2, "bias_rate": 0.01}}},
    ),
    "muon": (2, 2, {"optimizer": {"name": "muon"}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_lost_host_takes_nothing_with_it(name: str, corpus: Path, tmp_path: Path) -> None:
    ranks, count, parts = LAYOUTS[name]
    model = dict(tiny(corpus, tmp_path).model) | parts.pop("model", {})
    batch = {"steps": END, "global_batch": 24, "micro_batch": 2, "eval_samples": 24, "eval_interval": 0}

    def of(run: str, copies: str = "always") -> RunConfig:
        return recipe(corpus, tmp_path / run, copies, model=model, train=batch, **parts)

    hosts = memories(tmp_path, count, ranks)
    assert len(set(hosts)) == count
    run_ranks(ranks, train, of("clean", "never"), hosts, False)
    killed(ranks, of("run"), hosts)
    run, lost = tmp_path / "run", Path(hosts[-1])
    assert {p.rank for host in set(hosts) - {str(lost)} for p in held(host, run)} == set(range(ranks))
    shutil.rmtree(lost)
    lost.mkdir()  # a spare, or the same host after a power cut
    spoil_checkpoints(run)
    answers = run_ranks(ranks, train, of("run"), hosts, False)
    assert [a["code"] for a in answers] == [0] * ranks
    (resumed,) = events(run, "resumed")
    assert (resumed["step"], resumed["origin"]) == (POINT, "memory")
    assert identical(tmp_path / f"clean/checkpoints/step-{END}", run / f"checkpoints/step-{END}") == 3 * ranks
    # What was sent has arrived, all of it, and is what was written; one point of four steps each.
    assert sum(a["sent"] for a in answers) == sum(a["received"] for a in answers) > 0
    assert [a["sent"] for a in answers] == [a["written"] for a in answers]
    assert all(a["begun"] == [16, 20] for a in answers)


def one_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_wrong_byte_is_found(hosts: int, corpus: Path, tmp_path: Path) -> None:
    """Another copy is taken; where there is none, the checkpoint."""
    config, at = recipe(corpus, run := tmp_path / "run"), memories(tmp_path, hosts, 2)
    killed(2, config, at)
    folder = MemoryFolder(Path(at[0]), run)
    one_byte(folder.point_folder(folder.list_parts()[0].key) / "rank-00000.safetensors")
    assert all(a["code"] == 0 for a in run_ranks(2, train, config, at, False))
    (resumed,) = events(run, "resumed")
    assert (resumed["step"], resumed["origin"]) == ((10, "checkpoint") if hosts == 1 else (POINT, "memory"))
    assert [e["reason"] for e in events(run, "memory_refused")] == (
        ["rank-00000.safetensors: the hash of the copy here is wrong"] if hosts == 1 else []
    )


def journal(run: Path, **event: Any) -> None:
    with (run / "journal.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.time(), **event}) + "\n")


def quarantine(run: Path) -> None:
    from megastable.checkpoint import markers

    markers.mark_bad(run / "checkpoints/step-10", "bad")


# Everything else that makes a point outdated: tests/checkpoint/test_held_points.py.
OUTDATED: dict[str, tuple[Callable[[Path], object], str, int]] = {
    "rewound": (lambda run: journal(run, event="memory_dropped", step=10, epoch=1), "was rewound", 10),
    "quarantined": (quarantine, "was quarantined", 5),
    "tried often": (
        lambda run: [
            journal(run, event="memory_resume", step=POINT, lineage=key(run).lineage, epoch=0) for _ in range(2)
        ],
        "restored from it 2 times", 10,
    ),
}  # fmt: skip


def key(run: Path) -> PointKey:
    return held(str(run.parent / "host-0"), run)[0].key


@pytest.mark.slow
@pytest.mark.parametrize("name", OUTDATED)
def test_what_is_outdated_is_not_used(name: str, corpus: Path, tmp_path: Path) -> None:
    happens, why, step = OUTDATED[name]
    config, hosts = (
        recipe(corpus, run := tmp_path / "run", checkpoint={"interval": 5}),
        memories(tmp_path, 1, 1),
    )
    killed(1, config, hosts)
    happens(run)
    run_ranks(1, train, config, hosts, False)
    (refused,) = events(run, "memory_refused")
    assert refused["step"] == POINT and why in refused["reason"]
    assert [(e["step"], e["origin"]) for e in events(run, "resumed")] == [(step, "checkpoint")]


def failing(config: RunConfig, hosts: Sequence[str], how: str) -> dict[str, Any]:
    """Train with a memory that is full, or with a partner that takes connections and never answers."""
    import socket

    import torch.distributed as dist

    from megastable.checkpoint import memory_hosts
    from megastable.checkpoint.memory_hosts import MemoryHosts
    from megastable.train import train

    os.environ["MEMORY"] = hosts[dist.get_rank()]
    silent = socket.create_server(("127.0.0.1", 0))
    if how == "stalls":
        memory_hosts.SECONDS = 1000.0  # longer than the run: nobody may wait for it

        def connect(self: Any, rank: int) -> Any:
            return memory_hosts.MemoryClient("127.0.0.1", silent.getsockname()[1], self.token)

        MemoryHosts.connect_to = connect  # type: ignore[method-assign]
    else:
        memory_hosts.SPARE = 1 << 60  # bytes that must stay free: more than any host has
    begin = time.monotonic()
    code = train(config, Path("recipe.yaml"))
    return {"code": code, "seconds": time.monotonic() - begin}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stalls", "is full"])
def test_training_goes_on_when_a_partner(how: str, corpus: Path, tmp_path: Path, straight: Path) -> None:
    config, hosts = recipe(corpus, run := tmp_path / "run"), memories(tmp_path, 2, 2)
    answers = run_ranks(2, failing, config, hosts, how)  # which end although their threads wait
    assert [a["code"] for a in answers] == [0, 0]
    assert identical(straight, run / f"checkpoints/step-{END}") == 6
    told = [event["reason"] for event in events(run, "memory_off")]
    assert len(told) == (how == "is full") and all("no memory left for a copy" in reason for reason in told)


def test_a_folder_that_is_not_there_is_said(corpus: Path, tmp_path: Path) -> None:
    config = recipe(
        corpus, run := tmp_path / "run", train=dict(recipe(corpus, tmp_path).train) | {"steps": 2}
    )
    run_ranks(1, train, config, [str(tmp_path / "missing")], False)
    (event,) = events(run, "memory_off")
    assert "missing" in event["reason"]


@pytest.mark.slow
def test_a_point_beats_a_checkpoint_before_a_damaged_one(
    corpus: Path, tmp_path: Path, straight: Path
) -> None:
    """The checkpoint of step 15 is damaged: what comes before it is that of step 10, or the point of step 12."""
    config, hosts = recipe(corpus, run := tmp_path / "run"), memories(tmp_path, 1, 2)
    killed(2, config, hosts)
    shutil.copytree(run / "checkpoints/step-10", damaged := run / "checkpoints/step-15")
    (damaged / "state.json").write_text("{}")
    assert all(a["code"] == 0 for a in run_ranks(2, train, config, hosts, False))
    assert [(e["step"], e["origin"]) for e in events(run, "resumed")] == [(POINT, "memory")]
    assert (run / "checkpoints/rejected-step-15").exists()
    assert identical(straight, run / f"checkpoints/step-{END}") == 6


@pytest.mark.slow
def test_a_host_that_returns_with_old_memory_loses(corpus: Path, tmp_path: Path) -> None:
    config, hosts = (
        recipe(corpus, run := tmp_path / "run", checkpoint={"interval": 5}),
        memories(tmp_path, 2, 2),
    )
    killed(2, config, hosts)
    shutil.copytree(hosts[1], tmp_path / "old")
    run_ranks(2, train, config, hosts, False)  # to the end, step 20, of which there is a checkpoint
    longer = recipe(corpus, run, checkpoint={"interval": 5}, train=dict(config.train) | {"steps": END + 5})
    shutil.copytree(tmp_path / "old", hosts[1], dirs_exist_ok=True)
    run_ranks(2, train, longer, hosts, False)
    assert [(e["step"], e["origin"]) for e in events(run, "resumed")] == [
        (POINT, "memory"),
        (END, "checkpoint"),
    ]
