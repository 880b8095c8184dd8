"""Opens the validation samples of a run: those of its blend, and those of every corpus by itself.

The order inside a corpus does not depend on the other corpora (order.py). So the first samples of a corpus are the
same ones in both sources, and what was computed for the blend need not be computed again. `data.validation` names sets
of samples to take in place of these.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megastable.base.errors import ConfigError, DataError
from megastable.config.recipe import find
from megastable.config.tree import ValidationConfig
from megastable.data.blends import Share
from megastable.data.manifest import Manifest, Stream
from megastable.data.order import Order, OrderedCorpus
from megastable.data.source import Source

SPLIT = "validation"
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
        return [_names(source.order) if source else [] for source in (self.blend, self.alone)]

    @property
    def shards(self) -> list[tuple[Stream, str]]:
        """Those of the sets of `data.validation`, each once: its stream, and its name for `Stream.open`."""
        streams = self.blend.streams if self.blend is not None and self.in_turn else ()
        found = {(one.directory, each.shard): (one, each.shard) for one in streams for each in one.segments}
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
    sequence_length: int, seed: int, eod: int,
) -> HeldOut:  # fmt: skip
    """here: corpora of the recipe; out: those that were taken out of it; blends: weights by name, oldest first."""
    streams, gone = dict[str, Stream](), dict[str, str]()

    def add(name: str, path: Path, manifest: Manifest) -> None:
        # A split shorter than a sequence holds no sample.
        if manifest.tokens(SPLIT) > sequence_length:
            streams[name] = Stream(path, manifest, SPLIT)

    for name, corpus in here.items():
        add(name, *corpus)
    for name, share in out.items():
        try:
            add(name, *opened(share))
        except DataError as error:
            gone[name] = str(error)

    def source(weights: Mapping[str, float]) -> Source | None:
        chosen = [name for name in streams if name in weights]
        if not chosen:
            return None
        corpora = [OrderedCorpus(name, streams[name].tokens, weights[name]) for name in chosen]
        return Source(Order(corpora, sequence_length, seed), [streams[name] for name in chosen], eod)

    measured = next((w for w in blends if any(name in streams for name in w)), blends[-1])
    alone = source(dict.fromkeys(streams, 1.0)) if len(streams) > 1 else None
    without = [name for name in here if name not in streams]
    return HeldOut(source(measured), tuple(blends[0]), alone, without, gone)


def open_sets(
    given: Sequence[ValidationConfig], manifests: Mapping[Path, Manifest], trained: Collection[str],
    sequence_length: int, seed: int, eod: int,
) -> HeldOut:  # fmt: skip
    """The sets of `data.validation`. manifests: by their folders; trained: fingerprints of the corpora of the run, now
    or before. Raises ConfigError for sets of one name or of text that is trained on, DataError for damaged ones."""
    streams = dict[str, Stream]()
    for one in given:
        path = find(one.path)
        manifest, name = manifests[path], one.name or manifests[path].name
        if name in streams:
            raise ConfigError(
                f"data.validation: two sets are named {name!r}: list a folder once, or give one of them another name"
            )
        kept = manifest.splits.get(SPLIT, [])
        if manifest.fingerprint() not in trained:
            kept = [segment for segments in manifest.splits.values() for segment in segments]
        elif not kept:
            raise ConfigError(
                f"data.validation: the run trains on all of {path}: name another folder, or prepare that one with "
                "--validation"
            )
        streams[name] = Stream(path, manifest.model_copy(update={"splits": {SPLIT: kept}}), SPLIT)
    corpora = [OrderedCorpus(n, s.tokens, 1.0, s.manifest.fingerprint()) for n, s in streams.items()]
    try:
        order = Order(corpora, sequence_length, seed)
    except DataError as error:
        raise DataError(f"data.validation: {error}") from None
    return HeldOut(Source(order, list(streams.values()), eod), tuple(streams), None, [], {}, in_turn=True)


def samples_in_turn(order: Order, count: int) -> CorpusSamples:
    """The first `count` samples of every set, or all that a smaller one has: one of each, then the next of each. So the
    first samples of all are some of each set."""
    counts = [min(count, size) for size in order.sequences]
    numbers = np.concatenate([np.arange(n) for n in counts])
    sets = np.repeat(np.arange(len(counts)), counts)
    positions = np.concatenate([order.positions_at(index, np.arange(n)) for index, n in enumerate(counts)])
    turns = np.lexsort((sets, numbers))
    places = {c.name: np.flatnonzero(sets[turns] == i).tolist() for i, c in enumerate(order.corpora)}
    return CorpusSamples(positions[turns], places)


def corpus_samples(blend: Order, computed: int, alone: Order, count: int) -> CorpusSamples:
    """The first `count` samples of every corpus of `alone`, each once, or all that a smaller corpus has; the first
    `computed` positions of `blend` are there already."""
    known = {sample: place for place, sample in enumerate(_samples(blend, np.arange(computed)))}
    further, places = [np.empty(0, np.int64)], dict[str, list[int]]()
    end = computed
    for index, corpus in enumerate(alone.corpora):
        positions = alone.positions_at(index, np.arange(min(count, alone.sequences[index])))
        mine = [known.get(sample) for sample in _samples(alone, positions)]
        new = np.array([place is None for place in mine], dtype=bool)
        further.append(positions[new])
        later = iter(range(end, end := end + int(new.sum())))
        places[corpus.name] = [next(later) if place is None else place for place in mine]
    return CorpusSamples(np.concatenate(further), places)


def _samples(order: Order, positions: Int64s) -> list[tuple[str, int]]:
    found = order.locate(positions)
    return [(order.corpora[c].name, s) for c, s in zip(found.corpus, found.sequence.tolist(), strict=True)]


def _names(order: Order) -> list[str]:
    return sorted(f"{corpus.name} {corpus.fingerprint}".strip() for corpus in order.corpora)


def opened(share: Share) -> tuple[Path, Manifest]:
    """A corpus that was taken out of the blend. Raises DataError if it is not what it was."""
    path = find(Path(share.path))
    manifest = Manifest.load(path)
    if manifest.fingerprint() != share.fingerprint:
        raise DataError(f"{path} has changed: restore it")
    return path, manifest
