"""Tokenizers behind one interface: a SentencePiece model or a Hugging Face `tokenizer.json`.

Both encode a document without adding or interpreting special tokens: a text that spells out `</s>` or
`<|endoftext|>` gets the ids of these characters, so no document can forge its own end. Libraries find user-defined
symbols (SentencePiece) and added tokens that are not special (tokenizer.json) in a text, and a model may have the token
among its ordinary pieces; so the file is changed for the tokens that end and begin documents (`close_sentencepiece`,
`close_huggingface`). Other such symbols are for texts and stay.

`LossCounter` measures how much text a tokenizer loses: it has no token for a character, and spells it as its unknown
token or, without one, leaves it out.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

import numpy as np
import numpy.typing as npt
import xxhash
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
from tokenizers import Tokenizer as HuggingFaceModel

from megastable.base.durable import write_data_file
from megastable.base.errors import DataError
from megastable.base.text import make_visible, show_share
from megastable.data.manifest import TokenizerInfo

Ids = npt.NDArray[np.int32]

# Tried in this order if no end-of-document token is named.
END_OF_DOCUMENT = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<eod>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek's, with fullwidth bars
)
# ... and if documents are to begin with the tokenizer's own token.
BEGIN_OF_DOCUMENT = (
    "<|begin_of_text|>",
    "<s>",
    "<bos>",
    "<|bos|>",
    "[BOS]",
    "<|startoftext|>",
    "<\uff5cbegin\u2581of\u2581sentence\uff5c>",  # DeepSeek's
)
OWN: Final = "own"
NO_EOD: Final = -1  # for a tokenizer that ends no documents: it is compared, or asked for its names
SPACE = "\u2581"  # "▁", SentencePiece's symbol for a space
LONG = 4096  # characters: longer texts are encoded in parts
_SPACE_INSIDE = re.compile(f"[^ {SPACE}][ {SPACE}]")
_WORD_END = re.compile(r"(?<=[^ ])(?= )")


class Tokenizer(ABC):
    """Ids are 0 <= id < `vocab_size`; `eod` is the id that ends a document, `bos` the one that begins it (None: no such
    token), which no text gets, but for a piece of one character. `why_eod`, `why_bos`: in words, why it is that one; ""
    if it was given as an id. `content` is the file as it was read, `closed` as it is used; `xxh3` is the file's hash.
    """

    kind: ClassVar[Literal["sentencepiece", "huggingface"]]
    vocab_size: int

    def __init__(
        self, file: Path, content: bytes, eod: str | int | None, bos: int | Literal["own"] | None
    ) -> None:
        self.file = file
        self.content = self.closed = content
        self._open()
        self.eod, self.why_eod = self._choose_eod(eod)
        self.bos, self.why_bos = self._own_bos() if bos == OWN else (bos, "")
        self._close({token for token in (self.eod, self.bos) if token is not None and token != NO_EOD})

    @cached_property
    def xxh3(self) -> str:
        """xxh3-128 (hex) of the file as it was read."""
        return xxhash.xxh3_128_hexdigest(self.content)

    @property
    def info(self) -> TokenizerInfo:
        """The manifest's record of this tokenizer."""
        return TokenizerInfo(
            file=self.file.name, kind=self.kind, xxh3=self.xxh3, vocab_size=self.vocab_size, eod=self.eod,
            bos=self.bos,
        )  # fmt: skip

    def copy_to(self, directory: Path) -> Path:
        """Write the file as it was read into `directory`, under its own name."""
        write_data_file(directory / self.file.name, self.content)
        return directory / self.file.name

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without any special token."""
        return [int(token_id) for token_id in self.encode_batch([text])[0]]

    @abstractmethod
    def _open(self) -> None:
        """Load the model of `content`. Raises DataError if it is none."""

    @abstractmethod
    def _close(self, ids: Collection[int]) -> None:
        """Load the model so that no text gets one of `ids`."""

    @abstractmethod
    def spell_token(self, id: int) -> str:
        """A token as the file spells it; "" if it has no such id."""

    @abstractmethod
    def encode_batch(self, texts: list[str]) -> list[Ids]:
        """The ids of each text: int32 [tokens of that text]."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; special tokens have none. Raises DataError for an id beyond the vocabulary."""

    @property
    def added(self) -> tuple[int, ...]:
        """Ids that its own rules put before every text in other programs, such as Llama's <|begin_of_text|>."""
        return ()

    @abstractmethod
    def _id_of(self, piece: str) -> int | None:
        """The id of a token, by its name."""

    def begin_with(self, bos: int, why: str) -> Tokenizer:
        """The same tokenizer, of documents that begin with `bos`."""
        new_tokenizer = type(self)(self.file, self.content, self.eod, bos)
        new_tokenizer.why_eod, new_tokenizer.why_bos = self.why_eod, why
        return new_tokenizer

    @abstractmethod
    def is_special(self, id: int) -> bool:
        """Whether a token is none of a text, but for programs: a control symbol, or an added token that is special."""

    def _own_bos(self) -> tuple[int, str]:
        """Its own begin-of-document token, and why it is that one. Raises DataError if it has none."""
        named_tokens = (self._id_of(usual_name) for usual_name in BEGIN_OF_DOCUMENT)
        token, bos_reason = next((t for t in named_tokens if t is not None), None), "by its usual name"
        if len(self.added) == 1:
            (token,), bos_reason = self.added, "which the tokenizer puts before every text in other programs"
        if token is None:
            raise DataError(
                f"{self.file} has no token to begin documents with: it puts none before a text and has none of "
                f"{', '.join(BEGIN_OF_DOCUMENT)}: leave --bos out"
            )
        if token == self.eod:
            raise DataError(
                f"{self.file} begins and ends documents with one token, {token}, so that each follows the end of the "
                "one before it even without --bos: leave --bos out"
            )
        return token, bos_reason

    def _checked(self, ids: Iterable[int]) -> list[int]:
        plain_ids = [int(token) for token in ids]
        for plain_id in plain_ids:
            if not 0 <= plain_id < self.vocab_size:
                raise DataError(
                    f"the token id {plain_id} is outside of 0..{self.vocab_size - 1}, the vocabulary of {self.file}"
                )
        return plain_ids

    @property
    def _end_of_sentence(self) -> int | None:
        """The id that the file itself declares as the end of a sentence."""
        return None

    def _choose_eod(self, eod: str | int | None) -> tuple[int, str]:
        """The id of the end-of-document token, and why it is that one."""
        if eod == NO_EOD:
            return NO_EOD, ""
        if isinstance(eod, int) or (eod is not None and eod.isdecimal()):
            eod_reason, eod = "" if isinstance(eod, int) else "named by --eod", int(eod)
            if not 0 <= eod < self.vocab_size:
                raise DataError(
                    f"the end-of-document id {eod} is outside of 0..{self.vocab_size - 1}, the vocabulary of "
                    f"{self.file}"
                )
            return eod, eod_reason
        if eod is not None:
            token = self._id_of(eod)
            if token is None:
                raise DataError(f"{self.file} has no token {eod!r} to end documents with: name another")
            return token, "named by --eod"
        if self._end_of_sentence is not None:
            return self._end_of_sentence, "the tokenizer's own end of a sentence"
        usual_tokens = [(name, token) for name in END_OF_DOCUMENT if (token := self._id_of(name)) is not None]
        if not usual_tokens:
            raise DataError(
                f"{self.file} has none of the usual end-of-document tokens ({', '.join(END_OF_DOCUMENT)}): name it"
            )
        other_names = ", ".join(name for name, _ in usual_tokens[1:])
        return usual_tokens[0][1], "by its usual name" + (f", before {other_names}" if other_names else "")


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece `.model`, of any type."""

    kind = "sentencepiece"

    def _open(self) -> None:
        if not self.content:
            raise DataError(f"{self.file} is empty: it is not a SentencePiece model")
        self.model = SentencePieceProcessor()
        try:
            self.model.LoadFromSerializedProto(self.content)
        except RuntimeError as error:
            raise DataError(f"{self.file} is not a SentencePiece model: {error}") from error
        self.vocab_size = int(self.model.get_piece_size())

    def _close(self, ids: Collection[int]) -> None:
        self.closed = close_sentencepiece(self.content, ids)
        if self.closed is not self.content:
            self.model.LoadFromSerializedProto(self.closed)
        # Models that prepend or collapse spaces must get every text whole: a part of it would change.
        self._keeps_spaces = self.model.normalize("  a  b ") == "  a  b ".replace(" ", SPACE)
        piece_texts = (str(self.model.id_to_piece(token)) for token in range(self.vocab_size))
        self._cuttable = self._keeps_spaces and not any(map(_SPACE_INSIDE.search, piece_texts))
        space_tokens = [self._id_of(f"<0x{space_byte:02X}>") for space_byte in SPACE.encode()]
        self._spelled_space = np.array(
            [space_token for space_token in space_tokens if space_token is not None], dtype=np.int32
        )

    def spell_token(self, id: int) -> str:
        return str(self.model.id_to_piece(id)) if id < self.vocab_size else ""

    def is_special(self, id: int) -> bool:
        return id < self.vocab_size and bool(self.model.is_control(id))

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        parts_by_text = [list(self._parts(text)) for text in texts]
        plain_parts = [part for of_text in parts_by_text for part in of_text if part is not None]
        encoded_parts = iter(self.model.encode(plain_parts, return_type="numpy", num_threads=1))
        return [
            np.concatenate([self._spelled_space if part is None else next(encoded_parts) for part in of_text])
            for of_text in parts_by_text
        ]

    def decode(self, ids: Iterable[int]) -> str:
        return str(self.model.decode(self._checked(ids)))

    def _parts(self, text: str) -> Iterator[str | None]:
        """Cut `text` at each literal "▁", given as None: SentencePiece would take it for a space."""
        if SPACE not in text or not self._keeps_spaces or not self._spelled_space.size:
            yield from self._short_parts(text)
            return
        for part_number, part in enumerate(text.split(SPACE)):
            if part_number:
                yield None
            yield from self._short_parts(part)

    def _short_parts(self, text: str) -> Iterator[str]:
        """Cut `text` where that changes none of its ids: before a space, if no piece contains one.

        SentencePiece's time and memory grow faster than the length of a text.
        """
        part_start = 0
        while self._cuttable and len(text) - part_start > LONG:
            word_end = _WORD_END.search(text, part_start + LONG)
            if word_end is None:
                break
            yield text[part_start : word_end.start()]
            part_start = word_end.start()
        yield text[part_start:]

    @property
    def added(self) -> tuple[int, ...]:
        return (int(self.model.bos_id()),) if self.model.bos_id() >= 0 else ()

    @property
    def _end_of_sentence(self) -> int | None:
        return int(self.model.eos_id()) if self.model.eos_id() >= 0 else None

    def _id_of(self, piece: str) -> int | None:
        token = int(self.model.piece_to_id(piece))  # the id of <unk> when there is no such piece
        return token if str(self.model.id_to_piece(token)) == piece else None


class HuggingFaceTokenizer(Tokenizer):
    """A Hugging Face `tokenizer.json`. Its normalizer decides whether decoding restores the text."""

    kind = "huggingface"

    def _open(self) -> None:
        try:
            self.model = HuggingFaceModel.from_str(self.closed.decode("utf-8"))
        except Exception as error:  # the library raises a plain Exception for any problem with a file
            raise DataError(f"{self.file} is not a Hugging Face tokenizer.json: {error}") from error
        self.model.no_truncation()
        self.model.no_padding()
        self.model.encode_special_tokens = True  # encode them as text
        self.vocab_size = 1 + max(self.model.get_vocab(with_added_tokens=True).values(), default=-1)
        if self.vocab_size == 0:
            raise DataError(f"{self.file} has an empty vocabulary")

    def _close(self, ids: Collection[int]) -> None:
        self.closed = close_huggingface(self.content, ids)
        if self.closed is not self.content:
            self._open()

    @property
    def added(self) -> tuple[int, ...]:
        plain_ids, whole_ids = (
            self.model.encode("a", add_special_tokens=added).ids for added in (False, True)
        )
        begins = range(len(whole_ids))
        text_index = next((i for i in begins if whole_ids[i : i + len(plain_ids)] == plain_ids), 0)
        return tuple(whole_ids[:text_index])

    def _id_of(self, piece: str) -> int | None:
        token: int | None = self.model.token_to_id(piece)
        return token

    def spell_token(self, id: int) -> str:
        return str(self.model.id_to_token(id) or "")

    def is_special(self, id: int) -> bool:
        added_token = self.model.get_added_tokens_decoder().get(id)
        return added_token is not None and bool(added_token.special)

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        encodings = self.model.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        return str(self.model.decode(self._checked(ids), skip_special_tokens=True))


def load_tokenizer(
    path: Path, eod: str | int | None = None, bos: int | Literal["own"] | None = None
) -> Tokenizer:
    """The tokenizer in a file, or in a directory that holds one.

    `eod` is the end-of-document token, by name or by id (digits are an id). None takes the model's own
    end-of-sentence token (SentencePiece) or the first of END_OF_DOCUMENT that it has, NO_EOD none. `bos` is the id that
    begins a document, "own": the tokenizer's own. Raises DataError if there is no tokenizer, more than one, or no such
    token.
    """
    # Repositories with both forms of one tokenizer keep the .json up to date.
    if (path / "tokenizer.json").is_file():
        path /= "tokenizer.json"
    elif path.is_dir():
        model_files = sorted(path.glob("*.model"))
        if len(model_files) != 1:
            found = ", ".join(model_file.name for model_file in model_files) or "neither"
            raise DataError(
                f"{path} should hold tokenizer.json or one .model file, found {found}: name the file"
            )
        path = model_files[0]
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"the tokenizer {path} cannot be read: {error.strerror}") from error
    tokenizer_class = HuggingFaceTokenizer if path.suffix == ".json" else SentencePieceTokenizer
    return tokenizer_class(path, content, eod, bos)


MOST_LOST = 0.01  # of the text, unless more is allowed
BLANK = b" \t\n\r\v\f"
_BYTE_LEVEL_BLANK = {ord(character): None for character in "ĠĉĊčċČ"}  # how byte-level tokenizers spell BLANK
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
SHOWN = 40  # characters of the document that lost most


class LossCounter:
    """Counts the bytes of documents that `tokenizer` loses.

    Every id stands for some bytes of text; what these miss of a document is lost. Blanks do not count, as many
    tokenizers drop or merge them on purpose, and neither does what normalisation changes (NFKC, case, accents): a
    document that misses bytes is compared with its text as the model gets it. Bytes spelled one by one (byte fallback)
    are not lost.
    """

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

    def count_lost(self, texts: Sequence[str], raw: Sequence[bytes], ids: Sequence[Ids]) -> list[int]:
        """The bytes that are lost of each document.

        Args:
            texts: The documents.
            raw: The same, in UTF-8.
            ids: The tokens of each, int32, without those that begin and end it.
        """
        tokens = np.concatenate([np.empty(0, np.int32), *ids])
        is_unknown = np.zeros(tokens.size, bool) if self._unknown is None else tokens == self._unknown
        if self._unknown is not None and not is_unknown.any():
            return [0] * len(texts)  # the usual batch, in 1/40 of the time
        document_ends, lost_by_text = np.cumsum([0, *map(len, ids)]), list[int]()
        known_bytes = _sums(self._bytes[tokens], document_ends).tolist()
        unknown_counts = _sums(is_unknown, document_ends).tolist()
        for text, content, known, unknown in zip(texts, raw, known_bytes, unknown_counts, strict=True):
            if self._unknown is not None and not unknown:  # what misses bytes was normalised
                lost_by_text.append(0)
                continue
            plain_bytes = len(content.translate(None, BLANK))
            lost_bytes = plain_bytes - known
            # Normalising costs half as much as encoding: not where each unknown token can be one character.
            if not unknown <= lost_bytes <= 4 * unknown:
                lost_bytes = self._spelling.count_plain(text) - known
            lost_by_text.append(min(max(lost_bytes, unknown), plain_bytes))  # blanks may be unknown, too
        return lost_by_text


def describe_loss(share: float, tokenizer: Tokenizer, worst: str, of: str = "the text") -> str:
    """What was lost and where; worst: the beginning of the document that lost most."""
    return (
        f"{show_share(share)} of {of} is lost or unknown in {tokenizer.file}, which has no tokens for it, most of "
        f"it in a document that begins with {make_visible(worst[:SHOWN])!r}"
    )


def check_text(text: str, tokenizer: Tokenizer) -> None:
    """Raise a DataError if `tokenizer` loses more than MOST_LOST of a text."""
    raw_text = text.encode()
    (lost_bytes,) = LossCounter(tokenizer).count_lost([text], [raw_text], tokenizer.encode_batch([text]))
    if lost_bytes > MOST_LOST * len(raw_text):
        raise DataError(f"{describe_loss(lost_bytes / len(raw_text), tokenizer, text)}: give another text")


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
        piece_text = str(self._model.id_to_piece(id))
        return _count_byte(piece_text) if self._model.is_byte(id) else _count_literal(piece_text)

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
        splits_bytes, normalises_bytes = (
            '"ByteLevel"' in json.dumps(content.get(part)) for part in ("pre_tokenizer", "normalizer")
        )
        self._byte_level = splits_bytes or normalises_bytes
        # One that spells bytes changes no text.
        self._normalizer = None if normalises_bytes else tokenizer.model.normalizer
        unknown = model.get("unk_token")
        self.unknown = model.get("unk_id") if unknown is None else tokenizer.model.token_to_id(unknown)

    def count(self, id: int) -> int:
        piece_text = self._pieces.get(id)
        if piece_text is None or id in self._added:
            return _count_literal(self._added.get(id, ""))
        if self._byte_fallback and _BYTE.fullmatch(piece_text):
            return _count_byte(piece_text)
        if self._suffix:
            piece_text = piece_text.removesuffix(self._suffix)
        if self._byte_level:
            return len(piece_text.translate(_BYTE_LEVEL_BLANK))
        return _count_literal(piece_text.removeprefix(self._prefix))

    def count_plain(self, text: str) -> int:
        if self._normalizer is not None:
            text = self._normalizer.normalize_str(text)
        return len(text.encode().translate(None, BLANK)) if self._byte_level else _count_literal(text)


def _count_byte(piece: str) -> int:
    return int(bytes.fromhex(piece[3:5]) not in BLANK)


def _count_literal(text: str) -> int:
    return len("".join(text.replace(SPACE, " ").split()).encode())


Json = dict[str, Any]

# Kinds of pieces (sentencepiece_model.proto, ModelProto.SentencePiece.Type).
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def close_sentencepiece(content: bytes, ids: Collection[int]) -> bytes:
    """A SentencePiece model in which the pieces `ids` are control symbols, which no text contains.

    Bytes and the unknown piece stay what they are: a model is invalid without them.
    """
    proto: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    proto.ParseFromString(content)
    open_pieces = [proto.pieces[id] for id in ids if proto.pieces[id].type in (NORMAL, USER_DEFINED, UNUSED)]
    if not open_pieces:
        return content
    for open_piece in open_pieces:
        open_piece.type = CONTROL
    closed_model: bytes = proto.SerializeToString()
    return closed_model


def close_huggingface(content: bytes, ids: Collection[int]) -> bytes:
    """A tokenizer.json that gives `ids` to no text if special tokens are encoded as text: its added tokens are special,
    and a text is cut behind the first character wherever the model could take it for one of them.

    A token of a single character cannot be cut, and stays.
    """
    given: Json = json.loads(content)
    added_tokens = [t for t in given.get("added_tokens") or () if t["id"] in ids and not t["special"]]
    for token in added_tokens:
        token["special"] = True
    cuts = [cut_behind_first(piece) for piece in _found_by_model(given["model"], ids) if len(piece) > 1]
    if cuts:
        before = given.get("pre_tokenizer")
        given["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*([before] if before else []), *cuts]}
    return json.dumps(given, ensure_ascii=False).encode() if added_tokens or cuts else content


def cut_behind_first(piece: str) -> Json:
    """The step of a pre-tokenizer that cuts a text behind the first character of every `piece` in it."""
    cut_regex = f"{re.escape(piece[0])}(?={re.escape(piece[1:])})"
    return {"type": "Split", "pattern": {"Regex": cut_regex}, "behavior": "Isolated", "invert": False}


def _found_by_model(model: Json, ids: Collection[int]) -> list[str]:
    """The spellings of those of `ids` that the model may give to a text."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        spelled_pieces = [piece for piece, id in vocabulary.items() if id in ids]
    else:  # Unigram: pieces and scores
        spelled_pieces = [vocabulary[id][0] for id in sorted(ids) if id < len(vocabulary)]
    if model.get("merges") is None or model.get("ignore_merges"):
        return spelled_pieces
    # BPE makes only what it merges; older files have "a b" for ["a", "b"].
    merged_pieces = {"".join(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]}
    return [spelled_piece for spelled_piece in spelled_pieces if spelled_piece in merged_pieces]
