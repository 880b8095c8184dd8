"""Reads journals as typed events; the only reader."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from megastable.base import durable
from megastable.run.events import (
    data_events,
    people_events,
    stability_events,
    supervisor_events,
    training_events,
)
from megastable.run.events.event import Event, Other, Whole
from megastable.run.events.stability_events import IncidentEvent

KINDS: dict[str, type[Event]] = {
    kind.NAME: kind
    for module in (training_events, data_events, people_events, stability_events, supervisor_events)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Event) and kind.NAME
}


def read_events(journal: Path, *marks: bytes) -> Iterator[Event]:
    """The events of a journal, in order, one for every line that is not blank. A malformed line is an `Other` without a
    name; a torn last line is left out. marks: if given, only lines with one of them are read.

    Raises DataError for a file that cannot be read; a missing one is empty.
    """
    lines = durable.read_lines(journal)[0]
    wanted = (line for line in lines if any(line_mark in line for line_mark in marks)) if marks else lines
    return (event_of_line(line) for line in wanted if line.strip())


def event_of_line(line: bytes) -> Event:
    """Parse a line of a journal."""
    try:
        json_value = json.loads(line)
    except (ValueError, RecursionError):
        return NO_EVENT
    return event_of(json_value) if isinstance(json_value, dict) else NO_EVENT


def event_of(entry: Mapping[str, Any]) -> Event:
    """The event of a JSON object of a journal."""
    event_name = entry.get("event")
    event_class = KINDS.get(event_name, Other) if isinstance(event_name, str) else Other
    return event_class.from_fields(entry)


def find_latest(events: Iterable[Event]) -> dict[int, dict[str, Any]]:
    """The latest summary of each incident, by number: every event of an incident carries all that was known by then."""
    summary_by_number: dict[int, dict[str, Any]] = {}
    for event in events:
        summary = event.get("summary") if isinstance(event, IncidentEvent) else None
        if isinstance(summary, dict) and isinstance(summary.get("number"), int):
            summary_by_number[summary["number"]] = summary
    return summary_by_number


NO_EVENT = Other.from_fields({})


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
        self._again = False  # begin again with the next line: an emptied file is about to be written
        self._seen: tuple[int, ...] | None = None

    def read_new(self) -> list[Event]:
        """The events since the last call. Never raises."""
        return list(self.stream_events())

    def stream_events(self) -> Iterator[Event]:
        """As `read_new`, one at a time, so that the first read of a long file does not fill the memory."""
        self.problem = ""
        try:
            found = self.path.stat()
            seen_status = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
            if seen_status == self._seen:
                return
            with self.path.open("rb") as file:
                if not self._known(file):
                    self._offset, self._anchor, self._again = 0, b"", True
                yield from self._rest(file)
            self._seen = seen_status
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
        while line_block := file.read(BLOCK):
            line_block += file.readline()
            if not self.brief or len(line_block) < BLOCK or not line_block.endswith(b"\n"):
                yield from self._each(line_block)
                if not line_block.endswith(b"\n"):
                    return  # the new bytes are the rest of this line
                continue
            self._passed(line_block)
            kept_lines, refused_count = drop_refused(line_block)
            for block_line in kept_lines:
                if (line_event := _event(block_line)) is not None:
                    yield line_event
                elif block_line.strip():
                    self.damaged += 1
            yield PassedOver(refused=refused_count)

    def _each(self, block: bytes) -> Iterator[Event]:
        for block_line in io.BytesIO(block):
            line_event = _event(block_line)
            # A closed object is complete, also without its newline; anything else may still grow.
            if line_event is None and not block_line.endswith(b"\n"):
                return
            self._passed(block_line)
            if line_event is not None:
                yield line_event
            elif block_line.strip():
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
    is_whole = block.startswith(BEGIN) and 1 + block.count(b"}\n" + BEGIN) == block.count(BEGIN) == count
    first, newest = block.index(b"\n") + 1, len(block)
    for _ in range(NEWEST):
        newest = max(first, block.rfind(b"\n", 0, newest - 1) + 1)
    lines, line_end = [block[:first]], first
    # Only the few lines that matter are cut out of the block.
    for line_match in NOT_REFUSED.finditer(block, first, newest):
        if line_match.start() >= line_end:
            line_begin = block.rfind(b"\n", 0, line_match.start()) + 1
            line_end = block.index(b"\n", line_match.end()) + 1
            lines.append(block[line_begin:line_end])
    lines += io.BytesIO(block[newest:]).readlines()
    refused_count = block.count(REFUSED, first, newest)
    if not is_whole or b"\0" in block or refused_count + len(lines) != count:
        return io.BytesIO(block).readlines(), 0
    return lines, refused_count


def _event(line: bytes) -> Event | None:
    if not line.rstrip().endswith(b"}"):
        return None
    line_event = event_of_line(line)
    return line_event if line_event.named else None
