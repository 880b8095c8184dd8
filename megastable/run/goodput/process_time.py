"""Splits the time of one training process: its steps, and what lay between them. Pure, in numpy."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megastable.run.events.event import Event, whole
from megastable.run.events.stability_events import DiscardExamined, IncidentEvent, SamplesExamined
from megastable.run.events.training_events import CheckpointFailed, CheckpointSaved, Evaluated
from megastable.run.goodput.step_times import StepTimes
from megastable.run.goodput.time_account import CODE, Reason, TimeKind, TimeLine

PIECE = 1 << 16  # steps looked at together
BLOCK = 256  # steps whose median is the usual one
FEWEST = 5  # steps without which none is unusual
# A step, or the time before it, stalls if it takes so many times the usual time, and so much longer.
STALL, STALL_SECONDS = 5.0, 1.0
SHORT = 0.5  # seconds between two steps that are no stall; or a step's usual time, if that is longer
ROUNDED = 0.002  # seconds: times of the journal are rounded
# What an event explains, if there is one.
OPEN = (CODE[TimeKind.BETWEEN], CODE[TimeKind.STALLED], CODE[TimeKind.UNKNOWN])
BACK = ("opened", "attributed", "rewound", "released")  # what happens to an incident between two steps


class Usual(NamedTuple):
    """The usual seconds of steps, or of gaps: the medians of blocks of `block`."""

    medians: npt.NDArray[Any]
    block: int

    def at(self, n: Any) -> npt.NDArray[Any]:
        """Of those numbers."""
        return self.medians[np.asarray(n) // self.block]


@dataclass
class ProcessTime:
    """One training process. reason, attempt: of what is charged to nothing else; blame: why its steps are done again,
    as far as an earlier process had done them; done: the farthest step done before it.

    reasons: by number, of incidents of the training. missing: the share of the wanted ranks that it lacked.
    """

    attempt: int
    reason: Reason
    blame: Reason
    done: int
    step: int
    reasons: dict[int, Reason]
    missing: float = 0.0
    events: list[Event] = field(default_factory=list)

    def put(
        self, line: TimeLine, steps: StepTimes, until: float, tail: TimeKind | None = None, clock: int = 0,
        why: Reason | None = None,
    ) -> int:  # fmt: skip
        """Account for the process from `line.end` to `until`. tail: the kind of the time after its last step, if
        nothing else explains it, charged to `why`; clock: the farthest step that it is known to have done, recorded or
        not.

        Returns the farthest step done.
        """
        begin, plain = line.end, line.charge(self.reason, self.attempt, self.missing)
        count = len(steps.step)
        at = np.empty(2 * count + 1)
        kind, charge = np.empty(2 * count + 1, np.int8), np.full(2 * count + 1, plain, np.int32)
        # Gap n comes before step n, the last one after all. A run may have millions of steps: these are views.
        before, begins = at[0::2], at[1::2]
        gaps, kinds = kind[0::2], kind[1::2]
        gap_charges, charges = charge[0::2], charge[1::2]
        before[0], ends = begin, before[1:]
        np.clip(np.maximum.accumulate(steps.time), begin, until, out=ends)
        np.clip(steps.time - steps.seconds, before[:-1], ends, out=begins)
        usual = _usual(steps.seconds) if count >= FEWEST else Usual(steps.seconds, 1)
        farthest = np.maximum.accumulate(np.r_[self.done, steps.step])
        far = int(farthest[-1])

        # Steps
        kinds[:] = CODE[TimeKind.TRAINING]
        again = steps.step <= farthest[:-1]
        del farthest
        kinds[again] = CODE[TimeKind.REDONE]
        kinds[~steps.applied] = CODE[TimeKind.REFUSED]
        charges[again & steps.applied] = line.charge(self.blame, self.attempt)

        # Between them
        evaluations = self._evaluations(steps, before, begins, until)
        rest = np.empty(count + 1)
        rest[:-1], rest[-1] = begins, until
        rest -= before
        for n, low, high in evaluations:
            rest[n] -= high - low
        ordinary = _usual(rest[:-1]) if count >= FEWEST else Usual(np.zeros(1), BLOCK)
        gaps[:] = _gaps(steps.step, rest, usual, ordinary)
        del rest
        if count:
            gaps[0] = CODE[TimeKind.START_UP]
        gap_charges[0] = line.charge(self.blame, self.attempt)
        last = int(steps.step[-1]) if count else self.step
        if clock > last:  # the records of these were lost with the process, or are not written yet
            gaps[-1] = CODE[TimeKind.TRAINING if clock > far else TimeKind.REDONE]
            gap_charges[-1] = plain if clock > far else gap_charges[0]
        turns = np.flatnonzero(np.diff(steps.step) <= 0) + 1  # the steps after a rewind
        gaps[turns] = CODE[TimeKind.RECOVERY]
        self._events(line, steps, before, gaps, gap_charges)
        if tail is not None and gaps[-1] in OPEN:
            gaps[-1] = CODE[tail]
            gap_charges[-1] = gap_charges[-1] if why is None else line.charge(why, self.attempt)
        stalled = np.flatnonzero(gaps == CODE[TimeKind.STALLED])
        lasts = dict(zip(stalled.tolist(), (begins[stalled] - ordinary.at(stalled)).tolist(), strict=True))
        changes = _within(gaps, gap_charges, evaluations, before, lasts, plain)
        if last < far < clock:  # the first of them were done before
            share = (far - last) / (clock - last)
            gaps[-1], gap_charges[-1] = CODE[TimeKind.REDONE], gap_charges[0]
            middle = float(before[-1] + share * (until - before[-1]))
            changes.append((middle, int(CODE[TimeKind.TRAINING]), plain, 2 * count + 0.7))
        for turn in turns:  # from there on, steps are done again because of that incident
            here = slice(turn, None)
            charges[here] = np.where(again[here] & steps.applied[here], gap_charges[turn], charges[here])

        # All changes, in order: each into the gap, or the step, that it lies in
        late = _stalls(steps.seconds, usual)
        extra = np.minimum(begins[late] + steps.seconds[late] - usual.at(late), ends[late])
        changes += zip(
            extra.tolist(), kinds[late].tolist(), charges[late].tolist(), (2 * late + 1.5).tolist()
        )
        kind[2 * late + 1] = np.where(late == 0, CODE[TimeKind.START_UP], CODE[TimeKind.STALLED])
        charge[2 * late[late == 0] + 1] = gap_charges[0]
        del (
            before,
            begins,
            ends,
            gaps,
            kinds,
            gap_charges,
            charges,
        )  # or the arrays remain, beside their successors
        if changes:
            changes.sort(key=lambda change: (int(change[3]), change[0], change[3]))
            places = [int(order) + 1 for *_, order in changes]
            at = np.insert(at, places, [moment for moment, *_ in changes])
            kind = np.insert(kind, places, [of for _, of, _, _ in changes])
            charge = np.insert(charge, places, [why for _, _, why, _ in changes])
        line.follow(at, kind, charge, until)
        return max(far, clock, self.told())

    def told(self) -> int:
        """The farthest step that its events name as done; 0 if none."""
        done = (e for e in self.events if isinstance(e, Evaluated | CheckpointSaved))
        return max((whole(e.get("step")) or 0 for e in done), default=0)

    def _evaluations(
        self, steps: StepTimes, begins: npt.NDArray[Any], ends: npt.NDArray[Any], until: float
    ) -> list[tuple[int, float, float]]:
        """The gap, begin and end of each. begins, ends: of the gaps; the last one ends at `until`."""
        found = []
        for event in self.events:
            if isinstance(event, Evaluated):
                n, took = _gap(begins, event), event.seconds
                high = float(np.clip(event.time or 0.0, begins[n], ends[n] if n < len(ends) else until))
                if took is None:  # of an older version: all since its step, if that is recorded
                    took = high - begins[n] if n and steps.step[n - 1] == event.step else 0.0
                found.append((n, min(max(float(begins[n]), high - took), high), high))
        return found

    def _events(
        self, line: TimeLine, steps: StepTimes, begins: npt.NDArray[Any], gaps: npt.NDArray[Any],
        charges: npt.NDArray[Any],
    ) -> None:  # fmt: skip
        """Explain the gaps by the events in them, evaluations left out. begins: of the gaps."""
        saved = [e.step for e in self.events if isinstance(e, CheckpointSaved | CheckpointFailed) and e.step]
        after = defaultdict[int, list[int]](list)  # the gaps after steps of checkpoints
        for row in np.flatnonzero(np.isin(steps.step, saved)):
            after[int(steps.step[row])].append(int(row) + 1)
        for event in self.events:
            n = _gap(begins, event)
            match event:
                case CheckpointSaved() | CheckpointFailed():
                    # It is journaled when it is complete, some steps after the one that it was made after.
                    found = [m for m in after[event.step or 0] if m <= n]
                    if found and gaps[found[-1]] in OPEN:
                        gaps[found[-1]] = CODE[TimeKind.CHECKPOINTING]
                case IncidentEvent() | DiscardExamined() | SamplesExamined():
                    if n and gaps[n] in (*OPEN, CODE[TimeKind.RECOVERY]):
                        gaps[n] = CODE[TimeKind.RECOVERY]
                        charges[n] = line.charge(self._why(event), self.attempt)

    def _why(self, event: Event) -> Reason:
        number = whole(event.get("number"))
        if not isinstance(event, IncidentEvent) or number is None:
            return Reason("samples examined")
        return self.reasons.setdefault(number, Reason(incident=number))


def explains(event: Event) -> bool:
    """Whether it says what a training process did between two steps."""
    if isinstance(event, IncidentEvent):
        return event.what in BACK
    return isinstance(
        event, Evaluated | CheckpointSaved | CheckpointFailed | DiscardExamined | SamplesExamined
    )


def _gap(begins: npt.NDArray[Any], event: Event) -> int:
    """The gap before the first step that ended later."""
    # Not by numpy, which would copy a view of every other instant for it.
    return bisect_right(begins, (event.time or 0.0) + ROUNDED, lo=1) - 1


def _gaps(
    step: npt.NDArray[Any], rest: npt.NDArray[Any], usual: Usual, ordinary: Usual
) -> npt.NDArray[np.int8]:
    """What the time before each step is, and that after the last one, if no event explains it. rest: [n + 1] seconds,
    evaluations left out; usual, ordinary: of the steps, and of the gaps before them.

    Who did two steps in a row lived between them, and waited. Nobody knows that of the time after the last step, or
    where records are missing.
    """
    count = len(step)
    found = np.full(count + 1, CODE[TimeKind.UNKNOWN])
    for here in _pieces(1, count):
        waited, normal, limit = rest[here], ordinary.at(here), np.maximum(SHORT, usual.at(here))
        late = (waited > limit) & (waited > STALL * normal) & (waited > normal + STALL_SECONDS)
        lived = np.where(late, CODE[TimeKind.STALLED], CODE[TimeKind.BETWEEN])
        found[here] = np.where(step[here] - step[here - 1] == 1, lived, CODE[TimeKind.UNKNOWN])
    for n in {0, count}:
        limit = max(SHORT, float(usual.at(min(n, count - 1)))) if count else SHORT
        if rest[n] <= limit:
            found[n] = CODE[TimeKind.BETWEEN]
    return found


def _within(
    gaps: npt.NDArray[Any], charges: npt.NDArray[Any], evaluations: list[tuple[int, float, float]],
    begins: npt.NDArray[Any], lasts: Mapping[int, float], plain: int,
) -> list[tuple[float, int, int, float]]:  # fmt: skip
    """Changes within gaps: (at, kind, charge, order). lasts: of gaps that stalled, from when on they are as usual."""
    over = dict[int, float]()  # the end of the last evaluation of each
    changes = []
    for n, low, high in evaluations:
        over[n] = max(over.get(n, high), high)
        changes.append((low, int(CODE[TimeKind.EVALUATION]), plain, 2 * n + 0.5))
        changes.append((high, int(gaps[n]), int(charges[n]), 2 * n + 0.6))
    for n, usual_from in lasts.items():
        last = max(over.get(n, float(begins[n])), usual_from)
        changes.append((last, int(CODE[TimeKind.BETWEEN]), plain, 2 * n + 0.65))
    return changes


def _usual(seconds: npt.NDArray[Any]) -> Usual:
    """Of at least FEWEST steps or gaps: the median of each one's block, the first one left out: it compiles and warms
    up."""
    count, medians = len(seconds), []
    for first in range(0, count, BLOCK):
        # Not of a few steps that remain: those before are better known.
        begin = max(1, min(first, count - BLOCK))
        medians.append(np.median(seconds[begin : first + BLOCK]))
    return Usual(np.array(medians), BLOCK)


def _stalls(seconds: npt.NDArray[Any], usual: Usual) -> npt.NDArray[np.intp]:
    found = [np.empty(0, np.intp)]
    for here in _pieces(0, len(seconds)):
        taken, normal = seconds[here], usual.at(here)
        found.append(here[(taken > STALL * normal) & (taken > normal + STALL_SECONDS)])
    return np.concatenate(found)


def _pieces(first: int, end: int) -> Iterator[npt.NDArray[np.intp]]:
    """The numbers from `first` to `end`, a part at a time."""
    for begin in range(first, end, PIECE):
        yield np.arange(begin, min(end, begin + PIECE))
