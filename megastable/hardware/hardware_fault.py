"""What was found of a device, a link or memory: how it is named, told to the journal, and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megastable.base.text import ranks_on
from megastable.run.events.stability_events import (
    GradientsDoubted,
    HostFaulty,
    OfHardware,
    ReplayDiffers,
    StateChanged,
)
from megastable.run.log import RunLog

# What is counted, and when it begins again.
FOUND = (StateChanged, GradientsDoubted, ReplayDiffers, HostFaulty)
SEVERAL, WINDOW = 3, 2000  # so many faults of a rank within so many steps are no chance
Seen = set[tuple[int, int]]  # steps, and ranks that were wrong


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
    def excludes_host(self) -> bool:
        """Whether it is known which host must leave: the next result may be wrong, too."""
        return self.lasting and bool(self.ranks) and len(self.hosts) == 1

    @property
    def verdict(self) -> str:
        return "sum" if self.link else "persistent" if self.lasting else "transient"


class FaultLog:
    """Names ranks and their hosts, and tells the journal what was found. hosts: of all ranks, by rank."""

    def __init__(self, log: RunLog, hosts: list[str]) -> None:
        self._log, self.hosts = log, hosts

    def name_ranks(self, ranks: Sequence[int]) -> str:
        return ranks_on(ranks, self.hosts)

    def make_fault(
        self, after: int, ranks: Sequence[int], reason: str, lasting: bool = False, link: bool = False
    ) -> HardwareFault:
        """As the fields of `HardwareFault`."""
        host_names = sorted({self.hosts[rank] for rank in ranks})
        return HardwareFault(after, lasting, list(ranks), host_names, reason, link)

    def report_fault(
        self, kind: type[OfHardware], step: int, fault: HardwareFault, **fields: Any
    ) -> HardwareFault:
        """Tell the journal and the console of a fault. fields: those that this kind has beside the usual ones."""
        ranks = list(fault.ranks)
        hosts = [self.hosts[rank] for rank in ranks]
        self._log.emit_event(
            kind(step=step, ranks=ranks, hosts=hosts, reason=fault.reason, **fields), say=True
        )
        return fault


class FaultCounts:
    """Counts faults that passed, by rank. seen: what earlier processes found."""

    def __init__(self, seen: Iterable[tuple[int, int]] = ()) -> None:
        self._seen = set(seen)

    def count_fault(self, fault: HardwareFault, step: int) -> HardwareFault:
        """What comes by chance again and again on one rank is no chance. Only what is of one host for sure counts."""
        if fault.lasting or fault.link or len(fault.hosts) != 1:
            return fault
        recent_faults = {seen_fault for seen_fault in self._seen if step - seen_fault[0] < WINDOW}
        self._seen = recent_faults | {(step, rank) for rank in fault.ranks}
        times = Counter(rank for _, rank in self._seen)
        often = [rank for rank in fault.ranks if times[rank] >= SEVERAL]
        if not often:
            return fault
        return replace(fault, lasting=True, ranks=often, reason=f"{fault.reason}; {SEVERAL} times by now")


def read_counts(events: Iterable[OfHardware], hosts: Sequence[str]) -> tuple[Seen, Seen]:
    """What `FaultCounts` of a new process begin with: of memory and gradients, and of replays.

    events: `FOUND` of the journal, in order. hosts: of the ranks now; what was found on a rank that was on another host
    does not count. A host that had to leave begins again: it is another device, or nobody could do without it.
    """
    found, replayed_faults = Seen(), Seen()
    here = list(enumerate(hosts))
    for event in events:
        if isinstance(event, HostFaulty):
            found, replayed_faults = Seen(), Seen()
        elif event.get("verdict", "transient") == "transient" and len(set(map(str, event.hosts))) == 1:
            fault_set = replayed_faults if isinstance(event, ReplayDiffers) else found
            of = zip(event.ranks, event.hosts, strict=False)
            fault_set |= {
                (event.step, rank) for rank, host in of if event.step is not None and (rank, host) in here
            }
    return found, replayed_faults
