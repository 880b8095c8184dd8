"""Passes the records of one training process on to its trackers: from a pipe, and from the journal of the run."""

from __future__ import annotations

import logging
import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megastable.base import durable
from megastable.run.directory import RunDirectory, as_json, read_object
from megastable.training.trackers.curves import INCIDENTS
from megastable.training.trackers.lane import Lane
from megastable.training.trackers.points import Point, RunPoint, StepPoint, UndonePoint, point_of
from megastable.training.trackers.told_steps import ToldSteps
from megastable.training.trackers.tracker_notes import TrackerNotes

log = logging.getLogger(__name__)

TICK = 1.0  # seconds between two looks at journal and trackers
KEEP = 15.0  # seconds between two notes of how far it came
BLOCK = 1 << 16  # bytes per read


class Relay:
    """Of one training process. Its state is RUN/trackers/relay.json: what was told is not told again, and steps that a
    process told and the next one repeats are undone. One that is killed, with all of its job, has told more steps than
    it has kept: the next one says that any may have been told."""

    def __init__(self, run: RunPoint, lanes: Sequence[Lane]) -> None:
        self.run, self.lanes = run, lanes
        root = Path(run.directory)
        self._path = root / "trackers" / "relay.json"
        state = read_object(self._path)
        told = state.get("events")
        self._notes = TrackerNotes(RunDirectory(root).journal, told if isinstance(told, int) else 0)
        self._steps = ToldSteps.load(state.get("steps"))
        self._kept = time.monotonic()
        self._write(state | {"closed": False})
        self._look()  # first: what happened between the processes
        undone = self._steps.back(run.step, run.tokens + 1, run.time)
        if undone is None and state.get("closed") is False:
            undone = UndonePoint(run.step + 1, run.step + 1, run.tokens + 1, run.time)
        if undone is not None:
            self._put(undone)

    def tell(self, point: Point) -> None:
        """A record of the training process."""
        if isinstance(point, StepPoint):
            if undone := self._steps.advance(point):
                self._put(undone)
            if point.applied:
                point = replace(point, values={**point.values, INCIDENTS: float(self._notes.incidents)})
        if not isinstance(point, RunPoint):
            self._put(point)

    def tick(self) -> None:
        """Look at the journal, and for trackers that hang."""
        self._look()
        for lane in self.lanes:
            lane.check()
        if time.monotonic() - self._kept > KEEP:
            self._keep()

    def close(self, seconds: float) -> bool:
        """Close all trackers, within so many seconds; whether all of them worked to the end."""
        self._look()
        self._keep(closed=True)
        for lane in self.lanes:
            lane.close(self._notes.status)
        until = time.monotonic() + seconds
        while (open := [lane for lane in self.lanes if not lane.over]) and time.monotonic() < until:
            time.sleep(0.02)
            for lane in open:
                lane.check()
        return not any(lane.failed or not lane.over for lane in self.lanes)

    def _put(self, point: Point) -> None:
        for lane in self.lanes:
            lane.put(point)

    def _look(self) -> None:
        for note in self._notes.new():
            self._put(note if note.step else replace(note, step=self._steps.last))

    def _keep(self, closed: bool = False) -> None:
        self._kept = time.monotonic()
        self._write({"events": self._notes.read, "steps": self._steps.dump(), "closed": closed})

    def _write(self, state: Mapping[str, Any]) -> None:
        try:
            durable.write_file(self._path, as_json(state).encode())
        except OSError as error:  # the next process may tell something twice
            log.warning("%s: %s", self._path, error)


def relay_all(relay: Relay, given: int, rest: bytes = b"", alive: Callable[[], bool] = lambda: True) -> None:
    """Pass on the lines of a file descriptor, until its end, or until nobody is there who could write. rest: what was
    read of it already."""
    ticked = time.monotonic()
    while True:
        *lines, rest = rest.split(b"\n")
        for line in lines:
            if (point := point_of(line)) is not None:
                relay.tell(point)
        if time.monotonic() - ticked > TICK:
            relay.tick()
            ticked = time.monotonic()
        if not select.select([given], [], [], TICK)[0]:
            if not alive():
                return
            continue
        block = os.read(given, BLOCK)
        if not block:
            return
        rest += block
