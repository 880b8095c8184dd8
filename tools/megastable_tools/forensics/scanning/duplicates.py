"""Find exact and near duplicates among the documents of a corpus.

Exact ones are found by hashes (xxh3-128 of the bytes), of which a bounded number is in memory: those of a large corpus
are read several times, each time for another share of all hashes. Memory grows with the findings only, 33 bytes each.

Near ones are similar by MinHash over 5-grams of tokens: signatures of all documents, candidate pairs by banding,
verified pairs, groups (Broder, "On the resemblance and containment of documents", 1997; Leskovec, Rajaraman, Ullman,
"Mining of Massive Datasets", ch. 3). One hash of each 5-gram serves all bins of a signature (Li, Owen, Zhang, "One
Permutation Hashing", 2012); a bin without a 5-gram copies another one, in an order that is the same for all documents
(Shrivastava, "Optimal Densification for Fast and Accurate Minwise Hashing", 2017); 16 bits of a value are kept (Li and
König, "b-Bit Minwise Hashing", 2010). Memory is some 300 bytes for each near duplicate, disk space 256 bytes for each
document. The keys of all bands, 16 bytes each, are computed several times for a corpus of millions of documents, each
time for another share of them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from megastable.base.durable import write_data_file
from megastable.base.errors import DataError
from megastable.data.shards import Shard
from megastable_tools.forensics import resumable_map
from megastable_tools.forensics.resumable_map import KeptPart, write_rows
from megastable_tools.forensics.scanning.units import BLOCK, Int64s, Raw, Unit, edges_of, open_unit

GRAM = 5  # tokens
BINS = 128  # of a signature: a standard error of 0.035 for documents whose similarity is 0.8
RECALL = 0.995  # of pairs exactly at the threshold

CHUNK = 4096  # signatures completed at once

# A number of up to 16 bits before a hash of 48 bits: collisions of different 5-grams in a pair are negligible.
_NUMBER, _HASH = np.uint64(16), np.uint64(48)
_LOW = np.uint64((1 << 48) - 1)
_EMPTY = np.uint32(0xFFFFFFFF)
_ROUNDS = 32  # of the search for a filled bin to copy
_FACTORS = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F],
    dtype=np.uint64,
)

UInt64s = npt.NDArray[np.uint64]
Signatures = npt.NDArray[np.uint16]


def mix_bits(values: UInt64s) -> UInt64s:
    """Each value scattered over 64 bits, one to one (the finaliser of splitmix64; Steele, Lea, Flood, 2014)."""
    mixed_bits = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed_bits = (mixed_bits ^ (mixed_bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed_bits ^ (mixed_bits >> np.uint64(31))


def grams(tokens: npt.NDArray[np.integer]) -> UInt64s:
    """A hash of every 5-gram: uint64 [n - 4], empty for fewer than 5 tokens."""
    gram_count = len(tokens) - GRAM + 1
    if gram_count <= 0:
        return np.empty(0, np.uint64)
    wide_tokens = tokens.astype(np.int64).astype(np.uint64) + np.uint64(1)
    gram_sums = np.zeros(gram_count, np.uint64)
    for token_place, factor in enumerate(_FACTORS):
        gram_sums += mix_bits(wide_tokens[token_place : token_place + gram_count] * factor)
    return mix_bits(gram_sums)


def sign_documents(
    parts: Iterable[tuple[npt.NDArray[np.integer], Int64s, Int64s]], documents: int
) -> Signatures:
    """Signatures uint16 [documents, BINS] of documents that are given in parts.

    A part: tokens [n], its edges int64 [k + 1] and the document of each stretch between them, int64 [k]. The
    continuation of a document cut into parts must repeat the last 4 tokens. A document of fewer than 5 tokens has none:
    0.
    """
    least_values = np.full(documents * BINS, _EMPTY, dtype=np.uint32)
    for tokens, part_edges, stretch_owner in parts:
        gram_hashes = grams(tokens)
        values = gram_hashes[_inside(part_edges, len(gram_hashes))]
        of = np.repeat(stretch_owner * BINS, np.maximum(np.diff(part_edges) - GRAM + 1, 0))
        bin_numbers = (values >> np.uint64(64 - 7)).astype(np.int64)  # 2^7 of them
        np.minimum.at(least_values, of + bin_numbers, (values & np.uint64(0x7FFFFFFF)).astype(np.uint32))
    bin_table = least_values.reshape(documents, BINS)
    parts_of = (slice(first, first + CHUNK) for first in range(0, documents, CHUNK))
    dense_parts = [_densified(bin_table[part]).astype(np.uint16) for part in parts_of]
    return np.concatenate([np.empty((0, BINS), np.uint16), *dense_parts])


def _inside(edges: Int64s, count: int) -> npt.NDArray[np.bool_]:
    """Which of `count` 5-grams lie within a stretch; those across an edge do not count: bool [count]."""
    is_inside = np.ones(count, np.bool_)
    for tokens_back in range(1, GRAM):
        crossing_grams = edges[1:-1] - tokens_back
        is_inside[crossing_grams[(crossing_grams >= 0) & (crossing_grams < count)]] = False
    return is_inside


def _densified(table: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Every empty bin takes the value of the first filled one in its own fixed random order, then of the next one."""
    filled = table != _EMPTY
    partial_indexes = np.flatnonzero(filled.any(axis=1) & ~filled.all(axis=1))
    random = np.random.default_rng(0)
    source_order = random.integers(0, BINS, (_ROUNDS, BINS))
    part, known_bins = table[partial_indexes], filled[partial_indexes]
    filled_rows, missing_bins = part.copy(), ~known_bins
    for source_bins in source_order:
        bins_taken = missing_bins & known_bins[:, source_bins]
        filled_rows = np.where(bins_taken, part[:, source_bins], filled_rows)
        missing_bins &= ~bins_taken
        if not missing_bins.any():
            break
    if missing_bins.any():
        # The next filled bin to the right, around the end.
        known_twice = np.concatenate([known_bins, known_bins], axis=1)
        filled_index = np.where(known_twice, np.arange(2 * BINS), 2 * BINS)
        next_filled = np.minimum.accumulate(filled_index[:, ::-1], axis=1)[:, ::-1][:, :BINS] % BINS
        filled_rows = np.where(missing_bins, np.take_along_axis(part, next_filled, axis=1), filled_rows)
    dense_table = table.copy()
    dense_table[partial_indexes] = filled_rows
    dense_table[~filled.any(axis=1)] = 0
    return dense_table


