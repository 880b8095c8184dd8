"""The unigram entropy, against closed forms."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.data import statistics
from megastable.data.manifest import Stream
from megastable.data.order import Order, OrderedCorpus
from megastable.data.source import Source
from megastable.data.statistics import sample_entropy, token_counts, unigram_entropy
from tests.data.conftest import VOCABULARY, MakeCorpus


@pytest.mark.parametrize(
    ("counts", "nats"),
    [
        ([], 0.0),
        ([0, 0], 0.0),
        ([0, 7, 0], 0.0),
        ([5, 5], math.log(2)),
        ([3] * 1000, math.log(1000)),
        ([1, 3], 2 * math.log(2) - 0.75 * math.log(3)),
    ],
)
def test_known_entropies(counts: list[int], nats: float) -> None:
    assert unigram_entropy(np.array(counts, dtype=np.int64)) == pytest.approx(nats, abs=1e-12)


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=50))
def test_it_is_the_loss_of_the_frequencies_and_no_other_distribution_is_better(counts: list[int]) -> None:
    array = np.array(counts)
    entropy = unigram_entropy(array)
    assert 0 <= entropy <= math.log(len(counts)) + 1e-9
    if total := array.sum():
        smoothed = (array + total / 7) / (array + total / 7).sum()
        assert entropy <= float(-(array / total * np.log(smoothed)).sum()) + 1e-9


def test_all_tokens_are_counted(
    tmp_path: Path, make_corpus: MakeCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = make_corpus(tmp_path, [700, 300])
    monkeypatch.setattr(statistics, "CHUNK", 64)
    stream = Stream(tmp_path, manifest, "train")
    counts = token_counts(stream, VOCABULARY)
    assert counts.tolist() == np.bincount(stream.read(0, 1000), minlength=VOCABULARY).tolist()


def test_a_sample_of_a_blend_is_counted_as_it_is_read(tmp_path: Path, make_corpus: MakeCorpus) -> None:
    streams = []
    for name, tokens in (("one", 900), ("other", 500)):
        manifest = make_corpus(tmp_path / name, [tokens])
        streams.append(Stream(tmp_path / name, manifest, "train"))
    corpora = [
        OrderedCorpus(str(n), stream.tokens, weight)
        for n, (stream, weight) in enumerate(zip(streams, (3, 1)))
    ]
    source = Source(Order(corpora, 8, seed=3, block=64), streams, 0)
    read = source.samples(np.arange(50))[:, :-1].ravel()
    entropy = sample_entropy(source, 400, VOCABULARY)
    assert entropy == unigram_entropy(np.bincount(read)) > 0
    kept = read[read < VOCABULARY // 2]
    assert sample_entropy(source, 400, VOCABULARY // 2) == unigram_entropy(np.bincount(kept))
