"""How many rewind points there is host memory for: measured on every rank, decided from all their answers alike."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

from megastable.errors import ConfigError
from megastable.hostmemory import SHARE, taken
from megastable.stability.settings import SnapshotConfig
from megastable.stability.spacing import capacity

GIB = 2**30


@dataclass(frozen=True)
class Demand:
    """Of one rank: its host, the bytes that a snapshot takes, and the bytes that this process may still take there."""

    host: str
    snapshot: int
    free: int


@dataclass(frozen=True)
class Room:
    """points: how many snapshots every rank keeps. In bytes, on the rank with the least room: what one takes, and
    what there is for all of them. text: for the console. aside: whether every rank has room for one more for a
    while."""

    points: int
    snapshot: int
    budget: float
    text: str
    aside: bool


def demand(state: Iterable[Tensor], masters: Iterable[Tensor], moments: torch.dtype, pinned: bool) -> Demand:
    """This rank's. state: what a snapshot copies now; masters: the fp32 weights, with which Adam's two moments, of the
    type `moments`, are made at the first update."""
    now = sum(taken(t.numel() * t.element_size(), pinned) for t in state)
    later = sum(
        taken(4 * t.numel(), pinned) + 2 * taken(t.numel() * moments.itemsize, pinned) for t in masters
    )
    return Demand(socket.gethostname(), max(now, later), free())


def plan(demands: Sequence[Demand], config: SnapshotConfig) -> Room:
    """The same on every rank. Raises ConfigError when the memory that the recipe allows is not enough for one."""
    ranks = Counter(d.host for d in demands)
    least: dict[str, int] = {}
    for d in demands:
        least[d.host] = min(d.free, least.get(d.host, d.free))

    def budget(d: Demand) -> float:
        return config.memory_gib * GIB if config.memory_gib else SHARE * least[d.host] / ranks[d.host]

    rows = [(capacity(config.keep + 1, d.snapshot, budget(d)), d.snapshot, budget(d)) for d in demands]
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
        return Room(0, size, room, text, aside)
    text = f"rewind points: every {config.interval} steps, {points} of {size / GIB:.3f} GiB a rank"
    if not aside:
        text += "; no room for one more, to look back on batches without a rewind: see stability.snapshots.memory_gib"
    tight = [d for d in demands if most * d.snapshot * ranks[d.host] > least[d.host]]
    if tight:
        host = tight[0].host
        text += f"\nWARNING: that is more than the {least[host] / GIB:.3f} GiB that are free on {host}: "
        text += "lower stability.snapshots.memory_gib or .keep"
    return Room(points, size, room, text, aside)


def free() -> int:
    """Bytes of host memory that this process may still take: of the machine, and of the control groups it is in."""
    return min([int(psutil.virtual_memory().available), *group_limits()])


def group_limits(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """What every memory limit above this process leaves, in bytes: containers and batch systems set them.

    Both versions of control groups (kernel documentation, cgroup-v2 and cgroup-v1/memory). A limit holds for all groups
    below it; a container may see its own group as the root. File cache that the kernel can drop is free.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            top, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        below = top / group.lstrip("/")
        for folder in (below, *below.parents):
            if folder.is_relative_to(top) and (left := _left(folder, *names)) is not None:
                yield left


def _left(folder: Path, limit: str, usage: str, cache: str) -> int | None:
    """Of one group; None where there is no limit ("max") or no such group."""
    try:
        most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return max(0, most - used + int(statistics.get(cache, 0)))
