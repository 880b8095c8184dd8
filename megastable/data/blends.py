"""How a run's corpora were blended, and from which position on: `blends.jsonl`, append-only.

The first line is that of the start. New weights, a new corpus or one that is taken out begin at a later position, the
first of a block of the order; every other corpus goes on with its next sample (order.py). A line at or before the
position of earlier ones takes their place: the run went back behind them, or its corpora became others.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from megastable.data import ledger
from megastable.data.ledger import Entry
from megastable.data.manifest import Stream
from megastable.data.order import BLOCK, LAST_POSITION, Order, Phase
from megastable.data.shards import Shard
from megastable.data.skip_ledger import AnyEntry, Ledger, SampleEntry, SkipEntry, sample_entries
from megastable.data.skips import Skips
from megastable.errors import DataError

CONVICTED = "data: "  # begins the reason of what an incident convicted (casebook.py)
MOST = 1 << 24  # positions: a longer range of the ledger is no choice of samples


class Share(BaseModel):
    """A corpus of a blend: what the order needs of it, and where it was."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    path: str
    weight: float = Field(gt=0, allow_inf_nan=False)
    tokens: int = Field(ge=0)
    fingerprint: str


class BlendEntry(Entry):
    """A line: from `position` on, `corpora` are blended by their weights. step: of the run when it was decided."""

    position: Annotated[int, Field(ge=0, le=LAST_POSITION, multiple_of=BLOCK)]
    corpora: list[Share] = Field(min_length=1)
    step: int | None = None

    @property
    def weights(self) -> dict[str, float]:
        return {share.name: share.weight for share in self.corpora}


def read_blends(path: Path) -> list[BlendEntry]:
    """All lines, oldest first; see `ledger.read`."""
    return ledger.read(path, BlendEntry)


def in_force(entries: Sequence[BlendEntry]) -> list[BlendEntry]:
    """Those whose place no later line has taken, by position; the first is at 0."""
    valid: list[BlendEntry] = []
    for entry in entries:
        valid = [*(e for e in valid if e.position < entry.position), entry]
    if valid and valid[0].position:
        raise DataError("blends.jsonl has no line for position 0: restore it from a copy")
    return valid


def phases(entries: Sequence[BlendEntry]) -> list[Phase]:
    """For the order."""
    return [Phase(entry.position // BLOCK, entry.weights) for entry in entries]


def moved_skips(
    entries: Sequence[AnyEntry], old: Order, new: Order, position: int, since: datetime | None = None
) -> list[SkipEntry]:
    """The lines that the ledger needs where `new` takes the place of `old` from `position` on, so that the samples that
    are skipped by position behind it stay so: they stand elsewhere now. Those that are named by identity are found
    wherever they stand. since: lines of before it were moved already."""
    by_reason: dict[str, list[tuple[int, int]]] = {}
    places = [e for e in entries if isinstance(e, SkipEntry)]
    for e in places:
        later = since is None or e.time is None or e.time >= since
        if later and e.corpus is None and e.end > position and e.end - e.first <= MOST:
            by_reason.setdefault(e.reason, []).append((max(e.first, position), e.end))
    known = Skips.of((e.first, e.end) for e in places if e.corpus is None)
    found = []
    for reason, chosen in by_reason.items():
        positions = np.concatenate([np.arange(first, end) for first, end in Skips.of(chosen).ranges])
        there = old.moved_to(new, positions)
        new_ranges = Skips.of((p, p + 1) for p in there[~known.mask(there)].tolist()).ranges
        found += [SkipEntry(first=first, end=end, reason=reason) for first, end in new_ranges]
    return found


def named_skips(ledger: Ledger, blends: Sequence[BlendEntry], order: Order) -> list[SampleEntry]:
    """The lines by identity that the ledger needs for the convictions that an earlier version wrote by position, which
    hold in one epoch only. Where a later blend put other samples at these positions, nobody knows which were meant."""
    named = {(e.incident, e.reason) for e in ledger.by_identity.entries}
    found: list[SampleEntry] = []
    for e in ledger.by_position.entries:
        assert isinstance(e, SkipEntry)
        convicted = e.corpus is None and e.incident is not None and e.reason.startswith(CONVICTED)
        if not convicted or (e.incident, e.reason) in named or e.end - e.first > MOST:
            continue
        later = [b.position for b in blends if e.time is None or b.time is None or b.time > e.time]
        if e.end <= min(later, default=LAST_POSITION):
            found += sample_entries(order, np.arange(e.first, e.end), e.reason, (), e.incident, e.step)
    return found


class GoneStream(Stream):
    """Stands for a corpus that was taken out of the blend and is no longer on the disk."""

    def __init__(self, share: Share, problem: str) -> None:
        self.tokens = share.tokens
        self._problem = f"corpus {share.name!r}, which was taken out of the blend, is needed again: {problem}"

    def pieces(self, first: int, count: int) -> list[tuple[Shard, int, int, int]]:
        raise DataError(self._problem)
