"""Streaming decompression of gzip, Zstandard, xz and bzip2.

Each stream is read to its own end mark, so that damage and a missing end are errors, never a shorter text. (The file
objects of `lzma`, `bz2` and `zstandard`, and so fsspec's, silently end at a broken second stream or a truncated file.)
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import zstandard

from megastable.base.errors import DataError

INPUT = 2048  # bytes that a decoder gets at a time: a few may expand to 128 KiB (Zstandard)
PIECE = 1 << 20  # maximum bytes that bzip2 and xz give at a time: 46 bytes of bzip2 may hold 45 MB
_ZSTD_WINDOW = 1 << 31  # bytes of memory: as for `zstd --long=31`, which large text archives use

# Each makes the decoder of one stream: `decompress(bytes)`, `eof` once its end mark was read, `unused_data` after it.
DECODERS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(wbits=31),
    ".zst": lambda: zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj(),
    ".zstd": lambda: zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj(),
    ".xz": lzma.LZMADecompressor,
    ".lzma": lzma.LZMADecompressor,
    ".bz2": bz2.BZ2Decompressor,
}


def decompress(where: str, chunks: Iterable[bytes], ending: str) -> Iterator[bytes]:
    """Decompress one or more consecutive streams, with zero bytes between or after them (padding of tapes and xz).

    Args:
        where: Names the file.
        chunks: Its content.
        ending: Of DECODERS.

    Raises:
        DataError: for damage, and for data that ends too early.
    """
    decoder: Any = None
    try:
        for chunk in chunks:
            for at in range(0, len(chunk), INPUT):
                rest = chunk[at : at + INPUT]
                while rest := rest if decoder else rest.lstrip(b"\0"):
                    decoder = decoder or DECODERS[ending]()
                    yield from filter(None, _decompress_some(decoder, rest))
                    rest, decoder = (decoder.unused_data, None) if decoder.eof else (b"", decoder)
    except (zlib.error, lzma.LZMAError, zstandard.ZstdError, OSError, EOFError) as error:
        raise DataError(f"{where} is damaged: {error}; fetch it again") from error
    if decoder is not None:
        raise DataError(f"{where} ends too early, inside its compressed data: fetch it again")


def _decompress_some(decoder: Any, data: bytes) -> Iterator[bytes]:
    if not isinstance(decoder, bz2.BZ2Decompressor | lzma.LZMADecompressor):
        yield decoder.decompress(data)
        return
    yield decoder.decompress(data, PIECE)
    while not (decoder.eof or decoder.needs_input):
        yield decoder.decompress(b"", PIECE)