def banding(threshold: float) -> tuple[int, int]:
    """(bands, rows of each): the longest rows for which a pair exactly at `threshold` is found with `RECALL`."""
    for rows in range(16, 0, -1):
        bands = BINS // rows
        if 1 - (1 - threshold**rows) ** bands >= RECALL:
            return bands, rows
    return BINS, 1


def band_keys(table: Signatures, bands: int, rows: int) -> UInt64s:
    """A key for each band of each signature: uint64 [documents, bands]; equal for equal rows of one band."""
    band_hashes = np.zeros((len(table), bands), np.uint64)
    band_rows = table[:, : bands * rows].reshape(len(table), bands, rows).astype(np.uint64)
    for row in range(rows):
        row_values = band_rows[:, :, row] + np.uint64(1)
        band_hashes = mix_bits(band_hashes * np.uint64(0x9E3779B97F4A7C15) + row_values)
    band_salts: UInt64s = np.arange(bands, dtype=np.uint64)
    return mix_bits(band_hashes + band_salts)


def estimate_similarity(one: Signatures, other: Signatures) -> npt.NDArray[np.float64]:
    """The similarity (Jaccard) of pairs of documents by their signatures [n, BINS]: float64 [n]."""
    equal_share = (one == other).mean(axis=1)
    # 16 bits are equal by chance once in 65,536 times.
    return np.maximum(0.0, (equal_share - 2.0**-16) / (1 - 2.0**-16))


