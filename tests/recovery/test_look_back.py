"""Whole batches that are a little worse than usual, in real runs: examined on a state of before them, and undone where
samples do harm; else the run goes on as if nobody had looked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megastable.data.corpora import open_corpora
from tests.conftest import write_corpus
from tests.distributed import run_ranks
from tests.recovery.test_recovery import incidents, recipe, train
from tests.training.test_live_skips import events
from tests.training.test_resume import identical

BATCH, STEPS = 8, 90
FIRST = 70  # step of the first bad sample
SAMPLES = 20  # bad ones: two and a half batches


def config(
    corpus: Path,
    run: Path,
    snapshots: dict[str, Any] | None = None,
    policy: dict[str, Any] | None = None,
    dry_run: bool = False,
    **samples: Any,
) -> Any:
    stability = {
        "samples": samples,
        "snapshots": snapshots or {},
        "policy": policy or {},
        "dry_run": dry_run,
    }
    schedule = {"warmup_steps": 10, "total_steps": STEPS}
    train = {"steps": STEPS, "global_batch": BATCH, "micro_batch": 4, "eval_samples": 0, "eval_interval": 0}
    return recipe(corpus, run, train=train, schedule=schedule, stability=stability, optimizer={"lr": 3e-3})


def spoil(corpus: Path, bad: list[int], share: float) -> None:
    """Some noise in the samples at these positions."""
    made = config(corpus, corpus)
    source = open_corpora(made.data.corpora, 32, made.run.seed).train
    noise = np.random.default_rng(3)
    tokens = np.memmap(corpus / "part-0.bin", dtype=np.uint16, mode="r+")
    for first in source.order.locate(np.array(bad)).first_token.tolist():
        spoilt = noise.random(32) < share
        tokens[first : first + 32][spoilt] = noise.integers(20, size=int(spoilt.sum()))
    tokens.flush()


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_batches_that_are_a_little_worse_are_tried_and_kept_if_they_do_no_harm(
    world: int, tmp_path: Path
) -> None:
    """Their samples are found, and a model learns from them. (What harms is undone: test_rewinding.py.)"""
    corpus, run = tmp_path / "corpus", tmp_path / "run"
    write_corpus(corpus, tokens=38_000, ids=20, validation=0)
    bad = list(range(BATCH * (FIRST - 1) + 4, BATCH * (FIRST - 1) + 4 + SAMPLES))
    spoil(corpus, bad, 0.5)
    assert run_ranks(world, train, config(corpus, run)) == [(0, "")] * world
    (event,) = events(run, "samples_examined")
    assert FIRST - 2 <= event["first"] <= event["last"] <= FIRST + 3
    assert f"{SAMPLES} suspects" in event["reason"] and "no harm" in event["reason"]
    assert not events(run, "discarded") and not incidents(run) and not (run / "skips.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_look_back_that_convicts_nobody_leaves_no_trace(world: int, tmp_path: Path) -> None:
    corpus, looked, other = (tmp_path / name for name in ("corpus", "looked", "other"))
    write_corpus(corpus, tokens=38_000, ids=20, validation=0)
    policy = {"rewind_warmup": 10}  # which a look back must not begin
    for run, examinations in ((looked, 3000.0), (other, 1e-9)):
        c = config(corpus, run, policy=policy, examinations=examinations)
        assert run_ranks(world, train, c) == [(0, "")] * world
    assert events(looked, "samples_examined") and not events(other, "samples_examined")
    assert not incidents(looked) and not (looked / "skips.jsonl").exists()
    assert identical(looked / f"checkpoints/step-{STEPS}", other / f"checkpoints/step-{STEPS}") >= 3


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_few_that_are_bad_by_themselves_are_skipped_and_nothing_is_undone(
    world: int, tmp_path: Path
) -> None:
    corpus, run = tmp_path / "corpus", tmp_path / "run"
    write_corpus(corpus, tokens=38_000, ids=20, validation=0)
    bad = [BATCH * (FIRST - 1) + n for n in (1, 3, 6)]
    spoil(corpus, bad, 1.0)
    assert run_ranks(world, train, config(corpus, run, examinations=3000.0)) == [(0, "")] * world
    (incident,) = incidents(run)
    assert (incident["verdict"], incident["cause"], incident["actions"]) == ("shift", "data", ["skip"])
    guilty = {p for first, end in incident["positions"] for p in range(first, end)}
    assert guilty and guilty <= set(bad) and not events(run, "discarded")


@pytest.mark.slow
def test_without_room_for_one_more_state_nothing_is_looked_back_on(tmp_path: Path) -> None:
    corpus, run = tmp_path / "corpus", tmp_path / "run"
    write_corpus(corpus, tokens=38_000, ids=20, validation=0)
    spoil(corpus, list(range(BATCH * (FIRST - 1) + 4, BATCH * (FIRST - 1) + 4 + SAMPLES)), 0.5)
    short = {"keep": 1000, "memory_gib": 0.02}  # not for so many
    assert run_ranks(1, train, config(corpus, run, short)) == [(0, "")]
    actions = {action for incident in incidents(run) for action in incident["actions"]}
    assert actions | {"examined" for _ in events(run, "samples_examined")}
    assert actions <= {"skip"}


@pytest.mark.slow
def test_a_dry_run_only_says_it(tmp_path: Path) -> None:
    corpus, run = tmp_path / "corpus", tmp_path / "run"
    write_corpus(corpus, tokens=38_000, ids=20, validation=0)
    spoil(corpus, list(range(BATCH * (FIRST - 1) + 4, BATCH * (FIRST - 1) + 4 + SAMPLES)), 0.5)
    assert run_ranks(1, train, config(corpus, run, dry_run=True)) == [(0, "")]
    assert "skip" in [e["action"] for e in events(run, "would")]
    assert not (run / "skips.jsonl").exists() and not incidents(run) and not events(run, "samples_examined")
