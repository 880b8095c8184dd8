"""Open the recipe's corpora: the training samples, the validation samples of the blend and of every corpus by itself,
and warnings about what is probably not meant.

The order inside a corpus does not depend on the other corpora (order.py). So the first validation samples of a corpus
are the same ones in both sources, and what was computed for the blend need not be computed again. `data.validation`
names sets of samples to take in place of these.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megastable.base.errors import ConfigError, DataError
from megastable.base.text import make_visible
from megastable.config.recipe import find_recipe
from megastable.config.tree import CorpusConfig, ValidationConfig
from megastable.data.blends import (
    BlendEntry,
    ExchangeEntry,
    GoneStream,
    Line,
    Share,
    blends_in_force,
    exchanges_in_force,
    order_phases,
)
from megastable.data.manifest import Manifest, Stream, TokenizerInfo
from megastable.data.order import BLOCK, Order, OrderedCorpus, blend_quotas
from megastable.data.remote_corpus import open_remote
from megastable.data.samples import Source

SPLIT = "validation"
Manifests = dict[Path, Manifest]  # by folder
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class HeldOut:
    """blend: samples of the first blend of the run that has any, by its weights, so that they never change with the
    blend; None if there are none. at_first: corpora of the first blend, with and without samples. alone: samples of
    every corpus that was ever in the blend, all as often; None if fewer than two have any. without: corpora of the
    recipe that have none. gone: corpora that were taken out of the recipe and can no longer be read, and why. in_turn:
    `blend` holds the sets of `data.validation`, of which each gives as many samples; there is nothing else then.
    """

    blend: Source | None
    at_first: tuple[str, ...]
    alone: Source | None
    without: list[str]
    gone: dict[str, str]
    in_turn: bool = False

    @property
    def names(self) -> list[list[str]]:
        """The corpora that have samples, of either source: the same on all hosts, or the losses would be wrong."""
        return [
            sorted(f"{corpus.name} {corpus.fingerprint}".strip() for corpus in source.order.corpora)
            if source
            else []
            for source in (self.blend, self.alone)
        ]

    @property
    def shards(self) -> list[tuple[Stream, str]]:
        """Those of the sets of `data.validation`, each once: its stream, and its name for `Stream.open_shard`."""
        streams = self.blend.streams if self.blend is not None and self.in_turn else ()
        found = {(s.directory, segment.shard): (s, segment.shard) for s in streams for segment in s.segments}
        return list(found.values())


@dataclass(frozen=True)
class CorpusSamples:
    """The samples of every corpus, as far as they are not among the first ones of the blend. further: their positions
    in `HeldOut.alone`, or in `HeldOut.blend` if that is `in_turn`. places: of the samples of each corpus among those of
    the blend and, after them, `further`."""

    further: Int64s
    places: dict[str, list[int]]


def open_held_out(
    here: Mapping[str, tuple[Path, Manifest]], out: Mapping[str, Share], blends: Sequence[Mapping[str, float]],
    sequence_length: int, seed: int, eod: int, known: Manifests,
) -> HeldOut:  # fmt: skip
    """here: corpora of the recipe; out: those that were taken out of it; blends: weights by name, oldest first; known:
    manifests that are not read again."""
    streams, problem_by_name = dict[str, Stream](), dict[str, str]()
    for name in [*here, *out]:
        try:
            path, manifest = here[name] if name in here else open_share(out[name], known)
            # A split shorter than a sequence holds no sample.
            if manifest.count_tokens(SPLIT) > sequence_length:
                streams[name] = Stream(path, manifest, SPLIT)
        except DataError as error:
            if name in here:
                raise
            problem_by_name[name] = str(error)

    def source(weights: Mapping[str, float]) -> Source | None:
        chosen = {stream_name: stream for stream_name, stream in streams.items() if stream_name in weights}
        if not chosen:
            return None
        corpora = [OrderedCorpus(name, stream.tokens, weights[name]) for name, stream in chosen.items()]
        return Source(Order(corpora, sequence_length, seed), list(chosen.values()), eod)

    measured_weights = next((w for w in blends if any(name in streams for name in w)), blends[-1])
    alone_source = source(dict.fromkeys(streams, 1.0)) if len(streams) > 1 else None
    unmeasured_names = [name for name in here if name not in streams]
    blend_source = source(measured_weights)
    return HeldOut(blend_source, tuple(blends[0]), alone_source, unmeasured_names, problem_by_name)


def open_sets(
    given: Sequence[ValidationConfig], manifests: Mapping[Path, Manifest], trained: Collection[str],
    sequence_length: int, seed: int, eod: int,
) -> HeldOut:  # fmt: skip
    """The sets of `data.validation`. manifests: by their folders; trained: fingerprints of the corpora of the run, now
    or before. Raises ConfigError for sets of one name or of text that is trained on, DataError for damaged ones."""
    streams = dict[str, Stream]()
    for given_set in given:
        recipe_path = find_recipe(given_set.path)
        manifest, name = manifests[recipe_path], given_set.name or manifests[recipe_path].name
        if name in streams:
            raise ConfigError(
                f"data.validation: two sets are named {name!r}: list a folder once, or give one of them another name"
            )
        kept_segments = manifest.splits.get(SPLIT, [])
        if manifest.fingerprint() not in trained:
            kept_segments = [segment for segments in manifest.splits.values() for segment in segments]
        elif not kept_segments:
            raise ConfigError(
                f"data.validation: the run trains on all of {recipe_path}: name another folder, or prepare that one "
                "with --validation"
            )
        streams[name] = Stream(
            recipe_path, manifest.model_copy(update={"splits": {SPLIT: kept_segments}}), SPLIT
        )
    ordered_corpora = [OrderedCorpus(n, s.tokens, 1.0, s.manifest.fingerprint()) for n, s in streams.items()]
    try:
        order = Order(ordered_corpora, sequence_length, seed)
    except DataError as error:
        raise DataError(f"data.validation: {error}") from None
    return HeldOut(Source(order, list(streams.values()), eod), tuple(streams), None, [], {}, in_turn=True)


def samples_in_turn(order: Order, count: int) -> CorpusSamples:
    """The first `count` samples of every set, or all that a smaller one has: one of each, then the next of each. So the
    first samples of all are some of each set."""
    counts = [min(count, sequence_size) for sequence_size in order.sequences]
    sample_numbers = np.concatenate([np.arange(n) for n in counts])
    set_indexes = np.repeat(np.arange(len(counts)), counts)
    positions = np.concatenate([order.positions_at(index, np.arange(n)) for index, n in enumerate(counts)])
    turn_order = np.lexsort((set_indexes, sample_numbers))
    places_by_set = {
        c.name: np.flatnonzero(set_indexes[turn_order] == i).tolist() for i, c in enumerate(order.corpora)
    }
    return CorpusSamples(positions[turn_order], places_by_set)


def corpus_samples(blend: Order, computed: int, alone: Order, count: int) -> CorpusSamples:
    """The first `count` samples of every corpus of `alone`, each once, or all that a smaller corpus has; the first
    `computed` positions of `blend` are there already."""
    known_places = {sample: place for place, sample in enumerate(_samples(blend, np.arange(computed)))}
    further_positions, places_by_corpus = [np.empty(0, np.int64)], dict[str, list[int]]()
    next_place = computed
    for corpus_index, corpus in enumerate(alone.corpora):
        positions = alone.positions_at(corpus_index, np.arange(min(count, alone.sequences[corpus_index])))
        own_places = [known_places.get(sample, -1) for sample in _samples(alone, positions)]
        places = np.array(own_places, dtype=np.int64)
        is_new = places < 0
        further_positions.append(positions[is_new])
        places[is_new] = next_place + np.arange(is_new.sum())
        next_place += int(is_new.sum())
        places_by_corpus[corpus.name] = places.tolist()
    return CorpusSamples(np.concatenate(further_positions), places_by_corpus)


def _samples(order: Order, positions: Int64s) -> list[tuple[str, int]]:
    found_samples = order.locate_samples(positions)
    return [
        (order.corpora[c].name, s)
        for c, s in zip(found_samples.corpus, found_samples.sequence.tolist(), strict=True)
    ]


def open_share(share: Share, known: Manifests) -> tuple[Path, Manifest]:
    """A corpus that was taken out of the blend. Raises DataError if it is not what it was."""
    corpus_path = find_recipe(Path(share.path))
    manifest = _load(corpus_path, known)
    if manifest.fingerprint() != share.fingerprint:
        raise DataError(f"{corpus_path} has changed: restore it")
    return corpus_path, manifest


def _load(folder: Path, known: Manifests) -> Manifest:
    """The manifest of a folder, read if it is not known yet, and known from then on."""
    if folder not in known:
        known[folder] = Manifest.load_manifest(folder)
    return known[folder]


@dataclass(frozen=True)
class Corpora:
    """All corpora of a run.

    manifests: of the recipe's corpora; shares: the blend from now on, by the recipe; blends, exchanges: the lines of
    blends.jsonl in force when `train` was opened; known: all manifests that were read, to open them again.
    """

    manifests: list[Manifest]
    shares: list[Share]
    blends: list[BlendEntry]
    exchanges: list[ExchangeEntry]
    train: Source
    held_out: HeldOut
    vocab_size: int
    known: Manifests

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
        for exchange_count in range(len(self.exchanges), -1, -1):
            earlier_order = self.train.order.with_exchanges([], exchange_count)
            if self._fingerprint_until(earlier_order, cursor) == fingerprint:
                return exchange_count
        return None

    def _fingerprint_until(self, order: Order, cursor: int) -> str:
        later_phases = sum(phase.block * BLOCK >= cursor for phase in order.phases[1:])
        return order.fingerprint(self._all_fingerprints, len(order.phases) - later_phases, cursor)

    @property
    def reblended(self) -> bool:
        """Whether the recipe asks for another blend than the run's current one."""
        wanted = [OrderedCorpus(share.name, share.tokens, share.weight) for share in self.shares]
        wanted_quotas = {c.name: quota for c, quota in zip(wanted, blend_quotas(wanted, BLOCK), strict=True)}
        present_quotas = zip(self.train.order.corpora, self.train.order.quotas, strict=True)
        return wanted_quotas != {corpus.name: quota for corpus, quota in present_quotas if quota}

    @property
    def _all_fingerprints(self) -> list[str]:
        known = {share.name: share.fingerprint for entry in self.blends for share in entry.corpora}
        known |= {share.name: share.fingerprint for share in self.shares}
        return [known[corpus.name] for corpus in self.train.order.corpora]


