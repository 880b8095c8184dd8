"""Single bad samples in real runs: a trickle is noticed, examined and skipped, and nothing is undone; so is a batch
that was refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megastable.config.tree import RunConfig
from megastable.data.corpora import open_corpora
from megastable.data.skip_ledger import read_ledger
from tests.conftest import write_corpus
from tests.distributed import run_ranks
from tests.recovery.test_recovery import incidents, recipe, train
from tests.training.test_epochs import order_of
from tests.training.test_live_skips import events, positions

BATCH, STEPS = 9, 110
BEGIN, LAST = 70, 90  # steps of the trickle


def config(corpus: Path, run: Path, steps: int = STEPS, **parts: Any) -> RunConfig:
    train = {
        "steps": steps,
        "global_batch": BATCH,
        "micro_batch": BATCH,
        "eval_samples": 0,
        "eval_interval": 0,
    }
    train |= parts.pop("train", {})
    stability = {"samples": {"known": 64}, **parts.pop("stability", {})}
    schedule = {"warmup_steps": 10, "total_steps": STEPS}
    # In a model of one layer these samples are a spike of all.
    parts["model"] = {"layers": 2}
    return recipe(corpus, run, train=train, schedule=schedule, stability=stability, **parts)


def spoil(corpus: Path, bad: list[int], seed: int = 3) -> None:
    """Noise in the samples at these positions."""
    made = config(corpus, corpus)
    source = open_corpora(made.data.corpora, 32, made.run.seed).train
    noise = np.random.default_rng(seed)
    tokens = np.memmap(corpus / "part-0.bin", dtype=np.uint16, mode="r+")
    for first in source.order.locate(np.array(bad)).first_token.tolist():
        spoilt = noise.choice(32, 6, replace=False)
        tokens[first : first + 32][spoilt] = noise.integers(100, 250, 6)
    tokens.flush()


@pytest.fixture(scope="module")
def trickling(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """One bad sample in each of 20 steps, in a corpus of 125 steps."""
    folder = tmp_path_factory.mktemp("trickling")
    write_corpus(folder, tokens=38_000, ids=20, validation=0)
    random = np.random.default_rng(1)
    bad = [BATCH * (step - 1) + int(random.integers(BATCH)) for step in range(BEGIN, LAST)]
    spoil(folder, bad)
    return folder, bad


@pytest.mark.slow
def test_a_trickle_is_skipped_and_nothing_is_undone(
    trickling: tuple[Path, list[int]], tmp_path: Path
) -> None:
    corpus, bad = trickling
    run = tmp_path / "run"
    assert run_ranks(1, train, config(corpus, run)) == [(0, "")]
    (incident,) = incidents(run)
    assert (
        incident["verdict"] == "trickle" and incident["cause"] == "data" and incident["actions"] == ["skip"]
    )
    assert incident["steps_lost"] == 0 and incident["outcome"] == "healed" and incident["documents"]
    assert BEGIN <= incident["onset"] <= incident["step"] <= BEGIN + 6
    guilty = [p for first, end in incident["positions"] for p in range(first, end)]
    assert set(guilty) == set(bad)
    assert not events(run, "rewound")


@pytest.mark.slow
def test_a_restart_in_the_middle_of_a_trickle_loses_none(
    trickling: tuple[Path, list[int]], tmp_path: Path
) -> None:
    corpus, bad = trickling
    run = tmp_path / "run"
    for steps in (BEGIN, STEPS):  # the first bad sample was just met
        assert run_ranks(1, train, config(corpus, run, steps)) == [(0, "")]
    (incident,) = incidents(run)
    assert incident["actions"][-1] == "skip" and incident["onset"] <= BEGIN + 2 <= incident["step"]
    assert {p for first, end in incident["positions"] for p in range(first, end)} == set(bad)


@pytest.mark.slow
def test_a_trickle_while_an_incident_is_being_proven_is_a_part_of_it(
    trickling: tuple[Path, list[int]], tmp_path: Path
) -> None:
    """A burst of noise, gone back on; the trickle begins before that is proven."""
    corpus, bad = tmp_path / "corpus", trickling[1]
    shutil.copytree(trickling[0], corpus)
    burst = list(range(BATCH * (BEGIN - 8) + 3, BATCH * (BEGIN - 5) - 2))
    spoil(corpus, burst, seed=4)
    run = tmp_path / "run"
    assert run_ranks(1, train, config(corpus, run)) == [(0, "")]
    first, *others = incidents(run)
    assert first["actions"][:1] == ["rewind"] and "skip" in first["actions"] and not others
    assert first["cause"] == "data" and first["outcome"] == "healed"
    guilty = {p for a, b in first["positions"] for p in range(a, b)}
    assert guilty <= {*bad, *burst} and guilty >= set(burst) and len(guilty & set(bad)) >= 15


@pytest.mark.slow
def test_a_region_that_repeats_itself_is_skipped_though_it_is_easy(tmp_path: Path) -> None:
    corpus, run = tmp_path / "corpus", tmp_path / "run"
    write_corpus(corpus, tokens=38_000, ids=20, validation=0)
    bad = list(range(BATCH * 70 + 4, BATCH * 86))
    source = open_corpora(config(corpus, corpus).data.corpora, 32, config(corpus, corpus).run.seed).train
    tokens = np.memmap(corpus / "part-0.bin", dtype=np.uint16, mode="r+")
    for first in source.order.locate(np.array(bad)).first_token.tolist():
        tokens[first + 1 : first + 32] = 7
    tokens.flush()
    assert run_ranks(1, train, config(corpus, run)) == [(0, "")]
    (incident,) = incidents(run)
    assert incident["cause"] == "data" and incident["outcome"] == "healed" and 71 <= incident["step"] <= 76
    guilty = {p for a, b in incident["positions"] for p in range(a, b)}
    assert guilty <= set(bad) and len(guilty) >= len(bad) - BATCH


@pytest.mark.slow
def test_a_second_epoch_three_ranks_and_two_restarts(tmp_path: Path) -> None:
    corpus, run = tmp_path / "corpus", tmp_path / "run"
    write_corpus(corpus, tokens=BATCH * 32 * 96, ids=20, validation=0)
    random = np.random.default_rng(2)
    wrong = [BATCH * (step - 1) + int(random.integers(BATCH)) for step in range(BEGIN, BEGIN + 14)]
    spoil(corpus, wrong)
    for world, steps in ((3, 66), (3, 88), (1, 112)):
        made = config(corpus, run, steps, train={"micro_batch": 3})
        assert run_ranks(world, train, made) == [(0, "")] * world
    (incident,) = incidents(run)  # of the detector or of this test, whichever is the first
    assert incident["cause"] == "data" and incident["outcome"] == "healed"
    guilty = [p for a, b in incident["positions"] for p in range(a, b)]
    assert set(guilty) == set(wrong)
    order = order_of(made)
    bad = set(order.locate(np.array(guilty)).sequence.tolist())
    later = np.array([p for step, some in positions(run).items() if step > 88 for p in some])
    places = order.locate(later)
    assert places.epoch.max() == 1 and not bad & set(places.sequence.tolist())


@pytest.mark.slow
def test_a_refused_batch_is_examined_at_a_quiet_moment(tmp_path: Path) -> None:
    """One batch of noise: refused, no incident by itself; its samples are named all the same."""
    corpus, run = tmp_path / "corpus", tmp_path / "run"
    write_corpus(corpus, tokens=38_000, ids=20, validation=0)
    bad = list(range(BATCH * 44, BATCH * 45))
    spoil(corpus, bad)
    parts = {"stability": {"samples": {"known": 10_000}}}  # the running test has no say here
    assert run_ranks(1, train, config(corpus, run, 60, **parts)) == [(0, "")]
    assert [e["step"] for e in events(run, "discarded")] == [45]
    (incident,) = incidents(run)
    assert incident["actions"] == ["skip"] and incident["cause"] == "data" and incident["onset"] == 45
    assert incident["step"] == 49 and incident["batches_discarded"] == 1 and incident["steps_lost"] == 0
    guilty = {p for first, end in incident["positions"] for p in range(first, end)}
    assert guilty <= set(bad) and len(guilty) >= 7
    assert len(read_ledger(run / "skips.jsonl")) == 1


@pytest.mark.slow
def test_a_dry_run_only_says_it(trickling: tuple[Path, list[int]], tmp_path: Path) -> None:
    corpus, _ = trickling
    assert run_ranks(1, train, config(corpus, tmp_path / "run", 76, stability={"dry_run": True})) == [(0, "")]
    assert "skip" in [e["action"] for e in events(tmp_path / "run", "would")]
    assert not (tmp_path / "run/skips.jsonl").exists() and not incidents(tmp_path / "run")
