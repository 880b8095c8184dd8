"""Files of a checkpoint: the hash is that of what lies on the disk, and an error is never lost."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megastable.base.errors import CheckpointError
from megastable.checkpoint import files as pieces
from megastable.checkpoint.files import (
    FileRecord,
    PieceStatistics,
    Reader,
    TensorFile,
    hash_file,
    measure_piece,
    write_file,
)
from tests.full_disk import files_no_larger_than


def random_state(numbers: int = 1000) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    return {
        "weights": {"a": torch.randn(numbers, generator=g), "b": torch.randn(3, 5).to(torch.bfloat16)},
        "view": torch.arange(100).view(10, 10)[2:4].t(),
        "step": 5,
        "names": ["x", "ü"],
    }


CONTENTS: dict[str, Any] = {
    "state": random_state(),
    "large": {"a": torch.zeros(3_000_000)},
    "bytes": b'{"step": 1}',
    "empty": b"",
}


@pytest.mark.parametrize("name", CONTENTS)
def test_the_hash_on_the_way_is_that_on_the_disk(name: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    record = write_file(path, CONTENTS[name])
    content = path.read_bytes()
    assert record == hash_file(path)
    assert record == FileRecord(size=len(content), xxh3=xxhash.xxh3_128(content).hexdigest())


TENSORS = {
    "matrix": torch.randn(3, 5, generator=torch.Generator().manual_seed(1)),
    "transposed": torch.arange(100.0).view(10, 10)[2:4].t(),
    "bf16": torch.randn(7).to(torch.bfloat16),
    "empty": torch.empty(0, 4),
    "scalar": torch.tensor(3),
    "large": torch.arange(5_000_000.0),
}


def write_tensors(path: Path) -> FileRecord:
    entries = [(name, t.dtype, tuple(t.shape)) for name, t in TENSORS.items()]
    with TensorFile(path, entries, {"made": "here"}) as file:
        for name, tensor in TENSORS.items():
            file.write_tensor(name, tensor)
    return file.record


def test_a_stream_of_tensors_is_what_the_library_reads(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    record = write_tensors(path)
    content = path.read_bytes()
    assert record == hash_file(path) == hash_file(path, from_disk=True)
    assert record == FileRecord(size=len(content), xxh3=xxhash.xxh3_128(content).hexdigest())
    loaded = load_file(path)
    assert list(loaded) and set(loaded) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor), name
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"made": "here"}


def test_a_tensor_that_was_not_announced_is_refused(tmp_path: Path) -> None:
    file = TensorFile(tmp_path / "a.safetensors", [("a", torch.float32, (2,)), ("b", torch.float32, (2,))])
    with pytest.raises(AssertionError, match="b: expected"):
        file.write_tensor("b", torch.zeros(2))
    with pytest.raises(AssertionError, match="b was not written"):
        file.close()


@pytest.mark.parametrize("limit", [0, 1000, 15_000_000])
def test_a_disk_that_fills_under_the_tensors(limit: int, tmp_path: Path) -> None:
    """At once, in the header's block, in the tensors: an error where it happens."""
    with files_no_larger_than(limit), pytest.raises(OSError, match="File too large"):
        write_tensors(tmp_path / "a.safetensors")


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]


def write_by_library(path: Path, seed: int = 0) -> Path:
    drawn = torch.Generator().manual_seed(seed)
    shapes = [(3, 4), (5,), (), (0, 7), (2, 1, 3), (1000,), (1,)]
    tensors = {
        f"{i}": (10 * torch.randn(shape, generator=drawn)).to(dtype)
        for i, (shape, dtype) in enumerate(zip(shapes, DTYPES, strict=True))
    }
    save_file(tensors, path, {"format": "pt"})
    return path


