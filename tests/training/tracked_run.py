"""A small run with an incident, as rank 0 tells it to trackers: two processes, refused and undone steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from megastable.base.durable import lock_file
from megastable.config.tree import RunConfig
from megastable.run.directory import RunDirectory
from megastable.run.events.event import Event
from megastable.run.events.stability_events import IncidentEvent
from megastable.run.events.training_events import Finished, Stopped, TasksEvaluated
from megastable.run.log import RunLog
from megastable.run.records import LayerRecord, StepRecord
from megastable.training.tracking import Tracking, run_point
from tests.patience import PATIENCE, until

BEGAN = 1_700_000_000.0  # of the run; a step takes a second
TOKENS = 256  # of a step
NAME = "näme <b> $HOME/../x"
# What the run comes to: steps 15 and 16 are refused and, with 13 and 14, undone; the second process repeats 19 and 20.
LOSSES = {step: 5 - step / 10 for step in range(1, 25)} | {
    step: 5.05 - step / 10 for step in (13, 14, 19, 20)
}
LOSSES |= {step: 4.9 - step / 10 for step in range(15, 19)}
UNDONE = {13: 3.7, 14: 3.6, 19: 9.5, 20: 9.25}
REFUSED = {15: 9.0, 16: 11.0}
VALIDATION = {10: 4.5, 24: 3.5}
Told = Callable[[Tracking, RunLog], None]


def record(step: int, loss: float, applied: bool = True) -> StepRecord:
    return StepRecord(
        step=step, time=BEGAN + step, first_position=8 * step - 8, next_position=8 * step, skipped=[], applied=applied,
        finite=True, clipped=False, loss=loss, z_loss=0.0, z=2.0, grad_norm=loss / 2, lr=1e-3, worst_position=8 * step,
        worst_loss=loss + 1, worst_micro_batch=0, worst_rank=0, worst_positions=[], worst_losses=[], seconds=1.0,
        data_seconds=0.01, tokens_per_second=float(TOKENS), mfu_full=0.4, mfu_causal=0.3, memory=1.5, loss_scale=1.0,
    )  # fmt: skip


def steps(losses: dict[int, float], applied: bool = True) -> Told:
    def tell(tracking: Tracking, log: RunLog) -> None:
        for step, loss in losses.items():
            tracking.send_step(record(step, loss, applied), step * TOKENS)

    return tell


def layers(step: int) -> Told:
    rows = [
        LayerRecord(step, BEGAN + step, f"blocks.{i}", activation_max=1.0 + i, gradient_rms=10.0 ** -(i + 3))
        for i in range(4)
    ]
    return lambda tracking, log: tracking.send_layers(rows)


def validation(step: int, loss: float) -> Told:
    values = {"validation/loss": loss, "validation/of/a b": loss + 1}
    return lambda tracking, log: tracking.send_validation(step, step * TOKENS, values)


def event(event: Event) -> Told:
    return lambda tracking, log: log.emit_event(event)


def between(first: int, last: int) -> dict[int, float]:
    return {step: LOSSES[step] for step in range(first, last + 1)}


OPENED = {"number": 1, "verdict": "spike", "step": 16}
FIRST = [
    steps(between(1, 10)), layers(10), validation(10, VALIDATION[10]), steps(between(11, 12)),
    steps({13: UNDONE[13], 14: UNDONE[14]}), validation(14, 9.0), steps(REFUSED, applied=False),
    event(IncidentEvent(what="opened", step=16, reason="a spike", number=1, summary=OPENED)),
    event(IncidentEvent(what="rewound", step=16, to_step=12, cursor=128, number=1, summary=OPENED)),
    steps(between(13, 18)),
    event(IncidentEvent(what="closed", step=18, number=1, summary=OPENED | {"outcome": "healed"})),
    steps({19: UNDONE[19], 20: UNDONE[20]}), event(Stopped(step=20, cursor=160)),
]  # fmt: skip
TASKS = TasksEvaluated(
    checkpoint="step-18", of_step=18, manifest="m", tokens=18 * TOKENS, scores={"arc/acc": 0.5}, seconds=9.0
)
SECOND = [
    steps(between(19, 24)), event(TASKS), validation(24, VALIDATION[24]),
    event(Finished(steps=24, val_loss=VALIDATION[24])),
]  # fmt: skip


def configured(names: Iterable[str], command: str | None = None, timeout: int = 60) -> RunConfig:
    logging = {"trackers": list(names), "tracker_command": command, "tracker_timeout": timeout}
    return RunConfig.model_validate({"logging": logging, "run": {"name": NAME}, "optimizer": {"lr": 0.002}})


def process(root: Path, config: RunConfig, begin: int, told: Iterable[Told]) -> list[str]:
    """One process of the run, which begins after a step; what it prints."""
    root.mkdir(exist_ok=True)
    said: list[str] = []
    run = RunDirectory(root)
    tracking = Tracking(config.logging, run, run_point(config, run, begin, begin * TOKENS, None), said.append)
    for tell in told:
        tell(tracking, RunLog(run))
    tracking.close(seconds=60)
    return said


def all_told(root: Path) -> None:
    """Wait for the process of a run's trackers: it may need longer than the training has waited for it."""
    lock = root / "trackers/.lock"
    until(lock.exists)
    assert lock_file(lock, PATIENCE) is not None
