"""Reads runs of other stacks from traces, CSV files with a line for each logged step; sums up and plots backtests."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from megastable.base.errors import DataError
from megastable.report.figures import draw_figure, limit_value
from megastable_guard.actions import Action, Verdict
from megastable_guard.step_judge import BacktestDecision, Recorded

AROUND = 4  # gaps to each side that show the logging cadence of the loss: it must hold for five


def read_csv_trace(path: Path, say: Callable[[str], None] = lambda _: None) -> list[Recorded]:
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
    all_gaps, kept = list(_gaps(lines)), list[_Line]()
    for at, (gap, next_line) in enumerate(all_gaps):
        around = all_gaps[max(0, at - AROUND) : at + AROUND + 1]
        gap_lengths = [len(other_gap) for other_gap, line_after in around if line_after is not None]
        usual_gap = statistics.median_low(gap_lengths) if gap_lengths else 0
        due_lines = gap[usual_gap :: usual_gap + 1]
        if next_line is None:
            kept += due_lines
            continue
        if len(gap) > 2 * usual_gap:
            kept += [
                due_line
                for due_line in due_lines
                if due_line.row.grad_norm is not None or due_line.row.lr is not None
            ]
        kept.append(next_line)
    return kept


def _first_met(path: Path, lines: list[_Line]) -> list[_Line]:
    """Drop repeated steps, as after the resume of a run directory. Raises DataError if most lines repeat."""
    kept: list[_Line] = []
    again: list[str] = []
    for trace_line in lines:
        if kept and trace_line.row.step <= kept[-1].row.step:
            again.append(f"line {trace_line.number}: step {trace_line.row.step} after {kept[-1].row.step}")
        else:
            kept.append(trace_line)
    if len(again) >= len(kept):
        raise DataError(f"{path} {again[0]}, and half of all lines go back: sort it")
    return kept


def _parse(path: Path, line: int, row: dict[str, str | None]) -> _Line:
    def number(name: str) -> float | None:
        cell_text = (row.get(name) or "").strip()
        return float(cell_text) if cell_text else None

    try:
        if None in row or None in row.values():
            raise ValueError("not as many fields as the first line has")
        step, loss = number("step"), number("loss")
        if step is None or not step.is_integer() or abs(step) > 2**53:
            raise ValueError(f"the step is {row['step']!r}, not a whole number below 2^53")
        data = (row.get("data") or "").strip() or None
        was_logged, loss = loss is not None, math.nan if loss is None else loss
        return _Line(line, Recorded(int(step), loss, number("grad_norm"), number("lr"), data), was_logged)
    except ValueError as error:
        raise DataError(f"{path} line {line}: {error}: a line is step,loss,grad_norm[,lr]") from None


class Episode(NamedTuple):
    """Consecutive steps with the same verdict and action; a reset of the baseline is an episode of its own."""

    first: BacktestDecision
    last: int
    steps: int


def list_episodes(judged: Iterable[BacktestDecision]) -> list[Episode]:
    """The rows of a table: everything but healthy steps, repetitions merged."""
    found_episodes = []
    for group_kind, step_group in groupby(judged, key=lambda step: (step.verdict, step.action, step.reset)):
        if group_kind[:2] != (Verdict.HEALTHY, Action.APPLY):
            group_steps = list(step_group)
            found_episodes.append(Episode(group_steps[0], group_steps[-1].step, len(group_steps)))
    return found_episodes


COLOURS = {
    Action.DISCARD: "tab:orange", Action.REWIND: "tab:red", Action.FALL_BACK: "tab:blue", Action.CAP_LR: "tab:purple",
    Action.CUT_LR: "tab:purple", Action.SWAP_CORPUS: "tab:brown", Action.HANDOVER: "black", Action.ALERT: "tab:pink",
    Action.STOP: "black", Action.ADJUST: "tab:purple", Action.WAIT: "tab:olive",
}  # fmt: skip


def backtest_plot(
    rows: Sequence[Recorded], judged: Sequence[BacktestDecision], title: str, path: Path
) -> None:
    """Loss and gradient norm over the steps; grey where a step stood out, a coloured line at each action.

    The file format follows from the name (.png, .svg, .pdf). Raises DataError when it cannot be written.
    """
    steps = [row.step for row in rows]
    with draw_figure(path, 14, 7) as figure:
        loss, norm = figure.subplots(2, 1, sharex=True)
        loss.plot(steps, [limit_value(row.loss) for row in rows], linewidth=0.6)
        norm.plot(steps, [limit_value(row.grad_norm, positive=True) for row in rows], linewidth=0.6)
        norm.set_yscale("log")
        sorted_losses = sorted(row.loss for row in rows if math.isfinite(limit_value(row.loss)))
        if sorted_losses:
            # The start of a run is far above the rest: clipped, so that spikes are visible.
            low, high = sorted_losses[0], sorted_losses[int(0.99 * (len(sorted_losses) - 1))]
            loss.set_ylim(low - 0.1 * (high - low) - 1e-6, high + 0.4 * (high - low) + 1e-6)
        verdict_runs = groupby(judged, key=lambda step: step.verdict is Verdict.HEALTHY)
        marked_runs = [list(steps) for is_healthy, steps in verdict_runs if not is_healthy]
        for axis in (loss, norm):
            for marked_run in marked_runs:
                begin, end = marked_run[0].step - 0.5, marked_run[-1].step + 0.5
                label = "stands out" if marked_run is marked_runs[0] else None
                axis.axvspan(begin, end, color="0.85", zorder=0, label=label)
            line_style = {"transform": axis.get_xaxis_transform(), "linewidth": 1, "alpha": 0.8}
            for action, colour in COLOURS.items():
                if action_steps := [step.step for step in judged if step.action is action]:
                    axis.vlines(action_steps, 0, 1, colors=colour, label=action.value, **line_style)
        if marked_runs:
            loss.legend(loc="upper right")
        loss.set_ylabel("loss (nats per token)")
        norm.set_ylabel("gradient norm")
        norm.set_xlabel("step")
        figure.suptitle(title, parse_math=False)
