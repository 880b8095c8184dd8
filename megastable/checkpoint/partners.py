"""Decides which rank of another host keeps the copy of each rank's newest snapshot. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def partners(hosts: Sequence[Hashable]) -> list[int | None]:
    """By rank: the rank that keeps a copy of its point; None if all ranks are on one host.

    hosts: of every rank, by rank. The hosts form a ring in the order of their first ranks, and the i-th rank of a host
    sends to the i-th of the next one, around again if that has fewer. So the ranks of a host receive equally many
    copies, give or take one, and a host that is lost takes with it the copies of one other host only.
    """
    ranks: dict[Hashable, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    ring, found = list(ranks.values()), list[int | None]([None] * len(hosts))
    for here, there in zip(ring, [*ring[1:], ring[0]], strict=True) if len(ring) > 1 else ():
        for i, rank in enumerate(here):
            found[rank] = there[i % len(there)]
    return found
