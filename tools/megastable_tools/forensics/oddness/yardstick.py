"""Baseline of a corpus, and the distance of a piece of text from it, used by `megastable inspect scan`.

A piece is also judged by its worst part: damage that fills half of a piece shows in that half.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from megastable.base.durable import write_data_file
from megastable.base.errors import DataError
from megastable_tools.forensics.oddness.features import (
    FEATURES,
    NAMES,
    Features,
    Floats,
    Int64s,
    Keys,
    Lexicon,
    Tables,
    clip_ids,
    measure_pieces,
)
from megastable_tools.forensics.oddness.judgement import (
    CLASSES,
    KINDS,
    ODD,
    Judgement,
    UsualFeatures,
    judge_features,
    length_class,
)

PIECE = 256  # tokens
HEAD = 32  # tokens of a document that form its key
FORMAT = 1
MEASURED = 4 << 20  # tokens of the sample from which the baseline is learnt
BLOCK = 1 << 19  # tokens measured at once
ROUNDS = 2  # of removing odd pieces
MOST_ODD = 0.06  # maximum share of the sample that is removed
LEAST = 400  # pieces per class of length; classes with fewer get cuts of longer documents

Raw = npt.NDArray[np.integer]
Sample = tuple[Raw, Int64s, Keys]


def cut_documents(edges: Int64s, most: int = PIECE) -> tuple[Int64s, Int64s]:
    """Documents, int64 [d + 1] edges, in pieces of at most `most` tokens: (piece edges int64 [k + 1], the document of
    each piece int64 [k]). The pieces of a document are of about equal length; an empty document is one empty piece."""
    lengths = np.diff(edges)
    parts = np.maximum(-(-lengths // most), 1)
    piece_owner = np.repeat(np.arange(len(lengths), dtype=np.int64), parts)
    piece_number = np.arange(len(piece_owner), dtype=np.int64) - np.repeat(np.cumsum(parts) - parts, parts)
    piece_starts = edges[:-1][piece_owner] + piece_number * lengths[piece_owner] // parts[piece_owner]
    return np.append(piece_starts, edges[-1:]), piece_owner


def document_keys(tokens: Raw, edges: Int64s) -> Keys:
    """A key for each document, uint64 [d], from its first tokens: copies of a document share it."""
    keys = np.zeros(len(edges) - 1, dtype=np.uint64)
    begin, document_lengths = edges[:-1], np.diff(edges)
    for token_place in range(HEAD):
        has_token = document_lengths > token_place
        keys[has_token] = (
            keys[has_token] + tokens[begin[has_token] + token_place].astype(np.uint64) + np.uint64(1)
        ) * np.uint64(0xD6E8FEB86659FD93)
        keys ^= keys >> np.uint64(32)
    return keys


@dataclass(frozen=True)
class Yardstick:
    """Baseline of a corpus: see `learn_from`. Immutable; safe for several threads or processes."""

    lexicon: Lexicon
    tables: Tables
    usual: UsualFeatures

    @classmethod
    def learn_from(cls, sample: Iterable[Sample], lexicon: Lexicon) -> Yardstick:
        """From a sample of documents, at best a million tokens or more: tokens [n], edges int64 [d + 1] and keys uint64
        [d], which must match those of `measure_features`.

        Takes about 40 bytes of memory per token of the sample. 1 or 2 % of junk in it do not matter. Raises DataError
        for a sample without tokens.
        """
        ids, edges, keys = _gather(sample, lexicon.vocab_size)
        if not len(ids):
            raise DataError("the sample has no tokens: there is nothing to compare with")
        piece_edges, piece_owner = cut_documents(edges)
        piece_lengths, keys = np.diff(piece_edges), keys[piece_owner]
        fitted_yardstick = cls._fitted(ids, piece_edges, keys, lexicon)
        for _ in range(ROUNDS):
            # Junk would make similar junk usual: what is odd by the first baseline is left out of the next.
            piece_features = _measured(fitted_yardstick, ids, piece_edges, keys)
            piece_scores = fitted_yardstick.judge_features(piece_features).score
            odd = np.argsort(-piece_scores)[: int(MOST_ODD * len(piece_scores))]
            is_kept = np.ones(len(piece_scores), dtype=bool)
            is_kept[odd[piece_scores[odd] > ODD]] = False
            kept_ids = ids[np.repeat(is_kept, piece_lengths)]
            if not len(kept_ids):
                break
            kept_edges = np.append(0, np.cumsum(piece_lengths[is_kept]))
            fitted_yardstick = cls._fitted(kept_ids, kept_edges, keys[is_kept], lexicon)
        return fitted_yardstick

    @classmethod
    def _fitted(cls, ids: Raw, pieces: Int64s, keys: Keys, lexicon: Lexicon) -> Yardstick:
        tables = Tables.learn_tables(ids, pieces, keys, lexicon.vocab_size + 1)
        unfitted_yardstick = cls(lexicon, tables, UsualFeatures.of_no_pieces())
        ordinary_ids, ordinary_edges, ordinary_owner = _ordinary(ids, pieces)
        ordinary_features = _measured(unfitted_yardstick, ordinary_ids, ordinary_edges, keys[ordinary_owner])
        usual = UsualFeatures.learn_usual(np.diff(ordinary_edges), ordinary_features)
        return replace(unfitted_yardstick, usual=usual)

    def measure_features(self, tokens: Raw, edges: Int64s, keys: Keys) -> Features:
        """The features of k pieces: name -> float32 [k], with "length" among them, in tokens.

        tokens: integers [n] of any type, whatever their values; edges: int64 [k + 1], ascending; keys: uint64 [k], of
        the documents that they are of. Raises ValueError for a piece of more than PIECE tokens.
        """
        clipped_ids = clip_ids(tokens[edges[0] : edges[-1]], self.lexicon.vocab_size)
        piece_features = measure_pieces(clipped_ids, edges - edges[0], keys, self.lexicon, self.tables)
        return {"length": np.diff(edges).astype(np.float32), **piece_features}

    def judge_features(self, features: Features) -> Judgement:
        """How unusual k pieces are, by which feature, and their kinds."""
        return judge_features(self.usual, features["length"].astype(np.int64), features)

    def explain_piece(self, length: int, feature: str, value: float) -> str:
        """A sentence about a piece of `length` tokens: the value of a feature, by its name, and the usual one."""
        feature_number = NAMES.index(feature)
        usual_value = float(self.usual.quantiles[length_class(np.array([length]))[0], feature_number, 1])
        about = FEATURES[feature_number]
        return f"{about.text.format(about.format_value(value))}, usual {about.format_value(usual_value)}"

    def save_file(self, path: Path) -> None:
        """Write a .npz file, whole or not at all. Raises DataError when the disk refuses."""
        content = io.BytesIO()
        parts = {"lexicon": self.lexicon, "tables": self.tables, "usual": self.usual}
        arrays = {
            f"{name}.{key}": np.asarray(v) for name, part in parts.items() for key, v in vars(part).items()
        }
        arrays |= {"format": np.array(FORMAT), "names": np.array(NAMES)}
        np.savez(content, allow_pickle=False, **arrays)
        write_data_file(path, content.getvalue())

    @classmethod
    def load_file(cls, path: Path) -> Yardstick:
        """Read what `save_file` wrote. Raises DataError for a file that is missing, damaged or of another version."""
        try:
            with np.load(path, allow_pickle=False) as array_file:
                arrays_found = {file_key: array_file[file_key] for file_key in array_file.files}
            if int(arrays_found["format"]) != FORMAT or tuple(arrays_found["names"]) != NAMES:
                raise DataError(f"{path} was made by another version: remove it, it will be made again")
            parts: dict[str, dict[str, Any]] = {"lexicon": {}, "tables": {}, "usual": {}}
            for key, value in arrays_found.items():
                part_name, is_of_part, field_name = key.partition(".")
                if is_of_part:
                    parts[part_name][field_name] = value
            lexicon = parts["lexicon"]
            lexicon |= {"vocab_size": int(lexicon["vocab_size"]), "known": bool(lexicon["known"])}
            return cls(Lexicon(**lexicon), Tables(**parts["tables"]), UsualFeatures(**parts["usual"]))
        except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile) as error:
            raise DataError(f"{path} cannot be read: {error}; remove it, it will be made again") from error


def _gather(sample: Iterable[Sample], vocab_size: int) -> tuple[Raw, Int64s, Keys]:
    id_parts, length_parts, key_parts = list[Raw](), list[Int64s](), list[Keys]()
    for tokens, sample_edges, own_keys in sample:
        id_parts.append(clip_ids(tokens[sample_edges[0] : sample_edges[-1]], vocab_size))
        length_parts.append(np.diff(sample_edges))
        key_parts.append(own_keys)
    if not id_parts:
        return np.zeros(0, np.uint32), np.zeros(1, np.int64), np.zeros(0, np.uint64)
    edges = np.append(0, np.cumsum(np.concatenate(length_parts)))
    return np.concatenate(id_parts), edges, np.concatenate(key_parts)


def _measured(yardstick: Yardstick, ids: Raw, pieces: Int64s, keys: Keys) -> Features:
    """The features of many pieces, a block at a time."""
    found: list[Features] = []
    begin, piece_count = 0, len(pieces) - 1
    while begin < piece_count:
        block_end = max(int(np.searchsorted(pieces, pieces[begin] + BLOCK, side="right")) - 1, begin + 1)
        found.append(yardstick.measure_features(ids, pieces[begin : block_end + 1], keys[begin:block_end]))
        begin = block_end
    return {name: np.concatenate([block_part[name] for block_part in found]) for name in ("length", *NAMES)}


def _ordinary(ids: Raw, pieces: Int64s) -> tuple[Raw, Int64s, Int64s]:
    """Pieces to learn the baseline from: (ids, edges [k + 1], the original piece of each [k]).

    At most MEASURED tokens, and for each class of length at least LEAST pieces, cut from longer ones if it has
    fewer: so no text is compared with only a handful.
    """
    random = np.random.default_rng(0)
    piece_lengths = np.diff(pieces)
    owner = np.flatnonzero(piece_lengths)
    if len(ids) > MEASURED:
        owner = np.sort(random.permutation(owner)[: max(int(len(owner) * MEASURED / len(ids)), 1)])
    begin, piece_sizes = pieces[owner], piece_lengths[owner]
    class_bounds = [1, *CLASSES.tolist(), PIECE + 1]
    class_counts = np.bincount(length_class(piece_sizes), minlength=len(class_bounds) - 1)
    for class_begin, class_end, class_count in zip(class_bounds[:-1], class_bounds[1:], class_counts):
        longer = np.flatnonzero(piece_lengths >= class_end)
        if class_count >= LEAST or class_end <= class_begin or not longer.size:
            continue
        some = random.choice(longer, LEAST - class_count)
        cut_lengths = random.integers(class_begin, class_end, len(some))
        cut_offset = (random.random(len(some)) * (piece_lengths[some] - cut_lengths)).astype(np.int64)
        begin, piece_sizes = np.append(begin, pieces[some] + cut_offset), np.append(piece_sizes, cut_lengths)
        owner = np.append(owner, some)
    ordinary_edges = np.append(0, np.cumsum(piece_sizes))
    token_places = np.arange(int(ordinary_edges[-1])) + np.repeat(begin - ordinary_edges[:-1], piece_sizes)
    return ids[token_places], ordinary_edges, owner


Span = tuple[int, int]

# The score at which a half overrides its piece, by kind. Sound pieces have a half with a score of 3 two or three times
# as often as they have that score themselves. Nearly all of these halves are only unusual, or repetitive like tables:
# ordinary ones reach 4.6 in the standard library's source and 5.4 in C headers.
COUNTS = {"another language or register": np.inf, "odd": np.inf, "repetition": 6.0}
COUNTS_FROM = np.array([COUNTS.get(kind, ODD) for kind in KINDS])

WINDOW, STRIDE = 64, 16  # tokens: to locate odd spans in a document
AT_ONCE = 4096  # windows measured at a time
SHORTEST = 64  # tokens: shorter pieces are not halved


@dataclass(frozen=True)
class JudgedPieces:
    """Judgement of k pieces. features: name -> float32 [k], of the whole pieces; worst: of the worst part of each,
    which is tokens [first, first + tokens), int64 [k] both; value: float32 [k], its feature's value there."""

    features: Features
    worst: Judgement
    value: Floats
    first: Int64s
    tokens: Int64s


