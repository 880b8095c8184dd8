"""Shards damaged in every way: read right, or refused with a message. Nothing crashes, and no lie in a header is
believed."""

from __future__ import annotations

import os
import re
import struct
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.base.errors import DataError
from megastable.data.shards import Shard
from tests.forensics.shelves import VOCABULARY, Plain, shelves, write
from tests.tiers import examples

Files = tuple[bytes, bytes]  # .bin, .idx

HEADER = 34
REMEDY = re.compile(r"again|restore|cannot be read")
NUMBERS = st.sampled_from(
    [0, 1, 2, 3, 5, 2**15, 2**16, 2**31 - 1, 2**31, 2**32, 2**40, 2**60, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
)


def plain(files: Files) -> tuple[str, list[int], list[int], list[int]] | None:
    """(dtype, tokens, lengths, document indices) of a shard that is whole, as plainly as can be; None for any other."""
    raw, index = files
    if len(index) < HEADER:
        return None
    magic, version, code, sequences, entries = struct.unpack_from("<9sQBQQ", index)
    rest = index[HEADER:]
    known = {4: ("int32", "<i4"), 8: ("uint16", "<u2")}
    if (magic, version) != (b"MMIDIDX\0\0", 1) or code not in known or entries < 1:
        return None
    if len(rest) not in (12 * sequences + 8 * entries, 13 * sequences + 8 * entries):
        return None
    lengths = list(struct.unpack_from(f"<{sequences}i", rest))
    pointers = list(struct.unpack_from(f"<{sequences}q", rest, 4 * sequences))
    indices = list(struct.unpack_from(f"<{entries}q", rest, 12 * sequences))
    dtype, token = known[code]
    itemsize, at = np.dtype(token).itemsize, 0
    for length, pointer in zip(lengths, pointers, strict=True):
        if length < 0 or pointer != at:
            return None
        at += itemsize * length
    if at != len(raw) or indices[0] != 0 or indices[-1] != sequences or indices != sorted(indices):
        return None
    return dtype, np.frombuffer(raw, token).tolist(), lengths, indices


@st.composite
def mutations(draw: st.DrawFn) -> Callable[[bytes, bytes], bytes]:
    """A change of a file; the other is what pieces may come from."""
    kind = draw(st.sampled_from(["flip", "number", "cut", "extend", "splice", "drop", "header"]))
    at, size = draw(st.integers(0, 400)), draw(st.integers(1, 40))
    bit, value = draw(st.integers(0, 7)), draw(NUMBERS).to_bytes(8, "little")
    code, counts = draw(st.sampled_from([0, 1, 4, 8, 255])), [draw(NUMBERS), draw(NUMBERS)]

    def change(content: bytes, other: bytes) -> bytes:
        place = at % (len(content) + 1)
        if kind == "flip" and content:
            place = at % len(content)
            return content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]
        if kind == "number":
            # Where a number of the format is, mostly: the arrays begin at byte 34.
            place = place if place < HEADER else HEADER + (place - HEADER) // 4 * 4
            return content[:place] + value[: 4 if size % 2 else 8] + content[place + (4 if size % 2 else 8) :]
        if kind == "cut":
            return content[:place]
        if kind == "extend":
            return content + value[:size] * (1 + size // 8)
        if kind == "splice":
            return content[:place] + other[at % (len(other) + 1) :][:size] + content[place + size :]
        if kind == "drop":
            return content[:place] + content[place + size :]
        return struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, *counts) + content[HEADER:]

    return change


def ask(shard: Shard) -> Iterator[Callable[[], Any]]:
    """All that a shard can be asked and should know; nothing beyond its ends."""
    documents, tokens = range(shard.documents)[:60], range(shard.tokens)[:60]
    yield from (lambda d=d: shard.document_bounds(d) for d in documents)
    yield from (lambda d=d: shard.sequence_bounds(d) for d in documents)
    yield from (lambda t=t: shard.document_of(t) for t in tokens)
    yield from (lambda t=t: shard.documents_before(t) for t in tokens)
    for first in tokens:
        yield lambda first=first: shard.document_starts(first, shard.tokens - first)
        yield lambda first=first: shard.read_tokens(first, shard.tokens - first)
    yield lambda: shard.documents_before(shard.tokens)
    yield lambda: shard.document_edges(0, shard.documents)
    yield lambda: shard.document_sequences(0, shard.documents)
    yield lambda: shard.sequence_edges(np.arange(min(shard.sequences, 1000) + 1))
    yield lambda: shard.sequence_lengths(slice(0, shard.sequences))
    yield lambda: shard.sequence_modes(slice(0, shard.sequences))
    yield shard.verify_shard


def explained(error: DataError, prefix: Path) -> None:
    """It names a file and says what to do."""
    assert str(prefix) in str(error)
    assert REMEDY.search(str(error)), str(error)


def answers(shard: Shard) -> Iterator[Any]:
    """What it says to all of it."""
    for question in ask(shard):
        try:
            yield question()
        except DataError as error:
            explained(error, shard.bin_path.with_suffix(""))


