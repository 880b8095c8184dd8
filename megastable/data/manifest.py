"""The manifest of a corpus (`manifest.json` beside its shards), and the token stream that it describes.

A split ("train", "validation") is a list of token ranges of shards. Ranges begin and end at document boundaries and
never overlap, so no document is in two splits. The fingerprint covers everything that decides the order of the tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Set
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any, Literal, Self

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from megastable.base import durable
from megastable.base.errors import DataError
from megastable.data import remote_shards
from megastable.data.remote_shards import RemoteShards
from megastable.data.shard_format import DType, ShardInfo, Tokens, file_sizes
from megastable.data.shards import Shard

FILE = "manifest.json"
OPEN_SHARDS = 64  # per stream, at most two descriptors each; reopening costs less than reading a sample


class TokenizerInfo(BaseModel):
    """The tokenizer of a corpus: its file (relative to the corpus directory), its hash, its vocabulary."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str
    kind: Literal["sentencepiece", "huggingface"]
    xxh3: str
    vocab_size: int = Field(gt=0)
    eod: int = Field(ge=0)  # id of the end-of-document token
    bos: int | None = Field(default=None, ge=0)  # id of the begin-of-document token; None = none

    @model_validator(mode="after")
    def _are_tokens(self) -> Self:
        for name, token_id in (("eod", self.eod), ("bos", self.bos)):
            if token_id is not None and token_id >= self.vocab_size:
                raise ValueError(f"{name} {token_id} is outside of the vocabulary 0..{self.vocab_size - 1}")
        return self

    @model_serializer(mode="wrap")
    def _as_before(self, given: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Without a bos token the key is omitted, so that the fingerprints of older corpora stay valid.
        serialized_fields: dict[str, Any] = given(self)
        return {
            field_key: field_value
            for field_key, field_value in serialized_fields.items()
            if field_key != "bos" or field_value is not None
        }


class Segment(BaseModel):
    """Tokens [first_token, first_token + tokens) of a shard, whole documents only."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shard: str
    first_token: int = Field(ge=0)
    tokens: int = Field(gt=0)
    documents: int = Field(gt=0)

    @property
    def end(self) -> int:
        return self.first_token + self.tokens


class Manifest(BaseModel):
    """A corpus. `text_bytes` is the size of the UTF-8 text before tokenization, None if unknown."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    name: str = Field(min_length=1)
    tokenizer: TokenizerInfo
    dtype: DType
    shards: list[ShardInfo]
    splits: dict[str, list[Segment]]
    text_bytes: int | None = None
    source: str = ""
    created: datetime = Field(default_factory=lambda: datetime.now(UTC))

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        shard_by_name = {shard.name: shard for shard in self.shards}
        if len(shard_by_name) != len(self.shards):
            raise ValueError("two shards have the same name")
        if foreign_shards := [shard.name for shard in self.shards if shard.dtype != self.dtype]:
            raise ValueError(f"shard {foreign_shards[0]} is not {self.dtype} like the corpus")
        if not any(self.splits.values()):
            raise ValueError("the corpus is empty: no split has any tokens")
        placed = [(split, segment) for split, segments in self.splits.items() for segment in segments]
        for split, segment in placed:
            if segment.shard not in shard_by_name:
                raise ValueError(f"split {split} names the shard {segment.shard}, which is not listed")
            if segment.end > shard_by_name[segment.shard].tokens:
                raise ValueError(f"split {split} goes beyond the end of shard {segment.shard}")
        placed.sort(key=lambda item: (item[1].shard, item[1].first_token))
        for (earlier_split, a), (later_split, b) in pairwise(placed):
            if a.shard == b.shard and b.first_token < a.end:
                raise ValueError(
                    f"splits {earlier_split} and {later_split} overlap at token {b.first_token} of shard {a.shard}"
                )
        return self

    @classmethod
    def load_manifest(cls, directory: Path) -> Manifest:
        """Read DIRECTORY/manifest.json. Raises DataError when it is missing, broken or contradicts itself."""
        path = directory / FILE
        try:
            manifest_text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise DataError(
                f"{path} is not there: {directory} is not a prepared corpus, make one with megastable prepare"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        try:
            content = json.loads(manifest_text)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path} is not JSON ({error}): restore it or prepare the corpus again"
            ) from error
        if isinstance(content, dict) and content.get("format") != 1:
            raise DataError(f"{path} has format {content.get('format')!r}, this megastable reads format 1")
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            problem = error.errors()[0]
            problem_place = ".".join(map(str, problem["loc"]))
            problem_text = str(problem["msg"]).removeprefix("Value error, ")
            raise DataError(": ".join(filter(None, [str(path), problem_place, problem_text]))) from error

    def save_manifest(self, directory: Path) -> None:
        """Write DIRECTORY/manifest.json atomically. Raises DataError if the disk fails."""
        manifest_path = directory / FILE
        try:
            durable.write_file(manifest_path, (self.model_dump_json(indent=1) + "\n").encode())
        except OSError as error:
            raise DataError(f"{manifest_path} could not be written: {error}") from error

    def fingerprint(self) -> str:
        """SHA-256 (hex) of everything that decides the order of the tokens; excludes dates, source and text size."""
        hashed_content = self.model_dump(mode="json", exclude={"text_bytes", "source", "created"})
        return hashlib.sha256(json.dumps(hashed_content, sort_keys=True).encode()).hexdigest()

    @property
    def files(self) -> list[str]:
        """The names of its files, but for the manifest's own."""
        shard_files = [shard.name + suffix for shard in self.shards for suffix in (".bin", ".idx")]
        return [self.tokenizer.file, *shard_files]

    def check_replaceable(self, directory: Path, others: Set[str] = frozenset()) -> None:
        """Raise a DataError if its folder holds more than the corpus and `others`."""
        own_names = {FILE, *self.files, *others}
        if foreign := sorted(path.name for path in directory.iterdir() if path.name not in own_names):
            raise DataError(f"{directory} will not be replaced: {foreign[0]} in it is not part of its corpus")

    def count_tokens(self, split: str) -> int:
        """Number of tokens of a split; 0 when the corpus has no such split."""
        return sum(split_segment.tokens for split_segment in self.splits.get(split, ()))


