"""Free host memory of this process, and what a copy of its state there would take."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

from megastable.base.host_memory import taken

GIB = 2**30


@dataclass(frozen=True)
class Demand:
    """Of one rank: its host, the bytes that a snapshot takes, and the bytes that this process may still take there."""

    host: str
    snapshot: int
    free: int


def demand(state: Iterable[Tensor], masters: Iterable[Tensor], moments: torch.dtype, pinned: bool) -> Demand:
    """This rank's. state: what a snapshot copies now; masters: the fp32 weights, with which Adam's two moments, of the
    type `moments`, are made at the first update."""
    now = sum(taken(t.numel() * t.element_size(), pinned) for t in state)
    later = sum(
        taken(4 * t.numel(), pinned) + 2 * taken(t.numel() * moments.itemsize, pinned) for t in masters
    )
    return Demand(socket.gethostname(), max(now, later), free())


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
