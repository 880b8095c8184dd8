"""Open the recipe's corpora for training and validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megastable.base.errors import ConfigError, DataError
from megastable.config.recipe import find
from megastable.config.tree import CorpusConfig, ValidationConfig
from megastable.data.blends import (
    BlendEntry,
    ExchangeEntry,
    GoneStream,
    Line,
    Share,
    exchanges,
    in_force,
    phases,
)
from megastable.data.held_out import HeldOut, open_held_out, open_sets, opened
from megastable.data.manifest import Manifest, Stream, TokenizerInfo
from megastable.data.order import BLOCK, Order, OrderedCorpus, blend
from megastable.data.source import Source


@dataclass(frozen=True)
class Corpora:
    """All corpora of a run.

    manifests: of the recipe's corpora; shares: the blend from now on, by the recipe; blends, exchanges: the lines of
    blends.jsonl in force when `train` was opened.
    """

    manifests: list[Manifest]
    shares: list[Share]
    blends: list[BlendEntry]
    exchanges: list[ExchangeEntry]
    train: Source
    held_out: HeldOut
    vocab_size: int

    @property
    def validation(self) -> Source | None:
        """The validation samples of the blend; None if no corpus of it has such a split."""
        return self.held_out.blend

    @property
    def fingerprints(self) -> list[str]:
        return [share.fingerprint for share in self.shares]

    @property
    def order_fingerprint(self) -> str:
        """A fingerprint of everything that the order of the training samples depends on."""
        return self.train.order.fingerprint(self._all_fingerprints)

    def fingerprint_until(self, cursor: int) -> str:
        """A fingerprint of everything that the order of the samples before `cursor` depends on; checkpoints at that
        cursor hold it. A blend or an exchange at or after `cursor` may still change, so it is not included."""
        return self._fingerprint_until(self.train.order, cursor)

    def known_by(self, fingerprint: str, cursor: int) -> int | None:
        """How many of `exchanges` a checkpoint at `cursor` with `fingerprint` knew (the largest number that fits); None
        if its order was a different one."""
        order = self.train.order
        for count in range(len(self.exchanges), -1, -1):
            before = order.exchanging([], count)
            if self._fingerprint_until(before, cursor) == fingerprint:
                return count
        return None

    def _fingerprint_until(self, order: Order, cursor: int) -> str:
        later = sum(phase.block * BLOCK >= cursor for phase in order.phases[1:])
        return order.fingerprint(self._all_fingerprints, len(order.phases) - later, cursor)

    @property
    def reblended(self) -> bool:
        """Whether the recipe asks for another blend than the run's current one."""
        wanted = [OrderedCorpus(share.name, share.tokens, share.weight) for share in self.shares]
        quotas = {c.name: quota for c, quota in zip(wanted, blend(wanted, BLOCK), strict=True)}
        order = self.train.order
        return quotas != {
            c.name: quota for c, quota in zip(order.corpora, order.quotas, strict=True) if quota
        }

    @property
    def _all_fingerprints(self) -> list[str]:
        known = {share.name: share.fingerprint for entry in self.blends for share in entry.corpora}
        known |= {share.name: share.fingerprint for share in self.shares}
        return [known[corpus.name] for corpus in self.train.order.corpora]


def open_corpora(
    given: list[CorpusConfig], sequence_length: int, seed: int, blends: Sequence[Line] = (),
    validation: Sequence[ValidationConfig] = (),
) -> Corpora:  # fmt: skip
    """Open every corpus; no token data is read. blends: the lines of blends.jsonl of a run that has begun: they decide
    the order, and `given` only states what is wanted. validation: sets of samples in place of the corpora's own; the
    order does not depend on them.

    Raises ConfigError for an empty list or corpora with different tokenizers, DataError for damaged ones.
    """
    if not given:
        raise ConfigError(
            "data.corpora is empty: name at least one prepared corpus, e.g. data.corpora=[{path: data/stdlib}]; "
            "megastable prepare makes them"
        )
    given = [corpus.model_copy(update={"path": find(corpus.path)}) for corpus in given]
    manifests = [Manifest.load(corpus.path) for corpus in given]
    names = [manifest.name for manifest in manifests]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(
            f"data.corpora: two corpora are named {twice!r}: list a corpus once, with its weight, or prepare one of "
            "them under another name"
        )
    tokenizer = manifests[0].tokenizer
    for corpus, manifest in zip(given, manifests, strict=True):
        _check_tokenizer("data.corpora", corpus.path, manifest.tokenizer, given[0].path, tokenizer)
        if manifest.tokens("train") == 0:
            raise DataError(f"{corpus.path}: no documents to train on")
    shares = [
        Share(
            name=manifest.name,
            path=str(corpus.path),
            weight=corpus.weight,
            tokens=manifest.tokens("train"),
            fingerprint=manifest.fingerprint(),
        )
        for corpus, manifest in zip(given, manifests, strict=True)
    ]
    valid, moves = in_force(blends), exchanges(blends)
    here = {manifest.name: (corpus.path, manifest) for corpus, manifest in zip(given, manifests, strict=True)}
    out = {share.name: share for entry in valid for share in entry.corpora if share.name not in here}
    streams = [Stream(path, manifest, "train") for path, manifest in here.values()]
    train = Order(
        [
            OrderedCorpus(share.name, share.tokens, share.weight, share.fingerprint)
            for share in (*shares, *out.values())
        ],
        sequence_length,
        seed,
        phases=phases(valid),
        exchanges=[entry.done for entry in moves],
    )
    streams += [_taken_out(share) for share in out.values()]
    # The blend that the recipe asks for counts as the last one, also before blends.jsonl has a line for it.
    weights = [*(entry.weights for entry in valid), {share.name: share.weight for share in shares}]
    if validation:
        sets = {path: Manifest.load(path) for path in (find(one.path) for one in validation)}
        for path, manifest in sets.items():
            _check_tokenizer("data.validation", path, manifest.tokenizer, given[0].path, tokenizer)
        trained = {share.fingerprint for share in (*shares, *out.values())}
        held_out = open_sets(validation, sets, trained, sequence_length, seed, tokenizer.eod)
    else:
        held_out = open_held_out(here, out, weights, sequence_length, seed, tokenizer.eod)
    return Corpora(
        manifests, shares, valid, moves, Source(train, streams, tokenizer.eod), held_out, tokenizer.vocab_size
    )


def _check_tokenizer(key: str, path: Path, its: TokenizerInfo, first: Path, tokenizer: TokenizerInfo) -> None:
    """Raises ConfigError if a folder was not made with the tokenizer of the first one."""
    if its.xxh3 != tokenizer.xxh3:
        raise ConfigError(
            f"{key}: {path} was made with another tokenizer than {first}: "
            "their token ids mean different things; prepare both with the same tokenizer"
        )
    if its.bos != tokenizer.bos:
        one, other = (
            "begin with no token of their own" if bos is None else f"begin with token {bos}"
            for bos in (its.bos, tokenizer.bos)
        )
        raise ConfigError(
            f"{key}: documents of {path} {one}, those of {first} {other}: prepare both with --bos, or both without"
        )


def _taken_out(share: Share) -> Stream:
    try:
        return Stream(*opened(share), "train")
    except DataError as error:
        return GoneStream(share, str(error))
