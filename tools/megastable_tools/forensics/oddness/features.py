"""Features of a piece of a document that distinguish text from noise, in one pass of vectorised sums.

Order is measured within the piece: how much likelier its neighbours are together than its tokens far apart. Shuffled
tokens have no such gain, on any topic. The frequencies of tokens and token pairs in a corpus are in two halves, and a
document is measured with the other half: otherwise every document would be usual by its own counts, a repeated one most
of all. A bit of a document's key assigns it to a half.

What tokens are (bytes, letters, digits, controls and so on) is in tables of their vocabulary, for a scan to add up.
Counts per token are packed four to a 64-bit word, so that one gather and one sum per word give them for a whole piece:
a piece has at most 1,024 tokens, and a token counts at most 63 of anything, so that no field overflows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from megastable.data.tokenizer import SPACE, HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer

LONGEST_PIECE = 1024  # tokens; more would overflow the fields of a word
MOST = 63  # maximum count per token
FIELD = 16  # bits

# The four fields of each word. Bytes and characters are of the text, the others count characters unless said.
WORDS: tuple[tuple[str, ...], ...] = (
    ("bytes", "characters", "letters", "digits"),
    ("spaces", "capitals", "foreign", "ends"),  # foreign: not ASCII
    ("controls", "nulls", "replacements", "latin1"),
    ("fallbacks", "unknowns", "specials", "outside"),  # of tokens
)
COUNTED = tuple(name for word in WORDS for name in word)
_CONTROLS = re.compile(r"[\x01-\x08\x0b\x0e-\x1f\x7f]")  # without NUL, and without what lays out text
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Where Windows-1252 has a character in place of a control, without those that good typography uses.
_MOJIBAKE = frozenset("ƒ†‡ˆ‰Š‹ŒŽ˜š›œžŸ") | {chr(c) for c in range(0x80, 0xC0)} | {"Ã", "Â"}

Words = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Lexicon:
    """Tables by token id, each with one entry more than the vocabulary: the last is any id outside of it.

    words: uint64 [len(WORDS), vocab_size + 1], see WORDS; byte: uint8 [vocab_size + 1], the byte that a token
    spells on its own (byte fallback), 0 for other tokens. known: whether the tokens' texts were available.
    """

    vocab_size: int
    words: Words
    byte: npt.NDArray[np.uint8]
    known: bool

    @classmethod
    def of_tokenizer(cls, tokenizer: Tokenizer | None, vocab_size: int, eod: int | None = None) -> Lexicon:
        """The tables for a vocabulary of `vocab_size`; without a tokenizer only ids and ends are counted.

        Ids that the tokenizer lacks (padding of the vocabulary) count as specials. eod: the tokenizer's if None.
        """
        counts_by_name = {count_name: np.zeros(vocab_size + 1, dtype=np.uint64) for count_name in COUNTED}
        byte_table = np.zeros(vocab_size + 1, dtype=np.uint8)
        counts_by_name["outside"][vocab_size] = 1
        if tokenizer is not None:
            eod = tokenizer.eod if eod is None else eod
            counts_by_name["specials"][:vocab_size] = 1
            for token, (token_bytes, token_sort) in enumerate(_pieces(tokenizer)):
                if token >= vocab_size:
                    break
                counts_by_name["specials"][token] = token_sort == "special"
                counts_by_name["unknowns"][token] = token_sort == "unknown"
                counts_by_name["fallbacks"][token] = token_sort == "byte"
                if token_sort == "byte" and len(token_bytes) == 1:
                    byte_table[token] = token_bytes[0]
                for count_name, token_count in _look(token_bytes).items():
                    counts_by_name[count_name][token] = min(token_count, MOST)
        if eod is not None and 0 <= eod < vocab_size:
            for count_name in COUNTED:
                counts_by_name[count_name][eod] = count_name == "ends"
        word_table = np.zeros((len(WORDS), vocab_size + 1), dtype=np.uint64)
        for word_number, field_names in enumerate(WORDS):
            for field_place, count_name in enumerate(field_names):
                word_table[word_number] |= counts_by_name[count_name] << np.uint64(FIELD * field_place)
        return cls(vocab_size, word_table, byte_table, tokenizer is not None)

    def counts_of(self, name: str) -> npt.NDArray[np.int64]:
        """How much of `name` (one of COUNTED) each token counts: int64 [vocab_size + 1]."""
        return unpack_words(self.words)[name]


def unpack_words(words: Words) -> dict[str, npt.NDArray[np.int64]]:
    """The counts in words uint64 [len(WORDS), n], or in sums of at most LONGEST_PIECE of them: name -> int64 [n]."""
    field_mask = np.uint64((1 << FIELD) - 1)
    return {
        name: ((words[word_number] >> np.uint64(FIELD * field_place)) & field_mask).astype(np.int64)
        for word_number, field_names in enumerate(WORDS)
        for field_place, name in enumerate(field_names)
    }


def _look(content: bytes) -> dict[str, int]:
    """The counts of a token's bytes, which may be only a part of a character."""
    text = content.decode("utf-8", "ignore")
    # A continuation byte (10xxxxxx) begins no character.
    character_beginnings = [first_byte for first_byte in content if first_byte & 0xC0 != 0x80]
    return {
        "bytes": len(content),
        "characters": len(character_beginnings),
        "letters": sum(map(str.isalpha, text)),
        "digits": sum(map(str.isdigit, text)),
        "spaces": sum(map(str.isspace, text)),
        "capitals": sum(map(str.isupper, text)),
        "foreign": sum(first_byte >= 0x80 for first_byte in character_beginnings),
        "controls": len(_CONTROLS.findall(text)),
        "nulls": text.count("\0"),
        "replacements": text.count("\ufffd"),
        "latin1": sum(character in _MOJIBAKE for character in text),
    }


