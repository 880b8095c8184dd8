"""Number and spacing of snapshots: sparser with age."""

from __future__ import annotations

from collections.abc import Sequence


def thin(steps: Sequence[int], capacity: int, interval: int) -> list[int]:
    """Which of the ascending `steps` to keep, at most `capacity`: the newest, and older ones ever further apart.

    Ages grow about as powers of two of `interval`, so that a few snapshots reach far back; those beyond the
    capacity are dropped.
    """
    kept = list(steps)
    while len(kept) > capacity:
        ages = [kept[-1] - step for step in kept]
        if ages[0] > interval * 2 ** (capacity - 1) or len(kept) < 3:
            kept.pop(0)
            continue
        # Drop the snapshot whose neighbours are closest together for their age.
        crowding = [(ages[i - 1] - ages[i + 1]) / ages[i - 1] for i in range(1, len(kept) - 1)]
        kept.pop(1 + crowding.index(min(crowding)))
    return kept
