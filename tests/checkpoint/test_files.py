"""Files of a checkpoint: the hash is that of what lies on the disk, and an error is never lost."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from megastable.checkpoint.files import FileRecord, Writer, hash_file, write_file
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
    writer = Writer()
    writer.save(state(), tmp_path / "a.pt")
    assert writer.error is None
    loaded = Writer().load(str(tmp_path / "a.pt"), map_location="cpu")
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


def test_the_writer_records_every_file_by_name(tmp_path: Path) -> None:
    writer = Writer()
    writer.save(state(), str(tmp_path / "a.pt"))
    writer.save(b"{}", tmp_path / "b.json")
    assert writer.records == {"a.pt": hash_file(tmp_path / "a.pt"), "b.json": hash_file(tmp_path / "b.json")}
    assert writer.error is None


@pytest.mark.parametrize("limit", [0, 1000, 5_000_000])
def test_the_first_error_is_kept_and_later_files_are_left_out(limit: int, tmp_path: Path) -> None:
    """The save goes on to its end: DeepSpeed has barriers in it. Limits: at once, in the header, in the tensors."""
    writer = Writer()
    writer.save(b"", tmp_path / "before.json")
    with files_no_larger_than(limit):
        writer.save(CONTENTS["large"], tmp_path / "large.pt")
        first = writer.error
        writer.save(CONTENTS["large"], tmp_path / "again.pt")
    writer.save(state(), tmp_path / "after.pt")
    assert first is not None and first.startswith(f"{tmp_path / 'large.pt'}: ") and "File too large" in first
    assert writer.error == first
    assert list(writer.records) == ["before.json"]
    assert not (tmp_path / "again.pt").exists() and not (tmp_path / "after.pt").exists()


def test_a_missing_folder_is_an_error_that_is_kept(tmp_path: Path) -> None:
    writer = Writer()
    writer.save(state(), tmp_path / "none/a.pt")
    assert writer.error is not None and "none/a.pt" in writer.error
    # It is not made either: rank 0 has made it, and a host that does not see it must not go on by itself.
    again = Writer()
    again.makedirs(str(tmp_path / "none"), exist_ok=True)
    assert again.error is not None and "shared file system" in again.error
    assert not (tmp_path / "none").exists()
