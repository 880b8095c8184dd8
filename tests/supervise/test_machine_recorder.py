"""What the supervisor records of ranks and hosts, and that nothing waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from prometheus_client.core import GaugeMetricFamily

from megastable.cluster.fleet import Fleet
from megastable.cluster.store import Heard
from megastable.run.directory import RunDirectory
from megastable.run.machine_files import newest
from megastable.run.machine_state import HostReading
from megastable.run.rank_ipc import WorkBlock
from megastable.supervise.machine_recorder import MachineRecorder
from megastable.supervise.metrics import machine_families
from tests.patience import until


class TwoHosts:
    """The part of a fleet that is asked."""

    def readings(self) -> Mapping[str, HostReading]:
        gauges: dict[str, list[float | None]] = {
            "utilization": [0.5],
            "clock": [1755.0],
            "temperature": [None],
        }
        return {
            f"node-{n}": HostReading(
                memory=64.0,
                memory_free=16.0,
                load=1.0,
                gauges=gauges,
                throttled={0: ["x"]},
                xid={0: [79, 45]},
                unknown="nvidia-smi did not answer" * n,
            )
            for n in (0, 1)
        }

    def called(self, hostname: str) -> str:
        return f"node-{hostname[-1]}"


def recorder(
    root: Path, say: Callable[[str], None] = lambda text: None, seconds: float = 0.05
) -> MachineRecorder:
    return MachineRecorder(RunDirectory(root), cast(Fleet, TwoHosts()), say, seconds)


def heard(rank: int) -> Heard:
    return Heard(rank, 1, f"host{rank}", 1, time.monotonic())


def block(number: int, own: float, step: float = 1.0) -> WorkBlock:
    return WorkBlock(block=number, step=step, own=own, parts=[own])


def test_the_work_of_every_rank_since_the_sample_before(tmp_path: Path) -> None:
    (tmp_path / "progress.json").write_text('{"step": 41}')
    found = recorder(tmp_path, seconds=1000.0)
    first, second = heard(0), heard(1)
    found.hear([(first, block(0, 0.5)), (second, block(0, 0.75))])
    sample = found.sample()
    assert (sample.own, sample.whole, sample.step) == ([0.5, 0.75], 1.0, 41)
    assert [sample.hosts[name].ranks for name in ("node-0", "node-1")] == [[0], [1]]
    found.hear([(first, block(1, 0.6)), (first, block(2, 0.8))])
    assert found.sample().own == [0.7, 0.75]  # ten steps may take longer than a sample: the last word stands
    second.closed = time.monotonic()
    assert found.sample().own == [0.8]
    found.began()
    assert found.sample().own == [] and found.sample().whole is None
    found.close()


def test_it_records_by_itself_until_it_is_closed(tmp_path: Path) -> None:
    found = recorder(tmp_path)
    found.hear([(heard(0), block(0, 0.5))])
    sample = until(lambda: newest(tmp_path / "machines"))
    assert sample.own == [0.5] and sample.hosts.keys() == {"node-0", "node-1"}
    found.close()
    assert (tmp_path / "machines/6h.jsonl").exists() or until(
        lambda: (tmp_path / "machines/6h.jsonl").exists()
    )
    recorder(tmp_path).close()  # that never began


def test_a_disk_that_refuses_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "machines").write_text("in the way")
    said = list[str]()
    found = recorder(tmp_path, said.append, 0.01)
    found.hear([(heard(0), block(0, 0.5))])
    until(lambda: said)
    (tmp_path / "machines").unlink()
    until(lambda: newest(tmp_path / "machines"))
    found.close()
    assert len(said) == 1 and "machines cannot be written" in said[0]


def test_prometheus_gets_the_same(tmp_path: Path) -> None:
    found = recorder(tmp_path, seconds=1000.0)
    found.hear([(heard(0), block(0, 0.5)), (heard(1), block(0, 0.75))])
    served = {
        (sample.name, *(v for k, v in sorted(sample.labels.items()) if k != "run")): sample.value
        for family in machine_families("mine", found.sample(), 4, 2)
        for sample in cast(GaugeMetricFamily, family).samples
    }  # fmt: skip
    found.close()
    # Of four ranks in two stages, the last two have not told.
    assert served["megastable_rank_own_seconds", "node-1", "1", "0"] == 0.75
    assert served["megastable_gpu_xid_kinds", "0", "node-0"] == 1  # 45 is of a process that was killed
    assert [served["megastable_gpus_unreadable", f"node-{n}"] for n in (0, 1)] == [0, 1]
    assert served["megastable_gpu_clock_hertz", "0", "node-0"] == 1.755e9
    assert served["megastable_gpu_throttled", "0", "node-0"] == 1
    assert served["megastable_host_memory_free_bytes", "node-1"] == 16 << 30
    assert not any(name == "megastable_gpu_temperature_celsius" for name, *_ in served)


def test_what_no_gpu_tells_is_not_served_as_0(tmp_path: Path) -> None:
    found = recorder(tmp_path, seconds=1000.0)
    sample = found.sample()
    found.close()
    sample.hosts["node-0"].unread = ["throttled", "xid"]
    served = {
        (row.name, row.labels["host"])
        for family in machine_families("mine", sample) for row in cast(GaugeMetricFamily, family).samples
        if row.name in ("megastable_gpu_throttled", "megastable_gpu_xid_kinds")
    }  # fmt: skip
    assert served == {("megastable_gpu_throttled", "node-1"), ("megastable_gpu_xid_kinds", "node-1")}


def test_a_file_system_that_hangs_fills_no_memory(tmp_path: Path) -> None:
    found = recorder(tmp_path, seconds=1000.0)  # nobody takes a sample
    rank = heard(0)
    for number in range(10_000):
        found.hear([(rank, block(number, 0.5))])
    assert len(found._work[0]) <= 100 and found.sample().own == [0.5] and len(found._work[0]) == 1
    found.close()
