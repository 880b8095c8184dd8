"""What repeated computations have proven about a chip."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megastable.run.events.stability_events import (
    GradientsDoubted,
    HostFaulty,
    OfHardware,
    ReplayDiffers,
    StateChanged,
)

# What is counted, and when it begins anew.
FOUND = (StateChanged, GradientsDoubted, ReplayDiffers, HostFaulty)
SEVERAL, WINDOW = 3, 2000  # so many faults of a rank within so many steps are no chance


@dataclass(frozen=True)
class HardwareFault:
    """after: the last step after which all was right. lasting: it comes again. ranks: which were wrong, one of them at
    least; empty if it may also have been another one. hosts: theirs. reason: a sentence. link: what was wrong had been
    sent, so that it may have been who sent it, or what lies between: that is nobody's fault."""

    after: int
    lasting: bool
    ranks: Sequence[int]
    hosts: Sequence[str]
    reason: str
    link: bool = False

    @property
    def accused(self) -> bool:
        """Whether it is known which host must leave: the next result may be wrong, too."""
        return self.lasting and bool(self.ranks) and len(self.hosts) == 1


class FaultCounts:
    """Counts faults that passed, by rank. hosts: of all ranks. seen: (step, rank) of what earlier processes found."""

    def __init__(self, hosts: Sequence[str], seen: Iterable[tuple[int, int]] = ()) -> None:
        self._hosts, self._seen = hosts, list(seen)

    def counted(self, fault: HardwareFault, step: int) -> HardwareFault:
        """What comes by chance again and again on one rank is no chance. Only what is of one host for sure counts."""
        if fault.lasting or fault.link or len(fault.hosts) != 1:
            return fault
        self._seen = [seen for seen in self._seen if step - seen[0] < WINDOW]
        self._seen += [(step, rank) for rank in fault.ranks if (step, rank) not in self._seen]
        ranks = [rank for _, rank in self._seen]
        often = [rank for rank in fault.ranks if ranks.count(rank) >= SEVERAL]
        if not often:
            return fault
        hosts = sorted({self._hosts[rank] for rank in often})
        reason = f"{fault.reason}; {SEVERAL} times by now"
        return replace(fault, lasting=True, ranks=often, hosts=hosts, reason=reason)


def passed(
    events: Iterable[OfHardware], hosts: Sequence[str]
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """What `FaultCounts` of a new process begin with: of memory and gradients, and of replays.

    events: `FOUND` of the journal, in order. hosts: of the ranks now; what was found on a rank that was on another host
    does not count. A host that was accused begins anew: it is another device, or nobody could do without it.
    """
    found, replayed = list[tuple[int, int]](), list[tuple[int, int]]()
    for event in events:
        if isinstance(event, HostFaulty):
            found, replayed = [], []
            continue
        into = replayed if isinstance(event, ReplayDiffers) else found
        counts = event.get("verdict", "transient") == "transient" and len(set(map(str, event.hosts))) == 1
        if not counts or not isinstance(step := event.get("step"), int):
            continue
        for rank, host in zip(event.ranks, event.hosts, strict=False):
            here = isinstance(rank, int) and 0 <= rank < len(hosts) and hosts[rank] == host
            if here and (step, rank) not in into:
                into.append((step, rank))
    return found, replayed
