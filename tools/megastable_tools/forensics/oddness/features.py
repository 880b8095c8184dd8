"""Features of a piece of a document that distinguish text from noise, in one pass of vectorised sums.

Order is measured within the piece: how much likelier its neighbours are together than its tokens far apart. Shuffled
tokens have no such gain, on any topic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from megastable_tools.forensics.oddness.lexicon import LONGEST_PIECE, Lexicon, unpack
from megastable_tools.forensics.oddness.tables import (
    BONUS,
    BUCKETS,
    Ids,
    Int64s,
    Keys,
    Tables,
    bucket,
    halves,
)

Floats = npt.NDArray[np.float32]
Features = dict[str, Floats]

MIXER = np.uint64(0x9E3779B97F4A7C15)
GRAM = 5  # tokens: a repeated run of this length is rarely chance
LONGEST_PERIOD = 64  # tokens
LOOPED = 0.3  # minimum share of a loop's n-grams that are repeats
FAR = 0.381966  # of a piece: distance at which two tokens are unrelated


@dataclass(frozen=True)
class Feature:
    """One number per piece. side: which values are odd, "high" or "low"; "" for a feature that only describes
    a piece. grain: smaller differences are insignificant. judged: whether it makes a score; for the others an odd
    value is not damage (a table of digits is unusual, but sound). scale: what is compared, the value itself, log2 of
    1 + value ("octaves"), or how often the distance to 1 has halved ("halvings")."""

    name: str
    side: str
    grain: float
    text: str  # what it is, for people; {} is its value
    share: bool = False
    judged: bool = True
    scale: Literal["plain", "octaves", "halvings"] = "plain"

    def oddness(self, values: Floats) -> Floats:
        """The values on the scale of comparison; greater is odder."""
        values = np.asarray(values, dtype=np.float32)
        if self.scale == "octaves":
            values = np.log2(values + 1)
        elif self.scale == "halvings":
            values = -np.log2(np.maximum(1 - values, np.float32(1 / LONGEST_PIECE)))
        return -values if self.side == "low" else values

    def shown(self, value: float) -> str:
        """A value of it, for people."""
        if self.share:
            return f"{100 * value:.{0 if value > 0.1 else 1 if value > 0.001 or value == 0 else 2}f} %"
        return f"{value:.0f}" if self.scale == "octaves" else f"{value:.2f}"


FEATURES: tuple[Feature, ...] = (
    Feature("unlikely", "high", 0.1, "each token, after the one before it, has {} nats of surprise"),
    Feature(
        "surprise",
        "high",
        0.1,
        "its tokens, whatever their order, have {} nats of surprise each",
        judged=False,
    ),
    Feature("order", "low", 0.1, "a token tells {} nats of the next one"),
    Feature(
        "gain",
        "low",
        0.1,
        "neighbours tell {} nats more of each other than tokens that are far apart",
        judged=False,
    ),
    Feature(
        "repeats", "high", 0.2, f"{{}} of its {GRAM}-grams came before in it", share=True, scale="halvings"
    ),
    Feature(
        "period",
        "high",
        0.5,
        "{} of its tokens come again after the same distance",
        share=True,
        scale="halvings",
    ),
    Feature("pairs", "", 0.02, "{} of its pairs of tokens came before in it", share=True),
    Feature("entropy", "", 0.02, "its tokens have {} of the entropy that so many could have", share=True),
    Feature("top", "", 0.01, "one token makes up {} of it", share=True),
    Feature("run", "high", 1.0, "one token comes {} times in a row", scale="octaves"),
    Feature("bytes", "", 0.05, "a token has {} bytes"),
    Feature("letters", "", 0.01, "{} of its characters are letters", share=True),
    Feature("digits", "", 0.01, "{} of its characters are digits", share=True),
    Feature("spaces", "", 0.01, "{} of its characters are spaces", share=True),
    Feature("capitals", "", 0.01, "{} of its characters are capitals", share=True),
    Feature("foreign", "high", 0.15, "{} of its characters are not ASCII", share=True, scale="halvings"),
    Feature(
        "unbroken",
        "high",
        0.3,
        "a space, or a character that is not ASCII, comes every {} characters",
        scale="octaves",
    ),
    Feature("controls", "high", 0.002, "{} of its characters are control characters", share=True),
    Feature("nulls", "high", 0.002, "{} of its characters are NUL", share=True),
    Feature(
        "replacements",
        "high",
        0.002,
        "{} of its characters are U+FFFD, put in place of broken ones",
        share=True,
    ),
    Feature(
        "latin1",
        "high",
        0.005,
        "{} of its characters are such as a wrong decoding leaves (Ã, U+0080-U+00BF)",
        share=True,
    ),
    Feature("fallbacks", "high", 0.15, "{} of its tokens are single bytes", share=True, scale="halvings"),
    Feature("unknowns", "high", 0.004, "{} of its tokens are the unknown one", share=True),
    Feature("specials", "high", 0.004, "{} of its tokens are special ones", share=True),
    Feature("ends", "high", 0.004, "{} of its tokens end a document, inside of it", share=True),
    Feature("outside", "high", 0.0005, "{} of its ids are outside of the vocabulary", share=True),
)
NAMES = tuple(feature.name for feature in FEATURES)


def inside(tokens: npt.NDArray[np.integer], vocab_size: int) -> Ids:
    """Ids [n] as unsigned integers, with `vocab_size` for any id outside 0..vocab_size-1. Copies only if needed."""
    unsigned = tokens.view(f"u{tokens.dtype.itemsize}")  # a negative id is a huge one
    if unsigned.dtype.itemsize == 8:
        return np.minimum(unsigned, np.uint64(vocab_size)).astype(np.uint32)
    if vocab_size > np.iinfo(unsigned.dtype).max:
        return unsigned
    return np.minimum(unsigned, unsigned.dtype.type(vocab_size))


def measure(ids: Ids, edges: Int64s, keys: Keys, lexicon: Lexicon, tables: Tables) -> Features:
    """The features of pieces: each float32 [k]. ids: [n], of `inside`; edges: int64 [k + 1], from 0 to n, ascending,
    no piece longer than LONGEST_PIECE; keys: uint64 [k], of the documents.

    An empty piece has 0 everywhere. Raises ValueError for a longer piece.
    """
    lengths = np.diff(edges)
    if lengths.size and (int(lengths.max()) > LONGEST_PIECE or int(lengths.min()) < 0):
        raise ValueError(f"a piece of {int(lengths.max())} tokens: {LONGEST_PIECE} at most")
    full = np.flatnonzero(lengths)
    found = {name: np.zeros(len(lengths), dtype=np.float32) for name in NAMES}
    if full.size:
        starts, n = edges[:-1][full], lengths[full]
        some = _order(ids, starts, n, halves(keys[full]), tables)
        some |= _repetition(ids, starts, n, lexicon.vocab_size)
        some |= _characters(ids, starts, n, lexicon)
        for name, values in some.items():
            found[name][full] = values
    return found


def _order(ids: Ids, starts: Int64s, n: Int64s, half: npt.NDArray[np.uint32], tables: Tables) -> Features:
    """Surprise, order and gain: means in nats per token, by the tables of the other half."""
    width = tables.rarity.shape[1]
    of_token = np.repeat(half, n)
    at = ids + of_token * np.uint32(width)
    surprise = np.add.reduceat(tables.rarity.ravel().take(at), starts) / n
    start = tables.start.ravel().take(at)
    row = of_token << np.uint32(BUCKETS)
    last = starts + n - 1
    pairs = np.maximum(n - 1, 1).astype(np.float32)

    def together(partner: Ids) -> Floats:
        both = tables.bonus.ravel().take(bucket(ids, partner) | row)
        both[last] = 0
        return np.add.reduceat(both, starts, dtype=np.uint32).astype(np.float32) / (BONUS * pairs)

    base = (np.add.reduceat(start, starts) - start[last]) / pairs
    near = together(np.append(ids[1:], ids[-1:])) + base
    # The distant partner in the same piece wraps around its end.
    far = np.maximum((n * FAR).astype(np.int64), 1)
    place = np.arange(len(ids), dtype=np.int32) + np.repeat(far.astype(np.int32), n)
    over = place >= np.repeat((starts + n).astype(np.int32), n)
    place -= over * np.repeat(n.astype(np.int32), n)
    gain = near - together(ids.take(place)) - base
    return {
        "unlikely": surprise - near,
        "surprise": surprise,
        "order": near,
        "gain": np.where(n > 3, gain, near),
    }


def _repetition(ids: Ids, starts: Int64s, n: Int64s, vocab_size: int) -> Features:
    """Entropy, top, run, repeats, pairs, period."""
    size = len(ids)
    piece = np.repeat(np.arange(len(n), dtype=np.uint64), n)
    # Runs of the sorted (piece, id) are the counts of each token in its piece.
    bits = np.uint64(int(vocab_size).bit_length())
    order = np.sort((piece << bits) | ids)
    first = np.flatnonzero(np.append(True, order[1:] != order[:-1]))
    counts = np.diff(np.append(first, size)).astype(np.float32)
    of = np.searchsorted(first, starts)
    told = np.add.reduceat(counts * np.log(counts), of)
    entropy = np.log(n) - told / n
    top = np.maximum.reduceat(counts, of) / n
    # Runs of equal neighbours; a piece begins one.
    changes = np.append(True, ids[1:] != ids[:-1])
    changes[starts] = True
    begins = np.flatnonzero(changes)
    run = np.maximum.reduceat(np.diff(np.append(begins, size)), np.searchsorted(begins, starts))
    found = {
        "entropy": np.where(n > 1, entropy / np.log(np.maximum(n, 2)), 1),
        "top": top,
        "run": run.astype(np.float32),
    }
    for name, length in (("pairs", 2), ("repeats", GRAM)):
        again = _again(ids, piece, starts, n, length)
        found[name] = np.add.reduceat(again, starts, dtype=np.int32) / np.maximum(n - length + 1, 1)
    found["period"] = _period(ids, starts, n, found["repeats"])
    return {name: values.astype(np.float32) for name, values in found.items()}


def _again(
    ids: Ids, piece: npt.NDArray[np.uint64], starts: Int64s, n: Int64s, length: int
) -> npt.NDArray[np.bool_]:
    """As many True in each piece as it has repeated n-grams: bool [n], in no order within a piece.

    n-grams are hashed to 32 bits: in a piece of 1,024 tokens two different ones collide once in 8,000 pieces.
    """
    mixed = ids.astype(np.uint64)
    for ahead in range(1, length):
        mixed *= MIXER
        mixed[:-ahead] += ids[ahead:]
    for back in range(1, length):
        # An n-gram that reaches into the next piece gets a unique value.
        place = (starts + n - back)[n >= back].astype(np.uint64)
        mixed[place] = place ^ np.uint64(0xD1B54A32D192ED03)
    mixed *= MIXER
    mixed >>= np.uint64(32)
    mixed |= piece << np.uint64(32)
    mixed.sort()
    again = np.empty(len(mixed), dtype=bool)
    again[0] = False
    np.equal(mixed[1:], mixed[:-1], out=again[1:])
    return again


def _period(ids: Ids, starts: Int64s, n: Int64s, repeats: Floats) -> Floats:
    """The largest share of tokens that equal the one p before them, p up to LONGEST_PERIOD and half of the piece; 0 for
    pieces with few repeats, which saves most of the work."""
    found = np.zeros(len(n), dtype=np.float32)
    some = np.flatnonzero(repeats > LOOPED)
    if not some.size:
        return found
    size = n[some]
    ends = np.cumsum(size)
    begins = ends - size
    place = np.arange(int(ends[-1])) - np.repeat(begins, size)
    these = ids.take(place + np.repeat(starts[some], size))
    for period in range(1, LONGEST_PERIOD + 1):
        same = np.zeros(len(these), dtype=bool)
        np.equal(these[period:], these[:-period], out=same[period:])
        same &= place >= period
        share = np.add.reduceat(same, begins, dtype=np.int32) / np.maximum(size - period, 1)
        found[some] = np.maximum(found[some], np.where(size >= 2 * period, share, 0))
    return found


def _characters(ids: Ids, starts: Int64s, n: Int64s, lexicon: Lexicon) -> Features:
    """Shares of characters and tokens of each sort."""
    sums = np.stack([np.add.reduceat(word.take(ids), starts) for word in lexicon.words])
    counts = unpack(sums)
    if lexicon.byte.any():
        _spelled(counts, lexicon.byte.take(ids), starts)
    ended = lexicon.words[1].take(ids[starts + n - 1]) >> np.uint64(48)
    counts["ends"] -= ended.astype(np.int64)
    characters = np.maximum(counts["characters"], 1)
    per_character = "letters digits spaces capitals foreign controls nulls replacements latin1".split()
    found = {name: counts[name] / characters for name in per_character}
    found["unbroken"] = counts["characters"] / (counts["spaces"] + counts["foreign"] + 1)
    found["bytes"] = counts["bytes"] / n
    found |= {name: counts[name] / n for name in ("fallbacks", "unknowns", "specials", "ends", "outside")}
    return {name: np.minimum(values, 1e6).astype(np.float32) for name, values in found.items()}


def _spelled(counts: dict[str, Int64s], byte: npt.NDArray[np.uint8], starts: Int64s) -> None:
    """Count the characters that several tokens of a byte each spell: U+FFFD, and U+0080 to U+00BF."""
    next_byte = np.append(byte[1:], np.uint8(0))
    latin1 = (byte == 0xC2) & (next_byte & 0xC0 == 0x80)
    replacement = (
        (byte == 0xEF)
        & (next_byte == 0xBF)
        & (np.append(byte[2:], np.zeros(2, np.uint8))[: len(byte)] == 0xBD)
    )
    for name, found in (("latin1", latin1), ("replacements", replacement)):
        if found.any():
            counts[name] += np.add.reduceat(found, starts, dtype=np.int64)
