"""What the configuration calls valid can be trained: every key at its ends, for two steps from the entry point."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest

from megastable.base.errors import BAD_INPUT, OK, STOPPED, ConfigError
from megastable.config import recipe
from tests.config.ends import cases
from tests.conftest import write_corpus
from tests.distributed import run_main

CASES = list(cases())
CHUNKS = 16
PATIENCE = 60.0  # seconds; a case takes one or two on a quiet core
COMPILING = 400.0  # seconds, on one busy core
MEMORY = 12 * 2**30  # bytes of address space: a size that does not fit is to harm no other test

# What a key needs beside it to be read at all; the longest prefix counts.
NEEDS: dict[str, dict[str, Any]] = {
    "checkpoint.vitals": {"checkpoint.vitals.probes": 4},
    "logging.profile": {"logging.profile.start": 1},
    "model.attention_softcap": {"kernels.attention": "reference"},
    "model.branch_steps": {"model.norms": "branch"},
    "model.full_attention_every": {"model.window": 4},
    "model.mixed_share": {"model.norms": "mixed"},
    "model.mup": {"model.mup.base_width": 16},
    "model.rope_scaling": {
        "model.rope_scaling.kind": "llama3",
        "model.rope_scaling.factor": 2.0,
        "model.rope_scaling.original_length": 16,
    },
    "model.rope_scaling.attention_factor": {"model.rope_scaling.kind": "yarn"},
    "model.rope_scaling.beta": {"model.rope_scaling.kind": "yarn"},
    "optimizer.adafactor": {"optimizer.name": "adafactor"},
    "optimizer.clipping.decay": {"optimizer.clipping.kind": "adagc"},
    "optimizer.clipping.threshold": {"optimizer.clipping.kind": "value"},
    "optimizer.clipping.warmup": {"optimizer.clipping.kind": "zclip"},
    "optimizer.momentum": {"optimizer.name": "sgd"},
    "optimizer.qk_clip": {"model.qk_norm": False},
    "optimizer.spam": {"optimizer.name": "spam", "optimizer.spam.warmup": 0, "optimizer.spam.interval": 10**15},
    "optimizer.stable_spam": {"optimizer.name": "stable_spam"},
    "precision.fp8.history": {"precision.fp8.recipe": "delayed"},
    "precision.fp8.margin": {"precision.fp8.recipe": "delayed"},
    "precision.initial_scale_power": {"precision.kind": "fp16"},
    "precision.scale_window": {"precision.kind": "fp16"},
    "schedule.decay": {"schedule.kind": "wsd", "schedule.warmup_steps": 0},
    "schedule.decay_tokens": {"schedule.warmup_steps": None},
    "train.batch_warmup": {"train.batch_warmup.start": 2, "train.batch_warmup.tokens": 64},
    "train.sequence_warmup": {"train.sequence_warmup.start": 8, "train.sequence_warmup.tokens": 64},
}  # fmt: skip
STOPS = {"run.max_hours", "train.steps"}  # these runs are ended by the clock
# These would begin, but a forward pass of so many samples takes hours.
TOO_LARGE = {
    f"{key}={10**6}" for key in ("train.global_batch", "train.eval_samples", "checkpoint.vitals.probes")
}


def put(tree: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for name in path:
        tree = tree.setdefault(name, {})
    tree[last] = value


def tree_with(key: str, value: Any, corpus: Path, run: Path) -> dict[str, Any]:
    """A recipe of two steps in which all that happens once in a while happens at every step, with `key` at `value`."""
    tree: dict[str, Any] = {
        "run": {"dir": str(run), "timeout": 60},
        "model": {"layers": 2, "hidden": 32, "heads": 4, "ffn": 64, "sequence_length": 32, "vocab_multiple": 64},
        "data": {"corpora": [{"path": str(corpus)}]},
        "schedule": {"warmup_steps": 1, "total_steps": 2},
        "train": {"steps": 2, "global_batch": 4, "micro_batch": 2, "eval_samples": 4, "eval_interval": 1},
        "checkpoint": {"interval": 1},
        "logging": {"trackers": [], "norms_interval": 1, "layers_interval": 1, "peak_tflops": 1.0},
        "stability": {
            "snapshots": {"interval": 1},
            "hardware": {"fingerprint_interval": 1, "replay_interval": 1},
            "trends": {"interval": 1, "start": 0},
        },
    }  # fmt: skip
    if key.startswith("schedule.") and key.endswith("tokens"):
        tree["schedule"] = {"warmup_tokens": 0}
    if key == "train.steps":
        tree["run"]["max_hours"] = 0.001
    for prefix in sorted(filter(key.startswith, NEEDS), key=len):
        for other, needed in NEEDS[prefix].items():
            put(tree, other, needed)
    put(tree, key, value)
    return tree


def judge(key: str, code: int | None, said: str) -> str | None:
    """What is wrong with how a start ended; None: nothing."""
    if code == OK or (code == STOPPED and key in STOPS) or (code == BAD_INPUT and key in said):
        return None
    return f"exit code {code}: {said[-500:]}"


def limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_key_at_its_ends_is_refused_or_trained(chunk: int, tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", tokens=4000, validation=0.1)
    trained, fallen = 0, {}
    for number, (key, value) in enumerate(CASES[chunk::CHUNKS]):
        tree = tree_with(key, value, tmp_path / "corpus", tmp_path / f"run-{number}")
        try:
            recipe.validate_tree(tree, "recipe")
        except ConfigError:
            continue
        if f"{key}={value}" in TOO_LARGE:
            continue
        (tmp_path / "recipe.yaml").write_text(json.dumps(tree))
        patience = COMPILING if key == "kernels.compile" else PATIENCE
        said, given = tmp_path / f"said-{number}", str(tmp_path / "recipe.yaml")
        ended = run_main(1, said, given, prepare=limit_memory, patience=patience)
        trained += ended.code == OK
        if wrong := judge(key, ended.code, ended.stderr):
            fallen[f"{key}={value}"] = wrong
    assert fallen == {}
    assert trained > 25  # of some 40: the ends are found
