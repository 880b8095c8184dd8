"""A forward-only binary file over an iterable of chunks."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from typing import Any


class ForwardFile(io.RawIOBase):
    """`chunks` as a binary file: `read(n)` gives n bytes, fewer only at the end, and seeks go forward only.

    `ended`: a read has reached the end.
    """

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks: Iterator[bytes] = iter(chunks)
        self._rest = memoryview(b"")
        self._at = 0
        self.ended = False

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        parts, wanted = [], -1 if size is None else size
        while wanted and (some := self._some(wanted)):
            parts.append(bytes(some))
            wanted -= len(some) if wanted > 0 else 0
        return b"".join(parts)

    def readinto(self, buffer: Any, /) -> int:
        some = self._some(len(buffer))
        buffer[: len(some)] = some
        return len(some)

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        if whence != io.SEEK_SET or offset < self._at:
            raise io.UnsupportedOperation("this file is read once, forward")
        while self._at < offset and self._some(offset - self._at):
            pass
        return self._at

    def pieces(self) -> Iterator[bytes]:
        """The remaining bytes, in pieces as they come."""
        while some := self._some(-1):
            yield bytes(some)

    def _some(self, most: int) -> memoryview:
        """The next bytes: at most `most` (no limit if below 0), at least one unless the end is reached."""
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                self.ended = True
                break
            self._rest = memoryview(chunk)
        end = len(self._rest) if most < 0 else most
        some, self._rest = self._rest[:end], self._rest[end:]
        self._at += len(some)
        return some
