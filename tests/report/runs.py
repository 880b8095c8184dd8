"""Run directories with incidents in them, as a training process and its supervisor would leave them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megastable.data.corpora import open_corpora
from megastable.data.samples import documents_at
from megastable.report.postmortem import sample_texts
from megastable.run.directory import RunDirectory
from megastable.run.records import LAYER_SCHEMA, LayerRecord, Recorder, StepRecord
from megastable_guard.actions import Action, Cause, Verdict
from megastable_guard.incident import Incident
from tests.conftest import LENGTH, tiny

NASTY = "\x1b[31m<script>alert(1)</script>\u202e</pre> ``` | **x** <img src=http://x.y/z>\x07"
SPIKE: dict[str, Any] = {
    "step": 31, "onset": 30, "verdict": Verdict.SPIKE, "kind": "recoverable", "loss_before": 4.0, "loss_peak": 9.0,
    "norm_peak": 7.5, "batches_discarded": 2, "steps_lost": 2, "seconds": 1.5,
}  # fmt: skip

Make = Callable[..., Path]


def step_record(
    step: int, time: float, loss: float, applied: bool = True, first: int | None = None
) -> StepRecord:
    first = 8 * (step - 1) if first is None else first
    return StepRecord(
        step=step, time=time, first_position=first, next_position=first + 8, skipped=[], applied=applied, finite=True,
        clipped=False, loss=loss, z_loss=0.0, z=1.0, grad_norm=loss / 4, lr=1e-3, worst_position=first,
        worst_loss=loss, worst_micro_batch=0, worst_rank=0, worst_positions=[first], worst_losses=[loss], seconds=0.5,
        data_seconds=0.0, tokens_per_second=100.0, mfu_full=0.1, mfu_causal=0.1, memory=1.0, loss_scale=1.0,
    )  # fmt: skip


def make_run(corpus: Path, root: Path, *incidents: Incident, **parts: Any) -> Path:
    """A run directory in which the steps 30 and 31 went wrong, and were done again after a rewind."""
    run = RunDirectory(root)
    root.mkdir()
    config = tiny(corpus, root, **({"train": {"steps": 60, "global_batch": 8}} | parts))
    run.recipe.write_text(yaml.safe_dump({"config": config.model_dump(mode="json"), "manifests": []}))
    run.steps.mkdir()
    run.layers.mkdir()
    recorder, layers = Recorder(run.steps, 20), Recorder(run.layers, 1, LAYER_SCHEMA)
    for number, step in enumerate([*range(1, 32), *range(30, 51)]):
        bad = number in (29, 30)
        recorder.add_records(step_record(step, 1000.0 + number, 9.0 if bad else 4.0, not bad))
    recorder.flush_records()
    layers.add_records(LayerRecord(20, 1019.0, "blocks.0", activation_rms=1.0))
    # In the middle of it, when it was undone but not proven to be over, and after that.
    for step, time, value in ((31, 1030.0, 8.0), (40, 1040.0, 2.0), (60, 1060.0, 3.0), (80, 1080.0, 4.0)):
        layers.add_records(LayerRecord(step, time, "blocks.0", activation_rms=value))
    note(run, 1000.0, "training", step=0, cursor=0, world=2)
    for incident in incidents:
        tell(run, incident)
    return root


def note(run: RunDirectory, time: float, event: str, **fields: Any) -> None:
    with run.journal.open("a") as journal:
        journal.write(json.dumps({"time": time, "event": event, **fields}) + "\n")


def tell(run: RunDirectory, incident: Incident, time: float = 1030.5, **fields: Any) -> None:
    """The journal of an incident that was opened, undone and closed, with all that is known of it at the end."""
    summary = incident.model_dump(mode="json")
    number = {"number": incident.number, "summary": summary}
    note(run, time, "incident", what="opened", step=incident.step, reason="up", action="rewind", **number)
    suspects = [{"position": 236, "loss": 9.5, "z": "inf", "gradient_norm": None}]
    more = {
        "cause": "data",
        "reason": "bad",
        "action": "rewind",
        "remedy": "skipped",
        "suspects": suspects,
    } | fields
    note(run, time, "incident", what="attributed", **more, **number)
    note(run, time, "incident", what="rewound", to_step=29, cursor=232, **number)
    note(run, time + 10, "incident", what="closed", step=39, **number)


def data_incident(corpus: Path, ranges: list[tuple[int, int]], **change: Any) -> Incident:
    config = tiny(corpus, Path("unused"))
    source = open_corpora(config.data.corpora, LENGTH, config.run.seed).train
    found = documents_at(source, np.array(sample_texts.take_positions(ranges, 1000)))
    known = SPIKE | {
        "cause": Cause.DATA, "actions": [Action.REWIND], "reasons": ["they are bad"], "positions": ranges,
        "documents": [d.model_dump() for d in found], "loss_after": 4.1, "outcome": "healed",
    }  # fmt: skip
    return Incident(number=1, **(known | change))


def breakdown(**change: Any) -> Incident:
    failure = "rank 1 on node-3 was killed by signal 9 (SIGKILL)"
    known = {
        "step": 45,
        "onset": 45,
        "verdict": "crash",
        "kind": "recoverable",
        "cause": "process",
        "failure": failure,
    }
    return Incident.model_validate({"number": 1, "actions": ["restart"], "steps_lost": 5} | known | change)


def branch(name: str, cost: int, difference: float, losses: list[float], **change: Any) -> dict[str, Any]:
    """A branch of a trial, as the journal has it (recovery/replay_trials.py, `describe_branch`)."""
    return {
        "name": name, "cost": cost, "loss": round(4.2 + difference, 4), "difference": difference,
        "error": 0.02 if difference else 0.0, "losses": losses, "norms": [1.5 + cost] * len(losses), **change,
    }  # fmt: skip


def suspects_tried(**change: Any) -> dict[str, Any]:
    """The fields of a trial of suspected samples: the branch with them ends with a harder data to come."""
    names = "with the suspects", "without the suspects"
    return {
        "step": 31, "snapshot": 24, "steps": 16, "suspects": 16, "verdict": "bad", "damaged": False, "cost": 0.31,
        "cost_error": 0.02, "learnt": 0.01, "learnt_error": 0.02, "before": 4.25, "present": 4.6, "seconds": 3.5,
        "reason": "16 steps with 16 suspects, and the same steps without: they do harm",
        "branches": [
            branch(names[0], 0, 0.31, [*[4.0] * 5, *[9.0] * 2, *[4.8] * 9]), branch(names[1], 1, 0.0, [4.0] * 16),
        ],
    } | change  # fmt: skip


def remedies_tried(**change: Any) -> dict[str, Any]:
    """The fields of a trial of remedies: the state itself is bad, so that nothing but a new optimizer state helps."""
    bad = [4.0, 4.1, 4.3, 5.2, 6.4, 7.9, 8.8, 9.1]
    return {
        "step": 31, "snapshot": 24, "steps": 8, "chosen": "reset_moments", "before": 4.25, "present": 6.1,
        "reason": "only with the moments reset is the data to come no harder than before",
        "branches": [
            branch("nothing", 0, 0.05, bad), branch("other data", 1, 0.0, [loss + 0.1 for loss in bad]),
            branch("cut_lr", 2, -0.9, [0.5 * loss + 2 for loss in bad], error=0.06),
            branch("rewarm", 3, -1.4, [0.3 * loss + 2.8 for loss in bad], error=0.05),
            branch("reset_moments", 4, -1.95, [4.0, 4.02, 4.01, 3.98, 3.97, 3.99, 3.95, 3.96], error=0.04),
        ],
    } | change  # fmt: skip
