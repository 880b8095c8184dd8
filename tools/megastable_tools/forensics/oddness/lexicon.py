"""Per-token tables of a vocabulary: bytes, letters, digits, controls and so on, for a scan to add up.

Counts per token are packed four to a 64-bit word, so that one gather and one sum per word give them for a whole
piece: a piece has at most 1,024 tokens, and a token counts at most 63 of anything, so that no field overflows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
NOTHING = b""

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Where Windows-1252 has a character in place of a control, without those that good typography uses.
_MOJIBAKE = frozenset("ƒ†‡ˆ‰Š‹ŒŽ˜š›œžŸ") | {chr(c) for c in range(0x80, 0xC0)} | {"Ã", "Â"}

Words = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Lexicon:
    """Tables by token id, each with one entry more than the vocabulary: the last is any id outside of it.

    words: uint64 [len(WORDS), vocab_size + 1], see WORDS; byte: uint8 [vocab_size + 1], the byte that a token
    words: uint64 [len(WORDS), vocab_size + 1], see WORDS; byte: uint8 [vocab_size + 1], the byte that a token
    spells on its own (byte fallback), 0 for other tokens. known: whether the tokens' texts were available.
    """

    vocab_size: int
    words: Words
    byte: npt.NDArray[np.uint8]
    known: bool

    @classmethod
    def of(cls, tokenizer: Tokenizer | None, vocab_size: int, eod: int | None = None) -> Lexicon:
        """The tables for a vocabulary of `vocab_size`; without a tokenizer only ids and ends are counted.

        Ids that the tokenizer lacks (padding of the vocabulary) count as specials. eod: the tokenizer's if None.
        """
        counts = {name: np.zeros(vocab_size + 1, dtype=np.uint64) for name in COUNTED}
        byte = np.zeros(vocab_size + 1, dtype=np.uint8)
        counts["outside"][vocab_size] = 1
        if eod is None and tokenizer is not None:
            eod = tokenizer.eod
        if tokenizer is not None:
            counts["specials"][: max(vocab_size, 0)] = 1
            for token, (content, sort) in enumerate(_pieces(tokenizer)):
                if token >= vocab_size:
                    break
                counts["specials"][token] = sort == "special"
                counts["unknowns"][token] = sort == "unknown"
                counts["fallbacks"][token] = sort == "byte"
                if sort == "byte" and len(content) == 1:
                    byte[token] = content[0]
                for name, count in _look(content).items():
                    counts[name][token] = min(count, MOST)
        if eod is not None and 0 <= eod < vocab_size:
            for name in COUNTED:
                counts[name][eod] = name == "ends"
        words = np.zeros((len(WORDS), vocab_size + 1), dtype=np.uint64)
        for number, names in enumerate(WORDS):
            for place, name in enumerate(names):
                words[number] |= counts[name] << np.uint64(FIELD * place)
        return cls(vocab_size, words, byte, tokenizer is not None)

    def table(self, name: str) -> npt.NDArray[np.int64]:
        """How much of `name` (one of COUNTED) each token counts: int64 [vocab_size + 1]."""
        return unpack(self.words)[name]


def unpack(words: Words) -> dict[str, npt.NDArray[np.int64]]:
    """The counts in words uint64 [len(WORDS), n], or in sums of at most LONGEST_PIECE of them: name -> int64 [n]."""
    mask = np.uint64((1 << FIELD) - 1)
    return {
        name: ((words[number] >> np.uint64(FIELD * place)) & mask).astype(np.int64)
        for number, names in enumerate(WORDS)
        for place, name in enumerate(names)
    }


def _look(content: bytes) -> dict[str, int]:
    """The counts of a token's bytes, which may be only a part of a character."""
    text = content.decode("utf-8", "ignore")
    found = dict.fromkeys(
        ("letters", "digits", "spaces", "capitals", "foreign", "controls", "nulls", "replacements", "latin1"),
        0,
    )
    for c in text:
        found["letters"] += c.isalpha()
        found["digits"] += c.isdigit()
        found["spaces"] += c.isspace()
        found["capitals"] += c.isupper()
        found["nulls"] += c == "\0"
        found["controls"] += (c < " " and c not in "\t\n\r\0\f") or c == "\x7f"
        found["replacements"] += c == "\ufffd"
        found["latin1"] += c in _MOJIBAKE
    # A continuation byte (10xxxxxx) begins no character.
    beginnings = [b for b in content if b & 0xC0 != 0x80]
    found["foreign"] = sum(b >= 0x80 for b in beginnings)
    return {"bytes": len(content), "characters": len(beginnings), **found}


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
    model = tokenizer.model
    for token in range(tokenizer.vocab_size):
        piece = str(model.id_to_piece(token))
        if model.is_unknown(token):
            yield NOTHING, "unknown"
        elif model.is_control(token) or model.is_unused(token):
            yield NOTHING, "special"
        elif model.is_byte(token):
            yield bytes.fromhex(piece[3:5]), "byte"
        else:
            yield piece.replace(SPACE, " ").encode(), "text"


def _huggingface(tokenizer: HuggingFaceTokenizer) -> Iterator[tuple[bytes, str]]:
    described: dict[str, Any] = json.loads(tokenizer.content)
    special = {t["id"] for t in described.get("added_tokens") or [] if t.get("special")}
    unknown = (described.get("model") or {}).get("unk_token")
    # A byte-level vocabulary writes each byte as one printable character.
    by_bytes = '"ByteLevel"' in json.dumps([described.get("decoder"), described.get("pre_tokenizer")])
    alphabet = _byte_alphabet()
    for token in range(tokenizer.vocab_size):
        piece = tokenizer.model.id_to_token(token)
        if piece is None or token in special:
            yield NOTHING, "unknown" if piece is not None and piece == unknown else "special"
        elif piece == unknown:
            yield NOTHING, "unknown"
        elif by_bytes and all(c in alphabet for c in piece):
            content = bytes(alphabet[c] for c in piece)
            yield content, "text" if _whole(content) else "byte"
        elif spelled := _BYTE.fullmatch(piece):
            yield bytes.fromhex(spelled[1]), "byte"
        else:
            yield piece.replace(SPACE, " ").encode("utf-8", "ignore"), "text"


def _whole(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _byte_alphabet() -> dict[str, int]:
    """The character of each byte in a byte-level vocabulary (GPT-2): printable ones stand for themselves."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}
