"""Splits the time of one training process: its steps, and what lay between them. Pure, in numpy."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from megastable.run.events.event import Event, whole
from megastable.run.events.stability_events import DiscardExamined, IncidentEvent, SamplesExamined
from megastable.run.events.training_events import CheckpointFailed, CheckpointSaved, Evaluated
from megastable.run.goodput.step_times import StepTimes
from megastable.run.goodput.time_account import CODE, Reason, TimeKind, TimeLine

BLOCK = 256  # steps whose median is the usual one
FEWEST = 5  # steps without which none is unusual
STALL, STALL_SECONDS = 5.0, 1.0  # a step stalls if it takes so many times the usual time, and so much longer
SHORT = 0.5  # seconds between two steps that need no explanation; or a step's usual time, if that is longer
ROUNDED = 0.002  # seconds: times of the journal are rounded
BACK = ("opened", "attributed", "rewound", "released")  # what happens to an incident between two steps


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
        ends = np.clip(np.maximum.accumulate(steps.time), begin, until)
        before = np.r_[begin, ends]  # [count + 1] where the time between two steps begins
        begins = np.clip(steps.time - steps.seconds, before[:-1], ends)
        usual = _usual(steps.seconds)
        farthest = np.maximum.accumulate(np.r_[self.done, steps.step])

        # Steps
        kinds = np.full(count, CODE[TimeKind.TRAINING])
        again = steps.step <= farthest[:-1]
        kinds[again] = CODE[TimeKind.REDONE]
        kinds[~steps.applied] = CODE[TimeKind.REFUSED]
        charges = np.where(again & steps.applied, line.charge(self.blame, self.attempt), plain)

        # Between them: gap n comes before step n, the last one after all
        gap = np.append(begins, until) - before
        limit = np.maximum(SHORT, np.append(usual, usual[-1:] if count else 0.0))
        follows = np.r_[True, np.diff(steps.step) == 1, True] if count else np.ones(1, bool)
        gaps = np.where((gap <= limit) & follows, CODE[TimeKind.BETWEEN], CODE[TimeKind.UNKNOWN])
        gap_charges = np.full(count + 1, plain)
        if count:
            gaps[0] = CODE[TimeKind.START_UP]
        gap_charges[0] = line.charge(self.blame, self.attempt)
        last = int(steps.step[-1]) if count else self.step
        far = int(farthest[-1])
        if clock > last:  # the records of these were lost with the process, or are not written yet
            gaps[-1] = CODE[TimeKind.TRAINING if clock > far else TimeKind.REDONE]
            gap_charges[-1] = plain if clock > far else gap_charges[0]
        turns = np.flatnonzero(np.diff(steps.step) <= 0) + 1  # the steps after a rewind
        gaps[turns] = CODE[TimeKind.RECOVERY]
        changes = self._events(
            line, steps, before, np.append(begins, until), gaps, gap_charges, plain, tail, why
        )
        if last < far < clock:  # the first of them were done before
            share = (far - last) / (clock - last)
            gaps[-1], gap_charges[-1] = CODE[TimeKind.REDONE], gap_charges[0]
            middle = float(before[-1] + share * (until - before[-1]))
            changes.append((middle, int(CODE[TimeKind.TRAINING]), plain, 2 * count + 0.7))
        for turn in turns:  # from there on, steps are done again because of that incident
            here = slice(turn, None)
            charges[here] = np.where(again[here] & steps.applied[here], gap_charges[turn], charges[here])

        # All changes, in order
        at = np.empty(2 * count + 1)
        kind, charge = np.empty(2 * count + 1, np.int8), np.empty(2 * count + 1, np.int32)
        at[0::2], kind[0::2], charge[0::2] = before, gaps, gap_charges
        at[1::2], kind[1::2], charge[1::2] = begins, kinds, charges
        order = np.arange(2 * count + 1, dtype=float)
        late = _stalls(steps.seconds, usual)
        if len(late):
            extra = np.minimum(begins[late] + steps.seconds[late] - usual[late], ends[late])
            stalls = np.where(late == 0, CODE[TimeKind.START_UP], CODE[TimeKind.STALLED])
            kind[2 * late + 1] = stalls
            charge[2 * late[late == 0] + 1] = gap_charges[0]
            at, kind = np.r_[at, extra], np.r_[kind, kinds[late]]
            charge, order = np.r_[charge, charges[late]], np.r_[order, 2 * late + 1.5]
        if changes:
            more = np.array(changes)
            at, kind = np.r_[at, more[:, 0]], np.r_[kind, more[:, 1].astype(np.int8)]
            charge, order = np.r_[charge, more[:, 2].astype(np.int32)], np.r_[order, more[:, 3]]
        sorted_ = np.lexsort((order, at))
        line.follow(at[sorted_], kind[sorted_], charge[sorted_], until)
        return max(far, clock, self.told())

    def told(self) -> int:
        """The farthest step that its events name as done; 0 if none."""
        done = (e for e in self.events if isinstance(e, Evaluated | CheckpointSaved))
        return max((whole(e.get("step")) or 0 for e in done), default=0)

    def _events(
        self, line: TimeLine, steps: StepTimes, begins: npt.NDArray[Any], ends: npt.NDArray[Any],
        gaps: npt.NDArray[Any], charges: npt.NDArray[Any], plain: int, tail: TimeKind | None, why: Reason | None,
    ) -> list[tuple[float, int, int, float]]:  # fmt: skip
        """Explain the gaps by the events in them. Returns evaluations: changes (at, kind, charge, order)."""
        evaluations: list[tuple[int, float, float]] = []
        short = (CODE[TimeKind.BETWEEN], CODE[TimeKind.UNKNOWN])
        saved = [e.step for e in self.events if isinstance(e, CheckpointSaved | CheckpointFailed) and e.step]
        after = defaultdict[int, list[int]](list)  # the gaps after steps of checkpoints
        for row in np.flatnonzero(np.isin(steps.step, saved)):
            after[int(steps.step[row])].append(int(row) + 1)
        for event in self.events:
            moment = event.time or 0.0
            # The gap before the first step that ended later.
            n = int(np.searchsorted(begins[1:], moment + ROUNDED, side="right"))
            match event:
                case Evaluated():
                    high = float(np.clip(moment, begins[n], ends[n]))
                    took = event.seconds
                    if took is None:  # of an older version: all since its step, if that is recorded
                        took = high - begins[n] if n and steps.step[n - 1] == event.step else 0.0
                    evaluations.append((n, max(float(begins[n]), high - took), high))
                case CheckpointSaved() | CheckpointFailed():
                    # It is journaled when it is complete, some steps after the one that it was made after.
                    found = [m for m in after[event.step or 0] if m <= n]
                    if found and gaps[found[-1]] in short:
                        gaps[found[-1]] = CODE[TimeKind.CHECKPOINTING]
                case IncidentEvent() | DiscardExamined() | SamplesExamined():
                    if n and gaps[n] in (*short, CODE[TimeKind.RECOVERY]):
                        gaps[n] = CODE[TimeKind.RECOVERY]
                        charges[n] = line.charge(self._why(event), self.attempt)
        if tail is not None and gaps[-1] in short:
            gaps[-1] = CODE[tail]
            charges[-1] = charges[-1] if why is None else line.charge(why, self.attempt)
        changes = []
        for n, low, high in evaluations:
            changes.append((low, int(CODE[TimeKind.EVALUATION]), plain, 2 * n + 0.5))
            changes.append((high, int(gaps[n]), int(charges[n]), 2 * n + 0.6))
        return changes

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


def _usual(seconds: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The median of each step's block, the first step left out: it compiles and warms up."""
    count = len(seconds)
    if count < FEWEST:
        return seconds
    found = np.empty(count)
    for first in range(0, count, BLOCK):
        # Not of a few steps that remain: those before are better known.
        begin = max(1, min(first, count - BLOCK))
        found[first : first + BLOCK] = np.median(seconds[begin : first + BLOCK])
    return found


def _stalls(seconds: npt.NDArray[Any], usual: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    return np.flatnonzero((seconds > STALL * usual) & (seconds > usual + STALL_SECONDS))
