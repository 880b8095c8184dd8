"""What Prometheus sees, over real HTTP on loopback."""

from __future__ import annotations

import json
import socket
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from megastable.base.errors import ConfigError
from megastable.run.goodput.time_account import TimeKind
from megastable.run.goodput.watching import GoodputWatch
from megastable.supervise.metrics import Metrics, grown
from megastable.supervise.status import Status, read_status
from tests.patience import PATIENCE
from tests.run.test_goodput import BEGIN, at, run_of, steps
from tests.supervise.runs import incident, journal


def scrape(metrics: Metrics) -> dict[str, float]:
    """`name{label values in order}` -> value."""
    address = f"http://127.0.0.1:{metrics.port}/metrics"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(address, timeout=PATIENCE) as answer:
        text = answer.read().decode()
    return {
        "|".join([sample.name, *(v for k, v in sorted(sample.labels.items()) if k != "run")]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


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


def test_a_status_is_served(status: Status) -> None:
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


def test_a_counter_never_falls(status: Status) -> None:
    metrics = Metrics(0)
    (case, _), last = status.incidents, 0.0
    try:
        # Handed over, opened again by the next process with another cause, and over at last.
        for outcome, cause in (
            ("open", "data"),
            ("handed over", "data"),
            ("open", "unknown"),
            ("healed", "state"),
        ):
            metrics.update(replace(status, incidents=(replace(case, outcome=outcome, cause=cause),)))
            found = sum(
                v for name, v in scrape(metrics).items() if name.startswith("megastable_incidents_total")
            )
            assert found >= last
            last = found
        assert last == 1
    finally:
        metrics.close()


def test_the_seconds_of_a_run_by_kind_never_fall(status: Status) -> None:
    metrics = Metrics(0)
    try:
        assert status.goodput is not None and sum(status.goodput["seconds"].values()) == pytest.approx(
            status.goodput["wall_seconds"]
        )
        metrics.update(status)
        found = scrape(metrics)
        told = {
            name.partition("|")[2]: value
            for name, value in found.items()
            if "megastable_seconds_total" in name
        }
        assert {kind: seconds for kind, seconds in told.items() if seconds} == status.goodput["settled"]
        assert set(told) == set(TimeKind)  # those at 0, too: an alert does not see how a new counter began
        assert found["megastable_goodput_ratio"] == status.goodput["share"]
    finally:
        metrics.close()


def test_records_that_come_late_count_no_second_twice(status: Status) -> None:
    metrics = Metrics(0)
    try:
        # What was unknown was training.
        for training, unknown, wanted in ((20.0, 30.0, 20.0), (50.0, 5.0, 25.0), (90.0, 5.0, 65.0)):
            settled = {"training": training, "unknown": unknown}
            goodput = {"share": 0.5, "smaller": 0.1, "wall_seconds": 1e3, "seconds": {}, "settled": settled}
            metrics.update(replace(status, goodput=goodput))
            found = scrape(metrics)
            assert found["megastable_seconds_total|training"] == pytest.approx(wanted)
            assert found["megastable_missing_capacity_ratio"] == 0.1
        metrics.update(replace(status, goodput=None))
        found = scrape(metrics)
        assert found["megastable_seconds_total|unknown"] == 30 and "megastable_goodput_ratio" not in found
    finally:
        metrics.close()


SECONDS = st.dictionaries(st.sampled_from(["training", "hang", "unknown", "redone"]), st.floats(0, 1e6))


@given(st.lists(SECONDS, max_size=8))
def test_counters_never_fall_and_never_count_a_second_twice(looks: list[dict[str, float]]) -> None:
    counters: dict[str, float] = {}
    most = 0.0
    for told in looks:
        after = grown(counters, told)
        most = max(most, sum(told.values()))
        assert all(after[kind] >= seconds for kind, seconds in counters.items())
        assert sum(after.values()) <= most * (1 + 1e-9) + 1e-6
        counters = after


@pytest.mark.slow
def test_a_hang_that_was_unknown_for_minutes_counts_once(tmp_path: Path) -> None:
    """Looked at every ten seconds: nobody knew, for 775 s, what the time after the last step was."""
    rows = [*steps(1, 20, 106), *steps(21, 30, 915)]
    events = [
        *BEGIN,
        at(901, "hang", attempt=1, phase="step", waited=775.0, limit=600.0, step=20, silent=[], stacks=[]),
        at(902, "ended", attempt=1, clock=20, silent=776.0, hung=True, what="hang", host="b"),
        at(904, "launched", attempt=2),
        at(915, "training", step=20, cursor=0, world=2),
    ]
    counters: dict[str, float] = {}
    for now in range(110, 930, 10):
        run_of(tmp_path, [e for e in events if e["time"] <= now], [row for row in rows if row[1] <= now])
        account = GoodputWatch(tmp_path).look(alive=True, now=now)
        assert account is not None
        counters = grown(counters, account.settled_seconds())
        assert sum(counters.values()) <= account.wall + 1e-6
    assert account is not None and counters == pytest.approx(account.settled_seconds())
    assert counters["hang"] == 775 and "unknown" not in counters and counters["training"] == 25


def test_two_runs_in_one_process_share_nothing(status: Status) -> None:
    before = {family.name for family in REGISTRY.collect()}
    first, second = Metrics(0), Metrics(0)
    first.update(status)
    assert scrape(second) == {} and scrape(first)
    assert {family.name for family in REGISTRY.collect()} == before
    first.close()
    second.close()


def test_only_this_host_is_served(status: Status) -> None:
    metrics = Metrics(0)
    assert metrics._server.server_address[0] == "127.0.0.1"
    metrics.close()
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", metrics.port), timeout=5):
        pass


def test_another_address_is_served_instead() -> None:
    metrics = Metrics(0, "127.0.0.2")
    assert metrics._server.server_address[0] == "127.0.0.2"
    metrics.close()
    with pytest.raises(
        ConfigError, match=r"192\.0\.2\.1 \(supervise.metrics_address\) cannot be listened on"
    ):
        Metrics(0, "192.0.2.1")


def test_a_port_in_use_is_said() -> None:
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
