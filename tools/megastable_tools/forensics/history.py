"""Reconstruct a run's data history, step by step, from its directory: records, journal, blends, recipe. Without a
training process, a model or a GPU.

A step may have been done several times, if the run was rewound; each time is a row of its own. The data order is the
one in force at that time: of the blends and exchanges decided by then.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, groupby
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megastable.base.errors import DataError
from megastable.base.text import count_noun, show_ranges
from megastable.config.recipe import load_recipe
from megastable.data.blends import BlendEntry, Share, blends_in_force, read_blends
from megastable.data.skip_ledger import Ledger
from megastable.data.skips import Selection, Skips, numbers_of
from megastable.report.postmortem.evidence import RecordFolder
from megastable.report.postmortem.facts import IncidentFacts, SuspectFacts
from megastable.report.postmortem.journal import Journal, summary_of
from megastable.report.postmortem.sample_texts import Library
from megastable.run.directory import RunDirectory, read_object
from megastable.run.events.data_events import OrderChanged
from megastable.run.events.event import Event, read_whole
from megastable.run.events.reading import read_events
from megastable.run.events.training_events import Resumed, Training
from megastable.run.record_files import LAST_STEP
from megastable.run.records import SCHEMA

Int64s = npt.NDArray[np.int64]

COLUMNS = (
    "step", "time", "first_position", "next_position", "skipped", "applied", "loss", "grad_norm", "worst_positions",
    "worst_losses",
)  # fmt: skip
MARKS = b'"rewound"', b'"resumed"', b'"training"', b'"order_changed"', b'"attributed"'
SPANS = ("step", "time", "first_position", "next_position", "skipped", "applied", "loss")


@dataclass(frozen=True, slots=True)  # there may be millions
class Done:
    """One execution of a step. undone: the run was rewound past it later. skipped: edges of ranges, in turn."""

    step: int
    time: float
    first_position: int
    next_position: int
    skipped: list[int] | None  # None: none
    applied: bool
    undone: bool
    loss: float = float("nan")
    grad_norm: float = float("nan")
    worst_positions: Sequence[int] = ()
    worst_losses: Sequence[float] = ()

    @property
    def state(self) -> str:
        if not self.applied:
            return "refused"
        return "undone" if self.undone else "trained"


class History:
    """The history of the run in `root`. Raises DataError or ConfigError if it is not a run, or cannot be read."""

    def __init__(self, root: Path) -> None:
        self.run = RunDirectory(root)
        if not self.run.recipe.is_file():
            missing = f"{self.run.recipe.name} is missing; give one such as runs/quickstart"
            raise DataError(f"{root} is not the directory of a run: {missing}")
        self.config = load_recipe(self.run.recipe)
        self.blends = read_blends(self.run.blends)
        self.problems: list[str] = []
        self._folder = RecordFolder(self.run.steps, SCHEMA)
        self._library = lru_cache(maxsize=4)(self._open)

    def library_at(self, time: float | None = None) -> Library:
        """The corpora in the order in force at a time (default: now). Raises DataError for a time before the corpora
        changed (data.accept_changed_manifest)."""
        if time is not None and time < self._changed:
            raise DataError(
                f"{self.run.journal}: the corpora, the seed or the sequence length changed after this step "
                '("order_changed"): its samples can no longer be determined'
            )
        return self._library(self._held(time))

    def split_into_eras(self, done: Sequence[Done]) -> Iterator[tuple[Library, list[Done]]]:
        """`done`, in the order of time, in parts with the same data order, each with that order; without steps from
        before the corpora changed."""
        known_steps = (done_step for done_step in done if done_step.time >= self._changed)
        for blend_count, era_steps in groupby(known_steps, key=lambda one: self._held(one.time)):
            yield self._library(blend_count), list(era_steps)

    def _held(self, time: float | None) -> int:
        """Number of lines in blends.jsonl at a time: at least the first."""
        blends_held = len(self.blends) if time is None else bisect_right(self._decided, time)
        return max(blends_held, min(1, len(self.blends)))

    @cached_property
    def _decided(self) -> list[float]:
        """The times of the lines of blends.jsonl, ascending."""
        decision_times = (-math.inf if e.time is None else e.time.timestamp() for e in self.blends)
        return list(accumulate(decision_times, max))

    def _open(self, count: int) -> Library:
        return Library(self.config, self.blends[:count])

    def find_share(self, fingerprint: str) -> Share:
        """The corpus of the run with that manifest fingerprint. Raises DataError if there is none."""
        # A removed corpus is still read up to the next block.
        shares = [share for blend in reversed(blends_in_force(self.blends)) for share in blend.corpora]
        matching_share = next((share for share in shares if share.fingerprint == fingerprint), None)
        if matching_share is None:
            known = ", ".join(dict.fromkeys(share.path for share in shares)) or "none that it wrote down"
            raise DataError(
                f"{self.run.root} does not train on the corpus of the plan (fingerprint "
                f"{fingerprint[:12]}...), but on {known}: make a plan of one of those"
            )
        return matching_share

    def list_steps(self, first: int, last: int, columns: Sequence[str] = COLUMNS) -> list[Done]:
        """Every execution of the steps [first, last], in the order of time; damaged files are listed in `problems`."""
        record_rows, problems = self._folder.read_rows(first, last, columns)
        self.problems += [new_problem for new_problem in problems if new_problem not in self.problems]
        rewind_times, lowest_steps = self._goings_back
        steps_found = []
        for record_row in record_rows:
            later_index = bisect_right(rewind_times, record_row["time"])
            is_undone = later_index < len(rewind_times) and lowest_steps[later_index] < record_row["step"]
            steps_found.append(Done(**record_row, undone=is_undone))
        return steps_found

    def require_steps(self, first: int, last: int) -> list[Done]:
        """As `list_steps`. Raises DataError if none was recorded."""
        steps_found = self.list_steps(first, last)
        if not steps_found:
            record_files = self._folder.list_between(0, LAST_STEP)
            known = f"{count_noun(len(record_files), 'file')} of records" if record_files else "no records"
            steps_named = f"step {first}" if first == last else f"steps {first} to {last}"
            raise DataError(
                f"{self.run.steps}: {steps_named} was not recorded (there are {known}): steps count from 1, and the "
                f"latest {self.config.logging.flush_steps} of a run at work may not be on the disk yet"
            )
        return steps_found

    def incident(self, number: int) -> tuple[IncidentFacts, list[Event], list[Event]]:
        """What is told of an incident, its own events, and all events from its first to its last one. Raises DataError
        if it does not exist."""
        journal = Journal(self.run)
        if number not in journal.own:
            known = show_ranges([(n, n + 1) for n in sorted(journal.own)]) or "none"
            raise DataError(
                f"{self.run.journal}: there is no incident {number}; those of this run: {known}. Of a spike without an "
                f"incident (a dry run, the guard off) `megastable inspect step {self.run.root} STEP` shows the samples "
                f"and `megastable prune plan CORPUS --step {self.run.root}:STEP --spans` plans what to remove"
            )
        own_indexes = journal.own[number]
        own_events = [journal.events[event_index] for event_index in own_indexes]
        incident_facts = IncidentFacts.model_validate(summary_of(own_events[-1]))
        return incident_facts, own_events, journal.events[own_indexes[0] : own_indexes[-1] + 1]

    def positions_of(self, done: Done) -> Int64s:
        """The positions that the step trained on: int64, ascending."""
        # Whole epochs may be skipped: do not enumerate them.
        kept_ranges = self._left_out(done).gaps().ranges_between(done.first_position, done.next_position)
        return numbers_of(kept_ranges)

    def find_steps_that_read(
        self, positions: Int64s, among: Sequence[Done] | None = None
    ) -> list[tuple[Done, Int64s]]:
        """Every step, of `among` or of all, that trained on any of `positions`, with those positions: in the order
        of time."""
        steps_found = []
        for done_step in self.list_steps(0, LAST_STEP, SPANS) if among is None else among:
            if done_step.time < self._changed:
                continue
            low, high_index = np.searchsorted(positions, (done_step.first_position, done_step.next_position))
            mine = positions[low:high_index]
            if mine.size and (mine := mine[~self._left_out(done_step).mask_skipped(mine)]).size:
                steps_found.append((done_step, mine))
        return steps_found

    @cached_property
    def ledger(self) -> Ledger:
        return Ledger.read_ledger(self.run.skips, self.problems)

    def select_from(self, library: Library, ever: bool = False) -> Selection:
        """The selection by today's ledger over the order of `library`. ever: ignore releases, as positions passed
        before a release stay skipped."""
        ledger = self.ledger.ever if ever else self.ledger
        usable_selection, ledger_problems = ledger.select_usable(
            self.run.skips, library.source.order, self.config.data.skip
        )
        self.problems += [
            ledger_problem for ledger_problem in ledger_problems if ledger_problem not in self.problems
        ]
        return usable_selection

    def left_out(self, library: Library, positions: Int64s) -> npt.NDArray[np.bool_]:
        """Which samples at n positions of the order of `library` are skipped now: bool [n]. They may be at other
        positions by now; samples that the present order never gives are not skipped."""
        library_now, order_then = self.library_at(), library.source.order
        positions_now = order_then.moved_to(library_now.source.order, positions)
        skipped_positions = positions_now[self.select_from(library_now).mask_skipped(positions_now)]
        return np.isin(positions, library_now.source.order.moved_to(order_then, skipped_positions))

    @property
    def step(self) -> int:
        """The run's current step, by its records."""
        return self._latest.step if self._latest else 0

    @property
    def cursor(self) -> int:
        """The run's current position, by its records."""
        return self._latest.next_position if self._latest else 0

    @cached_property
    def _latest(self) -> Done | None:
        for record_file in reversed(self._folder.list_between(0, LAST_STEP)):  # the newest first
            if steps_found := self.list_steps(record_file.low, record_file.high, SPANS):
                return max(steps_found, key=lambda done: done.time)
        return None

    def _left_out(self, done: Done) -> Skips:
        edges = done.skipped or []
        return Skips.from_ranges(zip(edges[::2], edges[1::2], strict=True))

    @cached_property
    def _goings_back(self) -> tuple[list[float], list[int]]:
        """Times of rewinds and restarts, ascending; and the lowest step from which the run continued, then or later."""
        goings_back = []
        # A process that finds no checkpoint only reports that it trains.
        for event in self._events:
            to_step = event.get("to_step") if event.get("what") == "rewound" else None
            to_step = event.get("step") if isinstance(event, Resumed | Training) else to_step
            if isinstance(to_step, int):
                goings_back.append((float(event["time"]), to_step))
        goings_back.sort()
        lowest = list(accumulate((to_step for _, to_step in reversed(goings_back)), min))[::-1]
        return [event_time for event_time, _ in goings_back], lowest

    @cached_property
    def _changed(self) -> float:
        """When the data order last changed entirely; before all times if never."""
        change_times = [float(e["time"]) for e in self._events if isinstance(e, OrderChanged)]
        if change_times:
            self.problems.append(
                "The corpora, the seed or the sequence length changed during the run (order_changed in the journal): "
                "earlier steps are not shown."
            )
        return max(change_times, default=-math.inf)

    @cached_property
    def suspects(self) -> dict[int, SuspectFacts]:
        """What attribution measured of samples, by position; the newest."""
        attributions = [event for event in self._events if event.get("what") == "attributed"]
        told = [suspect for event in attributions for suspect in event.get("suspects") or []]
        return {suspect.position: suspect for suspect in map(SuspectFacts.model_validate, told)}

    @cached_property
    def _events(self) -> list[Event]:
        """The events on how the run continued, in order."""
        # Most journal lines are irrelevant here: they are not parsed.
        marked_events = read_events(self.run.journal, *MARKS)
        return [e for e in marked_events if "event" in e and isinstance(e.get("time"), int | float)]


def blends_text(blends: Sequence[BlendEntry]) -> list[str]:
    """The blends in force, a sentence each."""
    return [
        f"from position {entry.position:,}: "
        + ", ".join(f"{s.name} {s.weight / sum(entry.weights.values()):.1%}" for s in entry.corpora)
        for entry in blends
    ]


def live_place(history: History) -> tuple[int, int]:
    """Step and cursor of a run, by its processes, or else by its records."""
    progress_told = read_object(history.run.progress)
    step, cursor = read_whole(progress_told.get("step")), read_whole(progress_told.get("cursor"))
    return (history.step, history.cursor) if step is None or cursor is None else (step, cursor)


def checkpoint_cursor(run: RunDirectory, choose: Callable[[list[int]], int]) -> int:
    """The cursor of one of a run's checkpoints: choose `min` or `max`; 0 if there is none."""
    # An unreadable one is also skipped when the run starts.
    state_files = run.checkpoints.glob("step-*/state.json")
    cursors_told = [read_whole(read_object(state_file).get("cursor")) for state_file in state_files]
    known_cursors = [cursor for cursor in cursors_told if cursor is not None]
    return choose(known_cursors) if known_cursors else 0
