"""Samples of machines: what stands for several, how large their files become, and what survives a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megastable.run.machine_state import (
    HostReading,
    MachineSample,
    MachineWriter,
    host_reading,
    list_places,
    merge_samples,
    old_file,
    read_newest,
    read_sample,
)


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


def test_merged_takes_the_worst_of_several_samples() -> None:
    first, second, third = sample(0), sample(1), sample(2)
    first.hosts["node-0000"].gauges["temperature"] = [95.0, None]
    first.hosts["node-0000"].throttled = {1: ["power"]}
    second.hosts["node-0000"].xid = {0: [79]}
    second.own, third.own = [0.6, None], [None]
    found = merge_samples([first, second, third])
    host = found.hosts["node-0000"]
    assert (found.time, found.seconds, found.step) == (third.time, 90.0, 2)
    assert found.own == [0.5, first.own[1]] and host.memory_free == 1498.0
    assert host.gauges["temperature"][0] == 95.0 and host.gauges["temperature"][1] is not None
    assert host.throttled == {1: ["power"]} and host.xid == {0: [79]}


def test_host_reading_has_units_and_names_what_no_gpu_tells() -> None:
    gpu: dict[str, Any] = {"memory": 80 << 30, "memory_used": 60 << 30, "utilization": 97, "power": None}
    gpu |= {"xid": None, "clocks_throttled": []}
    found = host_reading(64 << 30, 16 << 30, 1.234, [gpu], "")
    assert (found.memory, found.memory_free, found.load, found.gpus) == (64.0, 16.0, 1.23, 1)
    assert found.gauges == {"memory": [80.0], "memory_used": [60.0], "utilization": [0.97]}
    assert found.unread == ["xid"]
    assert host_reading(1 << 30, 1 << 30, 0.0, [{**gpu, "xid": []}, gpu], "").unread == []
    none = host_reading(1 << 30, 1 << 30, 0.0, [], "why")
    assert (none.gpus, none.unread, none.unknown) == (0, [], "why")


def test_writer_keeps_fine_samples_of_late_and_coarse_ones_of_all(tmp_path: Path) -> None:
    assert read_newest(tmp_path / "none") is None and not any(list_places(tmp_path / "none").values())
    writer = MachineWriter(tmp_path, lines=100)
    for n in range(1500):
        writer.add_sample(sample(n))
    levels = list_places(tmp_path)
    counts = {name: len(level) for name, level in levels.items()}
    assert 100 <= counts["30s"] < 200 and counts == {"30s": counts["30s"], "15min": 50, "6h": 2}
    assert levels["30s"][-1].time == 1.79e9 + 30 * 1499 and old_file(tmp_path / "30s.jsonl").exists()
    day = read_sample(levels["6h"][0])
    assert day is not None and day.seconds == 21_600.0 and day.step == 719
    writer.close()
    assert len(list_places(tmp_path)["6h"]) == 3 and read_newest(tmp_path) == sample(1499)


def test_writer_goes_on_after_a_torn_line(tmp_path: Path) -> None:
    MachineWriter(tmp_path).add_sample(sample(0))
    file = tmp_path / "30s.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + whole[: len(whole) // 2])  # killed while it wrote, or a full disk
    assert read_newest(tmp_path) == sample(0)
    MachineWriter(tmp_path).add_sample(sample(1))
    assert [read_sample(place) for place in list_places(tmp_path)["30s"]] == [sample(0), sample(1)]
    file.write_bytes(b'{"time":5.0,"own":"x"}\n')
    assert [read_sample(place) for place in list_places(tmp_path)["30s"]] == [None] and read_newest(
        tmp_path
    ) is None


def test_writer_holds_nothing_in_memory_where_a_clock_is_set_back(tmp_path: Path) -> None:
    writer = MachineWriter(tmp_path)
    for n in range(40):
        writer.add_sample(sample(n))
    for n in range(100):
        writer.add_sample(sample(n).model_copy(update={"time": 1.79e9 - 4e8 + 30 * n}))  # years
    assert all(len(waiting) <= 30 for waiting in writer._open.values())
    levels = list_places(tmp_path)
    assert all(level == sorted(level) for level in levels.values())
    assert len(levels["30s"]) == 140 and len(levels["15min"]) == 2 + 3
    (before,) = (read_sample(place) for place in levels["6h"])
    assert before is not None and (before.time, before.seconds) == (1.79e9 + 30 * 39, 1200.0)
