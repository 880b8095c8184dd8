"""Reads runs of other stacks from traces, CSV files with a line for each logged step; and sums up their backtests."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from megastable.base.errors import DataError
from megastable_guard.actions import Action
from megastable_guard.guard import BacktestDecision, Recorded
from megastable_guard.signals import Verdict

AROUND = 4  # gaps to each side that show the logging cadence of the loss: it must hold for five


def read_trace(path: Path, say: Callable[[str], None] = lambda _: None) -> list[Recorded]:
    """A CSV file with the columns step, loss and, if known, grad_norm, lr and data, in any order, among others.

    Two features of real logs are skipped with a message: lines without a logged loss, and steps repeated after a
    restart. A loss counts as not logged if it is missing at regular intervals, or on a line that also lacks norm and
    rate; any other missing loss is a nan, as many tools write it. An empty grad_norm, lr or data was not recorded.
    Raises DataError with the line for anything else.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            missing = {"step", "loss"} - set(reader.fieldnames or ())
            if missing:
                named = " and ".join(sorted(missing))
                raise DataError(f"{path}: no column {named}: a trace is step,loss,grad_norm[,lr]")
            lines = [_parse(path, reader.line_num, row) for row in reader]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if not lines:
        raise DataError(f"{path}: no steps in it")
    logged = _logged(lines)
    met = _first_met(path, logged)
    if gaps := len(lines) - len(logged):
        say(f"{path}: {gaps} lines without a loss are skipped: it was not logged there")
    if again := len(logged) - len(met):
        say(f"{path}: {again} lines are skipped, as their steps were done before: a restart")
    return [line.row for line in met]


class _Line(NamedTuple):
    """number: in the file. logged: whether it has a loss; a logged line without one is a nan."""

    number: int
    row: Recorded
    logged: bool


def _gaps(lines: list[_Line]) -> Iterator[tuple[list[_Line], _Line | None]]:
    """All lines, cut after each one that has a loss: the lines without one before it, mostly none, and that line; None
    where the run ends or restarts first."""
    gap: list[_Line] = []
    for line in lines:
        if gap and line.row.step <= gap[-1].row.step:
            yield gap, None
            gap = []
        if line.logged:
            yield gap, line
            gap = []
        else:
            gap.append(line)
    yield gap, None


def _logged(lines: list[_Line]) -> list[_Line]:
    """Drop lines whose loss was not logged. A loss that the cadence of the surrounding gaps requires is kept as a nan:
    before the run ends or restarts, and in a gap twice as long, on a line that has a norm or a rate."""
    gaps, kept = list(_gaps(lines)), list[_Line]()
    for at, (gap, then) in enumerate(gaps):
        around = [len(g) for g, after in gaps[max(0, at - AROUND) : at + AROUND + 1] if after is not None]
        usual = statistics.median_low(around) if around else 0
        due = gap[usual :: usual + 1]
        if then is None:
            kept += due
            continue
        if len(gap) > 2 * usual:
            kept += [line for line in due if line.row.grad_norm is not None or line.row.lr is not None]
        kept.append(then)
    return kept


def _first_met(path: Path, lines: list[_Line]) -> list[_Line]:
    """Drop repeated steps, as after the resume of a run directory. Raises DataError if most lines repeat."""
    kept: list[_Line] = []
    again: list[str] = []
    for line in lines:
        if kept and line.row.step <= kept[-1].row.step:
            again.append(f"line {line.number}: step {line.row.step} after {kept[-1].row.step}")
        else:
            kept.append(line)
    if len(again) >= len(kept):
        raise DataError(f"{path} {again[0]}, and half of all lines go back: sort it")
    return kept


def _parse(path: Path, line: int, row: dict[str, str | None]) -> _Line:
    def number(name: str) -> float | None:
        text = (row.get(name) or "").strip()
        return float(text) if text else None

    try:
        if None in row or None in row.values():
            raise ValueError("not as many fields as the first line has")
        step, loss = number("step"), number("loss")
        if step is None or not step.is_integer() or abs(step) > 2**53:
            raise ValueError(f"the step is {row['step']!r}, not a whole number below 2^53")
        data = (row.get("data") or "").strip() or None
        logged, loss = loss is not None, math.nan if loss is None else loss
        return _Line(line, Recorded(int(step), loss, number("grad_norm"), number("lr"), data), logged)
    except ValueError as error:
        raise DataError(f"{path} line {line}: {error}: a line is step,loss,grad_norm[,lr]") from None


class Episode(NamedTuple):
    """Consecutive steps with the same verdict and action; a reset of the baseline is an episode of its own."""

    first: BacktestDecision
    last: int
    steps: int


def episodes(judged: Iterable[BacktestDecision]) -> list[Episode]:
    """The rows of a table: everything but healthy steps, repetitions merged."""
    found = []
    for kind, group in groupby(judged, key=lambda step: (step.verdict, step.action, step.reset)):
        if kind[:2] != (Verdict.HEALTHY, Action.APPLY):
            steps = list(group)
            found.append(Episode(steps[0], steps[-1].step, len(steps)))
    return found
