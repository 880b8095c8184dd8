"""Skips by identity in real runs: what is convicted in one epoch is trained on in none of the later ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megastable import records
from megastable.config import RunConfig
from megastable.data.corpora import open_corpora
from megastable.data.plant import Planted, plant
from megastable.data.skip_ledger import Ledger, SampleEntry, SkipEntry, append, read_ledger
from megastable.data.skips import Identity, Selection
from megastable.rundir import RunDirectory
from tests.conftest import LENGTH, write_corpus
from tests.distributed import run_ranks
from tests.test_live_skips import events, positions
from tests.test_recovery import incidents, recipe, train

TOKENS = 16_000  # 59 steps of 8 samples in an epoch
EPOCH = 59
FIRST_BAD = 31


def of(corpus: Path, run: Path, steps: int, **parts: Any) -> RunConfig:
    train = {"steps": steps, "global_batch": 8, "micro_batch": 2, "eval_samples": 0, "eval_interval": 0}
    schedule = {"warmup_steps": 10, "total_steps": 4 * EPOCH}
    return recipe(corpus, run, **{"train": train, "schedule": schedule, **parts})


def order_of(config: RunConfig) -> Any:
    return open_corpora(config.data.corpora, config.model.sequence_length, config.run.seed).train.order


def met(run: Path, bad: set[int], order: Any) -> dict[int, int]:
    """How many samples of `bad` (sequences) each epoch trained on."""
    found: dict[int, int] = {}
    for some in positions(run).values():
        places = order.locate(np.array(some))
        for epoch, sequence in zip(places.epoch.tolist(), places.sequence.tolist(), strict=True):
            found[epoch] = found.get(epoch, 0) + (sequence in bad)
    return found


@pytest.fixture(scope="module")
def region(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Planted]:
    """A corpus of 59 steps, with 20 samples of noise in the steps 31 to 33 of the first epoch."""
    folder = tmp_path_factory.mktemp("region")
    write_corpus(folder / "clean", tokens=TOKENS, ids=20)
    (folder / "clean/tokenizer.model").write_bytes(b"")  # copied along, never read
    what, _ = plant(folder / "clean", folder / "bad", of(folder / "clean", folder / "x", 60), step=FIRST_BAD, samples=20)
    return folder / "bad", what


def test_three_epochs_of_twenty_bad_samples_have_one_incident(
    region: tuple[Path, Planted], tmp_path: Path
) -> None:
    """On three data-parallel ranks; ended twice and resumed, and made longer after its end."""
    corpus, what = region
    run = tmp_path / "run"
    parts = {"train": {"global_batch": 9, "micro_batch": 3, "eval_samples": 0, "eval_interval": 0}}
    order = order_of(of(corpus, run, 1))
    bad = set(order.locate(np.arange(*what.positions)).sequence.tolist())
    for world, steps in ((3, 70), (3, 110), (1, 160)):
        config = of(corpus, run, steps, train=parts["train"] | {"steps": steps})
        assert run_ranks(world, train, config) == [(0, "")] * world
    (incident,) = incidents(run)
    assert incident["cause"] == "data" and [tuple(r) for r in incident["positions"]] == [what.positions]
    assert met(run, bad, order) == {0: 0, 1: 0, 2: 0, 3: 0}
    (entry,) = read_ledger(run / "skips.jsonl")
    assert isinstance(entry, SampleEntry) and entry.documents
    # No other sample is lost, in any epoch.
    trained = [p for some in positions(run).values() for p in some]
    wanted = [p for p in range(trained[-1] + 1) if order.locate_one(p).sequence not in bad]
    assert trained == wanted and len(trained) == 9 * 160