class Stream:
    """The tokens of one split, one after another, over all its segments.

    Opening costs two `stat` calls per shard; a shard is opened on its first read, at most `OPEN_SHARDS` at a time.
    Those of a corpus in an object store are fetched then (`remote`). Thread-safe. Raises DataError if the split is
    missing or a file is not the one that the manifest describes.
    """

    def __init__(self, directory: Path, manifest: Manifest, split: str) -> None:
        self.directory, self.manifest, self.split = directory, manifest, split
        self.segments = manifest.splits.get(split, [])
        if not self.segments:
            raise DataError(
                f"{directory / FILE} has no split {split!r}: it has {', '.join(manifest.splits) or 'none'}"
            )
        self._infos = {shard.name: shard for shard in manifest.shards}
        self.remote = RemoteShards.find_remote(directory)
        self._most = OPEN_SHARDS if self.remote is None else remote_shards.OPEN_SHARDS
        for shard_name in {segment.shard for segment in self.segments} if self.remote is None else ():
            _check_sizes(directory, self._infos[shard_name])
        # Segment i holds the tokens [edges[i], edges[i + 1]) of the stream.
        self._edges = np.cumsum([0, *(segment.tokens for segment in self.segments)], dtype=np.int64)
        self.tokens = int(self._edges[-1])
        self._shards: OrderedDict[str, Shard] = OrderedDict()
        self._lock = Lock()
        self._checked: set[int] = set()

    def read_tokens(self, first: int, count: int) -> Tokens:
        """Tokens [first, first + count) of the stream: int64 [count], across shards.

        Raises IndexError outside the stream; DataError as `Shard.read_tokens` does.
        """
        parts = [shard.read_tokens(at, length) for shard, at, length, _ in self.split_range(first, count)]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts])

    def offset_of(self, shard: str, token: int) -> int | None:
        """Stream offset of the token at offset `token` of a shard; None if it is not in this split."""
        for segment, segment_edge in zip(self.segments, self._edges.tolist()):
            if segment.shard == shard and segment.first_token <= token < segment.end:
                return int(segment_edge) + token - segment.first_token
        return None

    def open_shard(self, shard: str) -> Shard:
        """A shard of the corpus, of any split. Raises DataError if there is none of that name."""
        info, vocab_size = self.describe_shard(shard), self.manifest.tokenizer.vocab_size
        if self.remote is not None:
            return self.remote.open_shard(info, vocab_size)
        return Shard(self.directory / shard, info, vocab_size)

    def describe_shard(self, shard: str) -> ShardInfo:
        """What the manifest says of a shard. Raises DataError if there is none of that name."""
        if shard not in self._infos:
            raise DataError(f"{self.directory / FILE} lists no shard {shard!r}")
        return self._infos[shard]

    def shards_between(self, first: int, count: int) -> list[str]:
        """The shards that hold tokens [first, first + count) of the stream, without opening one."""
        begin, end = np.searchsorted(self._edges, [first, first + count - 1], side="right") - 1
        return [segment.shard for segment in self.segments[begin : end + 1]]

    def split_range(self, first: int, count: int) -> list[tuple[Shard, int, int, int]]:
        """Split a range of the stream at segments: (shard, offset in the shard, length, offset in the
        stream)."""
        if first < 0 or count < 0 or first + count > self.tokens:
            raise IndexError(f"tokens [{first}, {first + count}) of a stream of {self.tokens}")
        found_pieces = []
        segment_number = int(np.searchsorted(self._edges, first, side="right")) - 1
        while count > 0:
            segment, segment_begin = self.segments[segment_number], first - int(self._edges[segment_number])
            length = min(count, segment.tokens - segment_begin)
            shard, shard_offset = self._shard(segment_number), segment.first_token + segment_begin
            found_pieces.append((shard, shard_offset, length, first))
            first, count, segment_number = first + length, count - length, segment_number + 1
        return found_pieces

    def _shard(self, number: int) -> Shard:
        """The shard of segment `number`, opened, with the segment's edges checked once."""
        own_segment = self.segments[number]
        with self._lock:
            shard = self._shards.pop(own_segment.shard, None)
            if shard is None:
                shard = self.open_shard(own_segment.shard)
            self._shards[own_segment.shard] = shard
            if len(self._shards) > self._most:
                self._shards.popitem(last=False)  # closed once no thread reads from it
            if number not in self._checked:
                self._check_edges(shard, own_segment)
                self._checked.add(number)
        return shard

    def _check_edges(self, shard: Shard, segment: Segment) -> None:
        first, end = segment.first_token, segment.end
        is_whole = all(
            edge == shard.tokens or shard.document_bounds(shard.document_of(edge))[0] == edge
            for edge in (first, end)
        )
        document_count = shard.documents_before(end) - shard.documents_before(first)
        if not is_whole or document_count != segment.documents:
            raise DataError(
                f"{self.directory / FILE}: split {self.split!r} takes tokens {first} to {end} of "
                f"{segment.shard} as {segment.documents} whole documents, but its index disagrees: "
                "prepare the corpus again"
            )


