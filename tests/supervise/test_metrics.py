"""What the supervisor records of ranks and hosts, and what Prometheus sees, over real HTTP on loopback."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from megastable.base.errors import ConfigError
from megastable.cluster.fleet import Fleet
from megastable.cluster.store import Heard
from megastable.run.directory import RunDirectory
from megastable.run.machine_state import HostReading, read_newest
from megastable.run.rank_ipc import WorkBlock
from megastable.supervise.machine_recorder import MachineRecorder
from megastable.supervise.metrics import Metrics, build_machine_families, grow_counters
from megastable.supervise.status import Status, read_status
from tests.launch.eventful_run import served
from tests.patience import PATIENCE, until
from tests.supervise.runs import incident, journal


def scrape(metrics: Metrics) -> dict[str, float]:
    """`name{label values in order}` -> value."""
    return {
        "|".join([sample.name, *(v for k, v in sorted(sample.labels.items()) if k != "run")]): sample.value
        for family in text_string_to_metric_families(served(metrics)) for sample in family.samples
    }  # fmt: skip


@pytest.fixture
def status(tmp_path: Path) -> Status:
    run = tmp_path / 'odd"\nname'
    run.mkdir()
    journal(
        run,
        {"event": "launched", "attempt": 1},
        {"event": "training", "step": 0, "world": 2},
        {"event": "discarded", "step": 3, "reason": "spike"},
        incident(1, outcome="healed", cause="data", steps_lost=4),
        incident(2, outcome="open", cause="unknown", steps_lost=1),
        {"event": "ended", "attempt": 1, "signal": 9, "failure": "rank 1 was killed"},
        {"event": "restart", "attempt": 2, "reason": "killed", "delay": 0},
        {"event": "evaluated", "step": 7, "loss": 2.5},
        {"event": "probed", "step": 5, "loss": 2.75, "samples": 16},
        {"event": "probed", "step": 7, "loss": 2.625, "samples": 16},
    )
    (run / "progress.json").write_text(
        json.dumps(
            {"attempt": 1, "phase": "step", "step": 7, "steps": 20, "loss": "nan", "lr": 1e-3, "time": 5.0}
        )
    )
    return read_status(run)


def test_metrics_serve_a_status(status: Status) -> None:
    metrics = Metrics(0)
    try:
        assert scrape(metrics) == {}
        metrics.update(status)
        found = scrape(metrics)
        assert found["megastable_step"] == 7 and found["megastable_steps"] == 20
        assert found["megastable_loss_nats"] != found["megastable_loss_nats"]  # nan
        assert found["megastable_learning_rate"] == 1e-3
        assert found["megastable_validation_loss_nats"] == 2.5
        assert found["megastable_probe_loss_nats"] == 2.625 and status.probe == (7, 2.625)
        assert found["megastable_up"] == 0 and found["megastable_supervisor_up"] == 0
        assert found["megastable_restarts_total|killed"] == 1
        assert found["megastable_incidents_total|data|recoverable|spike"] == 1
        assert found["megastable_incidents_open"] == 1
        assert found["megastable_alert"] == 0
        metrics.update(replace(status, alert="since step 7: the rewinds are spent"))
        assert scrape(metrics)["megastable_alert"] == 1
        assert found["megastable_updates_refused_total"] == 1 and found["megastable_steps_lost_total"] == 5
        assert "megastable_grad_norm" not in found
        assert sum(value for name, value in found.items() if name.startswith("megastable_state|")) == 1
        metrics.update(replace(status, step=8))
        assert scrape(metrics)["megastable_step"] == 8
    finally:
        metrics.close()
    metrics.close()


def test_metrics_count_incidents_once_and_never_fall(status: Status) -> None:
    metrics = Metrics(0)
    (case, _), last = status.incidents, 0.0
    try:
        # Handed over, opened again by the next process with another cause, and over at last.
        stages = ("open", "data"), ("handed over", "data"), ("open", "unknown"), ("healed", "state")
        for outcome, cause in stages:
            metrics.update(replace(status, incidents=(replace(case, outcome=outcome, cause=cause),)))
            values = scrape(metrics)
            found = sum(v for name, v in values.items() if name.startswith("megastable_incidents_total"))
            assert found >= last
            last = found
        assert last == 1
    finally:
        metrics.close()


SECONDS = st.dictionaries(st.sampled_from(["training", "hang", "unknown", "redone"]), st.floats(0, 1e6))


@given(st.lists(SECONDS, max_size=8))
def test_grown_never_falls_and_never_counts_a_second_twice(looks: list[dict[str, float]]) -> None:
    counters: dict[str, float] = {}
    most = 0.0
    for told in looks:
        after = grow_counters(counters, told)
        most = max(most, sum(told.values()))
        assert all(after[kind] >= seconds for kind, seconds in counters.items())
        assert sum(after.values()) <= most * (1 + 1e-9) + 1e-6
        counters = after


def test_metrics_say_that_a_port_is_in_use() -> None:
    metrics = Metrics(0)
    with pytest.raises(ConfigError, match=rf"supervise.metrics_port={metrics.port}.*another port"):
        Metrics(metrics.port)
    metrics.close()
    Metrics(metrics.port).close()


def test_a_visitor_who_says_nothing_holds_nobody_up(status: Status) -> None:
    metrics = Metrics(0)
    metrics.update(status)
    with socket.create_connection(("127.0.0.1", metrics.port), timeout=PATIENCE):
        assert scrape(metrics)["megastable_step"] == 7
        metrics.close()


class TwoHosts:
    """The part of a fleet that is asked."""

    def latest_readings(self) -> Mapping[str, HostReading]:
        gauges: dict[str, list[float | None]] = {
            "utilization": [0.5], "clock": [1755.0], "temperature": [None],
        }  # fmt: skip
        known = HostReading(
            memory=64.0, memory_free=16.0, load=1.0, gauges=gauges, throttled={0: ["x"]}, xid={0: [79, 45]}
        )
        silent = {"unknown": "nvidia-smi did not answer", "unread": ["throttled", "xid"]}
        return {"node-0": known, "node-1": known.model_copy(update=silent)}

    def name_of_host(self, hostname: str) -> str:
        return f"node-{hostname[-1]}"


def recorder(root: Path, seconds: float = 1000.0) -> MachineRecorder:
    return MachineRecorder(RunDirectory(root), cast(Fleet, TwoHosts()), print, seconds)


def heard(rank: int) -> Heard:
    return Heard(rank, 1, f"host{rank}", 1, time.monotonic())


def block(number: int, own: float, step: float = 1.0) -> WorkBlock:
    return WorkBlock(block=number, step=step, own=own, parts=[own])


def test_sample_has_the_work_of_every_rank_since_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "progress.json").write_text('{"step": 41}')
    found = recorder(tmp_path)
    first, second = heard(0), heard(1)
    found.add_work_reports([(first, block(0, 0.5)), (second, block(0, 0.75))])
    sample = found.take_sample()
    assert (sample.own, sample.whole, sample.step) == ([0.5, 0.75], 1.0, 41)
    assert [sample.hosts[name].ranks for name in ("node-0", "node-1")] == [[0], [1]]
    found.add_work_reports([(first, block(1, 0.6)), (first, block(2, 0.8))])
    # Ten steps may take longer than a sample: the last word stands.
    assert found.take_sample().own == [0.7, 0.75]
    second.closed = time.monotonic()
    assert found.take_sample().own == [0.8]
    found.begin_attempt()
    assert found.take_sample().own == [] and found.take_sample().whole is None
    found.close()


def test_machine_families_serve_what_is_recorded_and_nothing_that_is_unread(tmp_path: Path) -> None:
    found = recorder(tmp_path, seconds=0.05)
    found.add_work_reports([(heard(0), block(0, 0.5)), (heard(1), block(0, 0.75))])
    sample = until(lambda: read_newest(tmp_path / "machines"))
    found.close()
    served = {
        (one.name, *(v for k, v in sorted(one.labels.items()) if k != "run")): one.value
        for family in build_machine_families("mine", sample, 4, 2)
        for one in cast(GaugeMetricFamily, family).samples
    }  # fmt: skip
    # Of four ranks in two stages, the last two have not told.
    assert served["megastable_rank_own_seconds", "node-1", "1", "0"] == 0.75
    assert served["megastable_gpu_xid_kinds", "0", "node-0"] == 1  # 45 is of a process that was killed
    assert [served["megastable_gpus_unreadable", f"node-{n}"] for n in (0, 1)] == [0, 1]
    assert served["megastable_gpu_clock_hertz", "0", "node-0"] == 1.755e9
    assert served["megastable_gpu_throttled", "0", "node-0"] == 1
    assert served["megastable_host_memory_free_bytes", "node-1"] == 16 << 30
    # What nobody can read is not served as 0.
    assert not any(name == "megastable_gpu_temperature_celsius" for name, *_ in served)
    assert ("megastable_gpu_throttled", "0", "node-1") not in served
