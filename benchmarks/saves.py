"""Results of `checkpoint_speed.py`, and their table. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

from megastable.base.text import size

LIMIT = 0.05  # maximum pause of an asynchronous save, relative to a synchronous one
MEANING = {
    "waiting": "a save that the steps wait for, s",
    "blocked": "one behind them: what they wait, s",
    "share": f"  of the former, % (limit {100 * LIMIT:g})",
    "begin": "  at its beginning, ms",
    "update": "  in the first update, for the copy, ms",
    "heard": "  in the steps after it, ms",
    "stands": "until it stands, s",
    "step": "a step, nothing behind it, s",
    "step behind": "a step, a save behind it, s",
    "slower": "  slower by, %",
    "added": "steps, added up: a save costs, s",
    "write": "bytes on the disk, waiting, MB/s",
    "save": "with reading them back, MB/s",
    "copy": "as cp copies them, with fsync, MB/s",
    "write to copy": "  writing / copying",
    "save to copy": "  the whole save / copying",
    "verify": "all checksums, from the disk, GB/s",
    "load": "into the engine afterwards, GB/s",
    "resume": "both, s",
}


@dataclass(frozen=True)
class Spread:
    """Over the rounds: median, minimum and maximum."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Measurement:
    """One recipe. run: its settings; bytes: of a checkpoint. values: in the units of MEANING.

    waited, behind: seconds of the pauses, and of the thread's work, in an asynchronous save
    (medians; "  " before the name: part of the line above). first: seconds, of the first asynchronous save,
    which allocates memory: the pause, and the copy as a part of it.
    """

    run: dict[str, Any]
    rounds: int
    bytes: int
    values: dict[str, Spread]
    waited: dict[str, float]
    behind: dict[str, float]
    first: dict[str, float]

    @property
    def within(self) -> bool:
        """Whether the steps wait no longer than the limit."""
        return self.values["share"].median <= 100 * LIMIT


@dataclass(frozen=True)
class Found:
    """machine: hardware and software; of: by recipe."""

    machine: dict[str, Any]
    of: dict[str, Measurement]


UNITS = {
    "s": "seconds", "ms": "milliseconds", "MB/s": "megabytes_per_second", "GB/s": "gigabytes_per_second",
    "%": "percent",
}  # fmt: skip


def facts(found: Found) -> dict[str, Any]:
    """All numbers, for programs: keys say their units."""
    return {"machine": found.machine, "of": {name: _facts(m) for name, m in found.of.items()}}


def _facts(m: Measurement) -> dict[str, Any]:
    by_part = {"waited": m.waited, "behind": m.behind, "first": m.first}
    return {
        "run": m.run, "rounds": m.rounds, "bytes": m.bytes,
        **{_with_unit(key): asdict(spread) for key, spread in m.values.items()},
        **{f"{key}_seconds": {name.strip(): s for name, s in parts.items()} for key, parts in by_part.items()},
    }  # fmt: skip


def _with_unit(key: str) -> str:
    unit = MEANING[key].partition(" (limit")[0].rpartition(", ")[2]
    return "_".join([*key.split(), *([UNITS[unit]] if unit in UNITS else [])])


def table(name: str, m: Measurement) -> Table:
    """For the terminal."""
    title = f"{name}: {m.run['parameters'] / 1e6:.1f}M parameters, {size(m.bytes)}, {m.rounds} rounds"
    shown = Table(title=title, box=box.SIMPLE_HEAD)
    shown.add_column("what", no_wrap=True)
    for heading in ("median", "least", "most"):
        shown.add_column(heading, justify="right", min_width=9)
    for key, meaning in MEANING.items():
        v = m.values[key]
        style = None if key != "share" else "bold green" if m.within else "bold red"
        shown.add_row(meaning, *(f"{x:.3g}" for x in (v.median, v.low, v.high)), style=style)
    for heading, found in (
        ("of what the steps wait, ms", m.waited),
        ("of what the thread does, ms", m.behind),
    ):
        shown.add_section()
        shown.add_row(heading)
        for part, seconds in found.items():
            shown.add_row(f"  {part}", f"{1e3 * seconds:.3g}", style="dim")
    shown.add_section()
    shown.add_row("the first save behind the steps: they wait, s", f"{m.first['blocked']:.3g}")
    shown.add_row("  of that the copy, into new memory", f"{m.first['copy']:.3g}")
    return shown