def opened(prefix: Path, vocabulary: int | None) -> Shard | None:
    try:
        return Shard(prefix, vocab_size=vocabulary)
    except DataError as error:
        explained(error, prefix)
        return None


def put(prefix: Path, files: Files) -> None:
    for suffix, content in zip((".bin", ".idx"), files, strict=True):
        Path(f"{prefix}{suffix}").write_bytes(content)


def some_files(folder: Path, shards: list[Plain], dtype: str) -> list[Files]:
    for shard in shards:
        write(folder, shard, dtype)
    return [
        ((folder / f"{s.name}.bin").read_bytes(), (folder / f"{s.name}.idx").read_bytes()) for s in shards
    ]


def consistent(shard: Shard, vocabulary: int | None) -> None:
    """What it says of itself before `verify` holds within its bounds, and no token is outside of the vocabulary."""
    for document in range(shard.documents)[:60]:
        try:
            first, end = shard.document_bounds(document)
        except DataError:
            continue
        assert 0 <= first <= end <= shard.tokens
    for token in range(shard.tokens)[:60]:
        try:
            document = shard.document_of(token)
            first, end = shard.document_bounds(document)
        except DataError:
            continue
        assert first <= token < end
    if vocabulary is not None:
        for first in range(shard.tokens)[:60]:
            try:
                tokens = shard.read_tokens(first, shard.tokens - first)
            except DataError:
                continue
            assert 0 <= tokens.min() <= tokens.max() < vocabulary


@settings(max_examples=examples(400))
@given(
    given_=shelves(),
    changes=st.lists(st.tuples(st.booleans(), mutations()), max_size=4),
    swap=st.integers(0, 9),
    vocabulary=st.sampled_from([None, VOCABULARY, 3]),
)
def test_shard_is_read_right_or_refused_when_damaged(
    given_: Any, changes: list[tuple[bool, Any]], swap: int, vocabulary: int | None
) -> None:
    with tempfile.TemporaryDirectory() as place:
        all_files = some_files(Path(place), given_[0], given_[2])
        (raw, index), (other_raw, other_index) = all_files[0], all_files[-1]
        if swap == 0:
            raw = other_raw
        for in_bin, change in changes:
            raw, index = (change(raw, other_index), index) if in_bin else (raw, change(index, other_raw))
        prefix = Path(place) / "damaged"
        put(prefix, (raw, index))
        wanted = plain((raw, index))
        if wanted and vocabulary is not None and not all(0 <= token < vocabulary for token in wanted[1]):
            wanted = None
        shard = opened(prefix, vocabulary)
        passes = False
        if shard is not None:
            list(answers(shard))
            consistent(shard, vocabulary)
            try:
                found = shard.verify_shard()
                passes = True
            except DataError:
                pass
        assert passes == (wanted is not None)
        if shard is not None and wanted is not None:
            dtype, tokens, lengths, indices = wanted
            assert (found.dtype, found.tokens, found.documents) == (dtype, len(tokens), len(indices) - 1)
            assert shard.read_tokens(0, shard.tokens).tolist() == tokens
            assert shard.sequence_lengths(slice(0, shard.sequences)).tolist() == lengths
            assert shard.document_sequences(0, shard.documents).tolist() == indices
            edges = np.append(0, np.cumsum(lengths, dtype=np.int64))[indices].tolist()
            assert shard.document_edges(0, shard.documents).tolist() == edges
            by_one = [shard.document_bounds(number) for number in range(shard.documents)]
            assert by_one == list(pairwise(edges))
            for token in range(len(tokens)):
                assert shard.documents_before(token) == sum(edge < token for edge in edges[:-1])
                inside = {edge for edge in edges[:-1] if token <= edge < len(tokens)}
                assert shard.document_starts(token, len(tokens) - token).tolist() == sorted(inside)
            assert [shard.sequence_bounds(n) for n in range(shard.documents)] == list(pairwise(indices))


@settings(max_examples=examples(60))
@given(sequences=NUMBERS, entries=NUMBERS, size=st.integers(0, 200), code=st.sampled_from([4, 8]))
def test_shard_does_not_believe_a_header(sequences: int, entries: int, size: int, code: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        prefix = Path(place) / "x"
        header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, sequences, entries)
        put(prefix, (b"", header + bytes(size)))
        tracemalloc.start()
        try:
            shard = opened(prefix, None)
            if shard is not None:
                list(answers(shard))
            assert tracemalloc.get_traced_memory()[1] < 4 << 20
        finally:
            tracemalloc.stop()


def test_shard_refuses_what_is_no_plain_file(tmp_path: Path) -> None:
    """A pipe would be waited for, a folder has a size."""
    (tmp_path / "x.idx").mkdir()
    os.mkfifo(tmp_path / "x.bin")
    with pytest.raises(DataError, match=r"x\.bin is not a plain file"):
        Shard(tmp_path / "x")
    (tmp_path / "x.bin").unlink()
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"x\.idx is not a plain file"):
        Shard(tmp_path / "x")
