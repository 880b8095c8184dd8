"""Serves a run's numbers to Prometheus, by default on loopback: `curl http://127.0.0.1:PORT/metrics`.

They are read from a `Status`, with the run's name as a label, so counters survive restarts of the training and of the
supervisor. Alerts and a dashboard: launch/monitoring/. Every label that is known beforehand is there from the start: a
counter that appears with its first event hides that event from alerts. Names end in their unit; losses are nats per
token. What is unknown is left out.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from megastable.base.activity import REST
from megastable.base.errors import ConfigError
from megastable.cluster.preflight import HARDWARE_XID
from megastable.run.goodput.time_account import KINDS
from megastable.run.machine_state import GIB, MachineSample, read_newest
from megastable.run.run_history import ENDED_AS
from megastable.supervise.standing import State
from megastable.supervise.status import Status
from megastable.warnings.trend_signals import SIGNALS
from megastable_guard.actions import Cause

LOOPBACK = "127.0.0.1"
PREFIX = "megastable_"
OVER = ("healed", "stopped")  # outcomes of incidents that will not change any more
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
    """Serves the latest status, and the latest sample of machines in a folder (machine_state.py). port: 0 = any free
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
        return int(self._server.server_address[1])

    def update(self, status: Status) -> None:
        self._status.set_status(status)

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

    def set_status(self, status: Status) -> None:
        self._seconds = grow_counters(self._seconds, (status.goodput or {}).get("settled", {}))
        self.status = status

    def collect(self) -> Iterator[Metric]:
        # Read once: the supervisor may replace it meanwhile.
        if (status := self.status) is not None:
            yield from build_families(status)
            seconds = {kind.value: 0.0 for kind in KINDS} | self._seconds
            yield _counter(status.name, "seconds", "Where the time went (docs/goodput.md).", seconds, "kind")
            machine_sample = None if self.machines is None else read_newest(self.machines)
            if machine_sample is not None and time.time() - machine_sample.time < FRESH:
                yield from build_machine_families(status.name, machine_sample, status.world, status.stages)


def grow_counters(counters: Mapping[str, float], told: Mapping[str, float]) -> dict[str, float]:
    """Counters by kind after what is told now; they never fall. Nor does their sum exceed what is told: time that turns
    out to be of another kind, as when records come late, is not counted again."""
    room_left = sum(told.values()) - sum(counters.values())
    growth = {kind: max(0.0, seconds - counters.get(kind, 0.0)) for kind, seconds in told.items()}
    share = min(1.0, max(0.0, room_left) / total) if (total := sum(growth.values())) else 0.0
    return {**counters, **{kind: counters.get(kind, 0.0) + share * more for kind, more in growth.items()}}


