"""Turns the newest sample of a run's machines into Prometheus metrics. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

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


def machine_families(run: str, sample: MachineSample) -> Iterator[Metric]:
    """Hosts, GPUs and ranks."""
    hosts = sample.hosts
    for name, about, values in (
        ("host_memory_bytes", "Memory of the host.", {h: r.memory * GIB for h, r in hosts.items()}),
        (
            "host_memory_free_bytes",
            "Memory that a process may still allocate.",
            {h: r.memory_free * GIB for h, r in hosts.items()},
        ),
        ("host_load", "Processes that run or wait, mean of a minute.", {h: r.load for h, r in hosts.items()}),
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
    xids = [
        ((host, str(n)), float(len(r.xid.get(n, ()))))
        for host, r in hosts.items() if "xid" not in r.unread for n in range(r.gpus)
    ]  # fmt: skip
    yield labelled(run, "gpu_xid_kinds", "Kinds of Xid errors of the last day.", ("host", "gpu"), xids)
    of_rank = {rank: host for host, r in hosts.items() for rank in r.ranks}
    own = [((of_rank.get(n, ""), str(n)), s) for n, s in enumerate(sample.own) if s is not None]
    yield labelled(
        run, "rank_own_seconds", "Seconds of a step that are a rank's own work.", ("host", "rank"), own
    )
