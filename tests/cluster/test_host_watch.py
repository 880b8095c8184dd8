"""A host is read again and again, whatever its driver does, and its agent tells the supervisor."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from megastable.base import free_memory
from megastable.cluster import gpu_health, host_watch
from megastable.cluster.agent import Agent
from megastable.cluster.fleet import Here
from megastable.cluster.host_watch import HostWatch
from megastable.cluster.hostfile import HostSlots
from megastable.cluster.hosts import Hosts
from megastable.cluster.launcher import TrainingCommand
from megastable.cluster.reach import Local
from megastable.cluster.store import Store
from megastable.run.directory import RunDirectory
from tests.cluster.test_host_check import H100, fake_driver, program
from tests.patience import until


def test_gpus_are_read_as_they_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "dmesg", "exit 1", monkeypatch)
    fake_driver(tmp_path, monkeypatch, H100)
    watch = HostWatch(0.05)
    reading = until(watch.latest)
    assert reading.gauges == {
        "utilization": [0.97], "memory_used": [1.0], "memory": [79.65], "temperature": [41.0], "power": [671.2],
        "clock": [1755.0], "ecc_uncorrected": [2.0],
    }  # fmt: skip
    assert (
        reading.throttled == {0: ["hardware slowdown", "hardware thermal slowdown"]} and not reading.unknown
    )
    assert 0 < reading.memory_free < reading.memory
    fake_driver(tmp_path, monkeypatch, H100 | {"nvmlDeviceGetTemperature": 88})
    until(lambda: watch.latest().gauges["temperature"] == [88.0])


def test_a_driver_that_hangs_is_asked_less_and_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_health, "SECONDS", 0.1)
    fake_driver(tmp_path, monkeypatch, H100 | {"hangs": 1})
    calls = list[str]()

    def counted(name: str) -> None:
        real = getattr(host_watch, name)

        def call(*given: Any) -> Any:
            if threading.current_thread() is watch._thread:  # earlier tests' watches go on
                calls.append(name)
            return real(*given)

        monkeypatch.setattr(host_watch, name, call)

    watch = HostWatch(0.01)
    counted("host_reading")
    counted("read_gpus")
    until(lambda: watch.latest() and calls.count("host_reading") > 40)
    reading, done = watch.latest(), list(calls)
    assert reading is not None and "did not end" in reading.unknown and reading.memory > 0
    # After the first: in pauses of two readings, four, ...; the one that is under way has made none.
    assert done.count("read_gpus") >= 2 and 2 ** done.count("read_gpus") - 2 <= done.count("host_reading")


def test_without_gpus_there_is_nothing_to_complain_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_driver(tmp_path, monkeypatch, {"nvmlInit": f"!{gpu_health.NO_DRIVER}"})
    fleet = Here(RunDirectory(tmp_path), TrainingCommand("recipe"))
    (reading,) = until(fleet.readings).values()
    assert reading.gauges == {} and reading.unknown == ""


def test_an_agent_tells_the_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_driver(tmp_path, monkeypatch, H100)
    run = RunDirectory(tmp_path)
    with Store(run) as store:
        fleet = Hosts(
            run,
            store,
            [HostSlots("first", (0,))],
            Local("elsewhere"),
            60.0,
            False,
            TrainingCommand("recipe"),
        )
        agent = Agent(run, "first")
        link = agent._connect()
        reading = until(agent.watch.latest)

        class OneTurn(Exception):
            pass

        def receive(seconds: float) -> None:
            raise OneTurn

        monkeypatch.setattr(link, "receive", receive)
        with pytest.raises(OneTurn):
            agent._serve(link)
        assert until(fleet.readings) == {"first": reading} and reading.gauges["temperature"] == [41.0]
        link.send({"machine": {"memory": "of another version"}})
        until(lambda: store.agents["first"].machine.get("memory") == "of another version")
        assert fleet.readings() == {}
        link.close()


def test_a_reading_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = list[bool]()

    def fails(*given: Any) -> Any:
        failed.append(True)
        raise ValueError("unexpected")

    monkeypatch.setattr(host_watch, "read_gpus", fails)
    free = free_memory.free
    monkeypatch.setattr(free_memory, "free", lambda: free() if len(failed) > 1 else fails())
    watch = HostWatch(0.01)
    assert until(watch.latest).unknown == "unexpected"
