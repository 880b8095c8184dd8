"""Turns a status into Prometheus metrics, with the run's name as a label. Pure.

Every label that is known beforehand is there from the start: a counter that appears with its first event hides that
event from alerts. Names end in their unit; losses are nats per token. What is unknown is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from megastable.base.activity import REST
from megastable.run.goodput.time_account import KINDS
from megastable.run.run_history import ENDED_AS
from megastable.supervise.standing import State
from megastable.supervise.status import Status
from megastable.warnings.trend_signals import SIGNALS
from megastable_guard.actions import Cause

PREFIX = "megastable_"
GIB = 1 << 30  # bytes
OVER = ("healed", "stopped")  # outcomes of incidents that will not change any more


def families(s: Status) -> Iterator[Metric]:
    """All metrics but the time by kind."""
    for name, (about, value) in {**_progress(s), **_model(s), **_speed(s), **_safety(s)}.items():
        if value is not None:
            yield labelled(s.name, name, about, (), [((), float(value))])
    states = [((state.name.lower(),), float(state is s.state)) for state in State]
    yield labelled(s.name, "state", "1 for the state that the run is in.", ("state",), states)
    phases = [((phase,), seconds) for phase, seconds in s.phases.items()]
    about = "Seconds of a step by phase, the median of the last ones (docs/profiling.md)."
    yield labelled(s.name, "step_phase_seconds", about, ("phase",), phases)
    flops = [
        ((name,), s.readings[f"mfu_{name}"]) for name in ("full", "causal") if f"mfu_{name}" in s.readings
    ]
    about = "Share of the devices' peak, counting the full attention matrix or its causal half."
    yield labelled(s.name, "mfu_ratio", about, ("attention",), flops)
    losses = [((corpus,), loss) for corpus, loss in s.validation_by_corpus.items()]
    about = "Last validation loss of a corpus, in a blend of several, nats per token."
    yield labelled(s.name, "validation_corpus_loss_nats", about, ("corpus",), losses)
    warned = [((signal,), float(signal in s.trends)) for signal in {**SIGNALS, **s.trends}]
    about = "1 while a slow signal is warned of (docs/stability.md)."
    yield labelled(s.name, "trend_warning", about, ("signal",), warned)
    yield from _tasks(s)
    yield from _hosts(s)
    yield from _counters(s)


def seconds_by_kind(run: str, seconds: Mapping[str, float]) -> Metric:
    """Where the time went."""
    known = {kind.value: 0.0 for kind in KINDS} | dict(seconds)
    about = "Where the time went (docs/goodput.md)."
    return _counter(run, "seconds", about, ("kind",), [((kind,), value) for kind, value in known.items()])


Values = dict[str, tuple[str, float | None]]
"""By name: what it is, and its value."""


def _progress(s: Status) -> Values:
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
    }


def _model(s: Status) -> Values:
    found = s.readings
    return {
        "loss_nats": ("Loss of the last step, nats per token.", s.loss),
        "validation_loss_nats": (
            "Last validation loss, nats per token.",
            s.validation[-1][1] if s.validation else None,
        ),
        "validation_step": (
            "The step that it was measured at.",
            s.validation[-1][0] if s.validation else None,
        ),
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
        "fp8_saturation_ratio": ("Largest share of FP8 values that saturated.", found.get("fp8_saturation")),
        "loss_scale": ("Scale of the loss; 1 but for fp16.", found.get("loss_scale")),
    }


def _speed(s: Status) -> Values:
    memory = s.readings.get("memory")
    return {
        "tokens_per_second": ("Tokens a second over all ranks, at the median step.", s.tokens_per_second),
        "step_seconds": ("Seconds a step, the median of the last ones.", s.rate),
        "memory_bytes": ("Highest use of memory by rank 0.", None if memory is None else memory * GIB),
        "goodput_ratio": (
            "The share of all time since the run began that was training.",
            s.goodput["share"] if s.goodput else None,
        ),
        "missing_capacity_ratio": (
            "The share of the wanted ranks' time that was missing while fewer of them trained.",
            s.goodput.get("smaller") if s.goodput else None,
        ),
    }


def _safety(s: Status) -> Values:
    newest = s.checkpoints[0] if s.checkpoints else None
    return {
        "incidents_open": ("Incidents that are not over.", sum(i.outcome == "open" for i in s.incidents)),
        "alert": ("1 while nothing more is done automatically and a person is needed.", bool(s.alert)),
        "last_checkpoint_step": ("Step of the newest checkpoint.", newest.step if newest else None),
        "last_checkpoint_timestamp_seconds": ("When it was complete.", newest.time if newest else None),
        "last_checkpoint_bytes": ("Its size.", newest.size if newest else None),
        "checkpoint_free_bytes": ("Space that is left where checkpoints are written.", s.free),
    }


def _tasks(s: Status) -> Iterator[Metric]:
    tasks = s.tasks
    about = "Score of the last evaluation by eval.command (docs/evaluation.md)."
    rows = [((name,), value) for name, value in tasks.scores.items()]
    yield labelled(s.name, "task_score", about, ("task",), rows)
    about = "How much worse the median of three evaluations is than the best such median, as a share of it."
    rows = [((name,), drop.ratio) for name, drop in tasks.drops.items()]
    yield labelled(s.name, "task_drop_ratio", about, ("task",), rows)
    about = "The same in standard deviations of one evaluation."
    rows = [((name,), drop.sigmas) for name, drop in tasks.drops.items()]
    yield labelled(s.name, "task_drop_sigmas", about, ("task",), rows)
    wanted = s.task_interval is not None
    for name, about, value in (
        ("task_step", "Step of the checkpoint of the last scores.", tasks.step if tasks.scores else None),
        (
            "task_settled_step",
            "Newest step whose checkpoint was evaluated, has failed, or was passed over for a newer one.",
            tasks.settled if wanted else None,
        ),
        ("task_interval_steps", "Steps between two evaluations (eval.interval).", s.task_interval),
        (
            "task_failures_in_a_row",
            "Evaluations that failed since the last one that succeeded.",
            tasks.failures if wanted else None,
        ),
    ):
        yield labelled(s.name, name, about, (), [] if value is None else [((), float(value))])
    about = "Checkpoints for the evaluation of tasks, by what became of them."
    yield _counter(
        s.name, "task_evaluations", about, ("outcome",), [((k,), n) for k, n in tasks.counts.items()]
    )


def _hosts(s: Status) -> Iterator[Metric]:
    out = [((host,), 1.0) for host in s.left_out]
    yield labelled(
        s.name, "host_left_out", "1 while others are preferred to a host that failed.", ("host",), out
    )
    for name, about, values in (
        (
            "ratio",
            "Time of a slow host's own work to that of the others.",
            {h: f.ratio for h, f in s.slow.items()},
        ),
        ("cost", "The share of a step that a slow host costs.", {h: f.cost for h, f in s.slow.items()}),
    ):
        known = [((host,), value) for host, value in values.items() if value is not None]
        yield labelled(s.name, f"slow_host_{name}", about, ("host",), known)


def _counters(s: Status) -> Iterator[Metric]:
    yield _counter(s.name, "updates_refused", "Updates that were not applied.", (), [((), s.refused)])
    about = "Steps done again or undone because of incidents."
    yield _counter(s.name, "steps_lost", about, (), [((), s.steps_lost)])
    yield _counter(s.name, "starts", "Starts of the training processes.", (), [((), s.starts)])
    restarts = [((how,), count) for how, count in (dict.fromkeys(ENDED_AS, 0) | s.restarts).items()]
    yield _counter(s.name, "restarts", "Restarts by the supervisor.", ("reason",), restarts)
    # What is open, or was handed over and opens again, may still change its class and cause; a counter never falls.
    over = [i for i in s.incidents if i.outcome in OVER]
    causes = {cause.value: 0 for cause in Cause} | Counter(i.cause for i in over)
    by_cause = [((cause,), count) for cause, count in causes.items()]
    yield _counter(s.name, "incidents_by_cause", "Incidents that are over, by cause.", ("cause",), by_cause)
    alike = Counter((i.kind, i.cause, i.verdict) for i in over)
    about = "Incidents that are over, by class, cause and symptom."
    yield _counter(s.name, "incidents", about, ("class", "cause", "verdict"), alike.items())


Rows = Iterable[tuple[Sequence[str], float]]
"""Values of the labels, and the value."""


def labelled(run: str, name: str, about: str, labels: Sequence[str], rows: Rows) -> Metric:
    """A gauge with a label for the run, and others."""
    gauge = GaugeMetricFamily(PREFIX + name, about, labels=["run", *labels])
    for values, value in rows:
        gauge.add_metric([run, *values], value)
    return gauge


def _counter(run: str, name: str, about: str, labels: Sequence[str], rows: Rows) -> Metric:
    counter = CounterMetricFamily(PREFIX + name, about, labels=["run", *labels])
    for values, value in rows:
        counter.add_metric([run, *values], value)
    return counter
