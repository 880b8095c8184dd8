"""Measure inspecting a step of a run over 10^12 tokens, in a separate process, on sparse files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megastable.config.tree import RunConfig
from megastable.data.append_only import append
from megastable.data.blends import BlendEntry
from megastable.data.corpora import open_corpora
from megastable.data.manifest import Manifest, Segment, TokenizerInfo
from megastable.data.shard_format import CODES, HEADER, MAGIC, VERSION, ShardInfo
from megastable.run.directory import RunDirectory
from megastable.run.records import Recorder, StepRecord

TOOL = Path(__file__).resolve().parents[1] / "tools" / "inspect_data.py"
# The process's report at its end, beside its output: seconds after the imports, and memory.
WATCH = """
import runpy, sys, time
from benchmarks.peak_memory import peak_mib
import megastable.forensics.history, megastable.forensics.samples, megastable.report.sheet.output, typer
begin = time.perf_counter()
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
print(time.perf_counter() - begin, peak_mib(), file=sys.stderr)
"""


def sparse_corpus(folder: Path, shards: int, tokens: int, documents: int) -> Manifest:
    """A corpus of `shards` shards of `tokens` tokens, all of them 0, in `documents` documents each. Little is written:
    the .bin files are sparse."""
    folder.mkdir(parents=True)
    lengths = np.full(documents, tokens // documents, dtype="<i4")
    pointers = np.arange(documents, dtype="<i8") * (tokens // documents) * 4
    code = next(code for code, dtype in CODES.items() if dtype == "int32")
    header = HEADER.pack(MAGIC, VERSION, code, documents, documents + 1)
    index = header + lengths.tobytes() + pointers.tobytes() + np.arange(documents + 1, dtype="<i8").tobytes()
    total = documents * (tokens // documents)
    infos = []
    for number in range(shards):
        name = f"part-{number:05d}"
        (folder / f"{name}.idx").write_bytes(index)
        with (folder / f"{name}.bin").open("wb") as file:
            file.truncate(4 * total)
        sizes = {"tokens": total, "documents": documents, "sequences": documents}
        files = {"bin_bytes": 4 * total, "idx_bytes": len(index), "bin_xxh3": "0" * 32, "idx_xxh3": "0" * 32}
        infos.append(ShardInfo.model_validate({"name": name, "dtype": "int32"} | sizes | files))
    info = TokenizerInfo(file="none", kind="sentencepiece", xxh3="0" * 32, vocab_size=100_000, eod=1)
    train = [Segment(shard=i.name, first_token=0, tokens=total, documents=documents) for i in infos]
    manifest = Manifest(name="web", tokenizer=info, dtype="int32", shards=infos, splits={"train": train})
    manifest.save(folder)
    return manifest


def recorded_run(root: Path, corpus: Path, steps: int, batch: int) -> RunDirectory:
    """The directory of a run on `corpus` as if it had done `steps` steps."""
    run = RunDirectory(root)
    run.steps.mkdir(parents=True)
    config = RunConfig.model_validate({
        "run": {"dir": root}, "data": {"corpora": [{"path": corpus}]}, "model": {"sequence_length": 4096},
        "train": {"steps": steps, "global_batch": batch},
    })  # fmt: skip
    run.recipe.write_text(yaml.safe_dump({"config": config.model_dump(mode="json"), "manifests": []}))
    run.journal.write_text("")
    opened = open_corpora(config.data.corpora, config.model.sequence_length, config.run.seed)
    append(run.blends, BlendEntry(position=0, corpora=opened.shares))
    recorder = Recorder(run.steps, 1000)
    usual: dict[str, Any] = {
        "skipped": [], "applied": True, "finite": True, "clipped": False, "loss": 2.0, "z_loss": 0.0, "z": 1.0,
        "grad_norm": 1.0, "lr": 1e-4, "worst_loss": 3.0, "worst_micro_batch": 0, "worst_rank": 0, "worst_losses": [3.0],
        "seconds": 1.0, "data_seconds": 0.0, "tokens_per_second": 1.0, "mfu_full": 0.4, "mfu_causal": 0.4,
        "memory": 60.0, "loss_scale": 1.0,
    }  # fmt: skip
    for step in range(1, steps + 1):
        first = batch * (step - 1)
        place: dict[str, Any] = {
            "first_position": first,
            "next_position": first + batch,
            "worst_position": first,
        }
        recorder.add(
            StepRecord(step=step, time=1.7e9 + step, **place, **usual | {"worst_positions": [first]})
        )
    recorder.flush()
    return run


def inspect_cost(
    folder: Path, shards: int = 1000, tokens: int = 10**9, steps: int = 20_000
) -> dict[str, float]:
    """Seconds, in all and after the imports, and memory (MB) of `inspect_data.py step` on a run over shards *
    tokens."""
    sparse_corpus(folder / "corpus", shards, tokens, documents=1000)
    run = recorded_run(folder / "run", folder / "corpus", steps, batch=1024)
    command = [sys.executable, "-c", WATCH, str(TOOL), "step", str(run.root), str(steps - 7), "--json"]
    begin = time.perf_counter()
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    whole = time.perf_counter() - begin
    after, megabytes = (float(x) for x in done.stderr.split()[-2:])
    rows = len(json.loads(done.stdout)["rows"])
    assert rows >= 1024, rows
    return {
        "tokens": float(shards * tokens),
        "seconds": whole,
        "after_imports": after,
        "megabytes": megabytes,
    }
