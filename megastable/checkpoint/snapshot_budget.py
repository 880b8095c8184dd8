"""Decides how many snapshots fit into host memory, from the measurements of all ranks. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megastable.base.errors import ConfigError
from megastable.base.free_memory import GIB, SHARE, Demand
from megastable.config.stability import SnapshotConfig


@dataclass(frozen=True)
class SnapshotBudget:
    """points: how many snapshots every rank keeps. In bytes, on the rank with the least room: the size of one, and the
    room for all. text: for the console. aside: whether every rank has room for a temporary extra one."""

    points: int
    snapshot: int
    budget: float
    text: str
    aside: bool


NO_SNAPSHOTS = SnapshotBudget(0, 0, 0.0, "", False)


def plan_snapshots(demands: Sequence[Demand], config: SnapshotConfig) -> SnapshotBudget:
    """The same on every rank. Raises ConfigError if the allowed memory does not hold one."""
    ranks = Counter(d.host for d in demands)
    least: dict[str, int] = {}
    for d in demands:
        least[d.host] = min(d.free, least.get(d.host, d.free))

    def budget(d: Demand) -> float:
        return config.memory_gib * GIB if config.memory_gib else SHARE * least[d.host] / ranks[d.host]

    rows = [(count_fitting(config.keep + 1, d.snapshot, budget(d)), d.snapshot, budget(d)) for d in demands]
    most, size, room = min(rows, key=lambda row: (row[0], -row[1], row[2]))
    points, aside = min(most, config.keep), most > config.keep
    numbers = f"a snapshot takes {size / GIB:.3f} GiB a rank, and there is room for {room / GIB:.3f}"
    if not points and config.memory_gib is not None:
        raise ConfigError(
            f"stability.snapshots.memory_gib={config.memory_gib}: {numbers}. Give it at least {size / GIB:.3f}, "
            "or set stability.snapshots.interval=0 to train without rewinding"
        )
    if not points:
        text = f"WARNING: {numbers}: a spike cannot be rewound in memory, and leads to a restart from a checkpoint"
        return SnapshotBudget(0, size, room, text, aside)
    text = f"snapshots: every {config.interval} steps, {points} of {size / GIB:.3f} GiB a rank"
    if not aside:
        text += "; no room for one more, to look back on batches without a rewind: see stability.snapshots.memory_gib"
    tight = [d for d in demands if most * d.snapshot * ranks[d.host] > least[d.host]]
    if tight:
        host = tight[0].host
        text += f"\nWARNING: that is more than the {least[host] / GIB:.3f} GiB that are free on {host}: "
        text += "lower stability.snapshots.memory_gib or .keep"
    return SnapshotBudget(points, size, room, text, aside)


def count_fitting(keep: int, snapshot_bytes: int, budget_bytes: float) -> int:
    """How many snapshots fit: at most `keep`, whole ones only."""
    return min(keep, int(budget_bytes // max(1, snapshot_bytes)))
