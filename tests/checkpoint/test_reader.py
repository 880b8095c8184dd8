"""A .safetensors file is read as the library reads it; a damaged one is an error, never a crash or a wrong number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from megastable.base.errors import CheckpointError
from megastable.checkpoint.reader import Reader

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]


def write(path: Path, seed: int = 0) -> Path:
    drawn = torch.Generator().manual_seed(seed)
    shapes = [(3, 4), (5,), (), (0, 7), (2, 1, 3), (1000,), (1,)]
    tensors = {
        f"{i}": (10 * torch.randn(shape, generator=drawn)).to(dtype)
        for i, (shape, dtype) in enumerate(zip(shapes, DTYPES, strict=True))
    }
    save_file(tensors, path, {"format": "pt"})
    return path


def test_what_the_library_wrote(tmp_path: Path) -> None:
    reader, expected = Reader(write(tmp_path / "a")), load_file(tmp_path / "a")
    assert set(reader.entries) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(reader.tensor(name), tensor)
        assert (reader.dtype(name), reader.shape(name)) == (tensor.dtype, tuple(tensor.shape))
        assert torch.equal(
            reader.flat(name, tensor.numel() // 3, tensor.numel()), tensor.flatten()[tensor.numel() // 3 :]
        )


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_byte_of_the_header_that_changed_is_an_error_or_no_harm(at: int, byte: int) -> None:
    path = Path(f"{FOLDER}/b")
    content = bytearray(write(path).read_bytes())
    at %= 8 + int.from_bytes(content[:8], "little")
    content[at] = byte
    path.write_bytes(content)
    try:
        reader = Reader(path)
        for name, entry in reader.entries.items():
            assert 8 <= entry.begin <= entry.end <= len(content)
            reader.tensor(name)
    except CheckpointError:
        pass  # anything else is a bug


FOLDER = ""


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    global FOLDER
    FOLDER = str(tmp_path_factory.mktemp("reader"))


def test_a_file_that_ends_too_early(tmp_path: Path) -> None:
    content = write(tmp_path / "a").read_bytes()
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
        [reader.tensor(name) for name in reader.entries]
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


def test_a_dtype_that_is_not_read_here_is_named(tmp_path: Path) -> None:
    text = json.dumps({"a": {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "a").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(CheckpointError, match=r"a is F8_E4M3, which is not read here"):
        Reader(tmp_path / "a").tensor("a")
