"""A host dies with its memory: a spare takes its place, and training goes on from the memories of the others."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from drills.chaos import ClusterRun, ClusterSetup, empty
from drills.hosts import Hosts
from drills.namespaces import missing
from tests.patience import PATIENCE

STEPS, INTERVAL, AT = 90, 5, 43
LIMITS = (
    "supervise.host_silence=8", "stability.enabled=true", "checkpoint.interval=1000", "train.eval_interval=0",
    f"stability.snapshots.interval={INTERVAL}",
)  # fmt: skip
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(6 * PATIENCE),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]


def events(run: ClusterRun, name: str) -> list[dict[str, Any]]:
    return [event for event in run._events() if event["event"] == name]


def until_step(run: ClusterRun, step: int) -> None:
    end = time.monotonic() + 2 * PATIENCE
    while (run.progress().get("step") or 0) < step:
        assert run.cluster.supervisor is not None and run.cluster.supervisor.poll() is None, (
            run.output.read_text()
        )
        assert time.monotonic() < end, run.output.read_text()
        time.sleep(0.02)


def kept(run: ClusterRun, name: str) -> list[Path]:
    """What the host keeps of runs in its /dev/shm."""
    shm = Path(f"/proc/{run.hosts[name].pid}/root/dev/shm")
    return list(shm.glob("megastable-*/*/step-*/held-*.json"))


def test_a_spare_goes_on_from_the_memories_of_the_others(corpus: Path, tmp_path: Path) -> None:
    setup = ClusterSetup(corpus, STEPS, 3, 1, patience=LIMITS)
    with Hosts(folder := empty(tmp_path / "hosts"), 4) as hosts:
        run = ClusterRun(setup, folder, hosts)
        until_step(run, AT)
        assert {len(kept(run, name)) >= 2 for name in ("first", "second", "third")} == {True}
        assert not kept(run, "fourth")
        hosts["second"].power_off()
        died = run.progress()["step"]
        assert not list((run.seen / "checkpoints").glob("step-*"))  # nothing to read on the shared disk
        assert run.end() == 0, run.output.read_text()
        (resumed,) = events(run, "resumed")
        assert resumed["origin"] == "memory" and set(run.lineup()) == {"first", "third", "fourth"}
        # Points are copied while the next steps are done: at most one interval, and what the copy took, is lost.
        assert died - 2 * INTERVAL <= resumed["step"] <= died + 2
        assert not any(kept(run, name) for name in ("first", "third", "fourth"))
        disturbed = run.left()
        print(f"killed at {died}, resumed from {resumed['step']}")
    with Hosts(folder := empty(tmp_path / "clean"), 3) as hosts:
        clean = ClusterRun(ClusterSetup(corpus, STEPS, 3, patience=LIMITS), folder, hosts)
        assert clean.end() == 0, clean.output.read_text()
        assert clean.left() == disturbed and len(disturbed) == 3
