"""Shards: written bytes against a plain reading of the format, and every accident that is known of them."""

from __future__ import annotations

import resource
import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash

from megastable.base.errors import DataError
from megastable.data.shards import Shard, ShardInfo, ShardWriter

Documents = list[list[int]]


def write(prefix: Path, documents: Documents, vocab_size: int = 1000) -> ShardInfo:
    return write_arrays(ShardWriter(prefix, vocab_size), [np.array(document) for document in documents])


def write_arrays(writer: ShardWriter, documents: list[np.ndarray]) -> ShardInfo:
    with writer:
        for document in documents:
            writer.add_document(document)
        return writer.close()


def write_index(
    prefix: Path,
    lengths: list[int],
    document_indices: list[int],
    pointers: list[int] | None = None,
    code: int = 4,
    version: int = 1,
    modes: bool = False,
) -> None:
    """An .idx, byte by byte as the format says, and as wrong as a test wants it."""
    itemsize = 2 if code == 8 else 4
    if pointers is None:
        pointers = [itemsize * sum(lengths[:number]) for number in range(len(lengths))]
    content = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", version, code, len(lengths), len(document_indices))
    content += struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(pointers)}q", *pointers)
    content += struct.pack(f"<{len(document_indices)}q", *document_indices) + bytes(len(lengths) * modes)
    Path(f"{prefix}.idx").write_bytes(content)


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return tmp_path / "corpus.v1"


@pytest.mark.parametrize(("vocab_size", "code", "token"), [(65_499, 8, "<u2"), (65_500, 4, "<i4")])
def test_shard_writer_writes_the_format(prefix: Path, vocab_size: int, code: int, token: str) -> None:
    info = write(prefix, [[5, 6, 7], [65_498], [1, 2]], vocab_size)
    index = Path(f"{prefix}.idx").read_bytes()
    assert struct.unpack("<9sQBQQ", index[:34]) == (b"MMIDIDX\x00\x00", 1, code, 3, 4)
    assert np.frombuffer(index, "<i4", 3, 34).tolist() == [3, 1, 2]
    itemsize = np.dtype(token).itemsize
    assert np.frombuffer(index, "<i8", 3, 34 + 12).tolist() == [0, 3 * itemsize, 4 * itemsize]
    assert np.frombuffer(index, "<i8", 4, 34 + 12 + 24).tolist() == [0, 1, 2, 3]
    assert len(index) == 34 + 12 + 24 + 32 == info.idx_bytes
    content = Path(f"{prefix}.bin").read_bytes()
    assert np.frombuffer(content, token).tolist() == [5, 6, 7, 65_498, 1, 2]
    assert (info.tokens, info.documents, info.sequences, info.bin_bytes) == (6, 3, 3, 6 * itemsize)
    assert (info.bin_xxh3, info.idx_xxh3) == (
        xxhash.xxh3_128_hexdigest(content),
        xxhash.xxh3_128_hexdigest(index),
    )


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "0 tokens"),
        ([1, 1000], "token id 1000"),
        ([-1, 3], "token id -1"),
        ([[1, 2]], "2-D"),
        ([1.0], "float64"),
    ],
)
def test_shard_writer_refuses_documents(prefix: Path, document: list[object], message: str) -> None:
    bad = np.array(document, dtype=None if document else np.int64)
    with pytest.raises(DataError, match=message):
        write_arrays(ShardWriter(prefix, 1000), [np.array([1]), bad])
    assert list(prefix.parent.iterdir()) == []


def test_shard_writer_leaves_nothing_after_an_exception(prefix: Path) -> None:
    writer = ShardWriter(prefix, 1000)
    writer.add_document(np.array([1, 2]))
    assert {path.suffix for path in prefix.parent.iterdir()} == {".tmp"}
    with pytest.raises(ZeroDivisionError), writer:
        raise ZeroDivisionError
    assert list(prefix.parent.iterdir()) == []


def test_shard_writer_leaves_nothing_on_a_full_disk(prefix: Path) -> None:
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = ShardWriter(prefix, 1000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_000, old[1]))
    try:
        with pytest.raises(DataError, match="could not be written"):
            write_arrays(writer, [np.zeros(1_000_000, dtype=np.int64)] * 10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert list(prefix.parent.iterdir()) == []


def test_shard_reads_offsets_beyond_two_gigabytes(prefix: Path) -> None:
    """Three documents of 400 million tokens: the last begins 3.2 GB into the file, which an int32 wraps."""
    lengths = [400_000_000, 400_000_000, 400_000_001]
    try:
        with Path(f"{prefix}.bin").open("wb") as file:
            file.truncate(4 * sum(lengths))
            file.seek(4 * 800_000_000)
            file.write(struct.pack("<2i", 7, 8))
    except OSError as error:
        pytest.skip(f"no sparse file of 4.8 GB here: {error}")
    write_index(prefix, lengths, [0, 1, 2, 3])
    shard = Shard(prefix)
    assert shard.document_bounds(2) == (800_000_000, 1_200_000_001)
    assert shard.read_tokens(800_000_000, 3).tolist() == [7, 8, 0]
    assert shard.document_starts(1, 1_200_000_000).tolist() == [400_000_000, 800_000_000]
    wrapped = [
        struct.unpack("<i", struct.pack("<I", 4 * n % 2**32))[0] for n in (0, 400_000_000, 800_000_000)
    ]
    write_index(prefix, lengths, [0, 1, 2, 3], pointers=wrapped)
    with pytest.raises(DataError, match="overflowed"):
        Shard(prefix)
