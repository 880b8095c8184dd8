"""Finds the ranks that a hang is due to, from how far every rank got in its process groups. Pure.

A collective ends when every member has entered it. So a rank that has entered more collectives of a group than another
member waits for that one. Ranks that others wait for, and that wait for nobody themselves, hold up the run: one that
stands still in its own work, or is stopped, or is gone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

Entered = Mapping[str, int]  # collectives entered, by process group


def waits(entered: Mapping[int, Entered]) -> dict[int, set[int]]:
    """For every rank, those it waits for. entered: of each rank, in the groups it belongs to."""
    groups = defaultdict[str, dict[int, int]](dict)
    for rank, counts in entered.items():
        for group, count in counts.items():
            groups[group][rank] = count
    found: dict[int, set[int]] = {rank: set() for rank in entered}
    for members in groups.values():
        for rank, count in members.items():
            found[rank] |= {other for other, theirs in members.items() if theirs < count}
    return found


def culprits(entered: Mapping[int, Entered]) -> list[int]:
    """The ranks that others wait for, and that wait for nobody; empty if all are equally far, as when the network
    fails within a collective."""
    graph = waits(entered)
    awaited = set().union(*graph.values()) if graph else set()
    return sorted(rank for rank in awaited if not graph[rank])
