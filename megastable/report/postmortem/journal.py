"""Reads the journal in one pass and selects what each incident needs; malformed lines are left out."""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from megastable.base.text import count_noun
from megastable.data.order import LAST_POSITION
from megastable.data.skips import Range, Skips
from megastable.run.directory import RunDirectory
from megastable.run.events.event import Event, read_pairs, read_tree
from megastable.run.events.reading import read_events
from megastable.run.events.stability_events import Discarded, Handover, IncidentEvent, IncidentLater
from megastable.run.events.supervisor_events import Ended, Hang, Launched, SupervisorEvent
from megastable.run.events.training_events import CheckpointSaved, Evaluated, Finished, Stopped, Training

EARLIER, LATER = 30, 12  # events before and after those of an incident that are searched
MARKS = (CheckpointSaved, Evaluated, Training, Finished, Stopped)  # a stretch between two is whole
STARTS = (Training, Launched)
TURNS = (*STARTS, Hang, Ended, Handover, SupervisorEvent)  # processes begin or end
LATEST = 1e11  # Unix seconds: beyond is no valid time


class Journal:
    """events: in order, without the policy's memory, of which every event of an incident has a copy.

    own: indexes of each incident's events, by number; later: its `IncidentLater`. refused: events of refused updates,
    by step. is_guarded: a loop of somebody else wrote it, under the guard alone. Raises DataError for a file that
    cannot be read.
    """

    def __init__(self, run: RunDirectory) -> None:
        self.events: list[Event] = []
        self.own: dict[int, list[int]] = defaultdict(list)
        self.later: dict[int, list[IncidentLater]] = defaultdict(list)
        self.refused: dict[int, list[Event]] = defaultdict(list)
        self._turns: list[int] = []
        self.is_guarded = False
        self.problems: list[str] = []
        odd_lines, was_collecting = 0, gc.isenabled()
        gc.disable()  # with a million live events it would take as long as reading them
        try:
            for event in read_events(run.journal):
                event_time = event.get("time")
                if event.named and isinstance(event_time, int | float) and 0 <= event_time < LATEST:
                    self._add(event)
                else:
                    odd_lines += 1
        finally:
            if was_collecting:
                gc.enable()
        if odd_lines:
            left_out = f"{count_noun(odd_lines, 'line')} left out: no event in JSON"
            self.problems.append(f"{run.journal.name}: {left_out}")

    def _add(self, event: Event) -> None:
        event_index, step = len(self.events), event.get("step")
        self.events.append(event.drop_field("policy"))
        if isinstance(event, TURNS):
            self._turns.append(event_index)
            self.is_guarded |= isinstance(event, Training) and bool(event.guarded)
        elif isinstance(event, Discarded) and isinstance(step, int):
            self.refused[step].append(event)
        elif isinstance(event, IncidentLater):
            self.later[event.number or 0].append(event)
        elif isinstance(event, IncidentEvent):
            incident_number = summary_of(event).get("number")
            if type(incident_number) is int and 0 < incident_number < 10**9:
                self.own[incident_number].append(event_index)

    def list_turns(self, at: int) -> list[int]:
        """Indexes of events where processes began or ended, after their last start before events[at]."""
        first_turn = bisect_left(self._turns, at)
        while first_turn > 0 and not isinstance(self.events[self._turns[first_turn - 1]], STARTS):
            first_turn -= 1
        return self._turns[first_turn:]

    def find_world(self, at: int) -> int | None:
        """Number of ranks at events[at]."""
        for turn_index in range(bisect_left(self._turns, at) - 1, -1, -1):
            if type(world_size := self.events[self._turns[turn_index]].get("world")) is int:
                return world_size
        return None

    def find_nearby(self, begin: int, end: int) -> slice:
        """From the last mark before events[begin] to the first after events[end], marks included."""
        first, last = begin, end
        while first > max(0, begin - EARLIER) and (
            first == begin or not isinstance(self.events[first], MARKS)
        ):
            first -= 1
        most_index = min(len(self.events) - 1, end + LATER)
        while last < most_index and (last == end or not isinstance(self.events[last], MARKS)):
            last += 1
        return slice(first, last + 1)


def summary_of(event: Event) -> dict[str, Any]:
    """The incident's summary in an event."""
    return read_tree(event.get("summary"))


def named_when(told: Sequence[Event]) -> list[tuple[float, list[Range], list[Range]]]:
    """The positions that each of an incident's events, in order, adds to those skipped and deferred: (time, skipped,
    deferred). They refer to the data order of that time, before the event's own deferrals."""
    named_positions = list[tuple[float, list[Range], list[Range]]]()
    known_skips, put_off = Skips.from_ranges([]), Counter[Range]()
    for event_number, event in enumerate(told):
        summary = summary_of(event)
        skipped = Skips.from_ranges(_ranges(summary.get("positions")))
        deferred = Counter(_ranges(summary.get("deferred")))
        new_ranges = skipped.minus(known_skips).ranges, sorted((deferred - put_off).elements())
        if any(new_ranges):
            named_positions.append((float(told[max(0, event_number - 1)]["time"]), *new_ranges))
        known_skips, put_off = known_skips.union(skipped), put_off | deferred
    return named_positions


def _ranges(given: object) -> list[Range]:
    """The ranges of an event, whatever it holds."""
    return [
        (a, end_position) for a, end_position in read_pairs(given) if 0 <= a < end_position <= LAST_POSITION
    ]
