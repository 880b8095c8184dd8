"""Serves a run's numbers to Prometheus, by default on loopback: `curl http://127.0.0.1:PORT/metrics`.

They are read from a `Status`, so counters survive restarts of the training and of the supervisor. Names end in their
unit; losses are nats per token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from megastable.base.errors import ConfigError
from megastable.supervise.standing import State
from megastable.supervise.status import Status

LOOPBACK = "127.0.0.1"


class Metrics:
    """Serves the latest status. port: 0 = any free one; address: to listen on. Raises ConfigError if it cannot."""

    def __init__(self, port: int, address: str = LOOPBACK) -> None:
        self._status = _Latest()
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
    def __init__(self) -> None:
        self.status: Status | None = None
        self._seconds: dict[str, float] = {}  # by kind

    def see(self, status: Status) -> None:
        self._seconds = grown(self._seconds, (status.goodput or {}).get("settled", {}))
        self.status = status

    def collect(self) -> Iterator[Metric]:
        # Read once: the supervisor may replace it meanwhile.
        if (status := self.status) is not None:
            yield from families(status)
            seconds = [((kind,), value) for kind, value in list(self._seconds.items())]
            yield _counter("seconds", "Where the time went (docs/goodput.md).", status, ["kind"], seconds)


def grown(counters: Mapping[str, float], told: Mapping[str, float]) -> dict[str, float]:
    """Counters by kind after what is told now; they never fall. Nor does their sum exceed what is told: time that turns
    out to be of another kind, as when records come late, is not counted again."""
    room = sum(told.values()) - sum(counters.values())
    growth = {kind: max(0.0, seconds - counters.get(kind, 0.0)) for kind, seconds in told.items()}
    share = min(1.0, max(0.0, room) / total) if (total := sum(growth.values())) else 0.0
    return {**counters, **{kind: counters.get(kind, 0.0) + share * more for kind, more in growth.items()}}


def families(s: Status) -> Iterator[Metric]:
    """The metrics of a status, with the run's name as a label; unknown ones are left out."""
    gauges = {
        "step": ("Steps done, refused ones included.", s.step),
        "steps": ("Steps of the whole run.", s.steps),
        "position": ("The next data position.", s.cursor),
        "ranks": ("Training processes.", s.world),
        "loss_nats": ("Loss of the last step, nats per token.", s.loss),
        "validation_loss_nats": (
            "Last validation loss, nats per token.",
            s.validation[-1][1] if s.validation else None,
        ),
        "grad_norm": ("Gradient norm of the last step before clipping.", s.grad_norm),
        "learning_rate": ("Rate of the last update.", s.lr),
        "tokens_per_second": ("Tokens a second over all ranks, at the median step.", s.tokens_per_second),
        "step_seconds": ("Seconds a step, the median of the last ones.", s.rate),
        "remaining_seconds": ("Seconds until the last step at that pace.", s.eta),
        "attempt": ("The present start by the supervisor.", s.attempt),
        "supervisor_up": ("1 while a supervisor is at work.", s.supervisor.alive),
        "up": ("1 while the training processes are at work.", s.trainer.alive),
        "incidents_open": (
            "Incidents that are not over.",
            sum(case.outcome == "open" for case in s.incidents),
        ),
        "alert": ("1 while nothing more is done automatically and a person is needed.", bool(s.alert)),
        "goodput_ratio": (
            "The share of all time since the run began that was training.",
            s.goodput["share"] if s.goodput else None,
        ),
        "missing_capacity_ratio": (
            "The share of the wanted ranks' time that was missing while fewer of them trained.",
            s.goodput.get("smaller") if s.goodput else None,
        ),
        "last_progress_timestamp_seconds": ("When there was the last sign of progress.", s.last_progress),
        "last_checkpoint_step": (
            "Step of the newest checkpoint.",
            s.checkpoints[0].step if s.checkpoints else None,
        ),
        "last_checkpoint_timestamp_seconds": (
            "When it was complete.",
            s.checkpoints[0].time if s.checkpoints else None,
        ),
    }
    for name, (about, value) in gauges.items():
        if value is not None:
            gauge = GaugeMetricFamily(f"megastable_{name}", about, labels=["run"])
            gauge.add_metric([s.name], float(value))
            yield gauge
    state = GaugeMetricFamily(
        "megastable_state", "1 for the state that the run is in.", labels=["run", "state"]
    )
    for possible in State:
        state.add_metric([s.name, possible.name.lower()], float(possible is s.state))
    yield state
    ratios = {host: found.ratio for host, found in s.slow.items()}
    yield _by_host("ratio", "Time of a slow host's own work to that of the others.", s, ratios)
    costs = {host: found.cost for host, found in s.slow.items()}
    yield _by_host("cost", "The share of a step that a slow host costs.", s, costs)
    yield _counter("updates_refused", "Updates that were not applied.", s, [], [((), s.refused)])
    yield _counter(
        "steps_lost", "Steps done again or undone because of incidents.", s, [], [((), s.steps_lost)]
    )
    yield _counter("starts", "Starts of the training processes.", s, [], [((), s.starts)])
    restarts = [((reason,), count) for reason, count in s.restarts.items()]
    yield _counter("restarts", "Restarts by the supervisor.", s, ["reason"], restarts)
    # What is open, or was handed over and opens again, may still change its class and cause; a counter never falls.
    over = Counter((i.kind, i.cause, i.verdict) for i in s.incidents if i.outcome in ("healed", "stopped"))
    labels = ["class", "cause", "verdict"]
    yield _counter(
        "incidents", "Incidents that are over, by class, cause and symptom.", s, labels, over.items()
    )


def _by_host(name: str, about: str, s: Status, values: Mapping[str, float | None]) -> Metric:
    gauge = GaugeMetricFamily(f"megastable_slow_host_{name}", about, labels=["run", "host"])
    for host, value in values.items():
        if value is not None:
            gauge.add_metric([s.name, host], value)
    return gauge


def _counter(
    name: str, about: str, s: Status, labels: list[str], counts: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    counter = CounterMetricFamily(f"megastable_{name}", about, labels=["run", *labels])
    for values, count in counts:
        counter.add_metric([s.name, *values], count)
    return counter
