"""Baseline of a corpus, and the distance of a piece of text from it, used by `megastable inspect scan`."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from megastable.base.errors import DataError
from megastable.data.local_copy import write_file
from megastable_tools.forensics.oddness.features import FEATURES, NAMES, Features, inside, measure
from megastable_tools.forensics.oddness.judgement import (
    CLASSES,
    Judgement,
    UsualFeatures,
    judge,
    length_class,
)
from megastable_tools.forensics.oddness.kinds import KINDS, ODD
from megastable_tools.forensics.oddness.lexicon import Lexicon
from megastable_tools.forensics.oddness.tables import Int64s, Keys, Tables

PIECE = 256  # tokens
HEAD = 32  # tokens of a document that form its key
FORMAT = 1
MEASURED = 4 << 20  # tokens of the sample from which the baseline is learnt
BLOCK = 1 << 19  # tokens measured at once
ROUNDS = 2  # of removing odd pieces
MOST_ODD = 0.06  # maximum share of the sample that is removed
LEAST = 400  # pieces per class of length; classes with fewer get cuts of longer documents

Raw = npt.NDArray[np.integer]
Sample = tuple[Raw, Int64s] | tuple[Raw, Int64s, Keys]

__all__ = ["FEATURES", "KINDS", "NAMES", "PIECE", "Judgement", "Lexicon", "Yardstick", "cut", "document_keys"]


def cut(edges: Int64s, most: int = PIECE) -> tuple[Int64s, Int64s]:
    """Documents, int64 [d + 1] edges, in pieces of at most `most` tokens: (piece edges int64 [k + 1], the document of
    each piece int64 [k]). The pieces of a document are of about equal length; an empty document is one empty piece."""
    lengths = np.diff(edges)
    parts = np.maximum(-(-lengths // most), 1)
    owner = np.repeat(np.arange(len(lengths), dtype=np.int64), parts)
    number = np.arange(len(owner), dtype=np.int64) - np.repeat(np.cumsum(parts) - parts, parts)
    begins = edges[:-1][owner] + number * lengths[owner] // parts[owner]
    return np.append(begins, edges[-1:]), owner


def document_keys(tokens: Raw, edges: Int64s) -> Keys:
    """A key for each document, uint64 [d], from its first tokens: copies of a document share it."""
    keys = np.zeros(len(edges) - 1, dtype=np.uint64)
    begin, lengths = edges[:-1], np.diff(edges)
    for place in range(HEAD):
        has = lengths > place
        keys[has] = (keys[has] + tokens[begin[has] + place].astype(np.uint64) + np.uint64(1)) * np.uint64(
            0xD6E8FEB86659FD93
        )
        keys ^= keys >> np.uint64(32)
    return keys


@dataclass(frozen=True)
class Yardstick:
    """Baseline of a corpus: see `of`. Immutable; safe for several threads or processes."""

    lexicon: Lexicon
    tables: Tables
    usual: UsualFeatures

    @classmethod
    def of(cls, sample: Iterable[Sample], lexicon: Lexicon, eod: int | None = None) -> Yardstick:
        """From a sample of documents, at best a million tokens or more: (tokens [n], edges int64 [d + 1]) or with
        their keys uint64 [d] as a third, which must then match those of `measure`; by default `document_keys`.

        Takes about 40 bytes of memory per token of the sample. 1 or 2 % of junk in it do not matter. `eod`: not needed
        when the lexicon knows it. Raises DataError for a sample without tokens.
        """
        ids, edges, keys = _gather(sample, lexicon.vocab_size)
        if not len(ids):
            raise DataError("the sample has no tokens: there is nothing to compare with")
        pieces, owner = cut(edges)
        lengths, keys = np.diff(pieces), keys[owner]
        yardstick = cls._fitted(ids, pieces, keys, lexicon)
        for _ in range(ROUNDS):
            # Junk in the sample would make similar junk usual: what is odd by the first baseline is left out of the
            # next.
            score = yardstick.judge(_measured(yardstick, ids, pieces, keys)).score
            odd = np.argsort(-score)[: int(MOST_ODD * len(score))]
            keep = np.ones(len(score), dtype=bool)
            keep[odd[score[odd] > ODD]] = False
            part = ids[np.repeat(keep, lengths)]
            if not len(part):
                break
            kept = np.append(0, np.cumsum(lengths[keep]))
            yardstick = cls._fitted(part, kept, keys[keep], lexicon)
        return yardstick

    @classmethod
    def _fitted(cls, ids: Raw, pieces: Int64s, keys: Keys, lexicon: Lexicon) -> Yardstick:
        yardstick = cls(
            lexicon, Tables.of(ids, pieces, keys, lexicon.vocab_size + 1), UsualFeatures.nothing()
        )
        some, edges, owner = _ordinary(ids, pieces)
        features = _measured(yardstick, some, edges, keys[owner])
        return replace(yardstick, usual=UsualFeatures.of(np.diff(edges), features))

    def measure(self, tokens: Raw, edges: Int64s, keys: Keys) -> Features:
        """The features of k pieces: name -> float32 [k], with "length" among them, in tokens.

        tokens: integers [n] of any type, whatever their values; edges: int64 [k + 1], ascending; keys: uint64 [k], of
        the documents that they are of. Raises ValueError for a piece of more than PIECE tokens.
        """
        ids = inside(tokens[edges[0] : edges[-1]], self.lexicon.vocab_size)
        found = measure(ids, edges - edges[0], keys, self.lexicon, self.tables)
        return {"length": np.diff(edges).astype(np.float32), **found}

    def judge(self, features: Features) -> Judgement:
        """How unusual k pieces are, by which feature, and their kinds."""
        return judge(self.usual, features["length"].astype(np.int64), features)

    def explain(self, values: Mapping[str, float], feature: int | str | None = None) -> str:
        """A sentence about one piece: the value of `feature` (the index in FEATURES, or its name) and the usual one;
        by default for the most significant feature."""
        single = {name: np.array([values[name]], dtype=np.float32) for name in ("length", *NAMES)}
        if feature is None:
            feature = int(self.judge(single).feature[0])
        elif isinstance(feature, str):
            feature = NAMES.index(feature)
        length = single["length"].astype(np.int64)
        usual = float(self.usual.quantiles[length_class(length)[0], feature, 1])
        about = FEATURES[feature]
        value = float(single[about.name][0])
        return f"{about.text.format(about.shown(value))}, usual {about.shown(usual)}"

    def save(self, path: Path) -> None:
        """Write a .npz file, whole or not at all. Raises DataError when the disk refuses."""
        content = io.BytesIO()
        parts = {"lexicon": self.lexicon, "tables": self.tables, "usual": self.usual}
        arrays = {
            f"{name}.{key}": np.asarray(value)
            for name, part in parts.items()
            for key, value in vars(part).items()
        }
        arrays |= {"format": np.array(FORMAT), "names": np.array(NAMES)}
        np.savez(content, allow_pickle=False, **arrays)
        write_file(path, content.getvalue())

    @classmethod
    def load(cls, path: Path) -> Yardstick:
        """Read what `save` wrote. Raises DataError for a file that is missing, damaged or of another version."""
        try:
            with np.load(path, allow_pickle=False) as file:
                found = {key: file[key] for key in file.files}
            if int(found["format"]) != FORMAT or tuple(found["names"]) != NAMES:
                raise DataError(f"{path} was made by another version: remove it, it will be made again")
            parts = {
                name: {
                    key.partition(".")[2]: value for key, value in found.items() if key.startswith(f"{name}.")
                }
                for name in ("lexicon", "tables", "usual")
            }
            plain = {"vocab_size": int, "known": bool}
            for part in parts.values():
                part |= {key: plain[key](value) for key, value in part.items() if key in plain}
            return cls(
                Lexicon(**parts["lexicon"]), Tables(**parts["tables"]), UsualFeatures(**parts["usual"])
            )
        except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile) as error:
            raise DataError(f"{path} cannot be read: {error}; remove it, it will be made again") from error


def _gather(sample: Iterable[Sample], vocab_size: int) -> tuple[Raw, Int64s, Keys]:
    parts: list[Raw] = []
    edges: list[Int64s] = [np.zeros(1, dtype=np.int64)]
    keys: list[Keys] = []
    done = 0
    for given in sample:
        tokens, at = given[0], given[1]
        keys.append(given[2] if len(given) == 3 else document_keys(tokens, at))
        parts.append(inside(tokens[at[0] : at[-1]], vocab_size))
        edges.append(at[1:] - at[0] + done)
        done = int(edges[-1][-1]) if len(at) > 1 else done
    if not parts:
        return np.zeros(0, np.uint32), edges[0], np.zeros(0, np.uint64)
    return np.concatenate(parts), np.concatenate(edges), np.concatenate(keys)


def _measured(yardstick: Yardstick, ids: Raw, pieces: Int64s, keys: Keys) -> Features:
    """The features of many pieces, a block at a time."""
    found: list[Features] = []
    begin, count = 0, len(pieces) - 1
    while begin < count:
        end = max(int(np.searchsorted(pieces, pieces[begin] + BLOCK, side="right")) - 1, begin + 1)
        found.append(yardstick.measure(ids, pieces[begin : end + 1], keys[begin:end]))
        begin = end
    return {name: np.concatenate([part[name] for part in found]) for name in ("length", *NAMES)}


def _ordinary(ids: Raw, pieces: Int64s) -> tuple[Raw, Int64s, Int64s]:
    """Pieces to learn the baseline from: (ids, edges [k + 1], the original piece of each [k]).

    At most MEASURED tokens, and for each class of length at least LEAST pieces, cut from longer ones if it has
    fewer: so no text is compared with only a handful.
    """
    random = np.random.default_rng(0)
    lengths = np.diff(pieces)
    owner = np.flatnonzero(lengths)
    if len(ids) > MEASURED:
        owner = np.sort(random.permutation(owner)[: max(int(len(owner) * MEASURED / len(ids)), 1)])
    begin, length = pieces[owner], lengths[owner]
    bounds = [1, *CLASSES.tolist(), PIECE + 1]
    there = np.bincount(length_class(length), minlength=len(bounds) - 1)
    for low, high, count in zip(bounds[:-1], bounds[1:], there):
        longer = np.flatnonzero(lengths >= high)
        if count >= LEAST or high <= low or not longer.size:
            continue
        some = random.choice(longer, LEAST - count)
        take = random.integers(low, high, len(some))
        offset = (random.random(len(some)) * (lengths[some] - take)).astype(np.int64)
        begin, length = np.append(begin, pieces[some] + offset), np.append(length, take)
        owner = np.append(owner, some)
    edges = np.append(0, np.cumsum(length))
    place = np.arange(int(edges[-1])) + np.repeat(begin - edges[:-1], length)
    return ids[place], edges, owner
