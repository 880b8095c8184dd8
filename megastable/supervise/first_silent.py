"""Names the ranks that were lost first, from the ends of their connections to the store. Pure.

A rank that loses another leaves last words, and is a witness. A process that dies closes its connection at once; a host
without power or link only falls silent, and the others notice much later. So the ranks without last words whose last
sign of life is the earliest were there first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from megastable.cluster.store import Heard

BEATS = 2.5  # seconds without a heartbeat after which a rank is silent; one is sent every second
TOGETHER = 1.0  # seconds within which ranks ended together: heartbeats come once a second
NAMED = 8  # ranks in a sentence


@dataclass(frozen=True)
class FirstSilent:
    """ranks: in order; none if nothing is known. host: theirs, if it is one. told: the end of a sentence."""

    ranks: tuple[int, ...] = ()
    host: str | None = None
    told: str = ""

    @property
    def rank(self) -> int | None:
        return self.ranks[0] if len(self.ranks) == 1 else None


UNKNOWN = FirstSilent()


def first_silent(
    heard: Iterable[Heard], spoke: Collection[int], called: Callable[[str], str], now: float
) -> FirstSilent:
    """heard: of all ranks, after the attempt; spoke: those with last words; called: a host's name, from the one that
    its ranks see; now: time.monotonic()."""
    last = {rank.rank: (_last_sign(rank, now), rank) for rank in heard}
    mute = sorted((at, rank) for rank, (at, _) in last.items() if rank not in spoke)
    if not mute:
        return UNKNOWN
    # The moment of a death is exact; that of silence is known to a heartbeat.
    first, rank = mute[0]
    exact = not _fell_silent(last[rank][1], now)
    if any(at < first for witness, (at, _) in last.items() if witness in spoke):
        return UNKNOWN  # it ended after a rank that had lost another: it followed, too
    ranks = [rank] if exact else sorted(other for at, other in mute if at - first <= TOGETHER)
    hosts = {called(last[other][1].host) for other in ranks}
    later = [at for at, _ in last.values() if at - first > (0 if exact else TOGETHER)]
    if len(hosts) > 1 or not later:
        return UNKNOWN  # all at once: the store or its network failed, or all were ended
    host = hosts.pop()
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:NAMED]))}"
    who += f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
    told = (
        "ended first, without last words"
        if exact
        else f"fell silent {min(later) - first:.1f} s before the others"
    )
    return FirstSilent(tuple(ranks), host, f"{who} on {host} {told}")


def _last_sign(rank: Heard, now: float) -> float:
    """When it was last known to live; time.monotonic()."""
    return rank.at if rank.closed is None or _fell_silent(rank, now) else rank.closed


def _fell_silent(rank: Heard, now: float) -> bool:
    """A busy process may be late with its heartbeats, but its end is still seen as one."""
    if rank.closed is None:
        return now - rank.at > BEATS
    return rank.cut and rank.closed - rank.at > BEATS
