"""Free host memory of this process, and the memory that a snapshot of its state would take."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

if TYPE_CHECKING:
    from torch import Tensor

GIB = 2**30
SHARE = 1 / 4  # of free memory: data loading, checkpoints and the file cache need some as well


@dataclass(frozen=True)
class Demand:
    """One rank's host, the bytes that a snapshot takes, and the bytes that this process may still allocate there."""

    host: str
    snapshot: int
    free: int


def measure_demand(state: Iterable[Tensor], later: Iterable[int]) -> Demand:
    """This rank's demand. state: what a snapshot copies now; later: bytes of the tensors that there are after the first
    update."""
    bytes_now = sum(t.numel() * t.element_size() for t in state)
    return Demand(socket.gethostname(), max(bytes_now, sum(later)), free_bytes())


def free_bytes() -> int:
    """Bytes of host memory that this process may still allocate, by the machine and by its control groups."""
    return min([int(psutil.virtual_memory().available), *(group.left for group in group_limits())])


def total_bytes() -> int:
    """Bytes of host memory that the processes of this control group may have together."""
    return min([int(psutil.virtual_memory().total), *(group_memory.most for group_memory in group_limits())])


class GroupMemory(NamedTuple):
    """The memory limit of a control group, and what is left of it. [bytes]"""

    most: int
    left: int


def group_limits(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> Iterator[GroupMemory]:
    """Every memory limit above this process; containers and batch systems set such limits.

    Both versions of control groups (kernel documentation, cgroup-v2 and cgroup-v1/memory). A limit holds for all groups
    below it; a container may see its own group as the root. File cache that the kernel can drop is free.
    """
    try:
        group_lines = own.read_text().splitlines()
    except OSError:
        return
    for group_line in group_lines:
        _, controllers, group_path = group_line.split(":", 2)
        if not controllers:
            top_folder, file_names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top_folder = root / "memory"
            file_names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group_folder = top_folder / group_path.lstrip("/")
        for folder in (group_folder, *group_folder.parents):
            if folder.is_relative_to(top_folder) and (group_limit := _limit(folder, *file_names)) is not None:
                yield group_limit


def _limit(folder: Path, limit: str, usage: str, cache: str) -> GroupMemory | None:
    """Of one group; None without a limit ("max") or without such a group."""
    try:
        limit_bytes, used_bytes = int((folder / limit).read_text()), int((folder / usage).read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return GroupMemory(limit_bytes, max(0, limit_bytes - used_bytes + int(statistics.get(cache, 0))))
