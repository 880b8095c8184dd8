"""Host memory taken by snapshots, for training and for the planner. Pure; without torch."""

from __future__ import annotations

SHARE = 1 / 4  # of free memory: data loading, checkpoints and the file cache need some as well


def taken(size: int, pinned: bool) -> int:
    """Bytes taken by a tensor of `size` bytes: torch rounds pinned memory up to a power of two."""
    return 1 << (size - 1).bit_length() if pinned and size else size
