"""The files of a run, written by the project's own writers: no training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megastable.base import durable
from megastable.config.tree import RunConfig
from megastable.run.directory import RunDirectory
from megastable.run.records import StepRecord

BEGIN = 1_790_000_000.0
BATCH, LENGTH, SECONDS = 8, 32, 2.0


def config(root: Path, steps: int = 200, **parts: Any) -> dict[str, Any]:
    """The content of recipe.yaml."""
    given = {
        "run": {"dir": str(root)}, "data": {"corpora": [{"path": "corpus", "weight": 1.0}]},
        "model": {"layers": 2, "hidden": 32, "heads": 2, "sequence_length": LENGTH, "vocab_size": 64},
        "train": {"steps": steps, "global_batch": BATCH, "micro_batch": 2}, **parts,
    }  # fmt: skip
    return {"config": RunConfig.model_validate(given).model_dump(mode="json"), "manifests": []}


def record(step: int, time: float, loss: float, applied: bool = True, **change: Any) -> StepRecord:
    """One step."""
    first = BATCH * (step - 1)
    sometimes: dict[str, Any] = {}
    if step % 10 == 0:
        sometimes = {
            "parameter_norm": 50.0 + step / 100, "update_ratio": 1e-3, "second_moment_norm": 0.1,
            "attention_logit": 8.0, "attention_entropy": 2.0, "clipped_fraction": 0.1,
        }  # fmt: skip
    known: dict[str, Any] = {
        "step": step, "time": time, "first_position": first, "next_position": first + BATCH, "skipped": [],
        "applied": applied, "finite": bool(np.isfinite(loss)), "clipped": step % 7 == 0, "loss": loss, "z_loss": 0.0,
        "z": 1.0, "grad_norm": loss / 4, "lr": 1e-3 * min(1.0, step / 20), "worst_position": first,
        "worst_loss": loss + 1, "worst_micro_batch": 0, "worst_rank": 0, "worst_positions": [first],
        "worst_losses": [loss + 1],
        "seconds": SECONDS * 0.9, "data_seconds": 0.01, "tokens_per_second": BATCH * LENGTH / SECONDS, "mfu_full": 0.41,
        "mfu_causal": 0.36, "memory": 31.5, "loss_scale": 1.0, "samples": BATCH, "attempt": 1,
    }  # fmt: skip
    return StepRecord(**(known | sometimes | change))


def note(run: RunDirectory, time: float, event: str, **fields: Any) -> None:
    with run.journal.open("a") as journal:
        journal.write(json.dumps({"time": time, "event": event, **fields}) + "\n")


def progress(run: RunDirectory, step: int, time: float, loss: float, steps: int = 200, **change: Any) -> None:
    """What rank 0 says of itself while it trains."""
    told = {
        "attempt": 1, "pid": 1, "host": "host-1", "world": 2, "steps": steps, "phase": "step", "step": step,
        "cursor": BATCH * step, "loss": loss, "grad_norm": loss / 4, "lr": 1e-3, "applied": True, "seconds": SECONDS,
        "tokens_per_second": 128.0, "time": time, "measured_step": step, "measured_cursor": BATCH * step,
        "stepped": time - SECONDS, **change,
    }  # fmt: skip
    durable.write_file(run.progress, json.dumps(told).encode())


def begin(root: Path, steps: int = 200, **parts: Any) -> RunDirectory:
    """A run that has just been started."""
    run = RunDirectory(root)
    root.mkdir(parents=True)
    for folder in (run.steps, run.layers, run.checkpoints):
        folder.mkdir()
    run.recipe.write_text(yaml.safe_dump(config(root, steps, **parts)))
    note(run, BEGIN, "supervisor", what="started", pid=1, host="host-1")
    note(run, BEGIN + 1, "launched", attempt=1, command=[], log="logs/1.log", hosts=["host-1"], wanted=1)
    note(run, BEGIN + 20, "training", step=0, cursor=0, world=2, seconds=5.0)
    return run
