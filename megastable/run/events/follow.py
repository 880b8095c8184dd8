"""Follows a growing journal, reading only what is new: it may have reached 100 MB."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from megastable.run.events.event import Event, Whole
from megastable.run.events.reading import event_of_line

ANCHOR = 4096  # bytes before the offset that identify a file
BLOCK = 1 << 22  # bytes per read


class PassedOver(Event):
    """Never journaled: reports how many refused updates were in skipped lines."""

    NAME = "passed over"
    refused: Whole


class Follower:
    """Gives every event of a growing file once, in order: JSON objects with a text "event".

    An incomplete last line is waited for. Other malformed lines are left out and counted in `damaged`. problem: why the
    last read failed; a missing file is empty.

    A file that was shortened or replaced, as when a person repaired it, is read from its beginning again. `starts`
    counts the beginnings, from 1 on: if a read changes it, all events of that read may be repeats. Rebuild state from
    them, but do not act on them, or all incidents are reported twice.

    skim: which lines of a long block matter, and how many refused updates the others report
    (supervise/journal_skim.py); these come as an event, `PassedOver`, after those of the block.
    """

    def __init__(self, path: Path, skim: Callable[[bytes], tuple[list[bytes], int]] | None = None) -> None:
        self.path, self._skim = path, skim
        self.starts = 1
        self.damaged = 0
        self.problem = ""
        self._offset = 0  # offset of the next unread line
        self._anchor = b""
        self._again = False  # begin anew with the next line: an emptied file is about to be written
        self._seen: tuple[int, ...] | None = None

    def new(self) -> list[Event]:
        """The events since the last call. Never raises."""
        return list(self.stream())

    def stream(self) -> Iterator[Event]:
        """As `new`, one at a time, so that the first read of a long file does not fill the memory."""
        self.problem = ""
        try:
            found = self.path.stat()
            seen = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
            if seen == self._seen:
                return
            with self.path.open("rb") as file:
                if not self._known(file):
                    self._offset, self._anchor, self._again = 0, b"", True
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

    def _rest(self, file: IO[bytes]) -> Iterator[Event]:
        file.seek(self._offset)
        while block := file.read(BLOCK):
            block += file.readline()
            if self._skim is None or len(block) < BLOCK or not block.endswith(b"\n"):
                yield from self._each(block)
                if not block.endswith(b"\n"):
                    return  # the new bytes are the rest of this line
                continue
            self._passed(block)
            lines, refused = self._skim(block)
            for line in lines:
                if (entry := _event(line)) is not None:
                    yield entry
                elif line.strip():
                    self.damaged += 1
            yield PassedOver(refused=refused)

    def _each(self, block: bytes) -> Iterator[Event]:
        for line in io.BytesIO(block):
            entry = _event(line)
            # A closed object is complete, also without its newline; anything else may still grow.
            if entry is None and not line.endswith(b"\n"):
                return
            self._passed(line)
            if entry is not None:
                yield entry
            elif line.strip():
                self.damaged += 1

    def _passed(self, lines: bytes) -> None:
        """Mark lines as read."""
        if self._again:
            self._again, self.damaged = False, 0
            self.starts += 1
        self._offset += len(lines)
        self._anchor = (self._anchor + lines)[-ANCHOR:]


def _event(line: bytes) -> Event | None:
    if not line.rstrip().endswith(b"}"):
        return None
    event = event_of_line(line)
    return event if event.named else None