def test_what_the_library_wrote(tmp_path: Path) -> None:
    reader, expected = Reader(write_by_library(tmp_path / "a")), load_file(tmp_path / "a")
    assert set(reader.entries) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(reader.read_tensor(name), tensor)
        assert (reader.dtype_of(name), reader.shape_of(name)) == (tensor.dtype, tuple(tensor.shape))
        assert torch.equal(
            reader.read_range(name, tensor.numel() // 3, tensor.numel()),
            tensor.flatten()[tensor.numel() // 3 :],
        )


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_byte_of_the_header_that_changed_is_an_error_or_no_harm(at: int, byte: int) -> None:
    path = Path(f"{FOLDER}/b")
    content = bytearray(write_by_library(path).read_bytes())
    at %= 8 + int.from_bytes(content[:8], "little")
    content[at] = byte
    path.write_bytes(content)
    try:
        reader = Reader(path)
        for name, entry in reader.entries.items():
            assert 8 <= entry.begin <= entry.end <= len(content)
            reader.read_tensor(name)
    except CheckpointError:
        pass  # anything else is a bug


FOLDER = ""


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    global FOLDER
    FOLDER = str(tmp_path_factory.mktemp("reader"))


def test_a_file_that_ends_too_early(tmp_path: Path) -> None:
    content = write_by_library(tmp_path / "a").read_bytes()
    for size in (0, 7, 8, 50, len(content) - 1):
        (tmp_path / "a").write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"a: damaged or incomplete"):
            Reader(tmp_path / "a")
    (tmp_path / "a").write_bytes(content + b"\0")
    with pytest.raises(CheckpointError, match=r"its header says"):
        Reader(tmp_path / "a")
    (tmp_path / "a").write_bytes(content)
    reader = Reader(tmp_path / "a")
    (tmp_path / "a").write_bytes(content[:-100])  # truncated while it is open
    with pytest.raises(CheckpointError, match=r"it ends at byte"):
        [reader.read_tensor(name) for name in reader.entries]
    with pytest.raises(CheckpointError, match=r"none cannot be read: No such file"):
        Reader(tmp_path / "none")


@pytest.mark.parametrize(
    "header",
    [
        [], 3, {"a": 3}, {"a": {}}, {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}},
        {"a": {"dtype": 7, "shape": [2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}},
        {name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for name in "ab"},
        {"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 8]}},
    ],
)  # fmt: skip
def test_a_header_that_is_none(tmp_path: Path, header: Any) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "a").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(CheckpointError, match=r"a: damaged or incomplete"):
        Reader(tmp_path / "a")


FLOATS = st.lists(st.floats(-(2.0**59), 2.0**59, width=32), max_size=40)


@given(FLOATS, st.integers(1, 7))
def test_statistics_of_ordinary_numbers(values: list[float], chunk: int) -> None:
    flat = torch.tensor(values, dtype=torch.float32)
    before, pieces.CHUNK = pieces.CHUNK, chunk
    try:
        found = measure_piece(flat)
    finally:
        pieces.CHUNK = before
    wide = flat.double()
    assert found.nonfinite == 0
    assert found.absmax == (float(wide.abs().max()) if values else 0.0)
    assert found.norm == pytest.approx(float(wide.norm()), rel=1e-5, abs=1e-20)
    assert found.mean == pytest.approx(float(wide.mean()) if values else 0.0, abs=1e-5 * found.absmax + 1e-30)


@given(FLOATS, st.integers(0, 40), st.sampled_from([math.nan, math.inf, -math.inf]), st.integers(1, 7))
def test_one_bad_number_is_counted_wherever_it_is(
    values: list[float], place: int, bad: float, chunk: int
) -> None:
    values.insert(place, bad)
    before, pieces.CHUNK = pieces.CHUNK, chunk
    try:
        found = measure_piece(torch.tensor(values, dtype=torch.float32))
    finally:
        pieces.CHUNK = before
    assert found.nonfinite == 1 and not math.isfinite(found.norm) and not math.isfinite(found.absmax)
    assert PieceStatistics.model_validate_json(found.model_dump_json()).nonfinite == 1


def test_numbers_whose_squares_are_beyond_fp32_are_finite() -> None:
    found = measure_piece(torch.tensor([3e30, 4e30]))
    assert found.nonfinite == 0 and found.norm == pytest.approx(5e30) and found.absmax == pytest.approx(4e30)
