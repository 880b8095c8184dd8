"""Passes the records of one training process on to its trackers: from a pipe, and from the journal of the run.

Each tracker has a thread of its own, behind a bounded queue: what it does not take in time is dropped.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from megastable.base import durable
from megastable.base.text import make_visible
from megastable.run.directory import RunDirectory, as_json, read_object
from megastable.run.events import (
    data_events,
    people_events,
    stability_events,
    supervisor_events,
    training_events,
)
from megastable.run.events.event import Event, read_tree, read_whole
from megastable.run.events.reading import Follower
from megastable.run.events.stability_events import IncidentEvent
from megastable.run.events.training_events import (
    ConfigChanged,
    Finished,
    Stopped,
    TasksEvaluated,
    Training,
)
from megastable.training.trackers.points import (
    INCIDENTS,
    TASKS,
    LayersPoint,
    NotePoint,
    Point,
    RunPoint,
    StepPoint,
    TasksPoint,
    UndonePoint,
    ValidationPoint,
    is_untold,
    point_of,
    values_apart,
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

    def put_point(self, point: Point) -> None:
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

    def check_timeout(self) -> None:
        """Give the tracker up if a call takes too long."""
        busy_since = self._busy
        if busy_since is not None and time.monotonic() - busy_since > self._timeout:
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
        self._warn(f"tracker {self.name} is given up: {make_visible(why, 500)}. Training goes on without it")

    def _run(self) -> None:
        try:
            self._busy = time.monotonic()
            opened_tracker = self._open()
            self._busy = None
            flush_time = time.monotonic()
            while not self.over:
                try:
                    next_point: Point | str | None = self._queue.get(timeout=0.5)
                except queue.Empty:
                    next_point = self._status
                self._busy = time.monotonic()
                if isinstance(next_point, str):
                    opened_tracker.close(next_point)
                    with self._lock:
                        self.over = True
                elif next_point is not None:
                    pass_point(opened_tracker, next_point)
                if not self.over and time.monotonic() - flush_time > FLUSH:
                    opened_tracker.flush()
                    flush_time = time.monotonic()
                self._busy = None
        except BaseException as error:  # SystemExit too: a library may raise anything
            log.exception("tracker %s", self.name)
            self._busy = None
            self._give_up(str(error) or type(error).__name__)


def pass_point(tracker: Tracker, point: Point) -> None:
    """Give a tracker one record."""
    match point:
        case StepPoint():
            tracker.add_step(point)
        case ValidationPoint():
            tracker.add_validation(point)
        case LayersPoint():
            tracker.add_layers(point)
        case UndonePoint():
            tracker.add_undone(point)
        case NotePoint():
            tracker.add_note(point)


TICK = 1.0  # seconds between two looks at journal and trackers
KEEP = 15.0  # seconds between two notes of how far it came
BLOCK = 1 << 16  # bytes per read


class Relay:
    """Of one training process. Its state is RUN/trackers/relay.json: what was told is not told again, and steps that a
    process told and the next one repeats are undone. One that is killed, with all of its job, has told more steps than
    it has kept: the next one says that any may have been told."""

    def __init__(self, run: RunPoint, lanes: Sequence[Lane]) -> None:
        self.run, self.lanes = run, lanes
        run_root = Path(run.directory)
        self._path = run_root / "trackers" / "relay.json"
        kept_state = read_object(self._path)
        self._notes = TrackerNotes(RunDirectory(run_root).journal, read_whole(kept_state.get("events")) or 0)
        self._steps = ToldSteps.from_dump(kept_state.get("steps"))
        self._kept = time.monotonic()
        self._write(kept_state | {"closed": False})
        self._look()  # first: what happened between the processes
        undone_point = self._steps.go_back(run.step, run.tokens + 1, run.time)
        if undone_point is None and kept_state.get("closed") is False:
            undone_point = UndonePoint(run.step + 1, run.step + 1, run.tokens + 1, run.time)
        if undone_point is not None:
            self._put(undone_point)

    def pass_point(self, point: Point) -> None:
        """A record of the training process."""
        if isinstance(point, StepPoint):
            if undone_point := self._steps.add_step(point):
                self._put(undone_point)
            if point.applied:
                point = replace(point, values={**point.values, INCIDENTS: float(self._notes.incidents)})
        if not isinstance(point, RunPoint):
            self._put(point)

    def look_around(self) -> None:
        """Look at the journal, and for trackers that hang."""
        self._look()
        for lane in self.lanes:
            lane.check_timeout()
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
                lane.check_timeout()
        return not any(lane.failed or not lane.over for lane in self.lanes)

    def _put(self, point: Point) -> None:
        for lane in self.lanes:
            lane.put_point(point)

    def _look(self) -> None:
        for new_note in self._notes.read_new():
            self._put(new_note if new_note.step else replace(new_note, step=self._steps.last))

    def _keep(self, closed: bool = False) -> None:
        self._kept = time.monotonic()
        self._write({"events": self._notes.read, "steps": self._steps.model_dump(), "closed": closed})

    def _write(self, state: Mapping[str, Any]) -> None:
        try:
            durable.write_file(self._path, as_json(state).encode())
        except OSError as error:  # the next process may tell something twice
            log.warning("%s: %s", self._path, error)


def relay_all(relay: Relay, given: int, rest: bytes = b"", alive: Callable[[], bool] = lambda: True) -> None:
    """Pass on the lines of a file descriptor, until its end, or until nobody is there who could write. rest: what was
    read of it already."""
    tick_time = time.monotonic()
    while True:
        *whole_lines, rest = rest.split(b"\n")
        for point_line in whole_lines:
            if (point := point_of(point_line)) is not None:
                relay.pass_point(point)
        if time.monotonic() - tick_time > TICK:
            relay.look_around()
            tick_time = time.monotonic()
        if not select.select([given], [], [], TICK)[0]:
            if not alive():
                return
            continue
        read_block = os.read(given, BLOCK)
        if not read_block:
            return
        rest += read_block


KEPT = 2000  # accepted steps that are remembered, to be shown once they are undone


class ToldSteps(BaseModel):
    """The steps told so far, to find out which were undone: those that come again. last: the newest one, 0 if there is
    none; points: accepted ones."""

    last: int = 0
    points: list[StepPoint] = []

    @classmethod
    def from_dump(cls, dumped: object) -> ToldSteps:
        """Of a `model_dump`; empty if it is none."""
        try:
            return cls.model_validate(dumped)
        except ValidationError:
            return cls()

    def add_step(self, point: StepPoint) -> UndonePoint | None:
        """Another step; what it undoes, if it is not a new one."""
        undone_point = self.go_back(point.step - 1, point.tokens, point.time)
        self.last = point.step
        if point.applied:
            self.points = [*self.points[-KEPT + 1 :], replace(point, values=values_apart(point))]
        return undone_point

    def go_back(self, step: int, tokens: int, time: float) -> UndonePoint | None:
        """The run stands after `step`; tokens: an upper bound of those before the next one's end."""
        if step >= self.last:
            return None
        points = tuple(p for p in self.points if p.step > step)
        undone = UndonePoint(step + 1, self.last, min([tokens, *(p.tokens for p in points)]), time, points)
        self.last = step
        self.points = [p for p in self.points if p.step <= step]
        return undone


