"""What repeated computations have proven about a chip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

SEVERAL, WINDOW = 3, 2000  # so many faults of a rank within so many steps are no chance


@dataclass(frozen=True)
class HardwareFault:
    """after: the last step after which all was right. lasting: it comes again. ranks: which were wrong, one of them at
    least; empty if it may also have been another one. hosts: theirs. reason: a sentence."""

    after: int
    lasting: bool
    ranks: Sequence[int]
    hosts: Sequence[str]
    reason: str

    @property
    def accused(self) -> bool:
        """Whether it is known which host must leave: the next result may be wrong, too."""
        return self.lasting and bool(self.ranks) and len(self.hosts) == 1


class FaultCounts:
    """Counts faults that passed, by rank. Of one process."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, int]] = []  # step, rank

    def note(self, ranks: Sequence[int], step: int) -> None:
        """A fault of them that needs no answer any more."""
        self._seen = [seen for seen in self._seen if step - seen[0] < WINDOW]
        self._seen += [(step, rank) for rank in ranks]

    def counted(self, fault: HardwareFault, step: int) -> HardwareFault:
        """What comes by chance again and again on one rank is no chance."""
        if fault.lasting:
            return fault
        self.note(fault.ranks, step)
        ranks = [rank for _, rank in self._seen]
        often = [rank for rank in fault.ranks if ranks.count(rank) >= SEVERAL]
        if not often:
            return fault
        return replace(fault, lasting=True, ranks=often, reason=f"{fault.reason}; {SEVERAL} times by now")
