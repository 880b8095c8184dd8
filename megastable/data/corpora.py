"""From the recipe's list of corpora to what can be trained and evaluated on."""

from __future__ import annotations

from dataclasses import dataclass

from megastable.config import CorpusConfig
from megastable.data.manifest import Manifest, Stream
from megastable.data.order import Corpus, Order
from megastable.data.source import Source
from megastable.errors import ConfigError, DataError
from megastable.recipe import find


@dataclass(frozen=True)
class Corpora:
    """All corpora of a run. `validation` is None where none of them has such a split."""

    manifests: list[Manifest]
    train: Source
    validation: Source | None
    vocab_size: int

    @property
    def fingerprints(self) -> list[str]:
        return [manifest.fingerprint() for manifest in self.manifests]

    @property
    def order_fingerprint(self) -> str:
        """What the order of the training samples depends on, as one string: a checkpoint holds it."""
        return self.train.order.fingerprint(self.fingerprints)


def open_corpora(given: list[CorpusConfig], sequence_length: int, seed: int) -> Corpora:
    """Open every corpus; none of the token data is read.

    Raises ConfigError for an empty list or corpora of different tokenizers, DataError for damaged ones.
    """
    if not given:
        raise ConfigError(
            "data.corpora is empty: name at least one prepared corpus, e.g. data.corpora=[{path: data/stdlib}]; "
            "tools/prepare_data.py makes them"
        )
    given = [corpus.model_copy(update={"path": find(corpus.path)}) for corpus in given]
    manifests = [Manifest.load(corpus.path) for corpus in given]
    first = manifests[0].tokenizer
    for corpus, manifest in zip(given, manifests, strict=True):
        if manifest.tokenizer.xxh3 != first.xxh3:
            raise ConfigError(
                f"data.corpora: {corpus.path} was made with another tokenizer than {given[0].path}: "
                "their token ids mean different things; prepare both with the same tokenizer"
            )
        if manifest.tokens("train") == 0:
            raise DataError(f"{corpus.path}: no documents to train on")

    def source(split: str) -> Source | None:
        chosen = [
            (corpus, manifest, Stream(corpus.path, manifest, split))
            for corpus, manifest in zip(given, manifests, strict=True)
            # A split shorter than a sequence holds no sample.
            if split == "train" or manifest.tokens(split) > sequence_length
        ]
        if not chosen:
            return None
        order = Order(
            [Corpus(manifest.name, stream.tokens, corpus.weight) for corpus, manifest, stream in chosen],
            sequence_length,
            seed,
        )
        return Source(order, [stream for _, _, stream in chosen], first.eod)

    train = source("train")
    assert train is not None
    return Corpora(manifests, train, source("validation"), first.vocab_size)