# Not every refused update, checkpoint or evaluation: what a person would write on the curve.
NOTED: tuple[type[Event], ...] = (
    IncidentEvent, stability_events.AlertEvent, stability_events.TrendEvent, stability_events.Handover,
    stability_events.RateCut, stability_events.RateLifted, stability_events.FellBack, stability_events.Returned,
    stability_events.KernelsLeft, stability_events.KernelsTriedAgain,
    stability_events.ReplicasDiffer, stability_events.StateChanged, stability_events.ReplayDiffers,
    stability_events.HostFaulty, training_events.Warned, training_events.Unstable, ConfigChanged,
    training_events.Resumed, training_events.CheckpointFailed, training_events.CheckpointRejected,
    training_events.TasksFailed, Stopped, Finished,
    people_events.Note, people_events.ChangeMade, people_events.ChangeMeasured,
    supervisor_events.Hang, supervisor_events.HostLeftOut, supervisor_events.HostSlow, supervisor_events.Restart,
    data_events.BlendChanged,
)  # fmt: skip
LONGEST = 200  # lines of an incident's story


class TrackerNotes:
    """told: how many events earlier processes have told. incidents: how many there were; status: how the training
    ended, as far as the journal says."""

    def __init__(self, journal: Path, told: int = 0) -> None:
        self._follower = Follower(journal)
        self._told, self.read = told, 0
        self._starts = self._follower.starts
        self._stories: dict[int, list[str]] = {}
        self.incidents = 0
        self.status = "failed"

    def read_new(self) -> Iterator[NotePoint | TasksPoint]:
        """Notes of the events since the last call, and the scores of tasks among them."""
        told_again = False
        for event in self._follower.stream_events():
            if self._follower.starts != self._starts:  # the file was repaired: its events were told already
                self._starts, self._told, self.read, told_again = self._follower.starts, 0, 0, True
                self._stories.clear()
            self.read += 1
            event_note, is_known = self._note(event), told_again or self.read <= self._told
            if isinstance(event, Training):
                self.status = "failed"  # until it says otherwise
            # A run that is complete stays so, whoever opens its trackers; one that was stopped is about to go on.
            if isinstance(event, Finished) or (isinstance(event, Stopped) and not is_known):
                self.status = event.NAME
            if event_note is not None and not is_known:
                yield event_note

    def _note(self, event: Event) -> NotePoint | TasksPoint | None:
        if isinstance(event, TasksEvaluated):
            scores = {TASKS + number_name: value for number_name, value in event.numbers.items()}
            return TasksPoint(event.of_step or 0, event.tokens or 0, event.time or 0.0, scores)
        if isinstance(event, ConfigChanged):
            # "key: old -> new" each, without those of keys that trackers are not told.
            texts = [text for text in map(str, event.changes) if not is_untold(text.partition(":")[0])]
            event = ConfigChanged.from_fields({**event.fields, "changes": texts})
            if not texts:
                return None
        if not isinstance(event, NOTED) or not (text := event.format_sentence()):
            return None
        step, what, moment = _step(event), str(event.get("what") or ""), event.time or 0.0
        if not isinstance(event, IncidentEvent) or (number := event.number) is None:
            return NotePoint(step, moment, event.event, text, what=what)
        self.incidents = max(self.incidents, number)
        lines = self._stories.setdefault(number, [])
        if len(lines) < LONGEST:
            lines.append(f"- step {step}: {text.removeprefix(f'incident {number}: ')}")
        story = f"**Incident {number}**\n\n" + "\n".join(lines) + "\n"
        return NotePoint(step, moment, event.event, text, number, what, event.summary, story)


def _step(event: Event) -> int:
    """When it happened; 0 if the event does not say."""
    for fields, key in ((event, "step"), (event, "steps"), (read_tree(event.get("summary")), "step")):
        if isinstance(step := fields.get(key), int):
            return step
    return 0