def open_corpora(
    given: list[CorpusConfig], sequence_length: int, seed: int, blends: Sequence[Line] = (),
    validation: Sequence[ValidationConfig] = (), known: Manifests | None = None,
) -> Corpora:  # fmt: skip
    """Open every corpus; no token data is read. blends: the lines of blends.jsonl of a run that has begun: they decide
    the order, and `given` only states what is wanted. validation: sets of samples in place of the corpora's own; the
    order does not depend on them. known: manifests that are not read again, by folder; those that are read are added.

    Raises ConfigError for an empty list or corpora with different tokenizers, DataError for damaged ones.
    """
    known = {} if known is None else known
    if not given:
        raise ConfigError(
            "data.corpora is empty: name at least one prepared corpus, e.g. data.corpora=[{path: data/stdlib}]; "
            "megastable prepare makes them"
        )
    given = [corpus.model_copy(update={"path": find_recipe(corpus.path)}) for corpus in given]
    for corpus in given:
        if corpus.url is not None:
            limit = None if corpus.cache_gib is None else max(1, round(corpus.cache_gib * 2**30))
            open_remote(corpus.path, corpus.url, limit)
    manifests = [_load(corpus.path, known) for corpus in given]
    corpus_names = [manifest.name for manifest in manifests]
    if twice := next(
        (corpus_name for corpus_name in corpus_names if corpus_names.count(corpus_name) > 1), None
    ):
        raise ConfigError(
            f"data.corpora: two corpora are named {twice!r}: list a corpus once, with its weight, or prepare one of "
            "them under another name"
        )
    tokenizer = manifests[0].tokenizer
    for corpus, manifest in zip(given, manifests, strict=True):
        _check_tokenizer("data.corpora", corpus.path, manifest.tokenizer, given[0].path, tokenizer)
        if manifest.count_tokens("train") == 0:
            raise DataError(f"{corpus.path}: no documents to train on")
    shares = [
        Share(
            name=manifest.name,
            path=str(corpus.path),
            weight=corpus.weight,
            tokens=manifest.count_tokens("train"),
            fingerprint=manifest.fingerprint(),
        )
        for corpus, manifest in zip(given, manifests, strict=True)
    ]
    valid, moves = blends_in_force(blends), exchanges_in_force(blends)
    here = {manifest.name: (corpus.path, manifest) for corpus, manifest in zip(given, manifests, strict=True)}
    out = {share.name: share for entry in valid for share in entry.corpora if share.name not in here}
    streams = [Stream(set_path, manifest, "train") for set_path, manifest in here.values()]
    known_shares = [*shares, *out.values()]
    ordered_corpora = [OrderedCorpus(s.name, s.tokens, s.weight, s.fingerprint) for s in known_shares]
    exchanges = [entry.done for entry in moves]
    train = Order(ordered_corpora, sequence_length, seed, phases=order_phases(valid), exchanges=exchanges)
    for share in out.values():
        try:
            streams.append(Stream(*open_share(share, known), "train"))
        except DataError as error:
            streams.append(GoneStream(share, str(error)))
    # The blend that the recipe asks for counts as the last one, also before blends.jsonl has a line for it.
    weights_by_blend = [*(entry.weights for entry in valid), {share.name: share.weight for share in shares}]
    if validation:
        set_paths = [find_recipe(given_set.path) for given_set in validation]
        manifest_by_folder = {set_path: _load(set_path, known) for set_path in set_paths}
        for set_path, manifest in manifest_by_folder.items():
            _check_tokenizer("data.validation", set_path, manifest.tokenizer, given[0].path, tokenizer)
        trained = {known_share.fingerprint for known_share in known_shares}
        held_out = open_sets(validation, manifest_by_folder, trained, sequence_length, seed, tokenizer.eod)
    else:
        held_out = open_held_out(here, out, weights_by_blend, sequence_length, seed, tokenizer.eod, known)
    return Corpora(
        manifests, shares, valid, moves, Source(train, streams, tokenizer.eod), held_out, tokenizer.vocab_size,
        known,
    )  # fmt: skip