def _pieces(tokenizer: Tokenizer) -> Iterator[tuple[bytes, str]]:
    """The bytes of each token and its sort: "text", "byte", "unknown" or "special"."""
    if isinstance(tokenizer, SentencePieceTokenizer):
        yield from _sentencepiece(tokenizer)
    elif isinstance(tokenizer, HuggingFaceTokenizer):
        yield from _huggingface(tokenizer)
    else:
        for token in range(tokenizer.vocab_size):
            yield tokenizer.decode([token]).encode(), "text"


def _sentencepiece(tokenizer: SentencePieceTokenizer) -> Iterator[tuple[bytes, str]]:
    piece_model = tokenizer.model
    for token in range(tokenizer.vocab_size):
        token_piece = str(piece_model.id_to_piece(token))
        if piece_model.is_unknown(token):
            yield b"", "unknown"
        elif piece_model.is_control(token) or piece_model.is_unused(token):
            yield b"", "special"
        elif piece_model.is_byte(token):
            yield bytes.fromhex(token_piece[3:5]), "byte"
        else:
            yield token_piece.replace(SPACE, " ").encode(), "text"


def _huggingface(tokenizer: HuggingFaceTokenizer) -> Iterator[tuple[bytes, str]]:
    described: dict[str, Any] = json.loads(tokenizer.content)
    added_tokens = described.get("added_tokens") or []
    special_ids = {added_token["id"] for added_token in added_tokens if added_token.get("special")}
    unknown = (described.get("model") or {}).get("unk_token")
    # A byte-level vocabulary writes each byte as one printable character.
    by_bytes = '"ByteLevel"' in json.dumps([described.get("decoder"), described.get("pre_tokenizer")])
    byte_alphabet = _byte_alphabet()
    for token in range(tokenizer.vocab_size):
        token_piece = tokenizer.model.id_to_token(token)
        if token_piece is not None and token_piece == unknown:
            yield b"", "unknown"
        elif token_piece is None or token in special_ids:
            yield b"", "special"
        elif by_bytes and all(character in byte_alphabet for character in token_piece):
            piece_bytes = bytes(byte_alphabet[character] for character in token_piece)
            is_whole = piece_bytes.decode("utf-8", "ignore").encode() == piece_bytes
            yield piece_bytes, "text" if is_whole else "byte"
        elif spelled_byte := _BYTE.fullmatch(token_piece):
            yield bytes.fromhex(spelled_byte[1]), "byte"
        else:
            yield token_piece.replace(SPACE, " ").encode("utf-8", "ignore"), "text"


