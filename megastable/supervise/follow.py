"""Reads what is appended to a file of JSON lines, as it comes: the journal may have grown to 100 MB."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

ANCHOR = 4096  # bytes before the offset by which a file is known again


class Follower:
    """Gives every object of a file once, in order, whatever pieces the file grows in.

    A last line that is not whole yet is waited for. A file that was shortened or replaced by another is read from its
    beginning again; `starts` counts how often that began. A line that is no JSON object is left out and counted in
    `damaged`. problem: why the file could not be read the last time; a file that is not there is empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.starts = 1
        self.damaged = 0
        self.problem = ""
        self._offset = 0  # where the next unread line begins
        self._anchor = b""
        self._seen: tuple[int, ...] | None = None

    def new(self) -> list[dict[str, Any]]:
        """The objects since the last call. Never raises."""
        return list(self.stream())

    def stream(self) -> Iterator[dict[str, Any]]:
        """As `new`, one at a time: the first reading of a long file does not fill the memory."""
        self.problem = ""
        try:
            found = self.path.stat()
            seen = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
            if seen == self._seen:
                return
            with self.path.open("rb") as file:
                if not self._known(file):
                    self._offset, self._anchor, self.damaged = 0, b"", 0
                    self.starts += 1
                yield from self._rest(file)
            self._seen = seen
        except FileNotFoundError:
            self._seen = None
        except OSError as error:
            self.problem = f"{self.path} cannot be read: {error.strerror or error}"

    def _known(self, file: IO[bytes]) -> bool:
        """Whether what was read is still there, unchanged. Leaves the file at the next unread line."""
        file.seek(self._offset - len(self._anchor))
        return file.read(len(self._anchor)) == self._anchor

    def _rest(self, file: IO[bytes]) -> Iterator[dict[str, Any]]:
        file.seek(self._offset)
        for line in file:
            entry = _object(line)
            # An object that is closed is whole, also without its newline; anything else may still grow.
            if entry is None and not line.endswith(b"\n"):
                return
            self._offset += len(line)
            self._anchor = (self._anchor + line)[-ANCHOR:]
            if entry is not None:
                yield entry
            elif line.strip():
                self.damaged += 1


def _object(line: bytes) -> dict[str, Any] | None:
    if not line.rstrip().endswith(b"}"):
        return None
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None
