"""Trouble that a branch goes through is waited for, and samples that are a little worse than usual are examined on a
state of before them, in real runs: undone, or skipped, only where that is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megastable.config.tree import RunConfig
from megastable.data.corpora import open_corpora
from megastable.data.skip_ledger import read_ledger
from megastable.run.directory import RunDirectory
from megastable.run.events.stability_events import BranchesTried
from tests.conftest import write_corpus
from tests.distributed import run_ranks
from tests.recovery.test_recovery import LAYOUTS, incidents, recipe, train, train_spoilt
from tests.training.test_epochs import order_of
from tests.training.test_live_skips import events, positions
from tests.training.test_resume import identical


@pytest.fixture(scope="module")
def easy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus that is learnt quickly; by its name, which decides the order, a trial finds the window harmless."""
    folder = tmp_path_factory.mktemp("waiting") / "easy0"
    write_corpus(folder, ids=20)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "always", "wait"),
    [("pp2", True, 30), ("one", False, 30), ("one", True, 0)],
    ids=["heals", "once", "without"],
)
def test_wait_only_for_what_the_same_steps_make_again_and_heal(
    layout: str, always: bool, wait: int, easy: Path, tmp_path: Path
) -> None:
    """What they do not make again they would not heal. Without `policy.wait` nothing is waited for."""
    world, parts = LAYOUTS[layout]
    steps = {**parts.get("train", {}), "steps": 110, "eval_samples": 0}
    stability = {"policy": {"wait": wait, "verify_steps": 10}}
    config = recipe(easy, tmp_path / "run", **{**parts, "train": steps}, stability=stability)
    # The last norm is larger at once, which is unlearnt in some steps.
    ends = run_ranks(world, train_spoilt, config, 66, "final_norm.weight", 3.0, "weight", always)
    assert [code for code, _ in ends] == [0] * world
    waited = incidents(tmp_path / "run")[0]
    if not (always and wait):
        assert waited["actions"][0] == "rewind"
        return
    assert waited["actions"][0] == "wait" and "rewind" not in waited["actions"]
    assert (waited["outcome"], waited["steps_lost"]) == ("healed", 0)
    assert not waited["positions"] and not waited["deferred"] and "heals by itself" in waited["reasons"][0]
    tried = [
        e
        for e in RunDirectory(tmp_path / "run").iterate_events(BranchesTried)
        if e.get("chosen") == "nothing"
    ]
    assert "make it again" in tried[0]["reason"]


# Samples that are a little worse

BATCH, STEPS, FIRST = 8, 90, 70  # step of the first bad sample


def watched(corpus: Path, run: Path, **parts: Any) -> RunConfig:
    steps = {"steps": STEPS, "global_batch": BATCH, "micro_batch": 4, "eval_samples": 0, "eval_interval": 0}
    stability = {"samples": parts.pop("samples", {}), "policy": {"rewind_warmup": 10}}
    schedule = {"warmup_steps": 10, "total_steps": parts.pop("total_steps", STEPS)}
    steps |= parts.pop("train", {})
    parts = {"optimizer": {"lr": 3e-3}} | parts
    return recipe(corpus, run, train=steps, schedule=schedule, stability=stability, **parts)


def write_spoilt(corpus: Path, bad: list[int], share: float, tokens: int = 38_000) -> None:
    """A corpus with about this share of noise in the samples at these positions."""
    write_corpus(corpus, tokens=tokens, ids=20, validation=0)
    made = watched(corpus, corpus)
    source = open_corpora(made.data.corpora, 32, made.run.seed).train
    noise = np.random.default_rng(3)
    memory = np.memmap(corpus / "part-0.bin", dtype=np.uint16, mode="r+")
    for first in source.order.locate_samples(np.array(bad, dtype=np.int64)).first_token.tolist():
        spoilt = noise.random(32) < share
        memory[first : first + 32][spoilt] = noise.integers(20, size=int(spoilt.sum()))
    memory.flush()


@pytest.mark.slow
def test_look_back_that_names_no_sample_leaves_no_trace(tmp_path: Path) -> None:
    corpus, looked, other = (tmp_path / name for name in ("corpus", "looked", "other"))
    write_spoilt(corpus, [], 0.0)
    for run, examinations in ((looked, 3000.0), (other, 1e-9)):
        samples = {"examinations": examinations}
        assert run_ranks(2, train, watched(corpus, run, samples=samples)) == [(0, "")] * 2
    assert events(looked, "samples_examined") and not events(other, "samples_examined")
    assert not incidents(looked) and not (looked / "skips.jsonl").exists()
    assert identical(looked / f"checkpoints/step-{STEPS}", other / f"checkpoints/step-{STEPS}") >= 3


@pytest.mark.slow
def test_look_back_skips_a_few_that_are_bad_by_themselves_and_undoes_nothing(tmp_path: Path) -> None:
    corpus, run = tmp_path / "corpus", tmp_path / "run"
    bad = [BATCH * (FIRST - 1) + n for n in (1, 3, 6)]
    write_spoilt(corpus, bad, 1.0)
    samples = {"examinations": 3000.0}
    assert run_ranks(2, train, watched(corpus, run, samples=samples)) == [(0, "")] * 2
    (incident,) = incidents(run)
    assert (incident["verdict"], incident["cause"], incident["actions"]) == ("shift", "data", ["skip"])
    found_bad = {p for first, end in incident["positions"] for p in range(first, end)}
    assert found_bad and found_bad <= set(bad) and not events(run, "discarded")


@pytest.mark.slow
def test_refused_batch_is_examined_at_a_quiet_moment_over_restarts_and_epochs(tmp_path: Path) -> None:
    """One batch of noise is no incident by itself. The first restart is between the refusal and the quiet moment."""
    corpus, run, batch, step = tmp_path / "corpus", tmp_path / "run", 9, 45
    bad = list(range(batch * (step - 1), batch * step))
    write_corpus(corpus, tokens=batch * 32 * 96, ids=20, validation=0)
    made = watched(corpus, corpus)
    source = open_corpora(made.data.corpora, 32, made.run.seed).train
    noise, memory = np.random.default_rng(3), np.memmap(corpus / "part-0.bin", dtype=np.uint16, mode="r+")
    for first in source.order.locate_samples(np.array(bad)).first_token.tolist():
        memory[first : first + 32][noise.choice(32, 6, replace=False)] = noise.integers(100, 250, 6)
    memory.flush()
    for world, steps in ((3, step + 2), (3, 88), (1, 112)):
        parts = {"train": {"steps": steps, "global_batch": batch, "micro_batch": 3}, "total_steps": 110}
        made = watched(corpus, run, model={"layers": 2}, optimizer={"lr": 1e-2}, **parts)
        assert run_ranks(world, train, made) == [(0, "")] * world
    (incident,) = incidents(run)
    assert incident["cause"] == "data" and incident["actions"] == ["skip"] and incident["onset"] == step
    assert (incident["step"], incident["batches_discarded"], incident["steps_lost"]) == (step + 4, 1, 0)
    found_bad = [p for a, b in incident["positions"] for p in range(a, b)]
    assert set(found_bad) <= set(bad) and len(found_bad) >= 7 and len(read_ledger(run / "skips.jsonl")) == 1
    order = order_of(made)
    skipped = set(order.locate_samples(np.array(found_bad)).sequence.tolist())
    later = np.array([p for step, some in positions(run).items() if step > 88 for p in some])
    places = order.locate_samples(later)
    assert places.epoch.max() == 1 and not skipped & set(places.sequence.tolist())
