"""Run directories for the page, written by the project's own writers: no training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megastable.data import skip_ledger
from megastable.data.blends import BlendEntry, Share
from megastable.data.skip_ledger import SampleEntry, append_entry
from megastable.run.directory import RunDirectory
from megastable.run.machine_state import HostReading, MachineSample, MachineWriter
from megastable.run.records import LAYER_SCHEMA, LayerRecord, Recorder
from tests.report.run_page.run_files import BATCH, BEGIN, LENGTH, SECONDS, begin, note, progress, record


def curve(step: int) -> float:
    """A loss that falls, with a little noise."""
    return float(2.0 + 6.0 * step**-0.25 + 0.05 * np.sin(step * 12.9898) ** 3)


def summary(number: int, onset: int, **change: Any) -> dict[str, Any]:
    """What the journal says of an incident."""
    return {
        "number": number, "step": onset + 1, "onset": onset, "verdict": "spike", "kind": "recoverable", "cause": "data",
        "actions": ["rewind"], "reasons": ["its samples are bad on the state before the onset, too"],
        "positions": [[BATCH * (onset - 1), BATCH * (onset - 1) + 5]], "documents": [], "steps_lost": 2,
        "batches_discarded": 2, "seconds": 21.0, "loss_before": 3.5, "loss_peak": 9.25, "norm_peak": 7.0,
        "loss_after": 3.4, "outcome": "healed", **change,
    }  # fmt: skip


Loads = Callable[[int], list[list[float]]]  # of a step: by block, by expert


def made_run(
    root: Path,
    last: int = 150,
    incidents: Sequence[int] = (60, 110),
    flush: int = 20,
    loads: Loads | None = None,
    **parts: Any,
) -> RunDirectory:
    """A run up to step `last` of 200. At each onset of `incidents` two updates were refused, and the two steps before
    them undone and done again. loads: of routed experts."""
    run = begin(root, **parts)
    recorder, layers, time = Recorder(run.steps, flush), Recorder(run.layers, 1, LAYER_SCHEMA), BEGIN + 22
    ledger = run.skips
    append_entry(
        run.blends, BlendEntry(position=0, step=0, corpora=[share("web", 1_000_000), share("code", 400_000)])
    )
    step, number, waiting = 1, 0, list(incidents)
    while step <= last:
        if waiting and step == waiting[0]:
            onset, number = waiting.pop(0), number + 1
            for bad in (onset, onset + 1):
                recorder.add_records(record(bad, time, 9.0 + bad % 2, applied=False))
                refused = {"step": bad, "verdict": "outlier", "reason": "loss 14 sigma above", "loss": 9.0}
                note(run, time, "discarded", **refused)
                time += SECONDS
            known: dict[str, Any] = {"number": number, "summary": summary(number, onset), "action": "rewind"}
            note(run, time, "incident", what="opened", step=onset + 1, reason="loss up", **known)
            note(run, time + 20, "incident", what="attributed", cause="data", reason="bad", **known)
            note(run, time + 21, "incident", what="rewound", to_step=onset - 3, **known)
            note(run, time + 60, "incident", what="closed", step=onset + 16, **known)
            skip_ledger.append_entries(ledger, [
                SampleEntry(corpus="web", fingerprint="f", tokens=[[onset * 4096, onset * 4096 + 5 * LENGTH]],
                            reason="data: bad on the state before the onset", incident=number, step=onset),
            ])  # fmt: skip
            time, step = time + 21, onset - 2
            continue
        recorder.add_records(record(step, time, curve(step)))
        if step % 10 == 0:
            layers.add_records(*looks(step, time), *expert_looks(step, time, loads))
        if step % 50 == 0:
            look_back(run, step, time)
        time, step = time + SECONDS, step + 1
    recorder.flush_records()
    progress(run, last, time, curve(last))
    return run


def look_back(run: RunDirectory, step: int, time: float) -> None:
    """An evaluation, and a checkpoint, which proves the one before healthy."""
    corpora = {"web": {"loss": curve(step) + 0.2, "samples": 8}, "code": {"loss": 1.5, "samples": 8}}
    loss = {"loss": curve(step) + 0.1, "samples": 16, "seconds": 1.0}
    note(run, time + 0.1, "evaluated", step=step, **loss, corpora=corpora)
    if step == 100:
        scores = {"scores": {"arc/acc": 0.25}, "seconds": 20.0, "tokens": 1}
        note(run, time + 0.2, "tasks_evaluated", checkpoint="step-50", of_step=50, manifest="m", **scores)
    saved = {"bytes": 63_000_000, "seconds": 1.4, "blocked": 0.01}
    note(run, time + 0.4, "checkpoint", step=step, name=f"step-{step}", **saved)
    (run.checkpoints / f"step-{step}").mkdir(exist_ok=True)
    (run.checkpoints / f"step-{step}" / "manifest.json").write_text("{}")
    if step > 50:
        note(run, time + 0.5, "checkpoint_healthy", step=step, name=f"step-{step - 50}")


def share(name: str, tokens: int) -> Share:
    return Share(name=name, path=name, weight=1.0, tokens=tokens, fingerprint="f")


def looks(step: int, time: float) -> list[LayerRecord]:
    """Of two blocks and the embedding."""
    found = [LayerRecord(step, time, "embedding.weight", gradient_rms=0.001, update_ratio=0.01)]
    for n in range(2):
        rms, block = 0.01 * (n + 1) + step / 1e4, f"blocks.{n}"
        values = {"activation_max": 5.0 + n, "attention_logit": 8.0, "attention_entropy": 2.5}
        found.append(LayerRecord(step, time, f"{block}.mlp.down.weight", gradient_rms=rms))
        found.append(LayerRecord(step, time, block, **values))
    return found


def expert_looks(step: int, time: float, loads: Loads | None) -> list[LayerRecord]:
    return [
        LayerRecord(step, time, f"blocks.{block}.mlp.experts.{expert}", expert_load=load, expert_bias=0.0)
        for block, block_loads in enumerate(loads(step) if loads else [])
        for expert, load in enumerate(block_loads)
    ]


def machines(run: RunDirectory, samples: int = 10, ranks: int = 4, slow: int = 2) -> None:
    """What the supervisor records of two hosts with two GPUs each; one rank is half as slow again."""
    writer = MachineWriter(run.machines)
    for n in range(samples):
        hosts = {
            f"host-{h}": HostReading(
                memory=64.0, memory_free=20.0 - n, load=2.0, ranks=[2 * h, 2 * h + 1],
                throttled={1: ["hardware slowdown"]} if h else {},
                gauges={"utilization": [0.9, 0.5], "temperature": [60.0 + n, None], "memory_used": [70.0, 71.0]},
            )
            for h in range(2)
        }  # fmt: skip
        own: list[float | None] = [1.5 if rank == slow else 1.0 for rank in range(ranks)]
        writer.add_sample(MachineSample(
            time=BEGIN + 52 + 30 * n, seconds=30.0, step=15 * (n + 1), whole=1.6, own=own, hosts=hosts,
        ))  # fmt: skip
