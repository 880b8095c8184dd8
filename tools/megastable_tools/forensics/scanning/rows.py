"""Compute a row for every document: its features, the oddness of its worst piece, a hash of its bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash
import zstandard

from megastable.data.shards import Shard
from megastable_tools.forensics.oddness.features import NAMES
from megastable_tools.forensics.oddness.judgement import KINDS
from megastable_tools.forensics.oddness.yardstick import JudgedPieces, Yardstick, cut_documents, judge_pieces
from megastable_tools.forensics.scanning.units import (
    BLOCK,
    SAMPLE,
    Int64s,
    PieceBlock,
    Raw,
    read_blocks,
    sample_documents,
)

EMPTY = "empty"  # the kind of a document without tokens, which is not measured
ALL_KINDS = (*KINDS, EMPTY)
LARGEST = ("run",)  # features whose value for a document is the maximum of its pieces, not the mean by tokens

COMPRESSED = 1 << 16  # leading bytes of a document that are compressed
LEVEL = 1  # of zstd
REPETITIVE = 10.0  # compression ratio worth reporting: code has 1 to 5, twice that with 4 bytes per token

UInt64s = npt.NDArray[np.uint64]

SCHEMA = pa.schema(
    [
        ("shard", pa.dictionary(pa.int8(), pa.string())),
        ("document", pa.int64()),
        ("first_token", pa.int64()),
        ("tokens", pa.int64()),
        ("score", pa.float32()),
        ("kind", pa.dictionary(pa.int8(), pa.string())),
        ("feature", pa.dictionary(pa.int8(), pa.string())),  # the deciding one, of the worst piece
        ("value", pa.float32()),  # and its value there
        ("piece", pa.int64()),  # the first token of the worst piece
        ("piece_tokens", pa.int32()),
        ("high", pa.uint64()),  # xxh3-128 of the bytes
        ("low", pa.uint64()),
        ("compression", pa.float32()),  # compression ratio of its first bytes by zstd; 0 without any
        *((name, pa.float32()) for name in NAMES),
    ]
)


def measure_rows(
    yardstick: Yardstick, shard: Shard, first: int, edges: Int64s, key: int | None = None
) -> pa.Table:
    """Rows (`SCHEMA`) of the documents from number `first` on, whose `edges` are int64 [d + 1] in tokens of the shard.

    key: for all of them, instead of their own. Time is linear in tokens, memory in documents. Raises DataError if
    they cannot be read.
    """
    _keep_memory()
    lengths = np.diff(edges)
    worst_pieces = _Worst(len(lengths), edges)
    largest = [NAMES.index(feature_name) for feature_name in LARGEST]
    feature_sums = np.zeros((len(lengths), len(NAMES)), dtype=np.float64)
    feature_peaks = np.zeros((len(lengths), len(largest)), dtype=np.float32)
    document_hashes, compression = _Hashes(shard.name, first, lengths), np.zeros(len(lengths), np.float32)
    for piece_block in read_blocks(shard, edges, cut_documents):
        piece_keys = document_hashes.add(piece_block.tokens, piece_block.edges, piece_block.owner)
        _compress(piece_block, compression)
        if key is not None:
            piece_keys = np.full_like(piece_keys, key)
        judged_block = judge_pieces(yardstick, piece_block.tokens, piece_block.edges, piece_keys)
        block_features = judged_block.features
        piece_weights = block_features["length"].astype(np.float64)
        begins = np.flatnonzero(np.append(True, np.diff(piece_block.owner) != 0))
        of = piece_block.owner[begins]
        table = np.stack([block_features[feature_name] for feature_name in NAMES], axis=1)
        feature_sums[of] += np.add.reduceat(table * piece_weights[:, None], begins)
        feature_peaks[of] = np.maximum(feature_peaks[of], np.maximum.reduceat(table[:, largest], begins))
        worst_pieces.look(piece_block.owner, begins, judged_block, piece_block.first_token)
    features = (feature_sums / np.maximum(lengths, 1)[:, None]).astype(np.float32)
    features[:, largest] = feature_peaks
    hash_halves = document_hashes.digests.astype(np.uint64)
    row_columns = {
        "shard": encode_names(np.zeros(len(lengths), np.int8), [shard.name]),
        "document": np.arange(first, first + len(lengths)),
        "first_token": edges[:-1],
        "tokens": lengths,
        "score": worst_pieces.score,
        "kind": encode_names(np.where(lengths > 0, worst_pieces.kind, len(KINDS)).astype(np.int8), ALL_KINDS),
        "feature": encode_names(worst_pieces.feature.astype(np.int8), NAMES),
        "value": worst_pieces.value,
        "piece": worst_pieces.first,
        "piece_tokens": worst_pieces.tokens,
        "high": hash_halves[:, 0],
        "low": hash_halves[:, 1],
        "compression": compression,
        **{feature_name: features[:, feature_column] for feature_column, feature_name in enumerate(NAMES)},
    }
    return pa.table(row_columns, schema=SCHEMA)


@cache
def _keep_memory() -> None:
    """Let this process keep up to 64 MiB of freed array memory for reuse: twice as fast.

    glibc returns every large block to the kernel, which clears it for the next use, until a block of nearly 32 MiB
    was freed: from then on it keeps smaller ones (mallopt(3), M_MMAP_THRESHOLD). On other systems this does nothing.
    """
    np.empty(31 << 20, np.uint8)


def encode_names(codes: npt.NDArray[np.int8], names: Sequence[str]) -> pa.DictionaryArray:
    """A column of texts, from their numbers in `names`."""
    return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int8()), pa.array(list(names)))


def decode_names(column: pa.ChunkedArray, names: Sequence[str]) -> Int64s:
    """The input of `encode_names`, int64 [n]; a file keeps only the names that occur, in any order."""
    whole = column.combine_chunks()
    known_codes = np.array([names.index(name) for name in whole.dictionary.to_pylist()], dtype=np.int64)
    return known_codes[whole.indices.to_numpy(zero_copy_only=False)] if len(whole) else np.empty(0, np.int64)


def document_keys(tokens: Raw, edges: Int64s) -> UInt64s:
    """Keys of whole documents for a yardstick, uint64 [d]: copies have the same. edges: int64 [d + 1] into tokens [n].

    The scan's keys, for documents no longer than a block; for others see `long_key`.
    """
    return _digests(tokens, edges)[:, 1].astype(np.uint64)


def long_key(shard: str, document: int) -> int:
    """The key of a document longer than a block, which is never in memory as a whole."""
    return xxhash.xxh3_64_intdigest(f"{document} {shard}".encode())


def keyed_sample(
    shards: Sequence[Shard], most: int = SAMPLE
) -> Iterator[tuple[Shard, Int64s, Int64s, int | None]]:
    """A sample of shards (`units.sample`), with the keys of parts of long documents."""
    for shard, sample_edges, document_numbers in sample_documents(shards, most):
        key = None
        if len(document_numbers) == 1:
            first, document_end = shard.document_bounds(int(document_numbers[0]))
            key = long_key(shard.name, int(document_numbers[0])) if document_end - first > BLOCK else None
        yield shard, sample_edges, document_numbers, key


def sample_with_keys(
    shards: Sequence[Shard], keys_of: Callable[[Raw, Int64s], UInt64s], most: int = SAMPLE
) -> Iterator[tuple[Raw, Int64s, UInt64s]]:
    """The sample with its tokens and keys, for a yardstick. keys_of: whole documents, by tokens and edges."""
    for shard, edges, _, key in keyed_sample(shards, most):
        tokens = shard.read_raw(int(edges[0]), int(edges[-1] - edges[0]))
        inner_edges = np.unique(edges - edges[0])
        yield tokens, inner_edges, keys_of(tokens, inner_edges) if key is None else np.array([key], np.uint64)


def _digests(tokens: Raw, edges: Int64s) -> npt.NDArray[np.uint64]:
    """xxh3-128 of the bytes between `edges` int64 [d + 1]: big-endian uint64 [d, 2]."""
    byte_view = tokens.data.cast("B") if len(tokens) else memoryview(b"")
    byte_edges = (edges * tokens.dtype.itemsize).tolist()
    joined = b"".join([xxhash.xxh3_128_digest(byte_view[a:byte_end]) for a, byte_end in pairwise(byte_edges)])
    return np.frombuffer(joined, ">u8").reshape(-1, 2)


def _compress(block: PieceBlock, compression: npt.NDArray[np.float32]) -> None:
    """Store the compression ratio of every document that begins in `block` in `compression` [d]."""
    byte_view, itemsize = block.tokens.data.cast("B"), block.tokens.dtype.itemsize
    begins = np.flatnonzero(np.append(True, np.diff(block.owner) != 0))
    byte_edges = (np.append(block.edges[begins], block.edges[-1]) * itemsize).tolist()
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False, write_content_size=False)
    for document, (byte_begin, end) in zip(block.owner[begins].tolist(), pairwise(byte_edges), strict=True):
        if not compression[document]:  # for a document of several blocks its first one counts
            size = min(end - byte_begin, COMPRESSED)
            compression[document] = size / len(compressor.compress(byte_view[byte_begin : byte_begin + size]))


class _Worst:
    """The worst piece of each document so far."""

    def __init__(self, documents: int, edges: Int64s) -> None:
        self.score = np.zeros(documents, np.float32)
        self.kind = np.zeros(documents, np.int16)
        self.feature = np.zeros(documents, np.int16)
        self.value = np.zeros(documents, np.float32)
        self.first = edges[:-1].copy()
        self.tokens = np.zeros(documents, np.int32)

    def look(
        self, owner: Int64s, begins: npt.NDArray[np.intp], judged: JudgedPieces, first_token: int
    ) -> None:
        """Consider pieces of documents `owner` [k], each document's first at `begins`; first_token: their offset in the
        shard."""
        piece_scores = judged.worst.score
        # The first of each document's maxima: a stable sort by score within each document.
        score_order = np.lexsort((-piece_scores, owner))
        at = score_order[begins]
        of = owner[at]
        is_better = (piece_scores[at] > self.score[of]) | (self.tokens[of] == 0)
        at, of = at[is_better], of[is_better]
        self.score[of], self.kind[of] = piece_scores[at], judged.worst.kind[at]
        self.feature[of], self.value[of] = judged.worst.feature[at], judged.value[at]
        self.first[of], self.tokens[of] = judged.first[at] + first_token, judged.tokens[at]


class _Hashes:
    """xxh3-128 of each document, which come in blocks; only one longer than a block comes in several."""

    def __init__(self, shard: str, first: int, lengths: Int64s) -> None:
        self._shard, self._first, self._lengths = shard, first, lengths
        self.digests = np.zeros((len(lengths), 2), dtype=">u8")
        self._open: tuple[int, xxhash.xxh3_128] | None = None

    def add(self, tokens: Raw, edges: Int64s, owner: Int64s) -> UInt64s:
        """The keys of the pieces of a block, uint64 [k]."""
        begins = np.flatnonzero(np.append(True, np.diff(owner) != 0))
        block_documents = owner[begins]
        if self._lengths[block_documents[0]] > BLOCK:
            long_document = int(block_documents[0])
            if self._open is None or self._open[0] != long_document:
                self._open = long_document, xxhash.xxh3_128()
            self._open[1].update(tokens.data.cast("B"))
            self.digests[long_document] = np.frombuffer(self._open[1].digest(), ">u8")
            return np.full(len(owner), long_key(self._shard, self._first + long_document), np.uint64)
        self.digests[block_documents] = _digests(tokens, np.append(edges[begins], edges[-1]))
        keys = self.digests[block_documents, 1].astype(np.uint64)
        return np.repeat(keys, np.diff(np.append(begins, len(owner))))


@lru_cache(maxsize=1)
def cached_yardstick(path: Path, changed: int) -> Yardstick:
    """The yardstick in a file, loaded once per process. changed: its modification time, in nanoseconds."""
    return Yardstick.load_file(path)
