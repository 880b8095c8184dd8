"""Small real corpora for the tests of `megastable.data`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megastable.data.manifest import Manifest, TokenizerInfo, adopt_shards
from megastable.data.shards import ShardWriter

VOCABULARY = 1000
EOD = 0

MakeCorpus = Callable[..., Manifest]


@pytest.fixture
def make_corpus() -> MakeCorpus:
    """`make_corpus(directory, [tokens of shard 0, ...], seed=0, validation=0.0)` writes shards of random
    documents of 1 to 40 tokens, each ended by EOD, and their manifest."""

    def make(directory: Path, sizes: list[int], seed: int = 0, validation: float = 0.0) -> Manifest:
        directory.mkdir(parents=True, exist_ok=True)
        random = np.random.default_rng(seed)
        for number, size in enumerate(sizes):
            with ShardWriter(directory / f"part-{number}", VOCABULARY) as writer:
                while writer.tokens < size:
                    length = min(int(random.integers(1, 41)), size - writer.tokens)
                    document = random.integers(1, VOCABULARY, length)
                    document[-1] = EOD
                    writer.add_document(document)
        tokenizer = TokenizerInfo(
            file="tokenizer.model", kind="sentencepiece", xxh3="0" * 32, vocab_size=VOCABULARY, eod=EOD
        )
        manifest = adopt_shards(directory, tokenizer, validation)
        manifest.save_manifest(directory)
        return manifest

    return make
