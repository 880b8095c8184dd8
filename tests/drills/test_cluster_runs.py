"""A host dies with its memory: a spare takes its place, and training goes on from the memories of the others."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from drills import namespaces
from drills.chaos import ClusterRun, ClusterSetup, make_empty
from drills.hosts import Host, Hosts
from drills.namespaces import find_missing
from tests.patience import PATIENCE

STEPS, INTERVAL, AT = 90, 5, 43
LIMITS = (
    "supervise.host_silence=8", "stability.enabled=true", "checkpoint.interval=1000", "train.eval_interval=0",
    f"stability.snapshots.interval={INTERVAL}",
)  # fmt: skip
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(6 * PATIENCE),
    pytest.mark.skipif(find_missing() is not None, reason=str(find_missing())),
]


def events(run: ClusterRun, name: str) -> list[dict[str, Any]]:
    return [event for event in run._events() if event["event"] == name]


def until_step(run: ClusterRun, step: int) -> None:
    end = time.monotonic() + 2 * PATIENCE
    while (run.read_progress().get("step") or 0) < step:
        assert run.cluster.supervisor is not None and run.cluster.supervisor.poll() is None, (
            run.output.read_text()
        )
        assert time.monotonic() < end, run.output.read_text()
        time.sleep(0.02)


def kept(run: ClusterRun, name: str) -> list[Path]:
    """What the host keeps of runs in its /dev/shm."""
    shm = Path(f"/proc/{run.hosts[name].pid}/root/dev/shm")
    return list(shm.glob("megastable-*/*/step-*/held-*.json"))


def test_spare_goes_on_from_the_memories_of_others(corpus: Path, tmp_path: Path) -> None:
    setup = ClusterSetup(corpus, STEPS, 3, 1, patience=LIMITS)
    with Hosts(folder := make_empty(tmp_path / "hosts"), 4) as hosts:
        run = ClusterRun(setup, folder, hosts)
        until_step(run, AT)
        assert {len(kept(run, name)) >= 2 for name in ("first", "second", "third")} == {True}
        assert not kept(run, "fourth")
        hosts["second"].power_off()
        died = run.read_progress()["step"]
        assert not list((run.seen / "checkpoints").glob("step-*"))  # nothing to read on the shared disk
        assert run.wait_for_end() == 0, run.output.read_text()
        (resumed,) = events(run, "resumed")
        assert resumed["origin"] == "memory" and set(events(run, "launched")[-1]["hosts"]) == {
            "first",
            "third",
            "fourth",
        }
        # Points are copied while the next steps are done: at most one interval, and what the copy took, is lost.
        assert died - 2 * INTERVAL <= resumed["step"] <= died + 2
        assert not any(kept(run, name) for name in ("first", "third", "fourth"))
        disturbed = run.hash_checkpoint()
        print(f"killed at {died}, resumed from {resumed['step']}")
    with Hosts(folder := make_empty(tmp_path / "clean"), 3) as hosts:
        clean = ClusterRun(ClusterSetup(corpus, STEPS, 3, patience=LIMITS), folder, hosts)
        assert clean.wait_for_end() == 0, clean.output.read_text()
        assert clean.hash_checkpoint() == disturbed and len(disturbed) == 3


MANY_STEPS = 400
SHORT_LIMITS = ("supervise.host_silence=8", "supervise.shrink_after=3", "supervise.cool_off=10")


def until(run: ClusterRun, what: Callable[[], object]) -> None:
    end = time.monotonic() + 2 * PATIENCE
    while not what():
        assert run.cluster.supervisor is not None and run.cluster.supervisor.poll() is None, (
            run.output.read_text()
        )
        assert time.monotonic() < end, run.output.read_text()
        time.sleep(0.1)


@contextmanager
def slowed(host: Host) -> Iterator[None]:
    """Its ranks run a fifth of the time, so that the run has steps left when the other host is back."""
    over = threading.Event()

    def alternate() -> None:
        while not over.is_set():
            ranks = host.ranks().values()
            for rank in ranks:
                with suppress(psutil.Error):
                    rank.suspend()
            over.wait(0.4)
            for rank in ranks:
                with suppress(psutil.Error):
                    rank.resume()
            time.sleep(0.1)

    thread = threading.Thread(target=alternate)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def order(run: Path) -> list[tuple[int, int, int]]:
    """By step, where its samples begin and end."""
    table = pq.read_table(run / "steps")
    table = table.take(pc.sort_indices(table, [("step", "ascending")]))
    return list(
        zip(
            *(table.column(name).to_pylist() for name in ("step", "first_position", "next_position")),
            strict=True,
        )
    )


def validation(run: ClusterRun) -> float:
    return float(events(run, "evaluated")[-1]["loss"])


def test_run_shrinks_and_grows_in_the_same_order(corpus: Path, tmp_path: Path) -> None:
    setup = ClusterSetup(corpus, MANY_STEPS, 3, patience=SHORT_LIMITS)
    with Hosts(folder := tmp_path / "hosts", 3) as hosts:
        run = ClusterRun(setup, folder, hosts)
        until(run, lambda: (run.read_progress().get("step") or 0) >= 60)
        hosts["second"].power_off()
        until(run, lambda: len(events(run, "launched")) == 2)
        assert events(run, "launched")[1]["hosts"] == ["first", "third"]
        (left_out,) = events(run, "host_left_out")
        assert (left_out["host"], left_out["wholly"], left_out["strikes"]) == ("second", False, 1)
        until(
            run,
            lambda: run.read_progress().get("world") == 2 and (run.read_progress().get("step") or 0) >= 100,
        )
        hosts["second"].power_on()
        with slowed(hosts["third"]):
            until(run, lambda: len(events(run, "launched")) == 3)
        assert events(run, "launched")[2]["hosts"] == ["first", "second", "third"]
        assert events(run, "ended")[1]["code"] == 75  # it saved, so that no step is done again
        assert run.wait_for_end() == 0, run.output.read_text()
        assert events(run, "training")[2]["step"] == events(run, "stopped")[0]["step"]
        shrunk = order(run.seen), validation(run)
    with Hosts(folder := tmp_path / "clean", 3) as hosts:
        clean = ClusterRun(setup, folder, hosts)
        assert clean.wait_for_end() == 0
        assert shrunk[0] == order(clean.seen) and len(shrunk[0]) == MANY_STEPS
        assert shrunk[1] == pytest.approx(validation(clean), abs=0.02)


ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(4 * 420 + PATIENCE)  # for the wait of each of its runs
@pytest.mark.skipif(namespaces.find_missing() is not None, reason=str(namespaces.find_missing()))
def test_chaos_blames_the_right_host_and_keeps_the_bytes(corpus: Path, tmp_path: Path) -> None:
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
