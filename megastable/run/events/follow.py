"""Follows a growing journal, reading only what is new: it may have reached 100 MB."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from megastable.run.events.event import Event, Whole
from megastable.run.events.reading import event_of_line

ANCHOR = 4096  # bytes before the offset that identify a file
BLOCK = 1 << 22  # bytes per read
NEWEST = 30  # lines of a block that a brief reading leaves in any case: people are shown the newest events
BEGIN = b'{"time": '  # of a line, as run/directory.py writes it
REFUSED = b'"event": "discarded", '
NOT_REFUSED = re.compile(rb'"event": "(?!discarded", )')


class PassedOver(Event):
    """Never journaled: reports how many refused updates were in lines that a brief reading passed over."""

    NAME = "passed over"
    refused: Whole


class Follower:
    """Gives every event of a growing file once, in order: JSON objects with a text "event".

    An incomplete last line is waited for. Other malformed lines are left out and counted in `damaged`. problem: why the
    last read failed; a missing file is empty.

    A file that was shortened or replaced, as when a person repaired it, is read from its beginning again. `starts`
    counts the beginnings, from 1 on: if a read changes it, all events of that read may be repeats. Rebuild state from
    them, but do not act on them, or all incidents are reported twice.

    brief: of long blocks, most refused updates are only counted (`drop_refused`); their number comes as an event,
    `PassedOver`, after those of the block.
    """

    def __init__(self, path: Path, brief: bool = False) -> None:
        self.path, self.brief = path, brief
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
            if not self.brief or len(block) < BLOCK or not block.endswith(b"\n"):
                yield from self._each(block)
                if not block.endswith(b"\n"):
                    return  # the new bytes are the rest of this line
                continue
            self._passed(block)
            lines, refused = drop_refused(block)
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


def drop_refused(block: bytes) -> tuple[list[bytes], int]:
    """The lines of a block but for refused updates, of which a run in trouble may have a million, and how many of these
    there are. The first and the newest lines are left as they are, and all of a block with a torn, merged or
    zero-filled line."""
    count = block.count(b"\n")
    whole = block.startswith(BEGIN) and 1 + block.count(b"}\n" + BEGIN) == block.count(BEGIN) == count
    first, newest = block.index(b"\n") + 1, len(block)
    for _ in range(NEWEST):
        newest = max(first, block.rfind(b"\n", 0, newest - 1) + 1)
    lines, end = [block[:first]], first
    # Only the few lines that matter are cut out of the block.
    for found in NOT_REFUSED.finditer(block, first, newest):
        if found.start() >= end:
            begin, end = block.rfind(b"\n", 0, found.start()) + 1, block.index(b"\n", found.end()) + 1
            lines.append(block[begin:end])
    lines += io.BytesIO(block[newest:]).readlines()
    refused = block.count(REFUSED, first, newest)
    if not whole or b"\0" in block or refused + len(lines) != count:
        return io.BytesIO(block).readlines(), 0
    return lines, refused


def _event(line: bytes) -> Event | None:
    if not line.rstrip().endswith(b"}"):
        return None
    event = event_of_line(line)
    return event if event.named else None