def build_machine_families(
    run: str, sample: MachineSample, world: int | None = None, stages: int = 1
) -> Iterator[Metric]:
    """Hosts, GPUs and ranks of a sample. Pure. world: ranks of the run; stages: of its pipeline."""
    hosts = sample.hosts
    of_hosts: Gauges = {
        "host_memory_bytes": (
            "Memory of the host, or of the run's control group there.",
            {host: reading.memory * GIB for host, reading in hosts.items()},
        ),
        "host_memory_free_bytes": (
            "Memory that a process may still allocate.",
            {host: reading.memory_free * GIB for host, reading in hosts.items()},
        ),
        "host_load": (
            "Processes that run or wait, mean of a minute.",
            {host: reading.load for host, reading in hosts.items()},
        ),
        "gpus_unreadable": (
            "1 while the driver of the GPUs fails or does not answer.",
            {host: bool(reading.unknown) for host, reading in hosts.items()},
        ),
    }
    yield from _gauges(run, of_hosts, "host")
    of_gpus: Gauges = {
        name: (about, {
            (host, str(n)): None if value is None else value * factor
            for host, reading in hosts.items() for n, value in enumerate(reading.gauges.get(key, []))
        })
        for key, (name, about, factor) in OF_GPU.items()
    }  # fmt: skip
    # What nobody can read is left out: 0 would say that all is well.
    of_gpus["gpu_throttled"] = "1 while the GPU's clocks are held back.", {
        (host, str(n)): n in reading.throttled
        for host, reading in hosts.items() if "throttled" not in reading.unread for n in range(reading.gpus)
    }  # fmt: skip
    # Others are a program's, such as that of a process that was killed.
    about = (
        "Kinds of Xid errors of the last day that hardware or driver are to blame for (docs/preflight.md)."
    )
    of_gpus["gpu_xid_kinds"] = about, {
        (host, str(n)): len(HARDWARE_XID.keys() & reading.xid.get(n, ()))
        for host, reading in hosts.items() if "xid" not in reading.unread for n in range(reading.gpus)
    }  # fmt: skip
    yield from _gauges(run, of_gpus, "host", "gpu")
    of_rank = {rank: host for host, reading in hosts.items() for rank in reading.ranks}
    stage_size = max(1, max(world or 0, len(sample.own)) // max(1, stages))
    about = "Seconds of a step that are a rank's own work; ranks of a pipeline stage have the same work."
    own_seconds = {
        (of_rank.get(n, ""), str(n), str(n // stage_size)): seconds for n, seconds in enumerate(sample.own)
    }
    yield from _gauges(run, {"rank_own_seconds": (about, own_seconds)}, "host", "rank", "stage")


def build_families(s: Status) -> Iterator[Metric]:
    """All metrics but the time by kind."""
    known_numbers: Gauges = {
        name: (about, {(): value}) for name, (about, value) in _list_numbers(s).items() if value is not None
    }
    yield from _gauges(s.name, known_numbers)
    of_state: Values = {state.name.lower(): state is s.state for state in State}
    yield from _gauges(s.name, {"state": ("1 for the state that the run is in.", of_state)}, "state")
    about = "Seconds of a step by phase, the median of the last ones (docs/profiling.md)."
    yield from _gauges(s.name, {"step_phase_seconds": (about, s.phases)}, "phase")
    about = "Share of the devices' peak, counting the full attention matrix or its causal half."
    of_attention: Values = {kind: s.readings.get(f"mfu_{kind}") for kind in ("full", "causal")}
    yield from _gauges(s.name, {"mfu_ratio": (about, of_attention)}, "attention")
    about = "Last validation loss of a corpus, in a blend of several, nats per token."
    yield from _gauges(s.name, {"validation_corpus_loss_nats": (about, s.validation_by_corpus)}, "corpus")
    about = "1 while a slow signal is warned of (docs/stability.md)."
    of_signal: Values = {signal: signal in s.trends for signal in {**SIGNALS, **s.trends}}
    yield from _gauges(s.name, {"trend_warning": (about, of_signal)}, "signal")
    drops = s.tasks.drops
    of_task: Gauges = {
        "task_score": ("Score of the last evaluation by eval.command (docs/evaluation.md).", s.tasks.scores),
        "task_drop_ratio": (
            "How much worse the median of three evaluations is than the best such median, as a share of it.",
            {task: drop.ratio for task, drop in drops.items()},
        ),
        "task_drop_sigmas": (
            "The same in standard deviations of one evaluation.",
            {task: drop.sigmas for task, drop in drops.items()},
        ),
    }
    yield from _gauges(s.name, of_task, "task")
    of_host: Gauges = {
        "host_left_out": (
            "1 while others are preferred to a host that failed.",
            dict.fromkeys(s.left_out, True),
        ),
        "slow_host_ratio": (
            "Time of a slow host's own work to that of the others.",
            {host: slow.ratio for host, slow in s.slow.items()},
        ),
        "slow_host_cost": (
            "The share of a step that a slow host costs.",
            {host: slow.cost for host, slow in s.slow.items()},
        ),
    }
    yield from _gauges(s.name, of_host, "host")
    yield from _count(s)


def _list_numbers(s: Status) -> dict[str, tuple[str, float | None]]:
    """Gauges without further labels, by name: what each is, and its value."""
    found, tasks = s.readings, s.tasks
    evaluates_tasks = s.task_interval is not None
    validation_step, validation_loss = s.validation[-1] if s.validation else (None, None)
    newest_checkpoint = s.checkpoints[0] if s.checkpoints else None
    memory_gib = found.get("memory")
    return {
        "step": ("Steps done, refused ones included.", s.step),
        "steps": ("Steps of the whole run.", s.steps),
        "position": ("The next data position.", s.cursor),
        "tokens": ("Tokens of the steps done, refused ones included.", s.tokens),
        "skipped_samples": ("Samples before the data position that no step was trained on.", s.skipped),
        "ranks": ("Training processes.", s.world),
        "remaining_seconds": ("Seconds until the last step at that pace.", s.eta),
        "attempt": ("The present start by the supervisor.", s.attempt),
        "supervisor_up": ("1 while a supervisor is at work.", s.supervisor.alive),
        "up": ("1 while the training processes are at work.", s.trainer.alive),
        "in_step": (
            "1 while rank 0 makes a step; 0 while it starts, evaluates, saves or goes back.",
            s.phase == REST,
        ),
        "last_progress_timestamp_seconds": ("When there was the last sign of progress.", s.last_progress),
        "last_step_timestamp_seconds": ("When the last step ended.", s.last_step),
        "loss_nats": ("Loss of the last step, nats per token.", s.loss),
        "validation_loss_nats": ("Last validation loss, nats per token.", validation_loss),
        "validation_step": ("The step that it was measured at.", validation_step),
        "probe_loss_nats": (
            "Newest loss of the probe, samples that are never trained on (docs/stability.md), nats per token.",
            s.probe[1] if s.probe else None,
        ),
        "grad_norm": (
            "Gradient norm of the last step before clipping.",
            s.grad_norm if s.grad_norm is not None else found.get("grad_norm"),
        ),
        "learning_rate": ("Rate of the last update.", s.lr),
        "clipped_ratio": ("Share of the steps whose gradients were clipped.", found.get("clipped_fraction")),
        "update_ratio": (
            "Norm of the last measured update to that of the weights.",
            found.get("update_ratio"),
        ),
        "attention_entropy_nats": (
            "Lowest attention entropy of a layer, nats.",
            found.get("attention_entropy"),
        ),
        "attention_logit": ("Largest attention logit.", found.get("attention_logit")),
        "expert_load_ratio": (
            "Tokens of the most chosen routed expert over the mean of its layer.",
            found.get("expert_violation"),
        ),
        "expert_idle_ratio": ("Share of the routed experts that no token chose.", found.get("expert_idle")),
        "fp8_saturation_ratio": ("Largest share of FP8 values that saturated.", found.get("fp8_saturation")),
        "loss_scale": ("Scale of the loss; 1 but for fp16.", found.get("loss_scale")),
        "tokens_per_second": ("Tokens a second over all ranks, at the median step.", s.tokens_per_second),
        "step_seconds": ("Seconds a step, the median of the last ones.", s.rate),
        "memory_bytes": (
            "Highest use of memory by rank 0.",
            None if memory_gib is None else memory_gib * GIB,
        ),
        "goodput_ratio": (
            "The share of all time since the run began that was training.",
            s.goodput["share"] if s.goodput else None,
        ),
        "missing_capacity_ratio": (
            "The share of the wanted ranks' time that was missing while fewer of them trained.",
            s.goodput.get("smaller") if s.goodput else None,
        ),
        "incidents_open": ("Incidents that are not over.", sum(i.outcome == "open" for i in s.incidents)),
        "alert": ("1 while nothing more is done automatically and a person is needed.", bool(s.alert)),
        "last_checkpoint_step": (
            "Step of the newest checkpoint.",
            newest_checkpoint.step if newest_checkpoint else None,
        ),
        "last_checkpoint_timestamp_seconds": (
            "When it was complete.",
            newest_checkpoint.time if newest_checkpoint else None,
        ),
        "last_checkpoint_bytes": ("Its size.", newest_checkpoint.size if newest_checkpoint else None),
        "checkpoint_free_bytes": ("Space that is left where checkpoints are written.", s.free),
        "task_step": ("Step of the checkpoint of the last scores.", tasks.step if tasks.scores else None),
        "task_settled_step": (
            "Newest step whose checkpoint was evaluated, has failed, or was passed over for a newer one.",
            tasks.settled if evaluates_tasks else None,
        ),
        "task_interval_steps": ("Steps between two evaluations (eval.interval).", s.task_interval),
        "task_failures_in_a_row": (
            "Evaluations that failed since the last one that succeeded.",
            tasks.failures if evaluates_tasks else None,
        ),
    }


def _count(s: Status) -> Iterator[Metric]:
    about = "Checkpoints for the evaluation of tasks, by what became of them."
    yield _counter(s.name, "task_evaluations", about, s.tasks.counts, "outcome")
    yield _counter(s.name, "updates_refused", "Updates that were not applied.", {(): s.refused})
    about = "Steps done again or undone because of incidents."
    yield _counter(s.name, "steps_lost", about, {(): s.steps_lost})
    yield _counter(s.name, "starts", "Starts of the training processes.", {(): s.starts})
    restarts = dict.fromkeys(ENDED_AS, 0) | s.restarts
    yield _counter(s.name, "restarts", "Restarts by the supervisor.", restarts, "reason")
    # What is open, or was handed over and opens again, may still change its class and cause; a counter never falls.
    over_incidents = [incident for incident in s.incidents if incident.outcome in OVER]
    by_cause = {cause.value: 0 for cause in Cause} | Counter(
        over_incident.cause for over_incident in over_incidents
    )
    yield _counter(s.name, "incidents_by_cause", "Incidents that are over, by cause.", by_cause, "cause")
    by_kind = Counter((incident.kind, incident.cause, incident.verdict) for incident in over_incidents)
    about = "Incidents that are over, by class, cause and symptom."
    yield _counter(s.name, "incidents", about, by_kind, "class", "cause", "verdict")


Values = Mapping[Any, float | None]
"""By the value of the label, or a tuple of those of all labels; None is left out."""
Gauges = dict[str, tuple[str, Values]]
"""By name: what it is, and its values."""


def _gauges(run: str, gauges: Gauges, *labels: str) -> Iterator[Metric]:
    """Gauges with a label for the run, and others."""
    for gauge_name, (about, values) in gauges.items():
        yield _add_values(GaugeMetricFamily(PREFIX + gauge_name, about, labels=["run", *labels]), run, values)


def _counter(run: str, name: str, about: str, values: Values, *labels: str) -> Metric:
    return _add_values(CounterMetricFamily(PREFIX + name, about, labels=["run", *labels]), run, values)


def _add_values(family: GaugeMetricFamily | CounterMetricFamily, run: str, values: Values) -> Metric:
    for key, value in values.items():
        if value is not None:
            family.add_metric([run, *([key] if isinstance(key, str) else key)], float(value))
    return family
