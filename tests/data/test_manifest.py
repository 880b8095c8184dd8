"""Manifests and streams: what they refuse, and that a stream is the concatenation of its segments."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megastable.base.errors import DataError
from megastable.data import manifest as manifests
from megastable.data.manifest import Manifest, Segment, Stream, adopt_shards
from megastable.data.shards import Shard, ShardWriter

MakeCorpus = Callable[..., Manifest]


def test_fingerprint_is_of_the_order_only(tmp_path: Path, make_corpus: MakeCorpus) -> None:
    manifest = make_corpus(tmp_path, [300, 200], validation=0.1)
    print_of = manifest.fingerprint()
    same = manifest.model_copy(update={"created": None, "source": "elsewhere", "text_bytes": 7})
    assert same.fingerprint() == print_of
    assert Manifest.load_manifest(tmp_path).fingerprint() == print_of
    shard = manifest.shards[0]
    changes: list[dict[str, Any]] = [
        {"name": "other"},
        {"shards": [shard.model_copy(update={"idx_xxh3": "1"}), manifest.shards[1]]},
        {"shards": [shard.model_copy(update={"bin_xxh3": "1"}), manifest.shards[1]]},
        {"shards": manifest.shards[::-1]},
        {"tokenizer": manifest.tokenizer.model_copy(update={"xxh3": "1"})},
        {"splits": {"train": manifest.splits["train"]}},
    ]
    assert len({manifest.model_copy(update=change).fingerprint() for change in changes} | {print_of}) == 7


def test_manifest_load_refuses(tmp_path: Path, make_corpus: MakeCorpus) -> None:
    make_corpus(tmp_path, [300], validation=0.1)
    path = tmp_path / "manifest.json"
    good = json.loads(path.read_text())

    def refused(message: str, **change: object) -> None:
        path.write_text(json.dumps({**good, **change}))
        with pytest.raises(DataError, match=message) as caught:
            Manifest.load_manifest(tmp_path)
        assert str(path) in str(caught.value)

    refused("format 2", format=2)
    refused("typo: Extra inputs", typo=1)
    refused(r"shards\.0\.tokens", shards=[{**good["shards"][0], "tokens": "many"}])
    refused("plain file name", shards=[{**good["shards"][0], "name": "../x"}])
    refused("same name", shards=good["shards"] * 2)
    refused("empty", splits={"train": []})
    refused("empty", splits={})
    refused("overlap at token 0", splits={**good["splits"], "test": good["splits"]["train"]})
    refused("not listed", splits={"train": [{**good["splits"]["train"][0], "shard": "x"}]})
    refused("beyond the end", splits={"train": [{**good["splits"]["train"][0], "tokens": 301}]})
    refused("eod 1000", tokenizer={**good["tokenizer"], "eod": 1000})
    refused("not int32", dtype="int32")
    path.write_text(path.read_text()[:50])
    with pytest.raises(DataError, match="not JSON"):
        Manifest.load_manifest(tmp_path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="cannot be read"):
        Manifest.load_manifest(tmp_path)
    path.unlink()
    with pytest.raises(DataError, match="not a prepared corpus"):
        Manifest.load_manifest(tmp_path)


def test_stream_is_the_concatenation_of_its_segments(
    tmp_path: Path, make_corpus: MakeCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "OPEN_SHARDS", 2)
    manifest = make_corpus(tmp_path, [120, 1, 80, 60], validation=0.2)
    whole, offsets = [], []
    for segment in manifest.splits["train"]:
        whole += Shard(tmp_path / segment.shard).read_tokens(segment.first_token, segment.tokens).tolist()
        offsets += [(segment.shard, token) for token in range(segment.first_token, segment.end)]
    stream = Stream(tmp_path, manifest, "train")
    assert stream.tokens == len(whole) == manifest.count_tokens("train")
    random = np.random.default_rng(0)
    for first, end in np.sort(random.integers(0, len(whole) + 1, (300, 2)), axis=1).tolist():
        assert stream.read_tokens(first, end - first).tolist() == whole[first:end]
    assert [stream.offset_of(*place) for place in offsets] == list(range(len(whole)))
    for first, count in [(-1, 1), (0, len(whole) + 1), (len(whole), 1)]:
        with pytest.raises(IndexError):
            stream.read_tokens(first, count)


@pytest.mark.parametrize("validation", [0.0, 0.001, 0.1, 0.5, 0.9])
def test_split_holds_whole_documents_and_never_overlaps(
    tmp_path: Path, make_corpus: MakeCorpus, validation: float
) -> None:
    manifest = make_corpus(tmp_path, [500, 700, 300], validation=validation)
    train = Stream(tmp_path, manifest, "train")
    tokens, documents = train.tokens, [train.read_tokens(0, train.tokens)]
    if validation:
        held = Stream(tmp_path, manifest, "validation")
        assert validation * 1500 - 1 <= held.tokens <= validation * 1500 + 40
        assert train.read_tokens(train.tokens - 1, 1).tolist() == [0]  # ends with an end of document
        tokens += held.tokens
        documents.append(held.read_tokens(0, held.tokens))
    else:
        assert list(manifest.splits) == ["train"]
    shards = [Shard(tmp_path / f"part-{number}") for number in range(3)]
    assert tokens == 1500
    assert np.array_equal(
        np.concatenate(documents), np.concatenate([s.read_tokens(0, s.tokens) for s in shards])
    )
    segments = [segment for split in manifest.splits.values() for segment in split]
    assert sum(segment.documents for segment in segments) == sum(shard.documents for shard in shards)


def test_adopt_refuses(tmp_path: Path, make_corpus: MakeCorpus) -> None:
    tokenizer = make_corpus(tmp_path / "good", [100]).tokenizer
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no Megatron shards"):
        adopt_shards(tmp_path / "empty", tokenizer, 0.1)
    for fraction in (1.0, -0.1, float("nan")):
        with pytest.raises(DataError, match="validation="):
            adopt_shards(tmp_path / "good", tokenizer, fraction)
    small = tokenizer.model_copy(update={"vocab_size": 500})
    with pytest.raises(DataError, match="outside of the vocabulary"):
        adopt_shards(tmp_path / "good", small, 0.1)
    with ShardWriter(tmp_path / "good" / "wide", 70_000) as writer:
        writer.add_document(np.array([1]))
    with pytest.raises(DataError, match="int32"):
        adopt_shards(tmp_path / "good", tokenizer, 0.1)
    with ShardWriter(tmp_path / "empty" / "one", 1000) as writer:
        writer.add_document(np.arange(1, 9))
    with pytest.raises(DataError, match="nothing is left to train on"):
        adopt_shards(tmp_path / "empty", tokenizer, 0.1)


@pytest.mark.parametrize(("first", "tokens", "documents"), [(0, 299, None), (1, 299, None), (0, 300, 1)])
def test_stream_refuses_segments_that_cut_documents(
    tmp_path: Path, make_corpus: MakeCorpus, first: int, tokens: int, documents: int | None
) -> None:
    manifest = make_corpus(tmp_path, [300])
    count = documents or manifest.splits["train"][0].documents
    segment = Segment(shard="part-0", first_token=first, tokens=tokens, documents=count)
    stream = Stream(tmp_path, manifest.model_copy(update={"splits": {"train": [segment]}}), "train")
    with pytest.raises(DataError, match="whole documents"):
        stream.read_tokens(0, 1)
