"""Streaming decompression of gzip, Zstandard, xz and bzip2.

Each stream is read to its own end mark, so that damage and a missing end are errors, never a shorter text. (The file
objects of `lzma`, `bz2` and `zstandard` silently end at a broken second stream or a truncated file.)
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import zstandard

from megastable.base.errors import DataError

PIECE = 1 << 20  # maximum bytes per step
_ZSTD_INPUT = 2048  # bytes: zstandard has no output limit, and a block of a few bytes may expand to 128 KiB
_ZSTD_WINDOW = 1 << 31  # bytes of memory: as for `zstd --long=31`, which large text archives use


class _Decoder(Protocol):
    """One stream: `eof` once its end mark was read, and `unused_data` after it."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def pieces(self, data: bytes) -> Iterator[bytes]: ...


class _Gzip:
    def __init__(self) -> None:
        self._stream = zlib.decompressobj(wbits=31)

    eof = property(lambda self: self._stream.eof)
    unused_data = property(lambda self: self._stream.unused_data)

    def pieces(self, data: bytes) -> Iterator[bytes]:
        while data:
            yield self._stream.decompress(data, PIECE)
            data = self._stream.unconsumed_tail


class _Zstandard:
    def __init__(self) -> None:
        self._stream = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj()
        self._behind = b""

    eof = property(lambda self: self._stream.eof)
    unused_data = property(lambda self: self._stream.unused_data + self._behind)

    def pieces(self, data: bytes) -> Iterator[bytes]:
        for at in range(0, len(data), _ZSTD_INPUT):
            if self.eof:
                self._behind = data[at:]
                return
            yield self._stream.decompress(data[at : at + _ZSTD_INPUT])


class _Bounded:
    """Common code for `lzma` and `bz2`."""

    def __init__(self, stream: lzma.LZMADecompressor | bz2.BZ2Decompressor) -> None:
        self._stream = stream

    eof = property(lambda self: self._stream.eof)
    unused_data = property(lambda self: self._stream.unused_data)

    def pieces(self, data: bytes) -> Iterator[bytes]:
        yield self._stream.decompress(data, PIECE)
        while not (self._stream.eof or self._stream.needs_input):
            yield self._stream.decompress(b"", PIECE)


DECODERS: dict[str, Callable[[], _Decoder]] = {
    ".gz": _Gzip,
    ".zst": _Zstandard,
    ".zstd": _Zstandard,
    ".xz": lambda: _Bounded(lzma.LZMADecompressor()),
    ".lzma": lambda: _Bounded(lzma.LZMADecompressor()),
    ".bz2": lambda: _Bounded(bz2.BZ2Decompressor()),
}


def decompress(where: str, chunks: Iterable[bytes], ending: str) -> Iterator[bytes]:
    """Decompress one or more consecutive streams, with zero bytes between or after them (padding of tapes and xz).

    where: names the file. ending: of DECODERS. Raises DataError for damage and for data that ends too early.
    """
    decoder: _Decoder | None = None
    try:
        for chunk in chunks:
            while chunk := chunk if decoder else chunk.lstrip(b"\0"):
                decoder = decoder or DECODERS[ending]()
                yield from filter(None, decoder.pieces(chunk))
                chunk = b""
                if decoder.eof:
                    chunk, decoder = decoder.unused_data, None
    except (zlib.error, lzma.LZMAError, zstandard.ZstdError, OSError, EOFError) as error:
        raise DataError(f"{where} is damaged: {error}; fetch it again") from error
    if decoder is not None:
        raise DataError(f"{where} ends too early, inside its compressed data: fetch it again")
