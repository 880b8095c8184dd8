"""Compressed data comes out whole, in pieces that stay small, or as an error that names the file."""

from __future__ import annotations

import random

import pytest
import zstandard

from megastable.base.errors import DataError
from megastable_tools.prepare.decompress import PIECE, decompress
from tests.data.archives import COMPRESS

TEXT = b"".join(b"line %d of a text\n" % number for number in range(20_000))


def chunked(data: bytes, size: int = 1000) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


@pytest.mark.parametrize("ending", COMPRESS)
def test_streams_in_a_row_and_padding_between_them(ending: str) -> None:
    end = random.Random(0).randbytes(10_000)  # longer than what a decoder is given at a time
    one, two = COMPRESS[ending](TEXT), COMPRESS[ending](end)
    for whole in (one + two, one + b"\0" * 8 + two + b"\0" * 1024):
        for size in (1000, len(whole)):
            assert b"".join(decompress("a", chunked(whole, size), ending)) == TEXT + end
    assert list(decompress("a", [], ending)) == []


@pytest.mark.parametrize("ending", COMPRESS)
def test_what_is_cut_off_or_changed_is_refused(ending: str) -> None:
    one = COMPRESS[ending](TEXT)
    for cut in (1, len(one) // 2, len(one) - 1):
        with pytest.raises(DataError, match=r"a\.txt (ends too early|is damaged)"):
            b"".join(decompress("a.txt", chunked(one + one[:cut]), ending))
    for whole in (one + b"another thing", b"another thing", one + one[:3] + b"\xff" + one[4:]):
        with pytest.raises(DataError, match=r"a\.txt (is damaged|ends too early)"):
            b"".join(decompress("a.txt", chunked(whole), ending))


@pytest.mark.parametrize("ending", [".gz", ".xz", ".bz2"])
def test_a_damaged_checksum_is_refused(ending: str) -> None:
    data = bytearray(COMPRESS[ending](TEXT))
    data[len(data) // 2] ^= 0x10
    with pytest.raises(DataError, match=r"a\.txt"):
        b"".join(decompress("a.txt", chunked(bytes(data)), ending))


@pytest.mark.quick(".gz")
@pytest.mark.parametrize("ending", COMPRESS)
def test_a_bomb_comes_out_in_small_pieces(ending: str) -> None:
    size, most = (200 << 20, 65 << 20) if ending == ".zst" else (16 << 20, 3 * PIECE)
    bomb = COMPRESS[ending](bytes(size))
    assert len(bomb) < size / 500
    lengths = [len(piece) for piece in decompress("a", [bomb], ending)]
    assert sum(lengths) == size
    assert max(lengths) <= most


def test_zstandard_with_a_long_window() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=30, enable_ldm=1)
    whole = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    data = whole.compress(TEXT) + whole.flush()
    assert b"".join(decompress("a", [data], ".zst")) == TEXT
