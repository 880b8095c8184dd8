"""Files of a checkpoint: the hash is that of what lies on the disk, and an error is never lost."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file

from megastable.checkpoint.files import FileRecord, TensorFile, hash_file, write_file
from tests.full_disk import files_no_larger_than


def state(numbers: int = 1000) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    return {
        "weights": {"a": torch.randn(numbers, generator=g), "b": torch.randn(3, 5).to(torch.bfloat16)},
        "view": torch.arange(100).view(10, 10)[2:4].t(),
        "step": 5,
        "names": ["x", "ü"],
    }


CONTENTS: dict[str, Any] = {
    "state": state(),
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


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    write_file(tmp_path / "a.pt", state())
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    assert loaded["step"] == 5 and loaded["names"] == ["x", "ü"]
    assert torch.equal(loaded["weights"]["a"], state()["weights"]["a"])
    assert torch.equal(loaded["view"], state()["view"])
    assert loaded["weights"]["b"].dtype == torch.bfloat16


def test_bytes_are_written_as_they_are(tmp_path: Path) -> None:
    write_file(tmp_path / "a.json", b'{"step": 1}')
    assert (tmp_path / "a.json").read_bytes() == b'{"step": 1}'


@pytest.mark.parametrize("position", [0, 100, -1])
def test_every_changed_bit_shows(position: int, tmp_path: Path) -> None:
    record = write_file(tmp_path / "a.pt", state())
    content = bytearray((tmp_path / "a.pt").read_bytes())
    content[position] ^= 1
    (tmp_path / "a.pt").write_bytes(content)
    assert hash_file(tmp_path / "a.pt").xxh3 != record.xxh3


@pytest.mark.parametrize("content", ["large", "bytes"])
def test_a_full_disk_is_an_error_where_it_happens(content: str, tmp_path: Path) -> None:
    """And says what happened: torch alone would report "unexpected pos 704 vs 598"."""
    with files_no_larger_than(5), pytest.raises(OSError, match="File too large"):
        write_file(tmp_path / "file", CONTENTS[content])


def test_a_device_without_space_is_an_error() -> None:
    with pytest.raises(OSError) as error:
        write_file(Path("/dev/full"), b"x")
    assert error.value.errno == errno.ENOSPC


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
            file.write(name, tensor)
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
        file.write("b", torch.zeros(2))
    with pytest.raises(AssertionError, match="b was not written"):
        file.close()


@pytest.mark.parametrize("limit", [0, 1000, 15_000_000])
def test_a_disk_that_fills_under_the_tensors(limit: int, tmp_path: Path) -> None:
    """At once, in the header's block, in the tensors: an error where it happens."""
    with files_no_larger_than(limit), pytest.raises(OSError, match="File too large"):
        write_tensors(tmp_path / "a.safetensors")