def _byte_alphabet() -> dict[str, int]:
    """The character of each byte in a byte-level vocabulary (GPT-2): printable ones stand for themselves."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other_bytes = [byte for byte in range(256) if byte not in plain]
    plain_alphabet = {chr(byte): byte for byte in plain}
    return plain_alphabet | {chr(code): byte for code, byte in enumerate(other_bytes, 256)}


BUCKETS = 22  # bits: pairs are hashed to 4 M buckets
BONUS = 16  # steps per nat of a bucket's entry
KEEN = 200.0  # weight of the prior in pairs: p(b|a) = (count(a,b) + KEEN p(b)) / (count(a) + KEEN)
HALF = 0.5  # count of a token that never occurred

Ids = npt.NDArray[np.integer]
Int64s = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Tables:
    """rarity: float32 [2, V + 1], -log p(token) in nats; start: float32 [2, V + 1] and bonus: uint8 [2, buckets].

    log p(b|a) / p(b) is start[a] + bonus[bucket(a, b)] / BONUS. The first axis: the half of the documents
    that are measured with it, made of the other half.
    """

    rarity: npt.NDArray[np.float32]
    start: npt.NDArray[np.float32]
    bonus: npt.NDArray[np.uint8]

    @classmethod
    def learn_tables(cls, ids: Ids, edges: Int64s, keys: Keys, width: int) -> Tables:
        """Tables of the documents `edges` int64 [d + 1] of `ids` (0 <= id < width), with their keys uint64 [d]."""
        rarity = np.empty((2, width), dtype=np.float32)
        start_weight = np.empty((2, width), dtype=np.float32)
        bonus = np.zeros((2, 1 << BUCKETS), dtype=np.uint8)
        half_of_token = np.repeat(halves_of(keys), np.diff(edges))
        inside_document = np.ones(max(len(ids) - 1, 0), dtype=bool)
        inside_document[edges[1:-1][(edges[1:-1] > 0) & (edges[1:-1] < len(ids))] - 1] = False
        for table_half in (0, 1):
            of_other = half_of_token != table_half
            counts = np.bincount(ids[of_other], minlength=width)
            id_probability = (counts + HALF) / (counts.sum() + HALF * width)
            rarity[table_half] = -np.log(id_probability)
            pair_starts = np.flatnonzero(of_other[:-1] & inside_document)
            first_ids, second_ids = ids[:-1][pair_starts], ids[1:][pair_starts]
            rarities = 1 / id_probability[second_ids]
            bucket_weights = np.bincount(pair_buckets(first_ids, second_ids), rarities, 1 << BUCKETS)
            seen = np.flatnonzero(bucket_weights)  # most are zero, and a logarithm of all of them is slow
            bonus[table_half, seen] = np.minimum(np.rint(np.log1p(bucket_weights[seen] / KEEN) * BONUS), 255)
            start_weight[table_half] = np.log(KEEN / (np.bincount(first_ids, minlength=width) + KEEN))
        return cls(rarity, start_weight, bonus)


def halves_of(keys: Keys) -> npt.NDArray[np.uint32]:
    """The half, 0 or 1, of the documents with these keys: the row of the tables to measure them with."""
    return ((keys * MIXER) >> np.uint64(63)).astype(np.uint32)


def pair_buckets(a: Ids, b: Ids) -> npt.NDArray[np.uint32]:
    """The bucket of each pair: uint32 [n], below 2^BUCKETS."""
    mixed_pairs = a.astype(np.uint32) * np.uint32(0x9E3779B1)
    mixed_pairs += b.astype(np.uint32) * np.uint32(0x85EBCA77)
    mixed_pairs ^= mixed_pairs >> np.uint32(15)
    mixed_pairs *= np.uint32(0x2C1B3C6D)
    return np.asarray(mixed_pairs >> np.uint32(32 - BUCKETS), dtype=np.uint32)


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

    def scale_oddness(self, values: Floats) -> Floats:
        """The values on the scale of comparison; greater is odder."""
        values = np.asarray(values, dtype=np.float32)
        if self.scale == "octaves":
            values = np.log2(values + 1)
        elif self.scale == "halvings":
            values = -np.log2(np.maximum(1 - values, np.float32(1 / LONGEST_PIECE)))
        return -values if self.side == "low" else values

    def format_value(self, value: float) -> str:
        """A value of it, for people."""
        if self.share:
            return f"{100 * value:.{0 if value > 0.1 else 1 if value > 0.001 or value == 0 else 2}f} %"
        return f"{value:.0f}" if self.scale == "octaves" else f"{value:.2f}"


FEATURES: tuple[Feature, ...] = (
    Feature("unlikely", "high", 0.1, "each token, after the one before it, has {} nats of surprise"),
    Feature("surprise", "high", 0.1,
            "its tokens, whatever their order, have {} nats of surprise each", judged=False),
    Feature("order", "low", 0.1, "a token tells {} nats of the next one"),
    Feature("gain", "low", 0.1,
            "neighbours tell {} nats more of each other than tokens that are far apart", judged=False),
    Feature("repeats", "high", 0.2,
            f"{{}} of its {GRAM}-grams came before in it", share=True, scale="halvings"),
    Feature("period", "high", 0.5,
            "{} of its tokens come again after the same distance", share=True, scale="halvings"),
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
    Feature("unbroken", "high", 0.3,
            "a space, or a character that is not ASCII, comes every {} characters", scale="octaves"),
    Feature("controls", "high", 0.002, "{} of its characters are control characters", share=True),
    Feature("nulls", "high", 0.002, "{} of its characters are NUL", share=True),
    Feature("replacements", "high", 0.002,
            "{} of its characters are U+FFFD, put in place of broken ones", share=True),
    Feature("latin1", "high", 0.005,
            "{} of its characters are such as a wrong decoding leaves (Ã, U+0080-U+00BF)", share=True),
    Feature("fallbacks", "high", 0.15, "{} of its tokens are single bytes", share=True, scale="halvings"),
    Feature("unknowns", "high", 0.004, "{} of its tokens are the unknown one", share=True),
    Feature("specials", "high", 0.004, "{} of its tokens are special ones", share=True),
    Feature("ends", "high", 0.004, "{} of its tokens end a document, inside of it", share=True),
    Feature("outside", "high", 0.0005, "{} of its ids are outside of the vocabulary", share=True),
)  # fmt: skip
NAMES = tuple(feature.name for feature in FEATURES)


def clip_ids(tokens: npt.NDArray[np.integer], vocab_size: int) -> Ids:
    """Ids [n] as unsigned integers, with `vocab_size` for any id outside 0..vocab_size-1. Copies only if needed."""
    unsigned_ids = tokens.view(f"u{tokens.dtype.itemsize}")  # a negative id is a huge one
    if unsigned_ids.dtype.itemsize == 8:
        return np.minimum(unsigned_ids, np.uint64(vocab_size)).astype(np.uint32)
    if vocab_size > np.iinfo(unsigned_ids.dtype).max:
        return unsigned_ids
    return np.minimum(unsigned_ids, unsigned_ids.dtype.type(vocab_size))


def measure_pieces(ids: Ids, edges: Int64s, keys: Keys, lexicon: Lexicon, tables: Tables) -> Features:
    """The features of pieces: each float32 [k]. ids: [n], of `clip_ids`; edges: int64 [k + 1], from 0 to n, ascending,
    no piece longer than LONGEST_PIECE; keys: uint64 [k], of the documents.

    An empty piece has 0 everywhere. Raises ValueError for a longer piece.
    """
    piece_lengths = np.diff(edges)
    if piece_lengths.size and (int(piece_lengths.max()) > LONGEST_PIECE or int(piece_lengths.min()) < 0):
        raise ValueError(f"a piece of {int(piece_lengths.max())} tokens: {LONGEST_PIECE} at most")
    nonempty_pieces = np.flatnonzero(piece_lengths)
    feature_values = {feature_name: np.zeros(len(piece_lengths), dtype=np.float32) for feature_name in NAMES}
    if nonempty_pieces.size:
        piece_starts, token_counts = edges[:-1][nonempty_pieces], piece_lengths[nonempty_pieces]
        measured_features = _order(ids, piece_starts, token_counts, halves_of(keys[nonempty_pieces]), tables)
        measured_features |= _repetition(ids, piece_starts, token_counts, lexicon.vocab_size)
        measured_features |= _characters(ids, piece_starts, token_counts, lexicon)
        for feature_name, values in measured_features.items():
            feature_values[feature_name][nonempty_pieces] = values
    return feature_values


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
        pair_bonus = tables.bonus.ravel().take(pair_buckets(ids, partner) | row)
        pair_bonus[last] = 0
        return np.add.reduceat(pair_bonus, starts, dtype=np.uint32).astype(np.float32) / (BONUS * pairs)

    base = (np.add.reduceat(start, starts) - start[last]) / pairs
    near = together(np.append(ids[1:], ids[-1:])) + base
    # The distant partner in the same piece wraps around its end.
    far = np.maximum((n * FAR).astype(np.int64), 1)
    place = np.arange(len(ids), dtype=np.int32) + np.repeat(far.astype(np.int32), n)
    over = place >= np.repeat((starts + n).astype(np.int32), n)
    place -= over * np.repeat(n.astype(np.int32), n)
    gain = near - together(ids.take(place)) - base
    gain = np.where(n > 3, gain, near)
    return {"unlikely": surprise - near, "surprise": surprise, "order": near, "gain": gain}


def _repetition(ids: Ids, starts: Int64s, n: Int64s, vocab_size: int) -> Features:
    """Entropy, top, run, repeats, pairs, period."""
    size = len(ids)
    piece_number = np.repeat(np.arange(len(n), dtype=np.uint64), n)
    # Runs of the sorted (piece, id) are the counts of each token in its piece.
    id_bits = np.uint64(int(vocab_size).bit_length())
    sorted_ids = np.sort((piece_number << id_bits) | ids)
    first_of_id = np.flatnonzero(np.append(True, sorted_ids[1:] != sorted_ids[:-1]))
    id_counts = np.diff(np.append(first_of_id, size)).astype(np.float32)
    count_index = np.searchsorted(first_of_id, starts)
    count_entropy = np.add.reduceat(id_counts * np.log(id_counts), count_index)
    entropy = np.log(n) - count_entropy / n
    top_share = np.maximum.reduceat(id_counts, count_index) / n
    # Runs of equal neighbours; a piece begins one.
    run_changes = np.append(True, ids[1:] != ids[:-1])
    run_changes[starts] = True
    run_starts = np.flatnonzero(run_changes)
    run = np.maximum.reduceat(np.diff(np.append(run_starts, size)), np.searchsorted(run_starts, starts))
    entropy_share = np.where(n > 1, entropy / np.log(np.maximum(n, 2)), 1)
    repetition_features = {"entropy": entropy_share, "top": top_share, "run": run.astype(np.float32)}
    for name, gram_length in (("pairs", 2), ("repeats", GRAM)):
        is_repeat = _again(ids, piece_number, starts, n, gram_length)
        repeat_counts = np.add.reduceat(is_repeat, starts, dtype=np.int32)
        repetition_features[name] = repeat_counts / np.maximum(n - gram_length + 1, 1)
    repetition_features["period"] = _period(ids, starts, n, repetition_features["repeats"])
    return {name: feature_values.astype(np.float32) for name, feature_values in repetition_features.items()}


def _again(
    ids: Ids, piece: npt.NDArray[np.uint64], starts: Int64s, n: Int64s, length: int
) -> npt.NDArray[np.bool_]:
    """As many True in each piece as it has repeated n-grams: bool [n], in no order within a piece.

    n-grams are hashed to 32 bits: in a piece of 1,024 tokens two different ones collide once in 8,000 pieces.
    """
    gram_hashes = ids.astype(np.uint64)
    for tokens_ahead in range(1, length):
        gram_hashes *= MIXER
        gram_hashes[:-tokens_ahead] += ids[tokens_ahead:]
    for tokens_back in range(1, length):
        # An n-gram that reaches into the next piece gets a unique value.
        edge_places = (starts + n - tokens_back)[n >= tokens_back].astype(np.uint64)
        gram_hashes[edge_places] = edge_places ^ np.uint64(0xD1B54A32D192ED03)
    gram_hashes *= MIXER
    gram_hashes >>= np.uint64(32)
    gram_hashes |= piece << np.uint64(32)
    gram_hashes.sort()
    is_repeat = np.empty(len(gram_hashes), dtype=bool)
    is_repeat[0] = False
    np.equal(gram_hashes[1:], gram_hashes[:-1], out=is_repeat[1:])
    return is_repeat


def _period(ids: Ids, starts: Int64s, n: Int64s, repeats: Floats) -> Floats:
    """The largest share of tokens that equal the one p before them, p up to LONGEST_PERIOD and half of the piece; 0 for
    pieces with few repeats, which saves most of the work."""
    period_shares = np.zeros(len(n), dtype=np.float32)
    looped_pieces = np.flatnonzero(repeats > LOOPED)
    if not looped_pieces.size:
        return period_shares
    piece_sizes = n[looped_pieces]
    piece_ends = np.cumsum(piece_sizes)
    piece_begins = piece_ends - piece_sizes
    place_inside = np.arange(int(piece_ends[-1])) - np.repeat(piece_begins, piece_sizes)
    looped_ids = ids.take(place_inside + np.repeat(starts[looped_pieces], piece_sizes))
    for period in range(1, LONGEST_PERIOD + 1):
        is_same = np.zeros(len(looped_ids), dtype=bool)
        np.equal(looped_ids[period:], looped_ids[:-period], out=is_same[period:])
        is_same &= place_inside >= period
        share = np.add.reduceat(is_same, piece_begins, dtype=np.int32) / np.maximum(piece_sizes - period, 1)
        share = np.where(piece_sizes >= 2 * period, share, 0)
        period_shares[looped_pieces] = np.maximum(period_shares[looped_pieces], share)
    return period_shares


def _characters(ids: Ids, starts: Int64s, n: Int64s, lexicon: Lexicon) -> Features:
    """Shares of characters and tokens of each sort."""
    word_sums = np.stack([np.add.reduceat(lexicon_word.take(ids), starts) for lexicon_word in lexicon.words])
    counts = unpack_words(word_sums)
    if lexicon.byte.any():
        _spelled(counts, lexicon.byte.take(ids), starts)
    ends_last = lexicon.words[1].take(ids[starts + n - 1]) >> np.uint64(48)
    counts["ends"] -= ends_last.astype(np.int64)
    character_counts = np.maximum(counts["characters"], 1)
    per_character = "letters digits spaces capitals foreign controls nulls replacements latin1".split()
    character_features = {name: counts[name] / character_counts for name in per_character}
    character_features["unbroken"] = counts["characters"] / (counts["spaces"] + counts["foreign"] + 1)
    character_features["bytes"] = counts["bytes"] / n
    per_token = ("fallbacks", "unknowns", "specials", "ends", "outside")
    character_features |= {name: counts[name] / n for name in per_token}
    return {name: np.minimum(values, 1e6).astype(np.float32) for name, values in character_features.items()}


def _spelled(counts: dict[str, Int64s], byte: npt.NDArray[np.uint8], starts: Int64s) -> None:
    """Count the characters that several tokens of a byte each spell: U+FFFD, and U+0080 to U+00BF."""
    next_byte = np.append(byte[1:], np.uint8(0))
    is_latin1 = (byte == 0xC2) & (next_byte & 0xC0 == 0x80)
    third_byte = np.append(byte[2:], np.zeros(2, np.uint8))[: len(byte)]
    is_replacement = (byte == 0xEF) & (next_byte == 0xBF) & (third_byte == 0xBD)
    for field_name, is_spelled in (("latin1", is_latin1), ("replacements", is_replacement)):
        if is_spelled.any():
            counts[field_name] += np.add.reduceat(is_spelled, starts, dtype=np.int64)
