"""Turns the newest sample of a run's machines into Prometheus metrics. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from megastable.cluster.preflight import HARDWARE_XID
from megastable.run.machine_state import GIB, MachineSample
from megastable.supervise.metric_families import labelled

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


def machine_families(
    run: str, sample: MachineSample, world: int | None = None, stages: int = 1
) -> Iterator[Metric]:
    """Hosts, GPUs and ranks. world: ranks of the run; stages: of its pipeline."""
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
