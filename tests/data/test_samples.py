"""The documents of positions, against a reference that labels every token of the streams."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.data.manifest import Manifest, Segment, Stream, TokenizerInfo, adopt_shards
from megastable.data.order import Order, OrderedCorpus
from megastable.data.samples import (
    Document,
    Source,
    documents_at,
    documents_by_position,
    sample_entropy,
    unigram_entropy,
)
from megastable.data.shards import Shard, ShardWriter
from tests.data.conftest import MakeCorpus
from tests.data.test_shards import write_index

VOCABULARY, EOD = 1000, 0
TOKENIZER = TokenizerInfo(
    file="tokenizer.model", kind="sentencepiece", xxh3="0" * 32, vocab_size=VOCABULARY, eod=EOD
)


def shard_tokens(folder: Path, name: str) -> np.ndarray:
    return np.fromfile(folder / f"{name}.bin", "<u2")


def labelled(folder: Path, corpus: str, name: str) -> list[Document]:
    """For every token of a shard its document, found by the ends of documents alone."""
    ends = np.flatnonzero(shard_tokens(folder, name) == EOD) + 1
    return [
        Document(corpus=corpus, shard=name, document=number, first_token=int(first), tokens=int(end - first))
        for number, (first, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True))
        for _ in range(int(end - first))
    ]


def write(folder: Path, sizes: list[int], seed: int) -> Manifest:
    folder.mkdir()
    random = np.random.default_rng(seed)
    for number, size in enumerate(sizes):
        with ShardWriter(folder / f"part-{number}", VOCABULARY) as writer:
            while writer.tokens < size:
                writer.add_document(np.append(random.integers(1, VOCABULARY, random.integers(0, 40)), EOD))
    return adopt_shards(folder, TOKENIZER, 0.2)


def segment(folder: Path, name: str, first: int, end: int) -> Segment:
    """The documents [first, end) of a shard."""
    edges = np.append(0, np.flatnonzero(shard_tokens(folder, name) == EOD) + 1)
    return Segment(
        shard=name,
        first_token=int(edges[first]),
        tokens=int(edges[end] - edges[first]),
        documents=end - first,
    )


Parts = tuple[list[str], list[Stream], list[list[Document]]]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    """Two corpora: their names, their streams, and for every token of each stream its document."""
    folder = tmp_path_factory.mktemp("corpora")
    books, web = write(folder / "books", [700, 500, 30], 1), write(folder / "web", [400], 2)
    # Segments that leave documents out, and are not in the order of the shards.
    chosen = [("part-1", 3, 12), ("part-0", 0, 6), ("part-1", 14, 15), ("part-1", 15, 20), ("part-2", 0, 1)]
    segments = [segment(folder / "books", *cut) for cut in chosen]
    manifests = [books.model_copy(update={"splits": {"train": segments}}), web]
    names = ["books", "web"]
    streams = [
        Stream(folder / name, manifest, "train") for name, manifest in zip(names, manifests, strict=True)
    ]
    labels = []
    for name, stream in zip(names, streams, strict=True):
        of_shard = {info.name: labelled(folder / name, name, info.name) for info in stream.manifest.shards}
        labels.append(
            [d for part in stream.segments for d in of_shard[part.shard][part.first_token : part.end]]
        )
        assert len(labels[-1]) == stream.tokens
    return names, streams, labels


@given(length=st.integers(1, 60), positions=st.lists(st.integers(0, 600), max_size=20))
def test_documents_at_hold_the_own_tokens_of_positions(
    parts: Parts, length: int, positions: list[int]
) -> None:
    names, streams, labels = parts
    corpora = [
        OrderedCorpus(name, stream.tokens, weight)
        for name, stream, weight in zip(names, streams, (2.0, 1.0), strict=True)
    ]
    source = Source(Order(corpora, length, seed=7, block=32), streams, EOD)

    expected = {}
    for position in positions:
        place = source.order.locate_sample(position)
        own = labels[place.corpus][place.first_token : place.first_token + length]
        expected[position] = list(dict.fromkeys(own))
    found = documents_by_position(source, positions)
    assert found == expected
    assert list(found) == list(expected)

    everything = documents_at(source, positions)
    assert set(everything) == {document for documents in expected.values() for document in documents}
    along = [(names.index(d.corpus), labels[names.index(d.corpus)].index(d)) for d in everything]
    assert along == sorted(set(along))


def test_documents_at_leave_out_empty_documents(tmp_path: Path) -> None:
    """As other programs write them: a document index that stays where it is."""
    lengths, documents = [3, 5, 4], [0, 1, 1, 1, 2, 3, 3]
    np.full(sum(lengths), 9, "<u2").tofile(tmp_path / "part.bin")
    write_index(tmp_path / "part", lengths, documents, code=8)
    assert Shard(tmp_path / "part").documents == 6
    stream = Stream(tmp_path, adopt_shards(tmp_path, TOKENIZER, 0.0, "c"), "train")
    source = Source(Order([OrderedCorpus("c", stream.tokens, 1.0)], 11, seed=0), [stream], EOD)
    found = [(d.document, d.first_token, d.tokens) for d in documents_at(source, [0])]
    assert found == [(0, 0, 3), (3, 3, 5), (4, 8, 4)]


@pytest.mark.parametrize(
    ("counts", "nats"),
    [
        ([], 0.0),
        ([0, 7, 0], 0.0),
        ([5, 5], math.log(2)),
        ([1, 3], 2 * math.log(2) - 0.75 * math.log(3)),
    ],
)
def test_unigram_entropy_of_known_counts(counts: list[int], nats: float) -> None:
    assert unigram_entropy(np.array(counts, dtype=np.int64)) == pytest.approx(nats, abs=1e-12)


def test_sample_entropy_counts_a_blend_as_it_is_read(tmp_path: Path, make_corpus: MakeCorpus) -> None:
    streams = []
    for name, tokens in (("one", 900), ("other", 500)):
        manifest = make_corpus(tmp_path / name, [tokens])
        streams.append(Stream(tmp_path / name, manifest, "train"))
    corpora = [
        OrderedCorpus(str(n), stream.tokens, weight)
        for n, (stream, weight) in enumerate(zip(streams, (3, 1)))
    ]
    source = Source(Order(corpora, 8, seed=3, block=64), streams, 0)
    read = source.read_samples(np.arange(50))[:, :-1].ravel()
    entropy = sample_entropy(source, 400, VOCABULARY)
    assert entropy == unigram_entropy(np.bincount(read)) > 0
    kept = read[read < VOCABULARY // 2]
    assert sample_entropy(source, 400, VOCABULARY // 2) == unigram_entropy(np.bincount(kept))
