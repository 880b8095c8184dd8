"""The ledger of a run's data order, `blends.jsonl`: append-only, a JSON object per line, of two kinds.

Blends: the weights of the corpora from a position on. The first line is that of the start. New weights, an added or a
removed corpus begin at a later position, the first of a block of the order; every other corpus continues with
its next sample (order.py). A line at or before the position of earlier ones replaces them: the run was rewound past
them, or its corpora changed.

Exchanges: samples of a corpus that are read later, in exchange for later ones (`order.Exchange`). An exchange holds
until a blend at position 0 starts the order again.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictInt, field_validator

from megastable.base.errors import DataError
from megastable.data import skip_ledger
from megastable.data.manifest import Stream
from megastable.data.order import BLOCK, LAST_POSITION, Exchange, Order, Phase, Swap
from megastable.data.shards import Shard
from megastable.data.skip_ledger import AnyEntry, LedgerEntry, SkipEntry
from megastable.data.skips import Skips, numbers_of, ranges_of

Slot = Annotated[StrictInt, Field(ge=0, le=LAST_POSITION)]
MOST = 1 << 24  # positions: a longer range in the ledger was not chosen by sample


class Share(BaseModel):
    """A corpus of a blend: its data in the order, and its path."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    path: str
    weight: float = Field(gt=0, allow_inf_nan=False)
    tokens: int = Field(ge=0)
    fingerprint: str


class BlendEntry(LedgerEntry):
    """A line: from `position` on, `corpora` are blended by their weights. step: the run's step when it was decided."""

    position: Annotated[int, Field(ge=0, le=LAST_POSITION, multiple_of=BLOCK)]
    corpora: list[Share] = Field(min_length=1)
    step: int | None = None

    @property
    def weights(self) -> dict[str, float]:
        return {share.name: share.weight for share in self.corpora}


class ExchangeEntry(LedgerEntry):
    """Samples of `corpus` are exchanged, [first slot, second slot, count] each. incident, step: when
    it was decided."""

    corpus: Annotated[str, Field(min_length=1)]
    exchange: Annotated[list[tuple[Slot, Slot, Slot]], Field(min_length=1)]
    reason: str
    incident: int | None = None
    step: int | None = None

    @property
    def done(self) -> Exchange:
        """The exchange as an object of the order."""
        return Exchange(self.corpus, tuple(self.exchange))

    def make_undoing(self, reason: str, step: int) -> ExchangeEntry:
        """The line that undoes this one if it is the latest: it exchanges the same samples again."""
        return ExchangeEntry(corpus=self.corpus, exchange=self.exchange[::-1], reason=reason, step=step)

    @field_validator("exchange")
    @classmethod
    def _apart(cls, swaps: list[Swap]) -> list[Swap]:
        for first_slot, second_slot, count in swaps:
            if count < 1 or first_slot + count > second_slot:
                raise ValueError(
                    f"[{first_slot}, {second_slot}, {count}]: [first, second, count], not overlapping, the first before"
                )
        return swaps


Line = BlendEntry | ExchangeEntry  # of blends.jsonl


def read_blends(path: Path) -> list[Line]:
    """All lines, oldest first; see `skip_ledger.read_entries`."""

    def choose_kind(content: Any) -> type[Line]:
        return ExchangeEntry if isinstance(content, dict) and "exchange" in content else BlendEntry

    return skip_ledger.read_entries(path, choose_kind)


def blends_in_force(lines: Sequence[Line]) -> list[BlendEntry]:
    """The blends that no later line has replaced, by position; the first is at 0."""
    valid_blends: list[BlendEntry] = []
    for line in lines:
        if isinstance(line, BlendEntry):
            valid_blends = [*(e for e in valid_blends if e.position < line.position), line]
    if valid_blends and valid_blends[0].position:
        raise DataError("blends.jsonl has no line for position 0: restore it from a copy")
    return valid_blends


def exchanges_in_force(lines: Sequence[Line]) -> list[ExchangeEntry]:
    """The exchanges in force, oldest first: those since the last blend at position 0."""
    valid_exchanges: list[ExchangeEntry] = []
    for line in lines:
        if isinstance(line, ExchangeEntry):
            valid_exchanges.append(line)
        elif not line.position:
            valid_exchanges = []
    return valid_exchanges


def lines_until(lines: Sequence[Line], time: float) -> list[Line]:
    """The lines written up to a time, in seconds since 1970; lines without a time always count."""
    return [line for line in lines if line.time is None or line.time.timestamp() <= time]


def order_phases(entries: Sequence[BlendEntry]) -> list[Phase]:
    """The blends as phases of the order."""
    return [Phase(blend_entry.position // BLOCK, blend_entry.weights) for blend_entry in entries]


def moved_skips(
    entries: Sequence[AnyEntry], old: Order, new: Order, position: int, since: datetime | None = None
) -> list[SkipEntry]:
    """Ledger lines needed when `new` replaces `old` from `position` on: samples skipped by position beyond it move to
    other positions and must stay skipped. Samples skipped by identity need no line. since: lines written before
    that time were moved already."""
    by_reason: dict[str, list[tuple[int, int]]] = {}
    position_entries = [e for e in entries if isinstance(e, SkipEntry)]
    for e in position_entries:
        is_later = since is None or e.time is None or e.time >= since
        if is_later and e.corpus is None and e.end > position and e.end - e.first <= MOST:
            by_reason.setdefault(e.reason, []).append((max(e.first, position), e.end))
    known_skips = Skips.from_ranges((e.first, e.end) for e in position_entries if e.corpus is None)
    moved_entries = []
    for reason, chosen_ranges in by_reason.items():
        positions = numbers_of(Skips.from_ranges(chosen_ranges).ranges)
        new_positions = old.moved_to(new, positions)
        new_ranges = ranges_of(new_positions[~known_skips.mask_skipped(new_positions)])
        moved_entries += [
            SkipEntry(first=range_first, end=range_end, reason=reason)
            for range_first, range_end in new_ranges
        ]
    return moved_entries


class GoneStream(Stream):
    """Stand-in for a corpus that was taken out of the blend and is no longer on disk."""

    def __init__(self, share: Share, problem: str) -> None:
        self.tokens, self.remote = share.tokens, None
        self._problem = f"corpus {share.name!r}, which was taken out of the blend, is needed again: {problem}"

    def split_range(self, first: int, count: int) -> list[tuple[Shard, int, int, int]]:
        raise DataError(self._problem)
