"""Shards: written bytes against a plain reading of the format, and every accident that is known of them."""

from __future__ import annotations

import itertools
import os
import resource
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

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


def write_bin(prefix: Path, tokens: list[int], code: int = 4) -> None:
    Path(f"{prefix}.bin").write_bytes(np.array(tokens, dtype="<u2" if code == 8 else "<i4").tobytes())


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return tmp_path / "corpus.v1"


@pytest.mark.parametrize(("vocab_size", "code", "token"), [(65_499, 8, "<u2"), (65_500, 4, "<i4")])
def test_written_bytes_are_the_format(prefix: Path, vocab_size: int, code: int, token: str) -> None:
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


@settings(deadline=None)
@given(
    sequences=st.lists(st.lists(st.integers(0, 99), max_size=5), max_size=12),
    cuts=st.lists(st.integers(0, 12), max_size=6),
    code=st.sampled_from([4, 8]),
    modes=st.booleans(),
)
def test_documents_against_a_naive_list(
    sequences: Documents, cuts: list[int], code: int, modes: bool
) -> None:
    """Documents of several sequences, empty documents and sequences: all that others may write."""
    count = len(sequences)
    indices = sorted([0, *(min(cut, count) for cut in cuts), count])
    stream = list(itertools.chain.from_iterable(sequences))
    starts = [sum(len(sequence) for sequence in sequences[:index]) for index in indices]
    with tempfile.TemporaryDirectory() as directory:
        prefix = Path(directory) / "x"
        write_bin(prefix, stream, code)
        write_index(prefix, [len(sequence) for sequence in sequences], indices, code=code, modes=modes)
        shard = Shard(prefix, vocab_size=100)
        assert (shard.tokens, shard.documents, shard.sequences) == (len(stream), len(indices) - 1, count)
        for document in range(shard.documents):
            assert shard.document_bounds(document) == (starts[document], starts[document + 1])
        for first in range(len(stream) + 1):
            assert shard.read(first, len(stream) - first).tolist() == stream[first:]
            inside = {start for start in starts[:-1] if first <= start < len(stream)}
            assert shard.document_starts(first, len(stream) - first).tolist() == sorted(inside)
        for token in range(len(stream)):
            first, end = shard.document_bounds(shard.document_of(token))
            assert first <= token < end
            assert shard.documents_before(token) == sum(start < token for start in starts[:-1])
        assert shard.documents_before(len(stream)) == shard.documents
        shard.verify()


def test_info_is_what_verify_finds(prefix: Path) -> None:
    info = write(prefix, [[1, 2], [3]])
    assert Shard(prefix, info, 1000).verify() == info


def test_outside_of_the_shard(prefix: Path) -> None:
    write(prefix, [[1, 2], [3]])
    shard = Shard(prefix)
    for first, count in [(-1, 1), (0, 4), (3, 1), (0, -1)]:
        with pytest.raises(IndexError):
            shard.read(first, count)
    with pytest.raises(IndexError):
        shard.document_bounds(2)
    with pytest.raises(IndexError):
        shard.document_of(3)
    assert shard.read(3, 0).tolist() == []


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
def test_documents_refused(prefix: Path, document: list[object], message: str) -> None:
    bad = np.array(document, dtype=None if document else np.int64)
    with pytest.raises(DataError, match=message):
        write_arrays(ShardWriter(prefix, 1000), [np.array([1]), bad])
    assert list(prefix.parent.iterdir()) == []


def test_nothing_final_before_close_and_nothing_left_after_an_exception(prefix: Path) -> None:
    writer = ShardWriter(prefix, 1000)
    writer.add_document(np.array([1, 2]))
    assert {path.suffix for path in prefix.parent.iterdir()} == {".tmp"}
    with pytest.raises(ZeroDivisionError), writer:
        raise ZeroDivisionError
    assert list(prefix.parent.iterdir()) == []


def test_a_shard_is_replaced_whole(prefix: Path) -> None:
    write(prefix, [[1, 2], [3]])
    info = write(prefix, [[4]])
    assert Shard(prefix, info).read(0, 1).tolist() == [4]
    assert len(list(prefix.parent.iterdir())) == 2


def test_a_full_disk_is_an_error_and_leaves_nothing(prefix: Path) -> None:
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = ShardWriter(prefix, 1000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_000, old[1]))
    try:
        with pytest.raises(DataError, match="could not be written"):
            write_arrays(writer, [np.zeros(1_000_000, dtype=np.int64)] * 10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert list(prefix.parent.iterdir()) == []


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="could not be written"):
        ShardWriter(tmp_path / "no" / "x", 1000)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_missing_file(prefix: Path, suffix: str) -> None:
    write(prefix, [[1, 2]])
    Path(f"{prefix}{suffix}").unlink()
    with pytest.raises(DataError, match=rf"corpus\.v1\{suffix} is not there"):
        Shard(prefix)


@pytest.mark.parametrize("size", [0, 5, 20, 34, 60])
def test_truncated_index(prefix: Path, size: int) -> None:
    write(prefix, [[1, 2], [3, 4, 5]])
    os.truncate(f"{prefix}.idx", size)
    with pytest.raises(DataError, match=r"truncated|not a Megatron index"):
        Shard(prefix)


