"""Tokenizers behind one interface: a SentencePiece model or a Hugging Face `tokenizer.json`.

Both encode a document without adding or interpreting special tokens: a text that spells out `</s>` or
`<|endoftext|>` gets the ids of these characters, so no document can forge its own end. That holds for the tokens that
end and begin documents however their file declares them (unforgeable.py); other added tokens that are not special, and
user-defined symbols, are for texts and stay.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Final, Literal

import numpy as np
import numpy.typing as npt
import xxhash
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer as HuggingFaceModel

from megastable.base.errors import DataError
from megastable.data.local_copy import write_file
from megastable.data.manifest import TokenizerInfo
from megastable.data.unforgeable import close_huggingface, close_sentencepiece

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
        write_file(directory / self.file.name, self.content)
        return directory / self.file.name

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without any special token."""
        return [int(token) for token in self.encode_batch([text])[0]]

    @abstractmethod
    def _open(self) -> None:
        """Load the model of `content`. Raises DataError if it is none."""

    @abstractmethod
    def _close(self, ids: Collection[int]) -> None:
        """Load the model so that no text gets one of `ids`."""

    @abstractmethod
    def spelled(self, id: int) -> str:
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

    def beginning(self, bos: int, why: str) -> Tokenizer:
        """The same tokenizer, of documents that begin with `bos`."""
        found = type(self)(self.file, self.content, self.eod, bos)
        found.why_eod, found.why_bos = self.why_eod, why
        return found

    @abstractmethod
    def is_special(self, id: int) -> bool:
        """Whether a token is none of a text, but for programs: a control symbol, or an added token that is special."""

    def _own_bos(self) -> tuple[int, str]:
        """Its own begin-of-document token, and why it is that one. Raises DataError if it has none."""
        named = (self._id_of(name) for name in BEGIN_OF_DOCUMENT)
        token, why = next((t for t in named if t is not None), None), "by its usual name"
        if len(self.added) == 1:
            (token,), why = self.added, "which the tokenizer puts before every text in other programs"
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
        return token, why

    def _checked(self, ids: Iterable[int]) -> list[int]:
        plain = [int(token) for token in ids]
        for token in plain:
            if not 0 <= token < self.vocab_size:
                raise DataError(
                    f"the token id {token} is outside of 0..{self.vocab_size - 1}, "
                    f"the vocabulary of {self.file}"
                )
        return plain

    @property
    def _end_of_sentence(self) -> int | None:
        """The id that the file itself declares as the end of a sentence."""
        return None

    def _choose_eod(self, eod: str | int | None) -> tuple[int, str]:
        """The id of the end-of-document token, and why it is that one."""
        if eod == NO_EOD:
            return NO_EOD, ""
        if isinstance(eod, int) or (eod is not None and eod.isdecimal()):
            why, eod = "" if isinstance(eod, int) else "named by --eod", int(eod)
            if not 0 <= eod < self.vocab_size:
                raise DataError(
                    f"the end-of-document id {eod} is outside of 0..{self.vocab_size - 1}, "
                    f"the vocabulary of {self.file}"
                )
            return eod, why
        if eod is not None:
            token = self._id_of(eod)
            if token is None:
                raise DataError(f"{self.file} has no token {eod!r} to end documents with: name another")
            return token, "named by --eod"
        if self._end_of_sentence is not None:
            return self._end_of_sentence, "the tokenizer's own end of a sentence"
        usual = [(name, token) for name in END_OF_DOCUMENT if (token := self._id_of(name)) is not None]
        if not usual:
            raise DataError(
                f"{self.file} has none of the usual end-of-document tokens ({', '.join(END_OF_DOCUMENT)}): "
                "name it"
            )
        others = ", ".join(name for name, _ in usual[1:])
        return usual[0][1], "by its usual name" + (f", before {others}" if others else "")


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
        pieces = (str(self.model.id_to_piece(token)) for token in range(self.vocab_size))
        self._cuttable = self._keeps_spaces and not any(map(_SPACE_INSIDE.search, pieces))
        spelled = [self._id_of(f"<0x{byte:02X}>") for byte in SPACE.encode()]
        self._spelled_space = np.array([token for token in spelled if token is not None], dtype=np.int32)

    def spelled(self, id: int) -> str:
        return str(self.model.id_to_piece(id)) if id < self.vocab_size else ""

    def is_special(self, id: int) -> bool:
        return id < self.vocab_size and bool(self.model.is_control(id))

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        parts = [list(self._parts(text)) for text in texts]
        plain = [part for of_text in parts for part in of_text if part is not None]
        encoded = iter(self.model.encode(plain, return_type="numpy", num_threads=1))
        return [
            np.concatenate([self._spelled_space if part is None else next(encoded) for part in of_text])
            for of_text in parts
        ]

    def decode(self, ids: Iterable[int]) -> str:
        return str(self.model.decode(self._checked(ids)))

    def _parts(self, text: str) -> Iterator[str | None]:
        """Cut `text` at each literal "▁", given as None: SentencePiece would take it for a space."""
        if SPACE not in text or not self._keeps_spaces or not self._spelled_space.size:
            yield from self._short_parts(text)
            return
        for number, part in enumerate(text.split(SPACE)):
            if number:
                yield None
            yield from self._short_parts(part)

    def _short_parts(self, text: str) -> Iterator[str]:
        """Cut `text` where that changes none of its ids: before a space, if no piece contains one.

        SentencePiece's time and memory grow faster than the length of a text.
        """
        start = 0
        while self._cuttable and len(text) - start > LONG:
            cut = _WORD_END.search(text, start + LONG)
            if cut is None:
                break
            yield text[start : cut.start()]
            start = cut.start()
        yield text[start:]

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
        plain, whole = (self.model.encode("a", add_special_tokens=added).ids for added in (False, True))
        at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
        return tuple(whole[:at])

    def _id_of(self, piece: str) -> int | None:
        token: int | None = self.model.token_to_id(piece)
        return token

    def spelled(self, id: int) -> str:
        return str(self.model.id_to_token(id) or "")

    def is_special(self, id: int) -> bool:
        token = self.model.get_added_tokens_decoder().get(id)
        return token is not None and bool(token.special)

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        encoded = self.model.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encoded]

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
    file = _tokenizer_file(path)
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"the tokenizer {file} cannot be read: {error.strerror}") from error
    kind = HuggingFaceTokenizer if file.suffix == ".json" else SentencePieceTokenizer
    return kind(file, content, eod, bos)


def _tokenizer_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    # Repositories with both forms of one tokenizer keep the .json up to date.
    if (path / "tokenizer.json").is_file():
        return path / "tokenizer.json"
    models = sorted(path.glob("*.model"))
    if len(models) != 1:
        found = ", ".join(model.name for model in models) or "neither"
        raise DataError(f"{path} should hold tokenizer.json or one .model file, found {found}: name the file")
    return models[0]
