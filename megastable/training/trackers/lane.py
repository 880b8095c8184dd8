"""Runs one tracker in a thread of its own, behind a bounded queue: what it does not take in time is dropped."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from megastable.base.text import visible
from megastable.training.trackers.points import (
    LayersPoint,
    NotePoint,
    Point,
    StepPoint,
    UndonePoint,
    ValidationPoint,
)
from megastable.training.trackers.tracker import Tracker

log = logging.getLogger(__name__)

ROOM = 10_000  # records that wait for a tracker
FLUSH = 5.0  # seconds between two flushes


class Lane:
    """name: of the tracker; open: makes it, in its thread; warn: prints a line for people; timeout: seconds that one
    call may take."""

    def __init__(
        self,
        name: str,
        open: Callable[[], Tracker],
        warn: Callable[[str], None],
        timeout: float,
        room: int = ROOM,
    ) -> None:
        self.name, self._open, self._warn, self._timeout = name, open, warn, timeout
        self._queue = queue.Queue[Point | str](room)  # a text: the status to close with
        self.dropped = 0
        self.over = False  # closed, or given up:
        self.failed = False
        self._busy: float | None = None  # since when a call is under way
        self._lock = threading.Lock()
        self._status: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, point: Point) -> None:
        """Pass on a record, unless the tracker is given up or too far behind."""
        if self.over:
            return
        try:
            self._queue.put_nowait(point)
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1:
                self._warn(
                    f"tracker {self.name} does not keep up: {self._queue.maxsize:,} records wait for it, and more are "
                    "dropped"
                )

    def check(self) -> None:
        """Give the tracker up if a call takes too long."""
        busy = self._busy
        if busy is not None and time.monotonic() - busy > self._timeout:
            self._give_up(f"it has not answered for {self._timeout:.0f} s (logging.tracker_timeout)")

    def close(self, status: str) -> None:
        """Begin to close the tracker, after what waits for it."""
        self._status = status
        with suppress(queue.Full):  # its thread looks at the status when the queue is empty
            self._queue.put_nowait(status)

    def _give_up(self, why: str) -> None:
        with self._lock:
            if self.over:
                return
            self.over = self.failed = True
        self._warn(f"tracker {self.name} is given up: {visible(why, 500)}. Training goes on without it")

    def _run(self) -> None:
        try:
            self._busy = time.monotonic()
            tracker = self._open()
            self._busy = None
            flushed = time.monotonic()
            while not self.over:
                try:
                    point: Point | str | None = self._queue.get(timeout=0.5)
                except queue.Empty:
                    point = self._status
                self._busy = time.monotonic()
                if isinstance(point, str):
                    tracker.close(point)
                    with self._lock:
                        self.over = True
                elif point is not None:
                    tell(tracker, point)
                if not self.over and time.monotonic() - flushed > FLUSH:
                    tracker.flush()
                    flushed = time.monotonic()
                self._busy = None
        except BaseException as error:  # SystemExit too: a library may raise anything
            log.exception("tracker %s", self.name)
            self._busy = None
            self._give_up(str(error) or type(error).__name__)


def tell(tracker: Tracker, point: Point) -> None:
    """Give a tracker one record."""
    match point:
        case StepPoint():
            tracker.step(point)
        case ValidationPoint():
            tracker.validation(point)
        case LayersPoint():
            tracker.layers(point)
        case UndonePoint():
            tracker.undone(point)
        case NotePoint():
            tracker.note(point)
