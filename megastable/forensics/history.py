"""What a run read, step by step, from its directory alone: records, journal, blends, recipe. No training process, no
model, no GPU.

A step may have been done several times, where the run went back; every time is a row of its own. The order of the data
is that of the time: of the blends and the exchanges that were decided by then.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, groupby
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megastable.base.errors import DataError
from megastable.base.text import plural
from megastable.config.recipe import load
from megastable.data.blends import BlendEntry, Share, in_force, read_blends
from megastable.data.skip_ledger import Ledger
from megastable.data.skips import Selection, Skips
from megastable.report.postmortem.facts import SuspectFacts
from megastable.report.postmortem.passes import LAST, NAMES, RecordFolder
from megastable.report.postmortem.sample_texts import Library
from megastable.run.directory import RunDirectory
from megastable.run.events.data_events import OrderChanged
from megastable.run.events.event import Event
from megastable.run.events.reading import read_events
from megastable.run.events.training_events import Resumed, Training
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
    """A step, once. undone: the run went back behind it later. skipped: None where an older version wrote it."""

    step: int
    time: float
    first_position: int
    next_position: int
    skipped: list[int] | None
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
    """Of the run in `root`. Raises DataError or ConfigError where that is none, or cannot be read."""

    def __init__(self, root: Path) -> None:
        self.run = RunDirectory(root)
        if not self.run.recipe.is_file():
            raise DataError(
                f"{root} is not the directory of a run that has begun: {self.run.recipe.name} is not there; give one "
                "such as runs/quickstart"
            )
        self.config = load(self.run.recipe)
        self.blends = read_blends(self.run.blends)
        self.problems: list[str] = []
        self._folder = RecordFolder(self.run.steps, SCHEMA, self.config.logging.flush_steps)
        self._library = lru_cache(maxsize=4)(self._open)

    def library(self, time: float | None = None) -> Library:
        """The corpora in the order that held at a time, of now without one. Raises DataError for one of before the
        corpora became others (data.accept_changed_manifest)."""
        if time is not None and time < self._changed:
            raise DataError(
                f"{self.run.journal}: the corpora, the seed or the sequence length became others after this step "
                '("order_changed"): what it read can no longer be told'
            )
        return self._library(self._held(time))

    def eras(self, done: Sequence[Done]) -> Iterator[tuple[Library, list[Done]]]:
        """`done`, in the order of time, in parts within which the order of the data stayed as it was, and that order;
        without what was done before the corpora became others."""
        told = (one for one in done if one.time >= self._changed)
        for count, some in groupby(told, key=lambda one: self._held(one.time)):
            yield self._library(count), list(some)

    def _held(self, time: float | None) -> int:
        """How many lines of blends.jsonl there were at a time: the first one always was."""
        held = len(self.blends) if time is None else bisect_right(self._decided, time)
        return max(held, min(1, len(self.blends)))

    @cached_property
    def _decided(self) -> list[float]:
        """When each line of blends.jsonl was there, ascending."""
        times = (-math.inf if e.time is None else e.time.timestamp() for e in self.blends)
        return list(accumulate(times, max))

    def _open(self, count: int) -> Library:
        return Library(self.config, self.blends[:count])

    def share(self, fingerprint: str) -> Share:
        """The corpus of the run with that manifest fingerprint. Raises DataError where there is none."""
        # One that was taken out is still read up to the next block.
        shares = [share for entry in reversed(in_force(self.blends)) for share in entry.corpora]
        found = next((share for share in shares if share.fingerprint == fingerprint), None)
        if found is None:
            known = ", ".join(dict.fromkeys(share.path for share in shares)) or "none that it wrote down"
            raise DataError(
                f"{self.run.root} does not train on the corpus that the plan was made for (fingerprint "
                f"{fingerprint[:12]}...), but on {known}: make a plan of one of those"
            )
        return found

    def steps(self, first: int, last: int, columns: Sequence[str] = COLUMNS) -> list[Done]:
        """Every time that a step of [first, last] was done, in the order of time; damaged files are named in
        `problems`."""
        rows, problems = self._folder.rows(first, last, columns)
        self.problems += [p for p in problems if p not in self.problems]
        return [Done(**row, undone=self._undone(row["step"], row["time"])) for row in rows]

    def at(self, first: int, last: int) -> list[Done]:
        """As `steps`. Raises DataError where none was recorded."""
        found = self.steps(first, last)
        if not found:
            rows = self._folder.files(0, LAST)
            known = f"{plural(len(rows), 'file')} of records" if rows else "no records"
            which = f"step {first}" if first == last else f"steps {first} to {last}"
            raise DataError(
                f"{self.run.steps}: {which} was not recorded (there are {known}): steps count from 1, and the "
                f"latest {self.config.logging.flush_steps} of a run at work may not be on the disk yet"
            )
        return found

    def positions(self, done: Done) -> Int64s:
        """What the step trained on: int64, ascending."""
        # Whole epochs may be left out: not one by one.
        kept = self._left_out(done).gaps().between(done.first_position, done.next_position)
        return np.concatenate([np.empty(0, np.int64), *(np.arange(first, end) for first, end in kept)])

    def that_read(self, positions: Int64s, among: Sequence[Done] | None = None) -> list[tuple[Done, Int64s]]:
        """Every step, of `among` or of all, that trained on any of `positions`, ascending, and on which: in the order
        of time."""
        found = []
        for done in self.steps(0, LAST, SPANS) if among is None else among:
            if done.time < self._changed:
                continue
            low, high = np.searchsorted(positions, (done.first_position, done.next_position))
            mine = positions[low:high]
            if mine.size and (mine := mine[~self._left_out(done).mask(mine)]).size:
                found.append((done, mine))
        return found

    @cached_property
    def ledger(self) -> Ledger:
        return Ledger.read(self.run.skips, self.problems)

    def selection(self, library: Library, ever: bool = False) -> Selection:
        """What the ledger of now leaves of the order of `library`. ever: as if nothing had been released, as what was
        passed over before stays passed over."""
        ledger = self.ledger.ever if ever else self.ledger
        found, problems = ledger.usable(self.run.skips, library.source.order, self.config.data.skip)
        self.problems += [p for p in problems if p not in self.problems]
        return found

    def left_out(self, library: Library, positions: Int64s) -> npt.NDArray[np.bool_]:
        """Which of the samples at n positions of the order of `library` are left out now: bool [n]. They may stand
        elsewhere by now; those that the present order never gives are not left out."""
        today, then = self.library(), library.source.order
        there = then.moved_to(today.source.order, positions)
        out = there[self.selection(today).mask(there)]
        return np.isin(positions, today.source.order.moved_to(then, out))

    @property
    def step(self) -> int:
        """The step that the run has come to, by its records."""
        return self._latest.step if self._latest else 0

    @property
    def cursor(self) -> int:
        """The position that the run has come to, by its records."""
        return self._latest.next_position if self._latest else 0

    @cached_property
    def _latest(self) -> Done | None:
        # A name tells the time of its last row; a file that somebody named otherwise is read last.
        named = [match for path in self._folder.files(0, LAST) if (match := NAMES.fullmatch(path.name))]
        for match in sorted(named, key=lambda match: int(match[3]), reverse=True):
            first, end = sorted((int(match[1]), int(match[2])))
            if found := self.steps(first, end, SPANS):
                return max(found, key=lambda done: done.time)
        return max(self.steps(0, LAST, SPANS), key=lambda done: done.time, default=None)

    def _left_out(self, done: Done) -> Skips:
        if done.skipped is None:
            return self._ledger_then(done.time)
        return Skips.of(zip(done.skipped[::2], done.skipped[1::2], strict=True))

    def _ledger_then(self, time: float) -> Skips:
        # Versions that wrote no `skipped` knew of no other lines.
        return Skips.of(self.config.data.skip).union(self.ledger.until(time).exclusions.positions)

    def _undone(self, step: int, time: float) -> bool:
        times, lowest = self._goings_back
        later = bisect_right(times, time)
        return later < len(times) and lowest[later] < step

    @cached_property
    def _goings_back(self) -> tuple[list[float], list[int]]:
        """When the run went back, ascending; and the lowest step after which it went on, then or later."""
        found = []
        # A process that finds no checkpoint says only that it trains.
        for event in self._events:
            to = event.get("to_step") if event.get("what") == "rewound" else None
            to = event.get("step") if isinstance(event, Resumed | Training) else to
            if isinstance(to, int):
                found.append((float(event["time"]), to))
        found.sort()
        lowest = list(accumulate((to for _, to in reversed(found)), min))[::-1]
        return [time for time, _ in found], lowest

    @cached_property
    def _changed(self) -> float:
        """When the order of the data became another one altogether; a time before all where it never did."""
        times = [float(e["time"]) for e in self._events if isinstance(e, OrderChanged)]
        if times:
            self.problems.append(
                "The corpora, the seed or the sequence length became others on the way (order_changed in the journal): "
                "nothing is told of the steps before."
            )
        return max(times, default=-math.inf)

    @cached_property
    def suspects(self) -> dict[int, SuspectFacts]:
        """What attribution measured of samples, by position; the newest."""
        told = [e.get("suspects") or [] for e in self._events if e.get("what") == "attributed"]
        return {s.position: s for some in told for s in map(SuspectFacts.model_validate, some)}

    @cached_property
    def _events(self) -> list[Event]:
        """Those that say how the run went on, in order."""
        # A journal has a hundred times as many lines as are wanted here: most need not be understood.
        told = read_events(self.run.journal, *MARKS)
        return [e for e in told if "event" in e and isinstance(e.get("time"), int | float)]


def blends_text(blends: Sequence[BlendEntry]) -> list[str]:
    """The blends in force, a sentence each."""
    return [
        f"from position {entry.position:,}: "
        + ", ".join(f"{s.name} {s.weight / sum(entry.weights.values()):.1%}" for s in entry.corpora)
        for entry in blends
    ]
