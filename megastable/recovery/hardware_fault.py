"""What repeated computations have proven about a chip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
        """Whether it is known who must leave: the next result may be wrong, too."""
        return self.lasting and bool(self.ranks)
