"""What faults of single bits are planted into: a tiny corpus that can be learnt, and a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from drills.corruption_plan import RESUMED, Layout
from megastable.config.tree import RunConfig
from megastable.data.manifest import FILE, TokenizerInfo, adopt
from megastable.data.shards import ShardWriter

VOCABULARY = 250
LENGTH = 32
TOKENS = 40_000
LAST = 40  # steps of a run
SAMPLES = 96  # of a step; of fewer, gradients of single ranks have no direction in common
MICRO_BATCHES = 2  # of a step and rank
# A fault is between the second look and the third.
HARDWARE: dict[str, Any] = {"fingerprint_interval": 10, "replay_interval": 10}


def write_corpus(folder: Path) -> None:
    """A random walk over token ids, in documents of 5 to 200 tokens, ended by 0. An existing one is used."""
    if (folder / FILE).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    with ShardWriter(folder / "part-0", VOCABULARY) as writer:
        while writer.tokens < TOKENS:
            steps = random.integers(-3, 4, random.integers(5, 200))
            document = (random.integers(1, VOCABULARY) + steps.cumsum()) % (VOCABULARY - 1) + 1
            writer.add_document(np.append(document, 0))
    tokenizer = TokenizerInfo(
        file="tokenizer.model", kind="sentencepiece", xxh3="0" * 32, vocab_size=VOCABULARY, eod=0
    )
    adopt(folder, tokenizer, 0.05).save(folder)


def config(corpus: Path, run: Path, layout: Layout, seed: int) -> RunConfig:
    """A run of seconds."""
    tree: dict[str, Any] = {
        "run": {"dir": run, "seed": seed, "timeout": 600},
        "model": {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "sequence_length": LENGTH}
        | {"vocab_multiple": 64},
        "data": {"corpora": [{"path": corpus}]},
        "precision": {"kind": "bf16"},
        "parallel": layout.parallel,
        "optimizer": {"lr": 3e-3},
        "schedule": {"warmup_steps": 5, "total_steps": LAST},
        "train": {"steps": LAST, "global_batch": SAMPLES, "micro_batch": SAMPLES // layout.data // MICRO_BATCHES}
        | {"eval_samples": 0, "eval_interval": 0},
        # A hand-over goes back to the one of step 20, and a wrong replica resumes from it.
        "checkpoint": {"interval": RESUMED},
        "stability": {"hardware": HARDWARE, "snapshots": {"interval": 5}},
        "logging": {"trackers": [], "interval": 1000, "norms_interval": 0, "peak_tflops": 1.0},
    }  # fmt: skip
    return RunConfig.model_validate(tree)
