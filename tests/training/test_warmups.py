"""Runs in the middle of both warm-ups: the same steps and samples after a resume, a rewind, and in every layout."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megastable.config.tree import RunConfig
from megastable.data.plant import Planted, plant_corruption
from megastable.run import records
from megastable.run.directory import RunDirectory
from megastable.run.events.data_events import BatchChanged, LengthChanged
from tests.checkpoint.states import state_of
from tests.conftest import LENGTH, tiny, write_corpus
from tests.distributed import run_ranks, train
from tests.recovery.test_recovery import hit_and_told, incidents, recipe
from tests.training.test_resume import identical

# Positions at which the batch grows: 16, 32; the length: 11, 32. A step of 4 samples has pieces of both lengths.
BATCHES = {"start": 4, "increment": 4, "tokens": 32 * LENGTH}
PIECES = {"start": 8, "tokens": 32 * LENGTH}
SCHEDULE = {
    "warmup_steps": None,
    "total_steps": None,
    "warmup_tokens": 20 * LENGTH,
    "total_tokens": 100 * LENGTH,
}
STOP, END = 5, 8  # steps
CURSORS = [0, 4, 8, 12, 16, 24, 32, 44, 56]  # before each step, and after the last one
LENGTHS = [8, 8, 16, 16, 16, 16, 32, 32]  # of the pieces of each step's last sample
COLUMNS = ("step", "first_position", "next_position", "samples", "piece", "lr")
MEASURED = ("loss", "grad_norm", "z_loss", "worst_position")

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "zero1-dp2": (2, {}),
    "zero2-dp2": (2, {"zero": 2}),
    "zero3-dp2": (2, {"zero": 3}),
    "pp2": (2, {"pipeline": 2}),
    "pp2-dp2": (4, {"pipeline": 2}),
    "tp2-sequence": (2, {"tensor": 2, "sequence": True}),
    "context2": (2, {"context": 2}),
}


def at(
    corpus: Path, run: Path, steps: int, parallel: dict[str, Any], kind: str = "bf16", **parts: Any
) -> RunConfig:
    train = {
        "steps": steps, "global_batch": 12, "micro_batch": 1, "eval_samples": 8, "eval_interval": 3,
        "batch_warmup": BATCHES, "sequence_warmup": PIECES,
    }  # fmt: skip
    return tiny(
        corpus, run, parallel=parallel, train=train | parts.pop("train", {}), precision={"kind": kind},
        schedule=parts.pop("schedule", SCHEDULE), checkpoint={"interval": STOP}, **parts,
    )  # fmt: skip


def told(run: Path, *columns: str) -> dict[str, list[Any]]:
    table = records.read_newest_records(run / "steps")
    return {name: table.column(name).to_pylist() for name in columns}


def as_the_data_says(run: Path) -> None:
    """Cursors, samples and lengths of all steps."""
    found = told(run, *COLUMNS)
    assert found["step"] == list(range(1, END + 1))
    assert [*found["first_position"], found["next_position"][-1]] == CURSORS
    assert found["samples"] == [b - a for a, b in pairwise(CURSORS)]
    assert found["piece"] == LENGTHS
    peak, warmup = 3e-3, 20
    for cursor, size, lr in zip(CURSORS, found["samples"], found["lr"], strict=False):
        if cursor < warmup:
            assert lr == pytest.approx(peak * min(1.0, (cursor + size) / warmup)), cursor
        else:
            assert 0.1 * peak < lr <= peak


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_resume_inside_of_both_is_bit_for_bit(name: str, corpus: Path, tmp_path: Path) -> None:
    world, parallel = LAYOUTS[name]
    apart = {"keep_documents_apart": True, "corpora": [{"path": corpus}]} if name == "zero1-dp2" else None
    parts = {} if apart is None else {"data": apart}
    run_ranks(
        world, train, at(corpus, tmp_path / "straight", END, parallel, **parts),
        at(corpus, tmp_path / "stopped", STOP, parallel, **parts),
    )  # fmt: skip
    run_ranks(world, train, at(corpus, tmp_path / "stopped", END, parallel, **parts))
    straight, stopped = (tmp_path / r / f"checkpoints/step-{END}" for r in ("straight", "stopped"))
    assert identical(straight, stopped) == 3 * world
    assert told(tmp_path / "straight", *COLUMNS, *MEASURED) == told(tmp_path / "stopped", *COLUMNS, *MEASURED)
    as_the_data_says(tmp_path / "straight")
    for run in (tmp_path / "straight", tmp_path / "stopped"):
        summary = json.loads((run / "summary.json").read_text())
        assert summary["tokens"] == CURSORS[-1] * LENGTH and summary["incidents"] == []
        events = RunDirectory(run)
        assert [(e.step, e.old, e.new) for e in events.iterate_events(BatchChanged)] == [
            (5, 4, 8),
            (7, 8, 12),
        ]
        assert [(e.step, e.old, e.new) for e in events.iterate_events(LengthChanged)] == [
            (3, 8, 16),
            (7, 16, 32),
        ]
    state = json.loads((stopped / "state.json").read_text())
    assert state["trained_tokens"] == state["tokens"] == CURSORS[-1] * LENGTH


def test_a_refused_update_does_not_move_a_schedule_by_tokens() -> None:
    after = {"cursor": 8, "tokens": 128, "seconds": 1.0, "loss": 3.0, "mix": {}, "batch": 8, "piece": 16}
    state = state_of(step=0, updates=0, cursor=0, tokens=0, trained_tokens=0)
    refused = state.after_step(**after, applied=False)
    applied = refused.after_step(**after | {"batch": 4, "tokens": 64}, applied=True)
    assert (refused.trained_tokens, refused.tokens, refused.updates) == (0, 128, 0)
    assert (applied.trained_tokens, applied.tokens, applied.updates) == (64, 192, 1)


# A rewind across the ends of both: from the steps of 8 whole samples back to those of 4 in pieces of 16.
WHOLE = 120  # position: step 31, the first bad one
GROWING: dict[str, Any] = {
    "steps": 50, "batch_warmup": {"start": 4, "tokens": WHOLE * LENGTH},
    "sequence_warmup": {"start": 8, "tokens": (WHOLE + 2) * LENGTH},
}  # fmt: skip
TOKENS = {
    "warmup_steps": None,
    "total_steps": None,
    "warmup_tokens": 40 * LENGTH,
    "total_tokens": 300 * LENGTH,
}


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Planted]:
    """A corpus with 20 samples of noise, from step 31 on."""
    folder = tmp_path_factory.mktemp("planted")
    write_corpus(folder / "clean", ids=20)
    (folder / "clean/tokenizer.model").write_bytes(b"")  # copied along, never read
    config = recipe(folder / "clean", folder / "run", train={**GROWING, "micro_batch": 2})
    what, _ = plant_corruption(folder / "clean", folder / "bad", config, step=31, samples=20)
    assert WHOLE <= what.positions[0][0] < WHOLE + 8
    return folder / "bad", what


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one", "pp2", "zero1-dp2", "zero2-dp2"])
def test_a_rewind_over_the_ends_of_both_is_exact(
    name: str, planted: tuple[Path, Planted], tmp_path: Path
) -> None:
    """The run that hits bad data ends with the bytes of one that was told to skip it from the start."""
    (world, parallel), (corpus, what) = LAYOUTS[name], planted
    parts: dict[str, Any] = {
        "train": {**GROWING, "micro_batch": 2},
        "schedule": TOKENS,
        "model": {"layers": 2},
    }
    hit, told_ = (recipe(corpus, tmp_path / run, **parts, parallel=parallel) for run in ("hit", "told"))
    assert run_ranks(world, hit_and_told, hit, told_) == [((0, ""), (0, ""))] * world
    (incident,) = incidents(tmp_path / "hit")
    assert incident["cause"] == "data" and incident["outcome"] == "healed"
    assert [tuple(r) for r in incident["positions"]] == what.positions
    events = RunDirectory(tmp_path / "hit")
    grown = [(e.step, e.old, e.new) for e in events.iterate_events(BatchChanged)]
    assert grown == [(31, 4, 8)] * 2  # the second time after the rewind
    assert identical(tmp_path / "hit/checkpoints/step-50", tmp_path / "told/checkpoints/step-50") >= 3
    assert told(tmp_path / "hit", *COLUMNS, *MEASURED) == told(tmp_path / "told", *COLUMNS, *MEASURED)
