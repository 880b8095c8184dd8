"""What rewind points take of a host's memory, for those who measure it and those who only plan. Pure; without torch."""

from __future__ import annotations

SHARE = 1 / 4  # of what is free: data loading, checkpoints and the file cache need memory, too


def taken(size: int, pinned: bool) -> int:
    """What a tensor of `size` bytes takes: torch rounds pinned memory up to a power of two."""
    return 1 << (size - 1).bit_length() if pinned and size else size
