"""Serves a run's numbers to Prometheus, by default on loopback: `curl http://127.0.0.1:PORT/metrics`.

They are read from a `Status`, so counters survive restarts of the training and of the supervisor. What is served:
metric_families.py and, of machines, below; alerts and a dashboard: launch/monitoring/.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from megastable.base.errors import ConfigError
from megastable.cluster.preflight import HARDWARE_XID
from megastable.run.machine_files import newest
from megastable.run.machine_state import GIB, MachineSample
from megastable.supervise.metric_families import families, labelled, seconds_by_kind
from megastable.supervise.status import Status

LOOPBACK = "127.0.0.1"
FRESH = 180.0  # seconds since a sample of machines within which it is served
# By reading of a GPU: name, what it is, factor.
OF_GPU = {
    "utilization": ("gpu_utilization_ratio", "Share of the last moment in which the GPU computed.", 1.0),
    "memory_used": ("gpu_memory_used_bytes", "Memory of the GPU that is taken.", GIB),
    "memory": ("gpu_memory_bytes", "Memory of the GPU.", GIB),
    "temperature": ("gpu_temperature_celsius", "Temperature of the GPU.", 1.0),
    "power": ("gpu_power_watts", "Power that the GPU draws.", 1.0),
    "clock": ("gpu_clock_hertz", "Clock of the GPU's multiprocessors.", 1e6),
    "ecc_uncorrected": ("gpu_ecc_uncorrected", "Uncorrected ECC errors since the driver was loaded.", 1.0),
}


class Metrics:
    """Serves the latest status, and the latest sample of machines in a folder (machine_files.py). port: 0 = any free
    one; address: to listen on. Raises ConfigError if it cannot."""

    def __init__(self, port: int, address: str = LOOPBACK, machines: Path | None = None) -> None:
        self._status = _Latest(machines)
        registry = CollectorRegistry()
        registry.register(self._status)
        try:
            self._server, self._thread = start_http_server(port, addr=address, registry=registry)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"supervise.metrics_port={port}: {address} (supervise.metrics_address) cannot be listened on "
                f"({error}): choose another port, one for each run on this host, or 0 for none"
            ) from None

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.server_address[1])

    def update(self, status: Status) -> None:
        """Serve this status from now on."""
        self._status.see(status)

    def close(self) -> None:
        """Stop listening. May be called again."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Latest(Collector):
    def __init__(self, machines: Path | None) -> None:
        self.machines = machines
        self.status: Status | None = None
        self._seconds: dict[str, float] = {}  # by kind

    def see(self, status: Status) -> None:
        self._seconds = grown(self._seconds, (status.goodput or {}).get("settled", {}))
        self.status = status

    def collect(self) -> Iterator[Metric]:
        # Read once: the supervisor may replace it meanwhile.
        if (status := self.status) is not None:
            yield from families(status)
            yield seconds_by_kind(status.name, self._seconds)
            sample = None if self.machines is None else newest(self.machines)
            if sample is not None and time.time() - sample.time < FRESH:
                yield from machine_families(status.name, sample, status.world, status.stages)


def grown(counters: Mapping[str, float], told: Mapping[str, float]) -> dict[str, float]:
    """Counters by kind after what is told now; they never fall. Nor does their sum exceed what is told: time that turns
    out to be of another kind, as when records come late, is not counted again."""
    room = sum(told.values()) - sum(counters.values())
    growth = {kind: max(0.0, seconds - counters.get(kind, 0.0)) for kind, seconds in told.items()}
    share = min(1.0, max(0.0, room) / total) if (total := sum(growth.values())) else 0.0
    return {**counters, **{kind: counters.get(kind, 0.0) + share * more for kind, more in growth.items()}}


def machine_families(
    run: str, sample: MachineSample, world: int | None = None, stages: int = 1
) -> Iterator[Metric]:
    """Hosts, GPUs and ranks of a sample. Pure. world: ranks of the run; stages: of its pipeline."""
    hosts = sample.hosts
    for name, about, values in (
        (
            "host_memory_bytes",
            "Memory of the host, or of the run's control group there.",
            {h: r.memory * GIB for h, r in hosts.items()},
        ),
        (
            "host_memory_free_bytes",
            "Memory that a process may still allocate.",
            {h: r.memory_free * GIB for h, r in hosts.items()},
        ),
        ("host_load", "Processes that run or wait, mean of a minute.", {h: r.load for h, r in hosts.items()}),
        (
            "gpus_unreadable",
            "1 while the driver of the GPUs fails or does not answer.",
            {h: float(bool(r.unknown)) for h, r in hosts.items()},
        ),
    ):
        yield labelled(run, name, about, ("host",), [((host,), value) for host, value in values.items()])
    for key, (name, about, factor) in OF_GPU.items():
        rows = [
            ((host, str(n)), value * factor)
            for host, r in hosts.items() for n, value in enumerate(r.gauges.get(key, [])) if value is not None
        ]  # fmt: skip
        yield labelled(run, name, about, ("host", "gpu"), rows)
    # What nobody can read is left out: 0 would say that all is well.
    held = [
        ((host, str(n)), float(n in r.throttled))
        for host, r in hosts.items() if "throttled" not in r.unread for n in range(r.gpus)
    ]  # fmt: skip
    yield labelled(run, "gpu_throttled", "1 while the GPU's clocks are held back.", ("host", "gpu"), held)
    # Others are a program's, such as that of a process that was killed.
    xids = [
        ((host, str(n)), float(len(HARDWARE_XID.keys() & r.xid.get(n, ()))))
        for host, r in hosts.items() if "xid" not in r.unread for n in range(r.gpus)
    ]  # fmt: skip
    about = (
        "Kinds of Xid errors of the last day that hardware or driver are to blame for (docs/preflight.md)."
    )
    yield labelled(run, "gpu_xid_kinds", about, ("host", "gpu"), xids)
    of_rank = {rank: host for host, r in hosts.items() for rank in r.ranks}
    size = max(1, max(world or 0, len(sample.own)) // max(1, stages))
    own = [
        ((of_rank.get(n, ""), str(n), str(n // size)), s) for n, s in enumerate(sample.own) if s is not None
    ]
    about = "Seconds of a step that are a rank's own work; ranks of a pipeline stage have the same work."
    yield labelled(run, "rank_own_seconds", about, ("host", "rank", "stage"), own)
