"""Serves a run's numbers to Prometheus, by default on loopback: `curl http://127.0.0.1:PORT/metrics`.

They are read from a `Status`, so counters survive restarts of the training and of the supervisor. What is served:
metric_families.py and, of machines, machine_metrics.py; alerts and a dashboard: launch/monitoring/.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from megastable.base.errors import ConfigError
from megastable.run.machine_files import newest
from megastable.supervise.machine_metrics import machine_families
from megastable.supervise.metric_families import families, seconds_by_kind
from megastable.supervise.status import Status

LOOPBACK = "127.0.0.1"
FRESH = 180.0  # seconds since a sample of machines within which it is served


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
