"""A complete run with checkpoints, made without training."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megastable.checkpoint import store
from megastable.checkpoint.new_run import write_run
from megastable.config.tree import RunConfig
from megastable.run.directory import RunDirectory
from tests.conftest import tiny
from tests.convert.huggingface.conftest import VOCABULARY, random_weights

TOKENS = 256  # of a step


def settings(corpus: Path, root: Path, steps: int, batch: int = 8, **parts: Any) -> RunConfig:
    train = {"steps": steps, "global_batch": batch}
    given: dict[str, Any] = {"model": {"vocab_size": VOCABULARY}, "train": train}
    return tiny(corpus, root, **given, checkpoint={"interval": 2, "keep": 9}, **parts)


def complete_run(config: RunConfig, steps: Sequence[int]) -> RunDirectory:
    """The run of `config`, with checkpoints of random weights at `steps`, and a summary that says it is complete."""
    assert config.run.dir is not None
    run, made = RunDirectory(config.run.dir), config.run.dir.with_name("made")
    for seed, step in enumerate(steps):
        weights = random_weights(config.model, seed)
        layout = store.LayoutState(tensor=1, pipeline=1, data=1, zero=1, precision="bf16")
        state = store.RunState(step=step, tokens=step * TOKENS, order_fingerprint="0" * 64, layout=layout)
        out = made if run.root.exists() else run.root
        path = write_run(out, config, state, lambda name, _, w=weights: w[name], optimizer=None, origin={})
        if out is made:
            path.rename(run.checkpoints / path.name)
            shutil.rmtree(made)
    run.summary.write_text(json.dumps({"steps": config.train.steps, "tokens": config.train.steps * TOKENS}))
    return run
