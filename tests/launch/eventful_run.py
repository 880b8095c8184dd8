"""A run to which everything has happened, and what it serves to Prometheus."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from megastable.run.machine_state import HostReading, MachineSample, MachineWriter
from megastable.supervise.metrics import Metrics
from megastable.supervise.status import read_status
from tests.patience import PATIENCE
from tests.run.test_records import record, write
from tests.supervise.runs import held, incident, journal

LATER = 3600.0  # seconds for which readings of machines stay fresh, however long the tests take


@contextmanager
def eventful_run(folder: Path) -> Iterator[Metrics]:
    """Its metrics, on a free port. It still trains, on two hosts with two GPUs each, in two pipeline stages."""
    run, now = folder / 'a "hostile"\nname{}', time.time()
    (run / "checkpoints/step-00000050").mkdir(parents=True)
    (run / "checkpoints/step-00000050/manifest.json").touch()
    recipe = {
        "train": {"steps": 900, "global_batch": 8}, "model": {"sequence_length": 64}, "parallel": {"pipeline": 2},
        "eval": {"interval": 8, "command": "evaluate {model} {results}"},
    }  # fmt: skip
    (run / "recipe.yaml").write_text(yaml.safe_dump({"config": recipe}))
    scores = [0.25, 0.3, 0.31, 0.29, 0.25]
    tasks = [
        {"event": "tasks_evaluated", "checkpoint": f"step-{step}", "of_step": step, "scores": {"arc/acc": score}}
        for step, score in zip(range(8, 48, 8), scores)
    ]  # fmt: skip
    journal(
        run,
        {"event": "launched", "attempt": 1, "hosts": ["a", "b"]},
        {"event": "training", "step": 0, "world": 2},
        {"event": "evaluated", "step": 40, "loss": 3.0, "corpora": {"a": {"loss": 3.5, "samples": 8}}},
        *tasks,
        {"event": "tasks_failed", "checkpoint": "step-48", "of_step": 48, "reason": "it hangs", "seconds": 9.0},
        {"event": "checkpoint", "step": 50, "name": "step-00000050", "bytes": 1000},
        {"event": "trend", "what": "warned", "step": 50, "signal": "entropy", "text": "it falls"},
        incident(1, outcome="healed", cause="data", steps_lost=4),
        incident(2, outcome="open"),
        {"event": "discarded", "step": 60, "reason": "spike"},
        {"event": "ended", "attempt": 1, "signal": 9},
        {
            "event": "host_left_out", "host": "c", "until": now + 1e4, "wholly": True, "strikes": 1,
            "reason": "it died",
        },
        {"event": "restart", "attempt": 2, "reason": "killed", "delay": 0},
        {"event": "launched", "attempt": 2, "hosts": ["a", "b"]},
        {"event": "training", "step": 50, "world": 2},
        {
            "event": "host_slow", "what": "begun", "attempt": 2, "host": "b", "ratio": 1.4, "cost": 0.2,
            "reason": "slow",
        },
        begin=now - 100,
    )  # fmt: skip
    (run / "steps").mkdir()
    made: dict[str, Any] = {"forward_seconds": 0.2, "other_seconds": 0.1, "loss_scale": 65536.0}
    write(run / "steps", [record(step, now - 110 + step, **made) for step in range(1, 101)])
    (run / "progress.json").write_text(json.dumps({
        "attempt": 2, "phase": "step", "step": 100, "steps": 900, "cursor": 808, "tokens": 100 * 8 * 64, "loss": 3.0,
        "grad_norm": 1.0, "lr": 1e-3, "tokens_per_second": 500.0, "seconds": 1.0, "applied": True, "stepped": now,
        "time": now, "host": "a", "pid": 1, "world": 2,
    }))  # fmt: skip
    writer = MachineWriter(run / "machines")
    writer.add_sample(MachineSample(
        time=round(now + LATER, 1), seconds=30.0, step=100, whole=1.0, own=[0.5, 0.7],
        hosts={"a": reading([0]), "b": reading([1])},
    ))  # fmt: skip
    metrics = Metrics(0, machines=run / "machines")
    try:
        with held(run / ".lock"):
            metrics.update(read_status(run))
        yield metrics
    finally:
        metrics.close()


def reading(ranks: list[int]) -> HostReading:
    gauges: dict[str, list[float | None]] = {
        "utilization": [0.97, 0.95], "memory_used": [60.0, 61.0], "memory": [79.6, 79.6], "temperature": [61.0, 88.0],
        "power": [650.0, 671.2], "clock": [1980.0, 1755.0], "ecc_uncorrected": [0.0, 1.0],
    }  # fmt: skip
    throttled = {1: ["hardware thermal slowdown"]}
    return HostReading(
        memory=2015.0, memory_free=1500.0, load=8.0, gauges=gauges, throttled=throttled, xid={1: [79, 45]}, ranks=ranks
    )  # fmt: skip


def served(metrics: Metrics) -> str:
    """What Prometheus gets, over HTTP."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(f"http://127.0.0.1:{metrics.port}/metrics", timeout=PATIENCE) as answer:
        return str(answer.read().decode())