def test_bin_cut_off_while_in_use(prefix: Path) -> None:
    write(prefix, [list(range(100))])
    shard = Shard(prefix)
    os.truncate(f"{prefix}.bin", 100)
    assert shard.read(0, 50).tolist() == list(range(50))
    with pytest.raises(DataError, match="became shorter"):
        shard.read(40, 20)


def test_index_removed_while_in_use(prefix: Path) -> None:
    write(prefix, [[1, 2]])
    shard = Shard(prefix)
    Path(f"{prefix}.idx").unlink()
    with pytest.raises(DataError, match=r"corpus\.v1\.idx cannot be read"):
        shard.document_of(0)


@pytest.mark.parametrize(
    ("tokens", "index", "message"),
    [
        ([1, 2, 3], {"lengths": [3], "document_indices": [0, 1], "version": 2}, "version 2"),
        (
            [1, 2, 3],
            {"lengths": [4], "document_indices": [0, 1]},
            r"describes a \.bin of 16 bytes, but .* has 12",
        ),
        ([], {"lengths": [], "document_indices": []}, "damaged"),
        *(
            (
                [1, 2, 3],
                {"lengths": [3], "document_indices": [0, 1], "code": code},
                f"type code {code}: only 4 .* and 8",
            )
            for code in (0, 1, 2, 3, 5, 6, 7, 9, 255)
        ),
        *(
            ([1, 2, 3, 4], {"lengths": [2, 2], "document_indices": indices}, "without merging")
            for indices in ([0, 1], [1, 2], [0])
        ),
    ],
)
def test_a_wrong_index_is_refused(
    prefix: Path, tokens: list[int], index: dict[str, Any], message: str
) -> None:
    write_bin(prefix, tokens)
    write_index(prefix, **index)
    with pytest.raises(DataError, match=message):
        Shard(prefix)


def test_a_file_of_another_format_is_refused(prefix: Path) -> None:
    write_bin(prefix, [1, 2, 3])
    Path(f"{prefix}.idx").write_bytes(b"TNTIDX\x00\x00" + bytes(100))
    with pytest.raises(DataError, match="not a Megatron index"):
        Shard(prefix)


def test_sequences_not_one_after_another(prefix: Path) -> None:
    """A gap, or two sequences stored in another order, would make the stream disagree with the documents."""
    write_bin(prefix, [1, 2, 3, 4, 5, 6])
    write_index(prefix, [1, 1, 2, 2], [0, 1, 2, 3, 4], pointers=[0, 8, 4, 16])
    shard = Shard(prefix)
    for ask in (lambda: shard.document_bounds(1), lambda: shard.document_starts(0, 6), shard.verify):
        with pytest.raises(DataError, match="write the shard again"):
            ask()


def test_descending_document_index(prefix: Path) -> None:
    write_bin(prefix, [1, 2, 3, 4])
    for indices in ([0, 3, 1, 4], [0, 9, 1, 4], [0, -1, 1, 4]):
        write_index(prefix, [1, 1, 1, 1], indices)
        with pytest.raises(DataError, match="not ascending"):
            Shard(prefix).verify()
    with pytest.raises(DataError):
        Shard(prefix).document_starts(0, 4)


def test_ids_beyond_the_vocabulary(prefix: Path) -> None:
    write_bin(prefix, [1, 2, 99, 100, 5, -7])
    write_index(prefix, [6], [0, 1])
    shard = Shard(prefix, vocab_size=100)
    assert shard.read(0, 3).tolist() == [1, 2, 99]
    with pytest.raises(DataError, match=r"corpus\.v1\.bin: token 3 has the id 100"):
        shard.read(1, 4)
    with pytest.raises(DataError, match="token 5 has the id -7"):
        shard.read(4, 2)
    with pytest.raises(DataError, match="token 3"):
        shard.verify()


def test_a_changed_byte_is_found_by_verify(prefix: Path) -> None:
    info = write(prefix, [[1, 2, 3]])
    write_bin(prefix, [1, 2, 4], code=8)
    shard = Shard(prefix, info, 1000)
    with pytest.raises(DataError, match=r"corpus\.v1\.bin is not the file that the manifest describes"):
        shard.verify()


def test_another_shard_under_the_same_name(prefix: Path) -> None:
    info = write(prefix, [[1, 2, 3]])
    write(prefix, [[1, 2], [3]])
    with pytest.raises(DataError, match="documents is 2, the manifest says 1"):
        Shard(prefix, info)


def test_offsets_beyond_two_gigabytes(prefix: Path) -> None:
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
    assert shard.read(800_000_000, 3).tolist() == [7, 8, 0]
    assert shard.document_starts(1, 1_200_000_000).tolist() == [400_000_000, 800_000_000]
    wrapped = [
        struct.unpack("<i", struct.pack("<I", 4 * n % 2**32))[0] for n in (0, 400_000_000, 800_000_000)
    ]
    write_index(prefix, lengths, [0, 1, 2, 3], pointers=wrapped)
    with pytest.raises(DataError, match="overflowed"):
        Shard(prefix)
