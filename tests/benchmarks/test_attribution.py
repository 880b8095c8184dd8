"""How the error rate of attribution is counted; the examinations themselves are tested elsewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.attribution_errors import BATCH, PLANTS, Found, Plant, Planted, parse, pooled, prepare
from drills import stage
from megastable.config.tree import CorpusConfig
from megastable.data.corpora import open_corpora

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "corpora"),
    [
        ("a.txt", [("a.txt", 1.0)]),
        ("a.txt+b:0.05", [("a.txt", 0.95), ("b", 0.05)]),
        ("a+b+c:0.5", [("a", 0.25), ("b", 0.25), ("c", 0.5)]),
    ],
)
def test_a_text_names_corpora_and_their_shares(text: str, corpora: list[tuple[str, float]]) -> None:
    assert parse(text) == [(Path(path), pytest.approx(share)) for path, share in corpora]


def test_what_is_convicted_is_counted() -> None:
    found = Found("a", "healthy")
    found.add([], set(), 32, "nobody")
    found.add([3, 4, 9], {3, 4, 5}, 48, "bad")
    found.add([7], set(), 16, "one")
    assert (found.windows, found.wrong, found.innocent, found.samples) == (3, 2, 2, 96)
    assert (found.bad, found.named) == (3, 2) and found.reasons == ["bad", "one"]
    assert found.shares == pytest.approx([0.0, 1 / 3, 1.0])
    both = pooled([found, Found("b", "healthy"), found])
    assert [(f.text, f.windows, f.innocent, len(f.shares)) for f in both] == [("a", 6, 4, 6), ("b", 0, 0, 0)]
    assert found.windows == 3


@pytest.mark.parametrize("plant", PLANTS.values())
def test_where_bad_samples_are(plant: Plant) -> None:
    places = plant.places(np.random.default_rng(0))
    assert places.size == plant.samples == np.unique(places).size and (np.diff(places) > 0).all()
    inside = np.bincount(places // BATCH)
    if plant.of_each is None:
        assert (np.diff(places) == 1).all() and places[0] > 0
    else:
        assert set(inside.tolist()) == {plant.of_each}


def test_a_planted_sample_is_other_text_with_the_same_ends_of_documents(corpus: Path) -> None:
    clean = open_corpora([CorpusConfig(path=corpus)], 32, 1).train
    source, asked = Planted(clean), np.array([3, 4, 3])
    before = source.samples(asked)
    source.instead = {4: np.full(32, 7)}
    after = source.samples(asked)
    assert np.array_equal(before[[0, 2]], after[[0, 2]]) and after[1, 0] == before[1, 0]
    assert np.array_equal(after[1, 1:], np.where(before[1, 1:] == source.eod, source.eod, 7))
    source.instead.clear()
    assert np.array_equal(source.samples(asked), before)


def test_two_texts_become_two_corpora_with_one_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "VOCABULARY", 400)
    words = "the quick brown fox jumps over a lazy dog and runs away into the dark green wood again".split()
    drawn = np.random.default_rng(0)
    for name in ("a.txt", "b.txt"):
        text = "\n".join(" ".join(drawn.choice(words, 9)) + f" {drawn.integers(10**9)}" for _ in range(3000))
        (tmp_path / name).write_text(text)
    made = prepare(f"{tmp_path / 'a.txt'}+{tmp_path / 'b.txt'}:0.1", tmp_path / "corpora")
    corpora = open_corpora([CorpusConfig.model_validate(c) for c in made], 32, 1)
    assert [share.weight for share in corpora.shares] == [0.9, 0.1] and corpora.validation is None


@pytest.mark.parametrize("given", [[], ["stability.samples.examinations=1"]])
def test_what_cannot_be_measured_is_refused(given: list[str]) -> None:
    command = [sys.executable, "-m", "megastable", "bench", "attribution", *given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and ("--text" in done.stderr) is not bool(given)
