"""Measure how much text a tokenizer loses: it has no token for a character, and spells it as its unknown token or,
without one, leaves it out.

Every id stands for some bytes of text; what these miss of a document is lost. Blanks do not count, as many tokenizers
drop or merge them on purpose, and neither does what normalisation changes (NFKC, case, accents): a document that misses
bytes is compared with its text as the model gets it. Bytes spelled one by one (byte fallback) are not lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megastable.base.errors import DataError
from megastable.base.text import show_share, visible
from megastable.data.tokenizer import SPACE, HuggingFaceTokenizer, Ids, SentencePieceTokenizer, Tokenizer

MOST_LOST = 0.01  # of the text, unless more is allowed
BLANK = b" \t\n\r\v\f"
_BYTE_LEVEL_BLANK = {ord(character): None for character in "ĠĉĊčċČ"}  # how byte-level tokenizers spell BLANK
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
SHOWN = 40  # characters of the document that lost most


class LossCounter:
    """Counts the bytes of documents that `tokenizer` loses."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if isinstance(tokenizer, HuggingFaceTokenizer):
            spelling: _Spelling = _HuggingFaceSpelling(tokenizer)
        else:
            assert isinstance(tokenizer, SentencePieceTokenizer)
            spelling = _SentencePieceSpelling(tokenizer)
        self._spelling, self._unknown = spelling, spelling.unknown
        self._bytes = np.array([spelling.count(id) for id in range(tokenizer.vocab_size)], dtype=np.int64)
        if self._unknown is not None:
            self._bytes[self._unknown] = 0

    def count(self, texts: Sequence[str], raw: Sequence[bytes], ids: Sequence[Ids]) -> list[int]:
        """The bytes that are lost of each document.

        Args:
            texts: The documents.
            raw: The same, in UTF-8.
            ids: The tokens of each, int32, without those that begin and end it.
        """
        tokens = np.concatenate([np.empty(0, np.int32), *ids])
        is_unknown = np.zeros(0, bool) if self._unknown is None else tokens == self._unknown
        if self._unknown is not None and not is_unknown.any():
            return [0] * len(texts)  # what misses bytes and has no unknown token was normalised
        ends = np.cumsum([0, *map(len, ids)])
        known = _sums(self._bytes[tokens], ends).tolist()
        unknown = [0] * len(texts) if self._unknown is None else _sums(is_unknown, ends).tolist()
        return [
            self._count_lost(text, content, *found)
            for text, content, *found in zip(texts, raw, known, unknown, strict=True)
        ]

    def _count_lost(self, text: str, raw: bytes, known: int, unknown: int) -> int:
        if self._unknown is not None and not unknown:
            return 0
        plain = len(raw.translate(None, BLANK))
        lost = plain - known
        # Normalising costs half as much as encoding: not where each unknown token can be one character.
        if not unknown <= lost <= 4 * unknown:
            lost = self._spelling.count_plain(text) - known
        return min(max(lost, unknown), plain)  # blanks may be unknown, too


def describe_loss(share: float, tokenizer: Tokenizer, worst: str, of: str = "the text") -> str:
    """What was lost and where; worst: the beginning of the document that lost most."""
    return (
        f"{show_share(share)} of {of} is lost or unknown in {tokenizer.file}, which has no tokens for it, most of "
        f"it in a document that begins with {visible(worst[:SHOWN])!r}"
    )


def check_text(text: str, tokenizer: Tokenizer) -> None:
    """Raise a DataError if `tokenizer` loses more than MOST_LOST of a text."""
    raw = text.encode()
    (lost,) = LossCounter(tokenizer).count([text], [raw], tokenizer.encode_batch([text]))
    if lost > MOST_LOST * len(raw):
        raise DataError(f"{describe_loss(lost / len(raw), tokenizer, text)}: give another text")


def _sums(values: npt.NDArray[Any], ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The sum of values[ends[i]:ends[i + 1]] for each i; 0 where that is empty."""
    return np.diff(np.concatenate([[0], np.cumsum(values, dtype=np.int64)])[ends])


class _Spelling:
    """Which bytes of text the ids of a tokenizer stand for; `unknown` stands for a character that has no token."""

    unknown: int | None = None

    def count(self, id: int) -> int:
        """Bytes that are not blank of the text that an id stands for."""
        raise NotImplementedError

    def count_plain(self, text: str) -> int:
        """Bytes that are not blank of a text as the model gets it."""
        raise NotImplementedError


class _SentencePieceSpelling(_Spelling):
    def __init__(self, tokenizer: SentencePieceTokenizer) -> None:
        self._model, self.unknown = tokenizer.model, int(tokenizer.model.unk_id())

    def count(self, id: int) -> int:
        if self._model.is_control(id) or self._model.is_unknown(id):
            return 0
        piece = str(self._model.id_to_piece(id))
        return _count_byte(piece) if self._model.is_byte(id) else _count_literal(piece)

    def count_plain(self, text: str) -> int:
        return _count_literal(str(self._model.normalize(text)))


class _HuggingFaceSpelling(_Spelling):
    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        content = json.loads(tokenizer.content)
        model = content["model"]
        self._added = {token["id"]: token["content"] for token in content.get("added_tokens") or ()}
        self._pieces = {id: piece for piece, id in tokenizer.model.get_vocab(with_added_tokens=False).items()}
        self._byte_fallback = bool(model.get("byte_fallback"))
        self._prefix = model.get("continuing_subword_prefix") or ""
        self._suffix = model.get("end_of_word_suffix") or ""
        splits, normalises = (
            '"ByteLevel"' in json.dumps(content.get(part)) for part in ("pre_tokenizer", "normalizer")
        )
        self._byte_level = splits or normalises
        # One that spells bytes changes no text.
        self._normalizer = None if normalises else tokenizer.model.normalizer
        unknown = model.get("unk_token")
        self.unknown = model.get("unk_id") if unknown is None else tokenizer.model.token_to_id(unknown)

    def count(self, id: int) -> int:
        piece = self._pieces.get(id)
        if piece is None or id in self._added:
            return _count_literal(self._added.get(id, ""))
        if self._byte_fallback and _BYTE.fullmatch(piece):
            return _count_byte(piece)
        if self._suffix:
            piece = piece.removesuffix(self._suffix)
        if self._byte_level:
            return len(piece.translate(_BYTE_LEVEL_BLANK))
        return _count_literal(piece.removeprefix(self._prefix))

    def count_plain(self, text: str) -> int:
        if self._normalizer is not None:
            text = self._normalizer.normalize_str(text)
        return len(text.encode().translate(None, BLANK)) if self._byte_level else _count_literal(text)


def _count_byte(piece: str) -> int:
    return int(bytes.fromhex(piece[3:5]) not in BLANK)


def _count_literal(text: str) -> int:
    return len("".join(text.replace(SPACE, " ").split()).encode())