def similarities(
    tokens: npt.NDArray[np.integer], edges: Int64s, one: Int64s, other: Int64s
) -> npt.NDArray[np.float64]:
    """The exact similarity of pairs of documents by their sets of 5-grams: float64 [n].

    tokens: [t]; edges: int64 [d + 1], of d documents; one, other: int64 [n], their indexes. At most 65,536 tokens each.
    """
    gram_hashes, documents = grams(tokens), len(edges) - 1
    gram_owner = np.repeat(np.arange(documents), np.maximum(np.diff(edges) - GRAM + 1, 0))
    inside_hashes = gram_hashes[_inside(edges, len(gram_hashes))] >> _NUMBER
    document_sets = np.unique((gram_owner.astype(np.uint64) << _HASH) | inside_hashes)
    set_sizes = np.bincount((document_sets >> _HASH).astype(np.int64), minlength=documents)
    set_begins = np.cumsum(set_sizes) - set_sizes
    # Both sets of each pair, one after the other; what is there twice is in both.
    pair_members = np.stack([one, other], axis=1).ravel()
    counts = set_sizes[pair_members]
    pair = np.repeat(np.arange(len(pair_members)) // 2, counts)
    place = np.arange(len(pair)) + np.repeat(set_begins[pair_members] - (np.cumsum(counts) - counts), counts)
    pair_keys = np.sort((pair.astype(np.uint64) << _HASH) | (document_sets[place] & _LOW))
    common_pairs = (pair_keys[1:][pair_keys[1:] == pair_keys[:-1]] >> _HASH).astype(np.int64)
    common_counts = np.bincount(common_pairs, minlength=len(one))
    union_sizes = set_sizes[one] + set_sizes[other] - common_counts
    return np.where(union_sizes > 0, common_counts / np.maximum(union_sizes, 1), 1.0)


BYTES = 1 << 29  # of records in memory

Records = npt.NDArray[np.void]

# A document: its hash, its number over all shards, its tokens.
HASHED = np.dtype([("high", "<u8"), ("low", "<u8"), ("document", "<i8"), ("tokens", "<i8")])
# A copy: its document, its original, their similarity, its tokens, and whether it is only nearly the same.
COPY = np.dtype([("document", "<i8"), ("of", "<i8"), ("similarity", "<f4"), ("tokens", "<i8"), ("near", "?")])


def count_passes(size: int) -> int:
    """How often records of `size` bytes are read, so that those of one share fit into memory."""
    return max(1, -(-size // BYTES))


def find_exact(read_hashes: Callable[[], Iterable[Records]], documents: int) -> Records:
    """The documents for which an earlier one has the same hash: `COPY` [n], ascending.

    Args:
        read_hashes: Gives `HASHED` records of all documents; those without tokens are not copies.
        documents: How many they are.
    """
    pass_count, copy_parts = count_passes(documents * HASHED.itemsize), [np.empty(0, COPY)]
    for pass_number in range(pass_count):
        share_parts = [np.empty(0, HASHED)]
        for records in read_hashes():
            in_share = (records["tokens"] > 0) & (records["high"] % np.uint64(pass_count) == pass_number)
            share_parts.append(records[in_share])
        copy_parts.append(_find_copies(np.concatenate(share_parts)))
    return sort_copies(copy_parts)


def sort_copies(copies: Iterable[Records]) -> Records:
    """Several copies [n] as one array, by their document."""
    all_copies = np.concatenate(list(copies))
    return all_copies[np.argsort(all_copies["document"], kind="stable")]


def _find_copies(share: Records) -> Records:
    """All documents but the first of each hash."""
    share = share[np.lexsort((share["document"], share["low"], share["high"]))]
    is_same = (share["high"][1:] == share["high"][:-1]) & (share["low"][1:] == share["low"][:-1])
    group_begins = np.flatnonzero(np.append(True, ~is_same)) if len(share) else np.empty(0, np.int64)
    first = np.repeat(share["document"][group_begins], np.diff(np.append(group_begins, len(share))))
    is_later = share["document"] != first
    found = np.empty(int(is_later.sum()), COPY)
    found["document"], found["of"], found["similarity"] = share["document"][is_later], first[is_later], 1.0
    found["tokens"], found["near"] = share["tokens"][is_later], False
    return found


def write_copies(path: Path, copies: Records) -> None:
    """Write copies as a Parquet file. Raises DataError if the disk fails."""
    write_rows(path, pa.table({name: copies[name] for name in COPY.names or ()}))


def read_copies(path: Path) -> Records:
    """The copies in a file that `write_copies` wrote, ascending. Raises DataError."""
    try:
        copy_table = pq.read_table(path, partitioning=None)
        copies_found = np.empty(len(copy_table), COPY)
        for column_name in COPY.names or ():
            copies_found[column_name] = copy_table[column_name].to_numpy()
        return copies_found
    except (OSError, pa.ArrowException, KeyError) as error:
        raise DataError(f"{path} cannot be read: {error}; scan again") from error


SMALL = 16  # documents of a bucket up to which all pairs are compared; in a larger one each with two others
CHEAP = 1 << 16  # tokens of a document up to which its text is compared
BUDGET = 1 << 30  # tokens read to compare texts; beyond it signatures decide
MARGIN = 0.15  # four standard errors: pairs estimated this far below the threshold are not read
BATCH = 1 << 15  # pairs
READ = 1 << 22  # tokens compared at once

BAND = np.dtype([("key", "<u8"), ("document", "<i8")])
PAIR = np.dtype([("one", "<i8"), ("other", "<i8")])


def sign_unit(unit: Unit, folder: Path) -> KeptPart:
    """Write the signatures of a unit, unless they exist."""
    signature_path = resumable_map.near_part_path(folder, unit.number)
    is_missing = _load(signature_path, unit.documents) is None
    if is_missing:
        unit_shard = open_unit(unit)
        unit_edges = edges_of(unit_shard, unit)
        file_content = io.BytesIO()
        np.save(file_content, sign_documents(_parts(unit_shard, unit_edges), unit.documents))
        write_data_file(signature_path, file_content.getvalue())
    return KeptPart(unit.tokens, unit.documents, is_missing)


def _parts(shard: Shard, edges: Int64s) -> Iterator[tuple[Raw, Int64s, Int64s]]:
    """About a block of tokens at a time; a continuation repeats the last 4 tokens."""
    part_begin, last_token = int(edges[0]), int(edges[-1])
    while part_begin < last_token:
        part_stop = min(part_begin + BLOCK, last_token)
        first_document = int(np.searchsorted(edges, part_begin, side="right")) - 1
        last_document = int(np.searchsorted(edges, part_stop, side="left"))
        is_cut = int(edges[last_document]) > part_stop
        yield (
            shard.read_raw(part_begin, part_stop - part_begin),
            np.clip(edges[first_document : last_document + 1], part_begin, part_stop) - part_begin,
            np.arange(first_document, last_document),
        )
        part_begin = part_stop - (GRAM - 1 if is_cut else 0)


def find_near(
    shards: Sequence[Shard], units: Sequence[Unit], folder: Path, copies: Records, threshold: float
) -> Records:
    """The documents that are at least `threshold` like an earlier one: `COPY` [n], ascending.

    Exact copies, `copies`, are represented by their first one. Documents of fewer than 5 tokens have no signature. A
    copy refers to the first document of its group, possibly linked through others, with its similarity to that one.
    Raises DataError.
    """
    look = _Look(shards, units, folder, threshold)
    duplicate_groups = _Groups()
    for one, other_document in look.pairs(copies["document"]):
        duplicate_groups.join(one, other_document)
    found = duplicate_groups.members()
    copy_records = np.empty(len(found), COPY)
    for batch_start in range(0, len(found), BATCH):
        pair_batch = found[batch_start : batch_start + BATCH]
        similarities_found = look.similarities(pair_batch[:, 1], pair_batch[:, 0])
        copy_records["similarity"][batch_start : batch_start + BATCH] = similarities_found
    copy_records["document"], copy_records["of"], copy_records["near"] = found[:, 0], found[:, 1], True
    copy_records["tokens"] = [look.tokens_of(document) for document in found[:, 0].tolist()]
    return copy_records


@dataclass
class _Groups:
    """Union-find over the documents of pairs; the first document of a group is its root."""

    parent: dict[int, int] = field(default_factory=dict)

    def root(self, document: int) -> int:
        root_path = []
        while (parent_document := self.parent.get(document, document)) != document:
            root_path.append(document)
            document = parent_document
        for lower_document in root_path:
            self.parent[lower_document] = document
        return document

    def join(self, one: int, other: int) -> None:
        low_root, high_root = sorted((self.root(one), self.root(other)))
        self.parent[low_root], self.parent[high_root] = low_root, low_root

    def members(self) -> Int64s:
        """(document, first of its group) of all but the first ones, ascending: int64 [n, 2]."""
        root_pairs = [(document, self.root(document)) for document in sorted(self.parent)]
        members = [(document, root) for document, root in root_pairs if document != root]
        return np.array(members, dtype=np.int64).reshape(-1, 2)


class _Look:
    """Documents by their number over all shards: signatures, texts, lengths."""

    def __init__(
        self, shards: Sequence[Shard], units: Sequence[Unit], folder: Path, threshold: float
    ) -> None:
        self.shards, self.units, self.folder, self.threshold = shards, units, folder, threshold
        self.firsts = np.array([unit.before + unit.first_document for unit in units], dtype=np.int64)
        self.budget = BUDGET
        self._table = lru_cache(maxsize=64)(self._open)
        self._span = lru_cache(maxsize=1 << 16)(self._find)

    def pairs(self, copied: Int64s) -> Iterator[tuple[int, int]]:
        """Pairs with at least the required similarity, without the documents `copied`, ascending."""
        band_count, row_count = banding(self.threshold)
        pass_count = count_passes(sum(unit.documents for unit in self.units) * band_count * BAND.itemsize)
        for pass_number in range(pass_count):
            share_parts = [np.empty(0, BAND)]
            for unit, first in zip(self.units, self.firsts.tolist()):
                # Those that have a signature, without those `copied`, counted from the first of the unit.
                edges = self.shards[unit.shard].document_edges(unit.first_document, unit.documents)
                is_signed = np.diff(edges) >= GRAM
                low_index, high_index = np.searchsorted(copied, (first, first + unit.documents))
                is_signed[copied[low_index:high_index] - first] = False
                chosen = np.flatnonzero(is_signed)
                keys = band_keys(self._table(unit.number)[chosen], band_count, row_count).ravel()
                mine = keys % np.uint64(pass_count) == pass_number
                records = np.empty(int(mine.sum()), BAND)
                records["key"], records["document"] = keys[mine], np.repeat(chosen + first, band_count)[mine]
                share_parts.append(records)
            candidate_pairs = _candidates(np.concatenate(share_parts))
            for batch_start in range(0, len(candidate_pairs), BATCH):
                pair_batch = candidate_pairs[batch_start : batch_start + BATCH]
                are_alike = self.similarities(pair_batch["one"], pair_batch["other"]) >= self.threshold
                yield from zip(pair_batch["one"][are_alike].tolist(), pair_batch["other"][are_alike].tolist())

    def similarities(self, one: Int64s, other: Int64s) -> npt.NDArray[np.float64]:
        """Similarities of pairs, float64 [n]: by their texts if those are short and near the threshold."""
        similarities_found = estimate_similarity(self._signatures(one), self._signatures(other))
        pair_batch: list[int] = []
        tokens_read = 0
        for pair_index in np.flatnonzero(similarities_found >= self.threshold - MARGIN).tolist():
            document_sizes = self.tokens_of(int(one[pair_index])), self.tokens_of(int(other[pair_index]))
            if max(document_sizes) > CHEAP or sum(document_sizes) > self.budget:
                continue
            self.budget -= sum(document_sizes)
            pair_batch.append(pair_index)
            tokens_read += sum(document_sizes)
            if tokens_read > READ:
                similarities_found[pair_batch] = self._exact(one[pair_batch], other[pair_batch])
                pair_batch, tokens_read = [], 0
        if pair_batch:
            similarities_found[pair_batch] = self._exact(one[pair_batch], other[pair_batch])
        return similarities_found

    def _exact(self, one: Int64s, other: Int64s) -> npt.NDArray[np.float64]:
        unique_documents, places = np.unique(np.concatenate([one, other]), return_inverse=True)
        texts = []
        for document_number in unique_documents.tolist():
            shard = self.shards[self._place(document_number)[0].shard]
            texts.append(shard.read_raw(*self._span(document_number)))
        text_edges = np.cumsum([0, *map(len, texts)])
        return similarities(np.concatenate(texts), text_edges, places[: len(one)], places[len(one) :])

    def tokens_of(self, document: int) -> int:
        return self._span(document)[1]

    def _find(self, document: int) -> tuple[int, int]:
        """First token, tokens."""
        unit, document_number = self._place(document)
        first_token, end_token = self.shards[unit.shard].document_bounds(document_number)
        return first_token, end_token - first_token

    def _place(self, document: int) -> tuple[Unit, int]:
        unit = self.units[int(np.searchsorted(self.firsts, document, side="right")) - 1]
        return unit, document - unit.before

    def _signatures(self, documents: Int64s) -> Signatures:
        signatures_found = np.empty((len(documents), BINS), np.uint16)
        unit_numbers = np.searchsorted(self.firsts, documents, side="right") - 1
        for unit_number in np.unique(unit_numbers).tolist():
            in_unit = unit_numbers == unit_number
            table_rows = documents[in_unit] - self.firsts[unit_number]
            signatures_found[in_unit] = self._table(unit_number)[table_rows]
        return signatures_found

    def _open(self, number: int) -> Signatures:
        signature_path = resumable_map.near_part_path(self.folder, number)
        signature_table = _load(signature_path, self.units[number].documents)
        if signature_table is None:
            raise DataError(f"{signature_path} is missing or damaged: scan again, other results are kept")
        return signature_table


def _load(path: Path, documents: int) -> Signatures | None:
    """Signatures, mapped; None if they are missing or of another number of documents."""
    try:
        table = np.load(path, mmap_mode="r", allow_pickle=False)
    except (FileNotFoundError, ValueError, EOFError):
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    return table if table.shape == (documents, BINS) and table.dtype == np.uint16 else None


def _candidates(part: Records) -> Records:
    """Pairs of documents with a key in common, the earlier one first: `PAIR` [n].

    All pairs of a small bucket; in a larger one each document with the first and the previous one.
    """
    if not len(part):
        return np.empty(0, PAIR)
    part = part[np.lexsort((part["document"], part["key"]))]
    bucket_begins = np.flatnonzero(np.append(True, part["key"][1:] != part["key"][:-1]))
    bucket_sizes = np.diff(np.append(bucket_begins, len(part))).astype(np.int64)
    bucket_place = np.arange(len(part)) - np.repeat(bucket_begins, bucket_sizes)
    size = np.repeat(bucket_sizes, bucket_sizes)
    pairs_found = []
    for places_back in range(1, SMALL):
        later_entries = np.flatnonzero((bucket_place >= places_back) & ((size <= SMALL) | (places_back == 1)))
        pairs_found.append((later_entries - places_back, later_entries))
    later_entries = np.flatnonzero((size > SMALL) & (bucket_place > 1))
    pairs_found.append((later_entries - bucket_place[later_entries], later_entries))
    earlier, later = (np.concatenate(entries) for entries in zip(*pairs_found, strict=True))
    pair_records = np.empty(len(earlier), PAIR)
    pair_records["one"], pair_records["other"] = part["document"][earlier], part["document"][later]
    return np.unique(pair_records[pair_records["one"] != pair_records["other"]])