def _check_tokenizer(key: str, path: Path, its: TokenizerInfo, first: Path, tokenizer: TokenizerInfo) -> None:
    """Raises ConfigError if a folder was not made with the tokenizer of the first one."""
    if its.xxh3 != tokenizer.xxh3:
        raise ConfigError(
            f"{key}: {path} was made with another tokenizer than {first}: "
            "their token ids mean different things; prepare both with the same tokenizer"
        )
    if its.bos != tokenizer.bos:
        one, other = (
            "begin with no token of their own" if bos_token is None else f"begin with token {bos_token}"
            for bos_token in (its.bos, tokenizer.bos)
        )
        raise ConfigError(
            f"{key}: documents of {path} {one}, those of {first} {other}: prepare both with --bos, or both without"
        )


# Muennighoff et al., arXiv:2305.16264: up to 4 epochs are about as good as new text; a repetition is worth 1/e of new
# text after about 15.
WORTH_LITTLE = 16
ROUNDED = 0.02  # of a share: more is said


def describe_epochs(source: Source, samples: int) -> str:
    """How often a run of `samples` positions reads every corpus."""
    order = source.order
    read = zip(order.corpora, source.streams, order.samples_before(samples), order.sequences, strict=True)
    epoch_texts = []
    for corpus, stream, samples_read, corpus_size in read:
        if not samples_read:
            continue
        # With its folder, if that has another name: a copy, planted or pruned, is called as the original is.
        is_gone = isinstance(stream, GoneStream)
        is_elsewhere = not is_gone and find_recipe(stream.directory).resolve().name != corpus.name
        folder_text = f" ({make_visible(stream.directory)})" if is_elsewhere else ""
        epoch_texts.append(f"{corpus.name}{folder_text} {_show_epochs(samples_read / corpus_size)}")
    return "epochs of this run: " + ", ".join(epoch_texts)


