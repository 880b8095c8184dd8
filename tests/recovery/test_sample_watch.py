"""Bad samples in real runs: those of a batch that was refused are examined and skipped, and nothing is undone."""

from __future__ import annotations

from pathlib import Path

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
BAD = 45  # step of the bad batch


def config(corpus: Path, run: Path, steps: int, micro_batch: int = BATCH) -> RunConfig:
    train = {
        "steps": steps,
        "global_batch": BATCH,
        "micro_batch": micro_batch,
        "eval_samples": 0,
        "eval_interval": 0,
    }
    schedule = {"warmup_steps": 10, "total_steps": STEPS}
    # In a model of one layer these samples are a spike of all.
    return recipe(corpus, run, train=train, schedule=schedule, model={"layers": 2})


def spoil(corpus: Path, bad: list[int], seed: int = 3) -> None:
    """Noise in the samples at these positions."""
    made = config(corpus, corpus, STEPS)
    source = open_corpora(made.data.corpora, 32, made.run.seed).train
    noise = np.random.default_rng(seed)
    tokens = np.memmap(corpus / "part-0.bin", dtype=np.uint16, mode="r+")
    for first in source.order.locate(np.array(bad)).first_token.tolist():
        spoilt = noise.choice(32, 6, replace=False)
        tokens[first : first + 32][spoilt] = noise.integers(100, 250, 6)
    tokens.flush()


@pytest.mark.slow
def test_a_refused_batch_is_examined_at_a_quiet_moment(tmp_path: Path) -> None:
    """One batch of noise: refused, no incident by itself; its samples are named all the same."""
    corpus, run = tmp_path / "corpus", tmp_path / "run"
    write_corpus(corpus, tokens=38_000, ids=20, validation=0)
    bad = list(range(BATCH * (BAD - 1), BATCH * BAD))
    spoil(corpus, bad)
    assert run_ranks(1, train, config(corpus, run, 60)) == [(0, "")]
    assert [e["step"] for e in events(run, "discarded")] == [BAD]
    (incident,) = incidents(run)
    assert incident["actions"] == ["skip"] and incident["cause"] == "data" and incident["onset"] == BAD
    assert incident["step"] == BAD + 4 and incident["batches_discarded"] == 1 and incident["steps_lost"] == 0
    guilty = {p for first, end in incident["positions"] for p in range(first, end)}
    assert guilty <= set(bad) and len(guilty) >= 7
    assert len(read_ledger(run / "skips.jsonl")) == 1


@pytest.mark.slow
def test_a_second_epoch_three_ranks_and_two_restarts(tmp_path: Path) -> None:
    """The first one between the refusal and the quiet moment."""
    corpus, run = tmp_path / "corpus", tmp_path / "run"
    write_corpus(corpus, tokens=BATCH * 32 * 96, ids=20, validation=0)
    bad = list(range(BATCH * (BAD - 1), BATCH * BAD))
    spoil(corpus, bad)
    for world, steps in ((3, BAD + 2), (3, 88), (1, 112)):
        made = config(corpus, run, steps, micro_batch=3)
        assert run_ranks(world, train, made) == [(0, "")] * world
    (incident,) = incidents(run)
    assert incident["cause"] == "data" and incident["actions"] == ["skip"] and incident["steps_lost"] == 0
    guilty = [p for a, b in incident["positions"] for p in range(a, b)]
    assert set(guilty) <= set(bad) and len(guilty) >= 7
    order = order_of(made)
    skipped = set(order.locate(np.array(guilty)).sequence.tolist())
    later = np.array([p for step, some in positions(run).items() if step > 88 for p in some])
    places = order.locate(later)
    assert places.epoch.max() == 1 and not skipped & set(places.sequence.tolist())
