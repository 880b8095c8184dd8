"""What became of samples: by the run's own ledger, against what was planted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from drills.score import Fate, fate
from megastable.data.corpora import open_corpora
from megastable.data.plant import Planted, plant
from megastable.data.skip_ledger import SkipEntry, append_all, sample_entries
from megastable.run.directory import RunDirectory
from tests.conftest import tiny, write_corpus
from tests.journal import note


@pytest.fixture
def bad(tmp_path: Path) -> tuple[RunDirectory, Planted, Any]:
    """A run on a planted corpus, the samples that are bad in it, and its source."""
    write_corpus(tmp_path / "clean")
    (tmp_path / "clean/tokenizer.model").touch()  # it is copied
    run = RunDirectory(tmp_path / "run")
    run.root.mkdir()
    config = tiny(tmp_path / "bad", run.root)
    planted, _ = plant(tmp_path / "clean", tmp_path / "bad", config, step=5, samples=10, of_each=2)
    run.recipe.write_text(yaml.safe_dump({"config": config.model_dump(mode="json"), "manifests": []}))
    run.journal.write_text("")
    opened = open_corpora(config.data.corpora, config.model.sequence_length, config.run.seed)
    return run, planted, opened.train.order


def numbers(planted: Planted) -> np.ndarray:
    return np.array([position for first, end in planted.positions for position in range(first, end)])


def test_nothing_was_done(bad: tuple[RunDirectory, Planted, Any]) -> None:
    run, planted, _ = bad
    assert fate(run.root, planted) == Fate(planted=10, documents=len(planted.documents))
    assert fate(run.root, None) == Fate()


def test_convicted_by_identity_and_left_out_by_position(bad: tuple[RunDirectory, Planted, Any]) -> None:
    run, planted, order = bad
    guilty = numbers(planted)
    clean = np.setdiff1d(np.arange(guilty.min(), guilty.max()), guilty)[:1]
    append_all(run.skips, sample_entries(order, np.append(guilty[:7], clean), "data"))
    assert (found := fate(run.root, planted)).convicted == 7 and found.lost == 1
    # A window that is left out by position counts as well: of its samples, whichever they are.
    first = int(guilty[-1]) // 8 * 8
    append_all(run.skips, [SkipEntry(first=first, end=first + 8, reason="state")])
    found = fate(run.root, planted)
    assert (found.convicted, found.lost) == (9, 7)
    assert fate(run.root, None).lost == 16


def test_documents_that_incidents_name_and_samples_that_were_put_off(
    bad: tuple[RunDirectory, Planted, Any],
) -> None:
    run, planted, _ = bad
    named = [d.model_dump() for d in planted.documents]
    other = {**named[0], "document": 100_000}
    for number, documents, deferred in (
        (1, [], [[0, 9]]),
        (1, named[:3], [[0, 8]]),
        (2, [other], [[80, 83]]),
    ):
        summary = {"number": number, "documents": documents, "deferred": deferred}
        note(run, "incident", number=number, summary=summary)
    found = fate(run.root, planted)
    assert (found.documents, found.named, found.wrong, found.deferred) == (len(named), 3, 1, 11)