def judge_pieces(yardstick: Yardstick, tokens: Raw, edges: Int64s, keys: Keys) -> JudgedPieces:
    """Measure and judge pieces, the odd ones also by their halves; arguments as for `Yardstick.measure_features`.

    Damage as long as a piece, wherever it begins, fills one of the halves that it touches. So neither its score nor
    its kind depends on the cuts between pieces, for kinds that a half can show (COUNTS).
    """
    piece_features = yardstick.measure_features(tokens, edges, keys)
    whole = yardstick.judge_features(piece_features)
    piece_lengths = np.diff(edges)
    score, worst_feature, kind = whole.score.copy(), whole.feature.copy(), whole.kind.copy()
    value = _at(piece_features, worst_feature)
    worst_first, count = edges[:-1].copy(), piece_lengths.copy()
    odd = np.flatnonzero((score >= ODD) & (piece_lengths >= SHORTEST))
    if odd.size:
        half_edges = np.stack([edges[odd], (edges[odd] + edges[odd + 1]) // 2, edges[odd + 1]], axis=1)
        place = np.concatenate([np.arange(a, range_end) for a, range_end in half_edges[:, [0, 2]].tolist()])
        half_sizes = np.diff(half_edges, axis=1).ravel()
        inner_edges, half_keys = np.append(0, np.cumsum(half_sizes)), np.repeat(keys[odd], 2)
        half_features = yardstick.measure_features(tokens[place], inner_edges, half_keys)
        parts = yardstick.judge_features(half_features)
        counting_scores = np.where(parts.score >= COUNTS_FROM[parts.kind], parts.score, 0)
        worse = 2 * np.arange(odd.size) + (counting_scores[1::2] > counting_scores[::2])
        is_better = counting_scores[worse] > score[odd]
        at, worse = odd[is_better], worse[is_better]
        score[at], worst_feature[at], kind[at] = parts.score[worse], parts.feature[worse], parts.kind[worse]
        value[at] = _at(half_features, parts.feature)[worse]
        worst_first[at], count[at] = half_edges[:, :2].ravel()[worse], half_sizes[worse]
    return JudgedPieces(piece_features, Judgement(score, worst_feature, kind), value, worst_first, count)


def find_odd_spans(yardstick: Yardstick, tokens: Raw, key: int, least: float) -> list[Span]:
    """Where a document [n] has a score of at least `least`, with its key as for `Yardstick.measure_features`: [first,
    end) of its tokens, ascending; at least around the worst window.

    Windows of WINDOW tokens begin every STRIDE. A window across the edge of damage is half sound, and its score about
    half as high: a token is odd if most of the windows that hold it have half of `least`, and a nearby one all of it.
    A stretch shorter than a window between two odd spans, or at an end, cannot be distinguished and counts as odd.
    """
    count = len(tokens)
    window_firsts = np.unique(np.append(np.arange(0, max(count - WINDOW, 0), STRIDE), max(count - WINDOW, 0)))
    window_ends = np.minimum(window_firsts + WINDOW, count)
    window_scores = np.empty(window_firsts.size, np.float32)
    for window_batch in np.split(np.arange(window_firsts.size), range(AT_ONCE, window_firsts.size, AT_ONCE)):
        place = np.concatenate([np.arange(window_firsts[n], window_ends[n]) for n in window_batch])
        batch_edges = np.append(0, np.cumsum(window_ends[window_batch] - window_firsts[window_batch]))
        window_keys = np.full(window_batch.size, key, np.uint64)
        window_features = yardstick.measure_features(tokens[place], batch_edges, window_keys)
        window_scores[window_batch] = yardstick.judge_features(window_features).score
    is_sure = window_scores >= min(least, float(window_scores.max()))
    odd = is_sure | (window_scores >= max(least / 2, ODD))
    vote_changes = np.zeros((3, count + 1), np.int64)
    for vote_row, windows in enumerate((odd, ~odd, is_sure)):
        np.add.at(vote_changes[vote_row], window_firsts[windows], 1)
        np.add.at(vote_changes[vote_row], window_ends[windows], -1)
    vote_counts = vote_changes.cumsum(axis=1)[:, :-1]
    is_inside = np.append(False, np.append(vote_counts[0] > vote_counts[1], False))
    batch_edges = np.flatnonzero(is_inside[1:] != is_inside[:-1])
    odd_ranges = [(a, b) for a, b in batch_edges.reshape(-1, 2).tolist() if vote_counts[2, a:b].any()]
    if not odd_ranges:  # the worst window is outvoted everywhere
        worst_window = int(window_scores.argmax())
        odd_ranges = [(int(window_firsts[worst_window]), int(window_ends[worst_window]))]
    spans = list[Span]()
    for first, end in odd_ranges:
        begin = spans.pop()[0] if spans and first - spans[-1][1] < WINDOW else 0 if first < WINDOW else first
        spans.append((begin, count if count - end < WINDOW else end))
    return spans


def _at(features: Features, chosen: npt.NDArray[np.int16]) -> Floats:
    """For each piece [k] the value of its chosen feature."""
    feature_table = np.stack([features[feature_name] for feature_name in NAMES])
    return np.asarray(feature_table[chosen, np.arange(chosen.size)])
