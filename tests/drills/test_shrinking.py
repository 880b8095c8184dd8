"""A run that loses a host without a spare goes on with fewer, and grows again when the host is back."""

from __future__ import annotations

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

from drills.chaos import ClusterRun, ClusterSetup
from drills.hosts import Host, Hosts
from drills.namespaces import missing
from tests.patience import PATIENCE

STEPS = 400
LIMITS = ("supervise.host_silence=8", "supervise.shrink_after=3", "supervise.cool_off=10")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(6 * PATIENCE),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]


def events(run: ClusterRun, name: str) -> list[dict[str, Any]]:
    return [event for event in run._events() if event["event"] == name]


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


def test_it_shrinks_and_grows_with_the_same_order_of_samples(corpus: Path, tmp_path: Path) -> None:
    setup = ClusterSetup(corpus, STEPS, 3, patience=LIMITS)
    with Hosts(folder := tmp_path / "hosts", 3) as hosts:
        run = ClusterRun(setup, folder, hosts)
        until(run, lambda: (run.progress().get("step") or 0) >= 60)
        hosts["second"].power_off()
        until(run, lambda: len(events(run, "launched")) == 2)
        assert events(run, "launched")[1]["hosts"] == ["first", "third"]
        (left_out,) = events(run, "host_left_out")
        assert (left_out["host"], left_out["wholly"], left_out["strikes"]) == ("second", False, 1)
        until(run, lambda: run.progress().get("world") == 2 and (run.progress().get("step") or 0) >= 100)
        hosts["second"].power_on()
        with slowed(hosts["third"]):
            until(run, lambda: len(events(run, "launched")) == 3)
        assert events(run, "launched")[2]["hosts"] == ["first", "second", "third"]
        assert events(run, "ended")[1]["code"] == 75  # it saved, so that no step is done again
        assert run.end() == 0, run.output.read_text()
        assert events(run, "training")[2]["step"] == events(run, "stopped")[0]["step"]
        shrunk = order(run.seen), validation(run)
    with Hosts(folder := tmp_path / "clean", 3) as hosts:
        clean = ClusterRun(setup, folder, hosts)
        assert clean.end() == 0
        assert shrunk[0] == order(clean.seen) and len(shrunk[0]) == STEPS
        assert shrunk[1] == pytest.approx(validation(clean), abs=0.02)
