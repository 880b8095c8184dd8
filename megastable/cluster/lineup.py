"""Which hosts train next: those of before, spares in the place of others, or fewer than wanted. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf

SETTLE = 10.0  # seconds for a host to answer before a spare takes its place: agents do not all come at once


def lineup(
    hosts: Sequence[str],
    wanted: int,
    there: Collection[str],
    barred: Mapping[str, bool],
    last: Sequence[str],
    waited: float,
    shrink_after: float | None,
    fits: Callable[[Sequence[str]], bool],
) -> tuple[str, ...]:
    """The hosts of the next attempt, that of rank 0 first; empty: wait on.

    hosts: all, spares at the end; wanted: how many train when all is well; there: those that can begin now. barred:
    hosts that failed, to be used only where nobody else is there (False) or not at all (True). last: of the attempt
    before. waited: seconds since it ended. shrink_after: seconds after which fewer hosts will do, None: never. fits:
    whether the layout and the global batch can be shared out among so many.
    """
    usable = [host for host in hosts if not barred.get(host, False)]
    # Before all others the hosts of before: a newcomer has to read everything.
    order = sorted(usable, key=lambda host: (host in barred, host not in (last or hosts[:wanted])))
    best = order[:wanted]
    here = [host for host in order if host in there]
    if len(best) == wanted:
        if all(host in there for host in best):
            return _arranged(best, last, hosts)
        if len(here) >= wanted and waited >= SETTLE:
            return _arranged(here[:wanted], last, hosts)
    patience = inf if shrink_after is None else shrink_after
    if waited < (patience if len(usable) >= wanted else min(patience, SETTLE)) or shrink_after is None:
        return ()
    for count in range(min(len(here), wanted), 0, -1):
        if fits(fewer := _arranged(here[:count], last, hosts)):
            return fewer
    return ()


def _arranged(chosen: Sequence[str], last: Sequence[str], hosts: Sequence[str]) -> tuple[str, ...]:
    """Those of before in their places, newcomers in the holes; in another number: all in the order of the host file."""
    if len(chosen) != len(last):
        return tuple(sorted(chosen, key=hosts.index))
    new = iter(sorted(set(chosen) - set(last), key=hosts.index))
    return tuple(host if host in chosen else next(new) for host in last)
