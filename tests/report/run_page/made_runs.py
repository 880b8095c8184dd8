"""Run directories for the page, written by the project's own writers: no training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from megastable.base import durable
from megastable.config.tree import RunConfig
from megastable.data import skip_ledger
from megastable.data.append_only import append
from megastable.data.blends import BlendEntry, Share
from megastable.data.skip_ledger import SampleEntry
from megastable.run.directory import RunDirectory
from megastable.run.records import LAYER_SCHEMA, SCHEMA, LayerRecord, Recorder, StepRecord

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


def curve(step: int) -> float:
    """A loss that falls, with a little noise."""
    return float(2.0 + 6.0 * step**-0.25 + 0.05 * np.sin(step * 12.9898) ** 3)


def note(run: RunDirectory, time: float, event: str, **fields: Any) -> None:
    with run.journal.open("a") as journal:
        journal.write(json.dumps({"time": time, "event": event, **fields}) + "\n")


def progress(run: RunDirectory, step: int, time: float, loss: float, steps: int = 200, **change: Any) -> None:
    """What rank 0 says of itself while it trains."""
    told = {
        "attempt": 1, "pid": 1, "host": "host-1", "world": 2, "steps": steps, "phase": "step", "step": step,
        "cursor": BATCH * step, "loss": loss, "grad_norm": loss / 4, "lr": 1e-3, "applied": True, "seconds": SECONDS,
        "tokens_per_second": 128.0, "time": time, **change,
    }  # fmt: skip
    durable.write_file(run.progress, json.dumps(told).encode())


def summary(number: int, onset: int, **change: Any) -> dict[str, Any]:
    """What the journal says of an incident."""
    return {
        "number": number, "step": onset + 1, "onset": onset, "verdict": "spike", "kind": "recoverable", "cause": "data",
        "actions": ["rewind"], "reasons": ["its samples are bad on the state before the onset, too"],
        "positions": [[BATCH * (onset - 1), BATCH * (onset - 1) + 5]], "documents": [], "steps_lost": 2,
        "batches_discarded": 2, "seconds": 21.0, "loss_before": 3.5, "loss_peak": 9.25, "norm_peak": 7.0,
        "loss_after": 3.4, "outcome": "healed", **change,
    }  # fmt: skip


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


def made_run(
    root: Path, last: int = 150, incidents: Sequence[int] = (60, 110), flush: int = 20, **parts: Any
) -> RunDirectory:
    """A run up to step `last` of 200. At each onset of `incidents` two updates were refused, and the two steps before
    them undone and done again."""
    run = begin(root, **parts)
    recorder, layers, time = Recorder(run.steps, flush), Recorder(run.layers, 1, LAYER_SCHEMA), BEGIN + 22
    ledger = run.skips
    append(
        run.blends, BlendEntry(position=0, step=0, corpora=[share("web", 1_000_000), share("code", 400_000)])
    )
    step, number, waiting = 1, 0, list(incidents)
    while step <= last:
        if waiting and step == waiting[0]:
            onset, number = waiting.pop(0), number + 1
            for bad in (onset, onset + 1):
                recorder.add(record(bad, time, 9.0 + bad % 2, applied=False))
                note(
                    run,
                    time,
                    "discarded",
                    step=bad,
                    verdict="outlier",
                    reason="loss 14 sigma above",
                    loss=9.0,
                )
                time += SECONDS
            told = summary(number, onset)
            numbered = {"number": number, "summary": told}
            note(
                run,
                time,
                "incident",
                what="opened",
                step=onset + 1,
                reason="loss up",
                action="rewind",
                **numbered,
            )
            note(
                run,
                time + 20,
                "incident",
                what="attributed",
                cause="data",
                reason="bad",
                action="rewind",
                **numbered,
            )
            note(run, time + 21, "incident", what="rewound", to_step=onset - 3, **numbered)
            note(run, time + 60, "incident", what="closed", step=onset + 16, **numbered)
            skip_ledger.append_all(ledger, [
                SampleEntry(corpus="web", fingerprint="f", tokens=[[onset * 4096, onset * 4096 + 5 * LENGTH]],
                            reason="data: bad on the state before the onset", incident=number, step=onset),
            ])  # fmt: skip
            time, step = time + 21, onset - 2
            continue
        recorder.add(record(step, time, curve(step)))
        if step % 10 == 0:
            layers.add(*looks(step, time))
        if step % 50 == 0:
            note(
                run,
                time + 0.1,
                "evaluated",
                step=step,
                loss=curve(step) + 0.1,
                samples=16,
                seconds=1.0,
                corpora={
                    "web": {"loss": curve(step) + 0.2, "samples": 8},
                    "code": {"loss": 1.5, "samples": 8},
                },
            )
            if step == 100:
                note(
                    run,
                    time + 0.2,
                    "tasks_evaluated",
                    checkpoint="step-50",
                    of_step=50,
                    manifest="m",
                    tokens=1,
                    scores={"arc/acc": 0.25},
                    seconds=20.0,
                )
            note(
                run,
                time + 0.4,
                "checkpoint",
                step=step,
                name=f"step-{step}",
                bytes=63_000_000,
                seconds=1.4,
                blocked=0.01,
            )
            (run.checkpoints / f"step-{step}").mkdir(exist_ok=True)
            (run.checkpoints / f"step-{step}" / "manifest.json").write_text("{}")
            if step > 50:
                note(run, time + 0.5, "checkpoint_healthy", step=step, name=f"step-{step - 50}")
        time, step = time + SECONDS, step + 1
    recorder.flush()
    progress(run, last, time, curve(last))
    return run


def share(name: str, tokens: int) -> Share:
    return Share(name=name, path=name, weight=1.0, tokens=tokens, fingerprint="f")


def looks(step: int, time: float) -> list[LayerRecord]:
    """Of two blocks and the embedding."""
    found = [LayerRecord(step, time, "embedding.weight", gradient_rms=0.001, update_ratio=0.01)]
    for n in range(2):
        found.append(
            LayerRecord(step, time, f"blocks.{n}.mlp.down.weight", gradient_rms=0.01 * (n + 1) + step / 1e4)
        )
        found.append(
            LayerRecord(
                step, time, f"blocks.{n}", activation_max=5.0 + n, attention_logit=8.0, attention_entropy=2.5
            )
        )
    return found


def long_run(root: Path, steps: int, per_file: int = 50, refused_every: int = 2000) -> RunDirectory:
    """A run of very many steps, with the files that it would have; layers every 100th."""
    run = begin(root, steps=steps)
    step = np.arange(1, steps + 1)
    random = np.random.default_rng(0)
    loss = (2.0 + 8.0 * step**-0.25 + 0.05 * random.standard_normal(steps)).astype(np.float32)
    applied = step % refused_every != 0
    loss[~applied] += 4
    time = BEGIN + 22 + SECONDS * np.arange(steps)
    known = {"step": step, "time": time, "next_position": step * BATCH, "loss": loss, "applied": applied}
    other = record(1, BEGIN, 3.0)
    for first in range(0, steps, per_file):
        rows = slice(first, min(first + per_file, steps))
        columns = {name: column_of(name, known, other, rows) for name in SCHEMA.names}
        table = pa.Table.from_pydict(columns, schema=SCHEMA)
        last = rows.stop - 1
        name = f"{step[first]:08d}-{step[last]:08d}-{int(time[last] * 1000)}.parquet"
        pq.write_table(
            table,
            run.steps / name,
            compression="zstd",
            use_dictionary=False,
            write_statistics=False,
            store_schema=False,
        )
    progress(run, steps, float(time[-1]) + 1, float(loss[-1]), steps=steps)
    return run


def column_of(name: str, known: dict[str, npt.NDArray[Any]], other: StepRecord, rows: slice) -> Any:
    if name in known:
        return known[name][rows]
    count = rows.stop - rows.start
    value = getattr(other, name)
    if name in (
        "parameter_norm",
        "update_ratio",
        "attention_logit",
        "attention_entropy",
        "second_moment_norm",
    ):
        return [1.0 if (rows.start + n) % 20 == 0 else None for n in range(count)]
    return [value] * count