def adopt_shards(
    directory: Path,
    tokenizer: TokenizerInfo,
    validation: float,
    name: str | None = None,
    seen: Callable[[Shard, int, Tokens], None] | None = None,
) -> Manifest:
    """A manifest for Megatron shards that another program wrote to `directory`; the caller saves it.

    Every file is read once in full: ids, indices and pointers are checked, hashes computed. The last fraction
    `validation` of all tokens, in the order of the shards' names, becomes the split "validation". `seen` gets the
    tokens as from `Shard.verify_shard`. Raises DataError.
    """
    shard_prefixes = sorted(path.with_suffix("") for path in directory.glob("*.idx"))
    if not shard_prefixes:
        raise DataError(f"{directory} contains no .idx file: it holds no Megatron shards")
    shards = [Shard(prefix, vocab_size=tokenizer.vocab_size).verify_shard(seen) for prefix in shard_prefixes]
    if len({shard.dtype for shard in shards}) > 1:
        raise DataError(f"{directory}: some shards are uint16, others int32: write them again as one type")
    return Manifest(
        name=name or directory.resolve().name,
        tokenizer=tokenizer,
        dtype=shards[0].dtype,
        shards=shards,
        splits=split_at_document(directory, shards, validation),
        source="adopted Megatron shards",
    )


def split_at_document(
    directory: Path, shards: list[ShardInfo], validation: float
) -> dict[str, list[Segment]]:
    """Splits for `shards` in this order: the last fraction `validation` of all tokens is "validation".

    The cut moves to the beginning of the document that it falls into. Raises DataError for a fraction outside
    [0, 1) or one that leaves nothing to train on.
    """
    if not 0 <= validation < 1:
        raise DataError(
            f"validation={validation}: give the fraction of the tokens to hold back, at least 0, below 1"
        )
    total_tokens = sum(shard.tokens for shard in shards)
    left = total_tokens - round(validation * total_tokens)  # training tokens, from the current shard on
    segments_by_split: dict[str, list[Segment]] = {"train": [], "validation": []}
    for shard_info in shards:
        cut_token, documents_before = 0, 0  # token offset of the boundary, and documents before it
        if left >= shard_info.tokens:
            cut_token, documents_before = shard_info.tokens, shard_info.documents
        elif left > 0:
            shard = Shard(directory / shard_info.name, shard_info)
            cut_token = shard.document_bounds(shard.document_of(left))[0]
            documents_before = shard.documents_before(cut_token)
        left -= shard_info.tokens
        for split, token_count, document_count, first_token in (
            ("train", cut_token, documents_before, 0),
            ("validation", shard_info.tokens - cut_token, shard_info.documents - documents_before, cut_token),
        ):
            if token_count:
                segment = Segment(
                    shard=shard_info.name,
                    first_token=first_token,
                    tokens=token_count,
                    documents=document_count,
                )
                segments_by_split[split].append(segment)
    if not segments_by_split["train"]:
        raise DataError("nothing is left to train on: the corpus is empty or its last document is most of it")
    return {split: segments for split, segments in segments_by_split.items() if segments}


def _check_sizes(directory: Path, info: ShardInfo) -> None:
    for suffix, actual_bytes, manifest_bytes in zip(
        (".bin", ".idx"), file_sizes(directory / info.name), (info.bin_bytes, info.idx_bytes), strict=True
    ):
        if actual_bytes != manifest_bytes:
            raise DataError(
                f"{directory / info.name}{suffix} has {actual_bytes} bytes, the manifest says {manifest_bytes}: "
                "the shard changed after its manifest was written, restore it or prepare the corpus again"
            )
