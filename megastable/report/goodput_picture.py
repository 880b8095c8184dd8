"""Draws where the time of a run went: a row per kind of time, and what the lost time is charged to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from megastable.report.figures import draw_figure
from megastable.run.goodput.time_account import TimeAccount, TimeKind

COLOURS = {
    TimeKind.TRAINING: "tab:green", TimeKind.REDONE: "tab:orange", TimeKind.REFUSED: "gold",
    TimeKind.STALLED: "tab:pink", TimeKind.BETWEEN: "0.75", TimeKind.CHECKPOINTING: "tab:cyan",
    TimeKind.EVALUATION: "tab:blue", TimeKind.RECOVERY: "tab:purple", TimeKind.START_UP: "tab:olive",
    TimeKind.HANG: "tab:red", TimeKind.ENDING: "firebrick", TimeKind.PAUSE: "rosybrown",
    TimeKind.HOSTS: "tab:brown", TimeKind.NOT_RUNNING: "0.4", TimeKind.UNKNOWN: "black",
}  # fmt: skip
UNITS = (
    ("days", 86400.0, 2 * 86400.0),
    ("hours", 3600.0, 2 * 3600.0),
    ("minutes", 60.0, 120.0),
    ("s", 1.0, 0.0),
)
THIN = 1 / 1200  # of the width: what is shorter is drawn as wide, what is nearer is drawn as one
CAUSES = 8  # of which the lost time is shown


def goodput_picture(account: TimeAccount, title: str, path: Path) -> None:
    """A picture of an account. The format follows from the name (.png, .svg, .pdf). Raises DataError when it cannot be
    written."""
    unit, scale = next((name, scale) for name, scale, least in UNITS if account.wall >= least)
    rows = defaultdict[TimeKind, list[tuple[float, float]]](list)
    for span in account.spans():
        rows[span.kind].append(((span.begin - account.begin) / scale, (span.end - account.begin) / scale))
    seconds, wall = account.seconds(), account.wall or 1.0
    kinds = [kind for kind in TimeKind if seconds[kind] > 0]
    lost = sorted(_by_cause(account), key=lambda entry: -sum(entry[1].values()))[:CAUSES]
    heights = [0.6 + 0.3 * max(1, len(kinds)), 0.6 + 0.3 * max(1, len(lost))]
    with draw_figure(path, 14, 1.5 + sum(heights)) as figure:
        strip, bars = figure.subplots(2, 1, height_ratios=heights)
        for n, kind in enumerate(kinds):
            drawn = [(a, b - a) for a, b in thick(rows[kind], THIN * wall / scale)]
            strip.broken_barh(drawn, (n - 0.4, 0.8), color=COLOURS[kind])
        strip.set_yticks(range(len(kinds)), [f"{_called(k)}  {seconds[k] / wall:.1%}" for k in kinds])
        strip.set_xlim(0, max(account.wall / scale, 1e-9))
        strip.set_ylim(len(kinds) - 0.5, -0.5)
        strip.set_xlabel(f"{unit} since the run began")
        for n, (_, by_kind) in enumerate(lost):
            left = 0.0
            for kind, value in by_kind.items():
                bars.barh(n, value / scale, left=left, color=COLOURS[kind], height=0.8)
                left += value / scale
        bars.set_yticks(range(len(lost)), [name for name, _ in lost], parse_math=False)
        bars.set_ylim(max(len(lost), 1) - 0.5, -0.5)
        bars.set_xlabel(f"{unit} lost, by cause")
        figure.suptitle(f"{title}: {account.goodput():.1%} of the time was training", parse_math=False)


def thick(intervals: Iterable[Sequence[float]], least: float) -> list[tuple[float, float]]:
    """Intervals in order, each at least `least` wide, and joined where less is between them."""
    found: list[tuple[float, float]] = []
    for begin, end in intervals:
        end = max(end, begin + least)
        if found and begin - found[-1][1] < least:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def _by_cause(account: TimeAccount) -> list[tuple[str, dict[TimeKind, float]]]:
    found = defaultdict[str, dict[TimeKind, float]](lambda: defaultdict(float))
    for (kind, cause, incident, host), (seconds, _) in account.lost().items():
        name = f"incident {incident}: {cause}" if incident is not None else cause
        found[f"{name} on {host}" if host else name][kind] += seconds
    for kind, seconds in account.seconds().items():
        told = sum(by_kind.get(kind, 0.0) for by_kind in found.values())
        if kind is not TimeKind.TRAINING and seconds - told > 1e-6:
            found[_called(kind)][kind] += seconds - told
    return [(name if len(name) <= 60 else f"{name[:59]}…", by_kind) for name, by_kind in found.items()]


def _called(kind: TimeKind) -> str:
    return kind.value.replace("_", " ")
