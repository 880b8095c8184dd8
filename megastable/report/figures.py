"""Draws figures into files; one of them shows where the time of a run went."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megastable.base.errors import DataError
from megastable.run.goodput.time_account import TimeAccount, TimeKind

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LARGEST = 1e30  # larger values are as good as infinite, and break a plot's scale


def limit_value(value: float | None, positive: bool = False) -> float:
    """`value` if it can be drawn, else nan, which draws nothing. positive: on a logarithmic scale."""
    if value is None or not -LARGEST < value < LARGEST or (positive and value <= 0):
        return math.nan
    return value


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure, in the format of the file's extension. Raises DataError."""
    try:
        figure.savefig(path, dpi=110, format=path.suffix[1:] or "png")
    except (OSError, ValueError) as error:
        raise DataError(f"{path} could not be written: {error}") from None


@contextmanager
def draw_figure(path: Path, width: float, height: float) -> Iterator[Figure]:
    """A new figure of so many inches, without a window system; saved at the end. Raises DataError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    yield figure
    save_figure(figure, path)


COLOURS = {
    TimeKind.TRAINING: "tab:green", TimeKind.REDONE: "tab:orange", TimeKind.REFUSED: "gold",
    TimeKind.STALLED: "tab:pink", TimeKind.BETWEEN: "0.75", TimeKind.CHECKPOINTING: "tab:cyan",
    TimeKind.EVALUATION: "tab:blue", TimeKind.RECOVERY: "tab:purple", TimeKind.START_UP: "tab:olive",
    TimeKind.HANG: "tab:red", TimeKind.ENDING: "firebrick", TimeKind.PAUSE: "rosybrown",
    TimeKind.HOSTS: "tab:brown", TimeKind.NOT_RUNNING: "0.4", TimeKind.UNKNOWN: "black",
}  # fmt: skip
UNITS = (("days", 86400.0, 172_800.0), ("hours", 3600.0, 7200.0), ("minutes", 60.0, 120.0), ("s", 1.0, 0.0))
THIN = 1 / 1200  # of the width: what is shorter is drawn as wide, what is nearer is drawn as one
CAUSES = 8  # of which the lost time is shown


def draw_goodput(account: TimeAccount, title: str, path: Path) -> None:
    """A picture of an account. The format follows from the name (.png, .svg, .pdf). Raises DataError when it cannot be
    written."""
    unit_name, scale = next((unit, scale) for unit, scale, least_wall in UNITS if account.wall >= least_wall)
    spans_by_kind = defaultdict[TimeKind, list[tuple[float, float]]](list)
    for span in account.list_spans():
        begin, end = (span.begin - account.begin) / scale, (span.end - account.begin) / scale
        spans_by_kind[span.kind].append((begin, end))
    seconds_by_kind, wall = account.sum_seconds(), account.wall or 1.0
    kinds = [kind for kind in TimeKind if seconds_by_kind[kind] > 0]
    lost = sorted(_by_cause(account), key=lambda entry: -sum(entry[1].values()))[:CAUSES]
    row_heights = [0.6 + 0.3 * max(1, len(kinds)), 0.6 + 0.3 * max(1, len(lost))]
    with draw_figure(path, 14, 1.5 + sum(row_heights)) as figure:
        time_axis, lost_axis = figure.subplots(2, 1, height_ratios=row_heights)
        for n, kind in enumerate(kinds):
            drawn_spans = [(a, b - a) for a, b in thicken_intervals(spans_by_kind[kind], THIN * wall / scale)]
            time_axis.broken_barh(drawn_spans, (n - 0.4, 0.8), color=COLOURS[kind])
        kind_labels = [f"{_called(kind)}  {seconds_by_kind[kind] / wall:.1%}" for kind in kinds]
        time_axis.set_yticks(range(len(kinds)), kind_labels)
        time_axis.set_xlim(0, max(account.wall / scale, 1e-9))
        time_axis.set_ylim(len(kinds) - 0.5, -0.5)
        time_axis.set_xlabel(f"{unit_name} since the run began")
        for n, (_, by_kind) in enumerate(lost):
            bar_left = 0.0
            for kind, kind_seconds in by_kind.items():
                lost_axis.barh(n, kind_seconds / scale, left=bar_left, color=COLOURS[kind], height=0.8)
                bar_left += kind_seconds / scale
        lost_axis.set_yticks(range(len(lost)), [cause_name for cause_name, _ in lost], parse_math=False)
        lost_axis.set_ylim(max(len(lost), 1) - 0.5, -0.5)
        lost_axis.set_xlabel(f"{unit_name} lost, by cause")
        goodput = f"{account.compute_goodput():.1%} of the time was training"
        figure.suptitle(f"{title}: {goodput}", parse_math=False)


def thicken_intervals(intervals: Iterable[Sequence[float]], least: float) -> list[tuple[float, float]]:
    """Intervals in order, each at least `least` wide, and joined where less is between them."""
    joined_intervals: list[tuple[float, float]] = []
    for begin, end in intervals:
        end = max(end, begin + least)
        if joined_intervals and begin - joined_intervals[-1][1] < least:
            joined_intervals[-1] = (joined_intervals[-1][0], max(end, joined_intervals[-1][1]))
        else:
            joined_intervals.append((begin, end))
    return joined_intervals


def _by_cause(account: TimeAccount) -> list[tuple[str, dict[TimeKind, float]]]:
    found = defaultdict[str, dict[TimeKind, float]](lambda: defaultdict(float))
    for (kind, cause, incident, host_name), (lost_seconds, _) in account.sum_losses().items():
        name = f"incident {incident}: {cause}" if incident is not None else cause
        found[f"{name} on {host_name}" if host_name else name][kind] += lost_seconds
    for kind, lost_seconds in account.sum_seconds().items():
        charged_seconds = sum(by_kind.get(kind, 0.0) for by_kind in found.values())
        if kind is not TimeKind.TRAINING and lost_seconds - charged_seconds > 1e-6:
            found[_called(kind)][kind] += lost_seconds - charged_seconds
    return [(name if len(name) <= 60 else f"{name[:59]}…", by_kind) for name, by_kind in found.items()]


def _called(kind: TimeKind) -> str:
    return kind.value.replace("_", " ")
