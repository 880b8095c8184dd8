"""Samples of machines: what stands for several, how large their files become, and what survives a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megastable.run import machine_files
from megastable.run.machine_files import LEVELS, MachineWriter, newest, old_file, places, read_sample
from megastable.run.machine_state import HostReading, MachineSample, host_reading, merged


def sample(n: int, ranks: int = 2, hosts: int = 1, gpus: int = 2) -> MachineSample:
    gauges = {
        name: [float(f"{value + 0.001 * (n + gpu) % 7:.4g}") for gpu in range(gpus)]
        for name, value in (("utilization", 0.9), ("temperature", 60.0), ("power", 650.0), ("clock", 1900.0))
    }  # fmt: skip
    each = ranks // hosts
    of_hosts = {
        f"node-{h:04d}": HostReading(
            memory=2015.0, memory_free=1500.0 - n % 10, load=8.0, gauges=gauges,
            ranks=list(range(h * each, (h + 1) * each)),
        )
        for h in range(hosts)
    }  # fmt: skip
    own: list[float | None] = [float(f"{0.4 + 0.013 * (n + r) % 0.1:.4g}") for r in range(ranks)]
    return MachineSample(time=1.79e9 + 30 * n, seconds=30.0, step=n, whole=0.5, own=own, hosts=of_hosts)


def test_the_worst_of_several_samples_stands_for_them() -> None:
    first, second, third = sample(0), sample(1), sample(2)
    first.hosts["node-0000"].gauges["temperature"] = [95.0, None]
    first.hosts["node-0000"].throttled = {1: ["power"]}
    second.hosts["node-0000"].xid = {0: [79]}
    second.own, third.own = [0.6, None], [None]
    found = merged([first, second, third])
    assert (found.time, found.seconds, found.step) == (third.time, 90.0, 2)
    assert found.own == [0.5, first.own[1]]
    host = found.hosts["node-0000"]
    assert host.memory_free == 1498.0
    assert host.gauges["temperature"][0] == 95.0 and host.gauges["temperature"][1] is not None
    assert host.throttled == {1: ["power"]} and host.xid == {0: [79]}
    assert merged([first]).own == first.own


def test_units_of_a_reading() -> None:
    gpu = {
        "memory": 80 << 30,
        "memory_used": 60 << 30,
        "utilization": 97,
        "power": None,
        "xid": None,
        "clocks_throttled": [],
    }
    found = host_reading(64 << 30, 16 << 30, 1.234, [gpu], "")
    assert (found.memory, found.memory_free, found.load) == (64.0, 16.0, 1.23)
    assert (
        found.gauges == {"memory": [80.0], "memory_used": [60.0], "utilization": [0.97]} and found.gpus == 1
    )
    assert host_reading(1 << 30, 1 << 30, 0.0, [], "why").gpus == 0


def test_fine_samples_of_late_and_coarse_ones_of_all(tmp_path: Path) -> None:
    writer = MachineWriter(tmp_path, lines=100)
    for n in range(1500):
        writer.add(sample(n))
    levels = places(tmp_path)
    counts = {name: len(level) for name, level in levels.items()}
    assert 100 <= counts["30s"] < 200 and counts == {"30s": counts["30s"], "15min": 50, "6h": 2}
    assert levels["30s"][-1].time == 1.79e9 + 30 * 1499 and old_file(tmp_path / "30s.jsonl").exists()
    day = read_sample(levels["6h"][0])
    assert day is not None and day.seconds == 21_600.0 and day.step == 719
    writer.close()
    assert len(places(tmp_path)["6h"]) == 3
    assert newest(tmp_path) == sample(1499)


def test_another_writer_goes_on_after_a_torn_line(tmp_path: Path) -> None:
    MachineWriter(tmp_path).add(sample(0))
    file = tmp_path / "30s.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + whole[: len(whole) // 2])  # killed while it wrote, or a full disk
    assert newest(tmp_path) == sample(0)
    MachineWriter(tmp_path).add(sample(1))
    found = [read_sample(place) for place in places(tmp_path)["30s"]]
    assert found == [sample(0), sample(1)]
    file.write_bytes(b'{"time":5.0,"own":"x"}\n')
    assert [read_sample(place) for place in places(tmp_path)["30s"]] == [None] and newest(tmp_path) is None


@pytest.mark.slow
def test_a_thousand_hosts_stay_within_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_files, "LEVELS", {"30s": 30.0, "15min": 60.0, "6h": 120.0})
    size = 1 << 20
    writer = MachineWriter(tmp_path, size=size)
    large = sample(0, ranks=8000, hosts=1000, gpus=8)
    line = len(large.model_dump_json(exclude_defaults=True))
    assert line < 600_000
    for n in range(6):
        writer.add(large.model_copy(update={"time": 1.79e9 + 30 * n, "step": n}))
    used = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert used <= 2 * len(LEVELS) * (size + line) and len(list(tmp_path.iterdir())) <= 2 * len(LEVELS)
    assert len(json.loads((old_file(tmp_path / "30s.jsonl")).read_bytes().splitlines()[0])["own"]) == 8000


def test_no_folder_is_no_sample(tmp_path: Path) -> None:
    assert newest(tmp_path / "none") is None and not any(places(tmp_path / "none").values())


def test_a_clock_that_is_set_back_holds_nothing_in_memory(tmp_path: Path) -> None:
    writer = MachineWriter(tmp_path)
    for n in range(40):
        writer.add(sample(n))
    back = 1.79e9 - 4e8  # years
    for n in range(100):
        writer.add(sample(n).model_copy(update={"time": back + 30 * n}))
    assert all(len(waiting) <= 30 for waiting in writer._open.values())
    levels = places(tmp_path)
    assert all(
        [place.time for place in level] == sorted(place.time for place in level) for level in levels.values()
    )
    assert len(levels["30s"]) == 140 and len(levels["15min"]) == 2 + 3
    (before,) = (read_sample(place) for place in levels["6h"])
    assert before is not None and (before.time, before.seconds) == (1.79e9 + 30 * 39, 1200.0)


def test_what_no_gpu_tells_is_not_nothing() -> None:
    gpus: list[dict[str, Any]] = [{"utilization": 97, "xid": None, "clocks_throttled": []}] * 2
    assert host_reading(1 << 30, 1 << 30, 0.0, gpus, "").unread == ["xid"]
    assert host_reading(1 << 30, 1 << 30, 0.0, [{**gpus[0], "xid": []}, gpus[1]], "").unread == []
    assert host_reading(1 << 30, 1 << 30, 0.0, [], "").unread == []
