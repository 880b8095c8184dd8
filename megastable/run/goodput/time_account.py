"""Holds where the time of a run went: kinds of time, what each second is charged to, and totals. Pure.

An account is a list of instants; between two of them lies one kind of time. So its spans have no gaps, do not overlap,
and add up to the wall time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class TimeKind(StrEnum):
    """Kinds of time. Only `training` is goodput."""

    TRAINING = "training"  # steps done for the first time, applied
    REDONE = "redone"  # steps done again, after a restart or a rewind
    REFUSED = "refused"  # steps whose update was refused
    # The excess of a step, or of a gap between two, several times as long as its neighbours.
    STALLED = "stalled"
    BETWEEN = "between_steps"  # records, statistics, decisions
    CHECKPOINTING = "checkpointing"  # steps waited for it
    EVALUATION = "evaluation"
    RECOVERY = "recovery"  # rewinds, and examinations of samples
    START_UP = "start_up"  # from the launch to the first step, and the excess of the first step
    HANG = "hang"  # from the last progress until it was noticed
    ENDING = "ending"  # from the last progress of another end until the next attempt is prepared
    PAUSE = "pause"  # before a restart, on purpose
    HOSTS = "waiting_for_hosts"
    NOT_RUNNING = "not_running"  # no process of the run: stopped, requeued, or all of them gone
    UNKNOWN = "unknown"


KINDS = tuple(TimeKind)
CODE = {kind: np.int8(code) for code, kind in enumerate(KINDS)}
# With short ones of these in between, steps of one kind are shown as one span.
BETWEEN = CODE[TimeKind.BETWEEN]
BLOCK = 1 << 16  # entries that are summed up at a time


@dataclass
class Reason:
    """Why time was lost. incident: its number; host: the one to blame, or several. Completed while the journal is
    read: the incident is named after the failure."""

    cause: str = ""
    incident: int | None = None
    host: str = ""


class Charge(NamedTuple):
    """What a second is charged to: a reason, and the attempt in which it passed (0: none). missing: the share of the
    wanted ranks without which that attempt trained."""

    reason: Reason
    attempt: int
    missing: float = 0.0


@dataclass(frozen=True)
class TimeSpan:
    """Seconds of one kind, from `begin` to `end` (unix seconds). between: of which seconds lay between its steps;
    missing: as of `Charge`."""

    begin: float
    end: float
    kind: TimeKind
    cause: str
    incident: int | None
    host: str
    attempt: int
    between: float = 0.0
    missing: float = 0.0

    @property
    def seconds(self) -> float:
        """Of its kind."""
        return self.end - self.begin - self.between


@dataclass(frozen=True)
class TimeAccount:
    """at: [n + 1] instants, rising; kind: [n] codes of `KINDS`; charge: [n] indices into `charges`. settled: up to when
    it will not change any more, None: all of it."""

    at: npt.NDArray[np.float64]
    kind: npt.NDArray[np.int8]
    charge: npt.NDArray[np.int32]
    charges: tuple[Charge, ...]
    settled: float | None = None

    @property
    def begin(self) -> float:
        return float(self.at[0])

    @property
    def end(self) -> float:
        return float(self.at[-1])

    @property
    def wall(self) -> float:
        """Seconds from the first instant to the last."""
        return self.end - self.begin

    def sum_seconds(self, until: float = np.inf) -> dict[TimeKind, float]:
        """Seconds of every kind, of all or up to an instant."""
        seconds_by_code = np.zeros(len(KINDS))
        for first in range(0, len(self.kind), BLOCK):
            block_instants, kind = self.at[first : first + BLOCK + 1], self.kind[first : first + BLOCK]
            seconds_by_code += np.bincount(kind, np.diff(np.minimum(block_instants, until)), len(KINDS))
        return {kind: float(seconds_by_code[code]) for code, kind in enumerate(KINDS)}

    def compute_goodput(self) -> float:
        """The share of the wall time that was training; 0 of an empty account."""
        return self.sum_seconds()[TimeKind.TRAINING] / self.wall if self.wall else 0.0

    def measure_missing(self) -> float:
        """The capacity that was missing while steps were trained on fewer ranks than wanted, as a share of what all of
        them could have done in the wall time. Of one that trained all the time on half of its ranks it is 0.5."""
        missing = np.array([charge.missing for charge in self.charges])
        if not missing.any():
            return 0.0
        trained = np.where(self.kind == CODE[TimeKind.TRAINING], np.diff(self.at), 0.0)
        return float(trained @ missing[self.charge]) / self.wall if self.wall else 0.0

    def list_facts(self) -> dict[str, Any]:
        """For summary.json and programs: `share` of the wall time that was training, `measure_missing`, and seconds
        by kind."""
        shares = {"share": self.compute_goodput(), "smaller": self.measure_missing()}
        return {**shares, "wall_seconds": round(self.wall, 3), "seconds": _told(self.sum_seconds())}

    def settled_seconds(self) -> dict[str, float]:
        """Seconds by kind, of what will not change any more: for counters."""
        return _told(self.sum_seconds(self.end if self.settled is None else self.settled))

    def sum_losses(self) -> dict[tuple[TimeKind, str, int | None, str], tuple[float, int]]:
        """Seconds, and the number of spans, by kind, cause, incident and host; training and what is charged to nothing
        is left out."""
        seconds_by_cause: dict[tuple[TimeKind, str, int | None, str], tuple[float, int]] = {}
        for span in self.list_spans():
            if span.kind is not TimeKind.TRAINING and (span.cause or span.host or span.incident is not None):
                loss_key = (span.kind, span.cause, span.incident, span.host)
                lost_seconds, span_count = seconds_by_cause.get(loss_key, (0.0, 0))
                seconds_by_cause[loss_key] = (lost_seconds + span.seconds, span_count + 1)
        return seconds_by_cause

    def list_spans(self) -> Iterator[TimeSpan]:
        """The account, in order. Steps of one kind and charge in a row, and what is between them, are one span."""
        # A stretch: entries of one kind and charge, with short ones between steps in between.
        # A run may have millions of steps: of its entries there are few arrays at a time.
        entry_count = len(self.kind)
        real = np.flatnonzero((self.at[1:] > self.at[:-1]) & (self.kind != BETWEEN))
        if not len(real):
            yield from self._bare(0, entry_count)
            return
        told = [(r.cause, r.incident, r.host, attempt, missing) for r, attempt, missing in self.charges]
        number_by_content = {content: n for n, content in enumerate(told)}
        equal_charges = np.array([number_by_content[content] for content in told], np.int32)
        charge_keys, kind = equal_charges[self.charge[real]], self.kind[real]
        begins = np.flatnonzero(np.r_[True, (charge_keys[1:] != charge_keys[:-1]) | (kind[1:] != kind[:-1])])
        del charge_keys, kind
        stretch_firsts = real[begins].tolist()
        stretch_lasts = (real[np.r_[begins[1:], len(real)] - 1] + 1).tolist()
        del real, begins
        yield from self._bare(0, stretch_firsts[0])
        next_firsts = [*stretch_firsts[1:], entry_count]
        for first, end, next_first in zip(stretch_firsts, stretch_lasts, next_firsts, strict=True):
            yield replace(self._span(first, end), between=self._between(first, end))
            yield from self._bare(end, next_first)

    def _between(self, first: int, end: int) -> float:
        """Seconds between steps in some entries."""
        found = 0.0
        for begin in range(first, end, BLOCK):
            stop = min(end, begin + BLOCK)
            found += float(np.diff(self.at[begin : stop + 1])[self.kind[begin:stop] == BETWEEN].sum())
        return found

    def _bare(self, first: int, end: int) -> Iterator[TimeSpan]:
        """Entries without a step around them."""
        for entry_number in range(first, end):
            if self.at[entry_number + 1] > self.at[entry_number]:
                yield self._span(entry_number, entry_number + 1)

    def _span(self, first: int, end: int) -> TimeSpan:
        reason, attempt, missing_share = self.charges[int(self.charge[first])]
        return TimeSpan(
            float(self.at[first]), float(self.at[end]), KINDS[int(self.kind[first])], reason.cause, reason.incident,
            reason.host, attempt, missing=missing_share,
        )  # fmt: skip


class TimeLine:
    """Builds an account from the left to the right. end: up to where all is accounted for."""

    def __init__(self, begin: float) -> None:
        self.begin = self.end = begin
        self._parts: list[tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]] = []
        self._charges: list[Charge] = []

    def copy_line(self) -> TimeLine:
        """One that can be continued on its own."""
        other = TimeLine(self.begin)
        other.end, other._parts, other._charges = self.end, list(self._parts), list(self._charges)
        return other

    def add_charge(self, reason: Reason, attempt: int, missing: float = 0.0) -> int:
        """The index of a new charge."""
        self._charges.append(Charge(reason, attempt, missing))
        return len(self._charges) - 1

    def fill_until(self, moment: float, kind: TimeKind, charge: int) -> None:
        """All up to `moment` is of one kind. Nothing happens if that is accounted for already."""
        if moment > self.end:
            self._parts.append((np.array([self.end]), np.array([CODE[kind]]), np.array([charge])))
            self.end = moment

    def follow_instants(
        self, at: npt.NDArray[Any], kind: npt.NDArray[Any], charge: npt.NDArray[Any], moment: float
    ) -> None:
        """From each of `at` on, all is of that kind; the last up to `moment`. at: in order, from `end` on. The arrays
        are taken over."""
        moment = max(moment, self.end)
        if len(at) and moment > self.end:
            self._parts.append((np.clip(at, self.end, moment, out=at), kind, charge))
            self.end = moment

    def build_account(self, settled: float | None = None) -> TimeAccount:
        """What was built, which uses this line up. settled: up to when it will not change any more."""
        ats, part_kinds, part_charges = ([line_part[n] for line_part in self._parts] for n in range(3))
        self._parts.clear()  # of millions of steps: not all of them twice
        all_instants = np.concatenate([*ats, [self.end]])
        ats.clear()
        all_kinds = np.concatenate([np.empty(0, np.int8), *part_kinds], dtype=np.int8, casting="unsafe")
        part_kinds.clear()
        all_charges = np.concatenate([np.empty(0, np.int32), *part_charges], dtype=np.int32, casting="unsafe")
        return TimeAccount(all_instants, all_kinds, all_charges, tuple(self._charges), settled)


def _told(seconds: dict[TimeKind, float]) -> dict[str, float]:
    return {second_kind.value: round(value, 3) for second_kind, value in seconds.items() if value}


class GpuHours(NamedTuple):
    """all: of all ranks while processes of the run existed; training: of which were goodput."""

    all: float
    training: float


def count_hours(spans: Iterable[TimeSpan], starts: Iterable[tuple[float, int | None]]) -> GpuHours | None:
    """spans: of a `TimeAccount`; starts: of training processes, in order, as (Unix seconds, ranks); those without ranks
    are left out. None if nobody knows the ranks."""
    known = [(at, ranks) for at, ranks in starts if ranks]
    if not known:
        return None
    all_hours, training_hours = 0.0, 0.0
    for span in spans:
        if span.kind is not TimeKind.NOT_RUNNING:
            # Before the first step of an attempt its ranks are there already.
            ranks = next((n for at, n in reversed(known) if at <= span.end), known[0][1])
            all_hours += (span.end - span.begin) * ranks / 3600
            training_hours += span.seconds * ranks / 3600 if span.kind is TimeKind.TRAINING else 0.0
    return GpuHours(all_hours, training_hours)
