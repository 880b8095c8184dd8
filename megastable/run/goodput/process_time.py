"""Reads the times of steps, and splits the time of one training process: its steps, and what lay between them."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megastable.run.events.event import Event, read_whole
from megastable.run.events.stability_events import DiscardExamined, IncidentEvent, SamplesExamined
from megastable.run.events.training_events import CheckpointFailed, CheckpointSaved, Evaluated
from megastable.run.goodput.time_account import CODE, Reason, TimeKind, TimeLine
from megastable.run.record_files import RecordFollower, to_array
from megastable.run.records import SCHEMA


class StepTimes(NamedTuple):
    """Steps in the order of their times. time: unix seconds of their ends; seconds: how long they took; attempt: 0 if
    unknown. [n] each."""

    step: npt.NDArray[np.int64]
    time: npt.NDArray[np.float64]
    seconds: npt.NDArray[np.float64]
    applied: npt.NDArray[np.bool_]
    attempt: npt.NDArray[np.int32]

    def select_between(self, begin: float, end: float) -> StepTimes:
        """Those that ended after `begin`, up to `end`."""
        first_index, last_index = np.searchsorted(self.time, [begin, end], side="right")
        return self.select_rows(slice(first_index, last_index))

    def select_rows(self, chosen: slice | npt.NDArray[np.intp]) -> StepTimes:
        return StepTimes(*(column[chosen] for column in self))  # type: ignore[arg-type]


NO_STEPS = StepTimes(
    np.empty(0, np.int64), np.empty(0), np.empty(0), np.empty(0, np.bool_), np.empty(0, np.int32)
)
COLUMNS = pa.schema([SCHEMA.field(field_name) for field_name in StepTimes._fields])


class StepFiles:
    """The times in the record files of a run, as far as they were read."""

    def __init__(self, folder: Path) -> None:
        self._follower = RecordFollower(folder, COLUMNS)
        self._written = self._ordered = NO_STEPS  # in the order of writing, and of time

    @property
    def damaged(self) -> dict[str, str]:
        """Names of files that cannot be read, with the reason."""
        return self._follower.damaged

    def look_again(self) -> None:
        """Read what is new."""
        parts = [(0, self._written)]
        for row, record_table in self._follower.read_new():
            while parts and parts[-1][0] >= row:
                parts.pop()
            if parts:
                part_begin, times = parts[-1]
                parts[-1] = part_begin, times.select_rows(slice(row - part_begin))
            parts.append((row, _times_of(record_table)))
        if len(parts) == 1 and parts[0][1] is self._written:
            return
        self._written = StepTimes(*map(np.concatenate, zip(*(times for _, times in parts), strict=True)))
        is_ascending = not np.any(np.diff(self._written.time) < 0)
        time_order = slice(None) if is_ascending else np.argsort(self._written.time, kind="stable")
        self._ordered = self._written.select_rows(time_order)

    def list_steps(self) -> StepTimes:
        """All steps read so far."""
        return self._ordered


def _times_of(table: pa.Table) -> StepTimes:
    step_numbers, end_times, seconds, was_applied, attempt_numbers = map(to_array, table.columns)
    seconds = np.nan_to_num(seconds.astype(np.float64), posinf=0.0)
    return StepTimes(step_numbers, end_times, seconds, was_applied, attempt_numbers.astype(np.int32))


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


class UsualSeconds(NamedTuple):
    """The usual seconds of steps, or of gaps: the medians of blocks of `block`."""

    medians: npt.NDArray[Any]
    block: int

    def look_up(self, n: Any) -> npt.NDArray[Any]:
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

    def put_time(
        self, line: TimeLine, steps: StepTimes, until: float, tail: TimeKind | None = None, clock: int = 0,
        why: Reason | None = None,
    ) -> int:  # fmt: skip
        """Account for the process from `line.end` to `until`. tail: the kind of the time after its last step, if
        nothing else explains it, charged to `why`; clock: the farthest step that it is known to have done, recorded or
        not.

        Returns the farthest step done.
        """
        begin, plain_charge = line.end, line.add_charge(self.reason, self.attempt, self.missing)
        count = len(steps.step)
        at = np.empty(2 * count + 1)
        kind, charge = np.empty(2 * count + 1, np.int8), np.full(2 * count + 1, plain_charge, np.int32)
        # Gap n comes before step n, the last one after all. A run may have millions of steps: these are views.
        before, begins = at[0::2], at[1::2]
        gaps, step_kinds = kind[0::2], kind[1::2]
        gap_charges, charges = charge[0::2], charge[1::2]
        before[0], step_ends = begin, before[1:]
        np.clip(np.maximum.accumulate(steps.time), begin, until, out=step_ends)
        np.clip(steps.time - steps.seconds, before[:-1], step_ends, out=begins)
        usual_steps = _usual(steps.seconds) if count >= FEWEST else UsualSeconds(steps.seconds, 1)
        farthest = np.maximum.accumulate(np.r_[self.done, steps.step])
        far = int(farthest[-1])

        # Steps
        step_kinds[:] = CODE[TimeKind.TRAINING]
        done_again = steps.step <= farthest[:-1]
        del farthest
        step_kinds[done_again] = CODE[TimeKind.REDONE]
        step_kinds[~steps.applied] = CODE[TimeKind.REFUSED]
        charges[done_again & steps.applied] = line.add_charge(self.blame, self.attempt)

        # Between them
        evaluation_times = self._evaluations(steps, before, begins, until)
        rest = np.empty(count + 1)
        rest[:-1], rest[-1] = begins, until
        rest -= before
        for n, evaluation_begin, evaluation_end in evaluation_times:
            rest[n] -= evaluation_end - evaluation_begin
        usual_gaps = _usual(rest[:-1]) if count >= FEWEST else UsualSeconds(np.zeros(1), BLOCK)
        gaps[:] = _gaps(steps.step, rest, usual_steps, usual_gaps)
        del rest
        if count:
            gaps[0] = CODE[TimeKind.START_UP]
        gap_charges[0] = line.add_charge(self.blame, self.attempt)
        last_step = int(steps.step[-1]) if count else self.step
        if clock > last_step:  # the records of these were lost with the process, or are not written yet
            gaps[-1] = CODE[TimeKind.TRAINING if clock > far else TimeKind.REDONE]
            gap_charges[-1] = plain_charge if clock > far else gap_charges[0]
        rewind_steps = np.flatnonzero(np.diff(steps.step) <= 0) + 1  # the steps after a rewind
        gaps[rewind_steps] = CODE[TimeKind.RECOVERY]
        self._events(line, steps, before, gaps, gap_charges)
        if tail is not None and gaps[-1] in OPEN:
            gaps[-1] = CODE[tail]
            gap_charges[-1] = gap_charges[-1] if why is None else line.add_charge(why, self.attempt)
        stalled = np.flatnonzero(gaps == CODE[TimeKind.STALLED])
        usual_from = begins[stalled] - usual_gaps.look_up(stalled)
        stall_ends = dict(zip(stalled.tolist(), usual_from.tolist(), strict=True))
        changes = _within(gaps, gap_charges, evaluation_times, before, stall_ends, plain_charge)
        if last_step < far < clock:  # the first of them were done before
            redone_share = (far - last_step) / (clock - last_step)
            gaps[-1], gap_charges[-1] = CODE[TimeKind.REDONE], gap_charges[0]
            redone_end = float(before[-1] + redone_share * (until - before[-1]))
            changes.append((redone_end, int(CODE[TimeKind.TRAINING]), plain_charge, 2 * count + 0.7))
        for rewind_step in rewind_steps:  # from there on, steps are done again because of that incident
            here = slice(rewind_step, None)
            charges[here] = np.where(
                done_again[here] & steps.applied[here], gap_charges[rewind_step], charges[here]
            )

        # All changes, in order: each into the gap, or the step, that it lies in
        late = _stalls(steps.seconds, usual_steps)
        stall_begins = np.minimum(
            begins[late] + steps.seconds[late] - usual_steps.look_up(late), step_ends[late]
        )
        late_kinds, late_charges = step_kinds[late].tolist(), charges[late].tolist()
        changes += zip(stall_begins.tolist(), late_kinds, late_charges, (2 * late + 1.5).tolist())
        kind[2 * late + 1] = np.where(late == 0, CODE[TimeKind.START_UP], CODE[TimeKind.STALLED])
        charge[2 * late[late == 0] + 1] = gap_charges[0]
        # Or the arrays remain, beside their successors.
        del (before, begins, step_ends, gaps, step_kinds, gap_charges, charges)
        if changes:
            changes.sort(key=lambda change: (int(change[3]), change[0], change[3]))
            insert_places = [int(change_order) + 1 for *_, change_order in changes]
            at = np.insert(at, insert_places, [change_time for change_time, *_ in changes])
            kind = np.insert(kind, insert_places, [of for _, of, _, _ in changes])
            charge = np.insert(charge, insert_places, [why for _, _, why, _ in changes])
        line.follow_instants(at, kind, charge, until)
        return max(far, clock, self.find_told())

    def find_told(self) -> int:
        """The farthest step that its events name as done; 0 if none."""
        done_events = (e for e in self.events if isinstance(e, Evaluated | CheckpointSaved))
        return max((read_whole(done_event.get("step")) or 0 for done_event in done_events), default=0)

    def _evaluations(
        self, steps: StepTimes, begins: npt.NDArray[Any], ends: npt.NDArray[Any], until: float
    ) -> list[tuple[int, float, float]]:
        """The gap, begin and end of each. begins, ends: of the gaps; the last one ends at `until`."""
        evaluation_times = []
        for event in self.events:
            if isinstance(event, Evaluated):
                n, took_seconds = _gap(begins, event), event.seconds
                high = float(np.clip(event.time or 0.0, begins[n], ends[n] if n < len(ends) else until))
                if took_seconds is None:  # of an older version: all since its step, if that is recorded
                    took_seconds = high - begins[n] if n and steps.step[n - 1] == event.step else 0.0
                evaluation_times.append((n, min(max(float(begins[n]), high - took_seconds), high), high))
        return evaluation_times

    def _events(
        self, line: TimeLine, steps: StepTimes, begins: npt.NDArray[Any], gaps: npt.NDArray[Any],
        charges: npt.NDArray[Any],
    ) -> None:  # fmt: skip
        """Explain the gaps by the events in them, evaluations left out. begins: of the gaps."""
        saved_steps = [
            e.step for e in self.events if isinstance(e, CheckpointSaved | CheckpointFailed) and e.step
        ]
        after = defaultdict[int, list[int]](list)  # the gaps after steps of checkpoints
        for step_row in np.flatnonzero(np.isin(steps.step, saved_steps)):
            after[int(steps.step[step_row])].append(int(step_row) + 1)
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
                        charges[n] = line.add_charge(self._why(event), self.attempt)

    def _why(self, event: Event) -> Reason:
        incident_number = read_whole(event.get("number"))
        if not isinstance(event, IncidentEvent) or incident_number is None:
            return Reason("samples examined")
        return self.reasons.setdefault(incident_number, Reason(incident=incident_number))


def explains_gap(event: Event) -> bool:
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
    step: npt.NDArray[Any], rest: npt.NDArray[Any], usual: UsualSeconds, ordinary: UsualSeconds
) -> npt.NDArray[np.int8]:
    """What the time before each step is, and that after the last one, if no event explains it. rest: [n + 1] seconds,
    evaluations left out; usual, ordinary: of the steps, and of the gaps before them.

    Who did two steps in a row lived between them, and waited. Nobody knows that of the time after the last step, or
    where records are missing.
    """
    count = len(step)
    gap_kinds = np.full(count + 1, CODE[TimeKind.UNKNOWN])
    for here in _pieces(1, count):
        waited, usual_gap, limit = rest[here], ordinary.look_up(here), np.maximum(SHORT, usual.look_up(here))
        is_late = (waited > limit) & (waited > STALL * usual_gap) & (waited > usual_gap + STALL_SECONDS)
        lived_kinds = np.where(is_late, CODE[TimeKind.STALLED], CODE[TimeKind.BETWEEN])
        gap_kinds[here] = np.where(step[here] - step[here - 1] == 1, lived_kinds, CODE[TimeKind.UNKNOWN])
    for n in {0, count}:
        limit = max(SHORT, float(usual.look_up(min(n, count - 1)))) if count else SHORT
        if rest[n] <= limit:
            gap_kinds[n] = CODE[TimeKind.BETWEEN]
    return gap_kinds


def _within(
    gaps: npt.NDArray[Any], charges: npt.NDArray[Any], evaluations: list[tuple[int, float, float]],
    begins: npt.NDArray[Any], lasts: Mapping[int, float], plain: int,
) -> list[tuple[float, int, int, float]]:  # fmt: skip
    """Changes within gaps: (at, kind, charge, order). lasts: of gaps that stalled, from when on they are as usual."""
    evaluation_ends = dict[int, float]()  # the end of the last evaluation of each
    kind_changes = []
    for n, evaluation_begin, evaluation_end in evaluations:
        evaluation_ends[n] = max(evaluation_ends.get(n, evaluation_end), evaluation_end)
        kind_changes.append((evaluation_begin, int(CODE[TimeKind.EVALUATION]), plain, 2 * n + 0.5))
        kind_changes.append((evaluation_end, int(gaps[n]), int(charges[n]), 2 * n + 0.6))
    for n, usual_from in lasts.items():
        stall_end = max(evaluation_ends.get(n, float(begins[n])), usual_from)
        kind_changes.append((stall_end, int(CODE[TimeKind.BETWEEN]), plain, 2 * n + 0.65))
    return kind_changes


def _usual(seconds: npt.NDArray[Any]) -> UsualSeconds:
    """Of at least FEWEST steps or gaps: the median of each one's block, the first one left out: it compiles and warms
    up."""
    value_count, block_medians = len(seconds), []
    for first in range(0, value_count, BLOCK):
        # Not of a few steps that remain: those before are better known.
        block_begin = max(1, min(first, value_count - BLOCK))
        block_medians.append(np.median(seconds[block_begin : first + BLOCK]))
    return UsualSeconds(np.array(block_medians), BLOCK)


def _stalls(seconds: npt.NDArray[Any], usual: UsualSeconds) -> npt.NDArray[np.intp]:
    found = [np.empty(0, np.intp)]
    for here in _pieces(0, len(seconds)):
        taken, usual_seconds = seconds[here], usual.look_up(here)
        found.append(here[(taken > STALL * usual_seconds) & (taken > usual_seconds + STALL_SECONDS)])
    return np.concatenate(found)


def _pieces(first: int, end: int) -> Iterator[npt.NDArray[np.intp]]:
    """The numbers from `first` to `end`, a part at a time."""
    for begin in range(first, end, PIECE):
        yield np.arange(begin, min(end, begin + PIECE))