def find_warnings(corpora: Corpora, samples: int, evaluated: bool) -> list[str]:
    """What is probably not meant.

    Args:
        corpora: of the run.
        samples: positions that the run reads.
        evaluated: the recipe asks for validation.
    """
    order = corpora.train.order
    samples_read = zip(order.corpora, order.samples_before(samples), order.sequences, strict=True)
    warning_texts = [
        f"the run reads the corpus {corpus.name} {_show_epochs(done / corpus_size)} times; after about {WORTH_LITTLE} "
        "little is left to learn (arXiv:2305.16264): more text, a lower weight, or fewer train.steps"
        for corpus, done, corpus_size in samples_read
        if done > WORTH_LITTLE * corpus_size
    ]
    for stream in corpora.train.streams:
        if stream.remote is None or (limit := stream.remote.remote.limit) is None:
            continue
        infos = [stream.describe_shard(name) for name in {segment.shard for segment in stream.segments}]
        shard_bytes = sum(info.bin_bytes + info.idx_bytes for info in infos)
        if shard_bytes > limit:
            warning_texts.append(
                f"{stream.directory} may hold {limit / 2**30:.3g} of {shard_bytes / 2**30:.3g} GiB: samples are drawn "
                f"from all shards, so {100 * (1 - limit / shard_bytes):.0f} % of them need a whole one fetched again: "
                "a cache_gib that holds all is much faster"
            )
    total_weight = sum(share.weight for share in corpora.shares)
    quota_by_name = dict(zip((corpus.name for corpus in order.corpora), order.quotas, strict=True))
    for share in corpora.shares:
        quota, wanted_quota = quota_by_name[share.name], share.weight / total_weight * order.block
        if quota and abs(quota / wanted_quota - 1) > ROUNDED:
            warning_texts.append(
                f"the corpus {share.name} gets {quota} of {order.block} samples of the blend, its weight would be "
                f"{wanted_quota:.3g} of them ({100 * (quota / wanted_quota - 1):+.0f} %): shares are whole numbers of "
                f"{order.block}; merge small corpora into one, or choose a weight that is"
            )
    held_out = corpora.held_out
    if evaluated and held_out.without:
        token_counts = {manifest.name: manifest.count_tokens(SPLIT) for manifest in corpora.manifests}
        split_texts = ", ".join(
            f"{name} has {token_counts[name]:,} tokens" if token_counts[name] else f"{name} has none"
            for name in held_out.without
        )
        what = "no validation loss at all" if held_out.blend is None else "corpora without a validation loss"
        warning_texts.append(
            f"{what}: the validation split of {split_texts}, a sample needs {order.sequence_length + 1:,} "
            "(megastable prepare shards --validation or --validation-input; train.eval_samples=0 if none is wanted)"
        )
    return warning_texts


def _show_epochs(epochs: float) -> str:
    return f"{epochs:,.0f}" if epochs >= 100 else f"{epochs:.3g}"
