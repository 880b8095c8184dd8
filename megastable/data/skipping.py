"""Reads and persists the skips of a run: rank 0 reads and writes the ledger, all ranks get the same selection.

Only rank 0 reads the ledger, so that all ranks see the same lines, and broadcasts it, pickled. All methods but
`foreign` are collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megastable.base.collectives import first
from megastable.base.errors import DataError, SpaceError
from megastable.config.tree import RunConfig
from megastable.data.append_only import LedgerEntry, append_all
from megastable.data.order import Order
from megastable.data.skip_ledger import SkipLedger
from megastable.data.skips import Exclusions, Identity, Selection
from megastable.run.directory import RunDirectory


def persist(path: Path, entries: Sequence[LedgerEntry], what: str) -> None:
    """Add lines to a ledger, on disk when this returns. Raises SpaceError on all ranks if they cannot be written."""

    def write() -> None:
        try:
            append_all(path, entries)
        except DataError as error:
            raise SpaceError(
                f"{error}. What {what} is not written down: make room and start again; the run goes on from its newest "
                "checkpoint, and meets it again"
            ) from None

    first(write)


class Skipping:
    """Of one process of a run: data.skip of the recipe, and skips.jsonl."""

    def __init__(self, config: RunConfig, run: RunDirectory) -> None:
        self._more = config.data.skip
        self._ledger = SkipLedger(run.skips)
        self._excluded = Exclusions()

    def check(self, strict: bool) -> None:
        """strict: raise DataError for a malformed line, when a person has started the run and can fix it."""
        self._excluded, odd = first(self._ledger.read)
        if strict and odd:
            raise DataError(odd[0])

    def selection(self, order: Order, strict: bool = True) -> Selection:
        """The samples left in `order`. Raises DataError as `check` and `Selection` do, if `strict`."""
        if not strict:
            return self.usable(order)[0]
        self.check(strict)
        return Selection(order, self._excluded, self._more)

    def usable(self, order: Order) -> tuple[Selection, list[str]]:
        """As `selection`, but during a run, which a malformed line does not end: such lines are ignored, and their
        problems are the second result."""
        self._excluded, odd = first(lambda: self._ledger.usable(order, self._more))
        return Selection(order, self._excluded, self._more), odd

    def foreign(self, order: Order) -> dict[Identity, int]:
        """Corpora that lines of the last read name tokens of, and how many, but that are not in `order`."""
        mine = {Identity(corpus.name, corpus.fingerprint) for corpus in order.corpora}
        return {key: of.count() for key, of in self._excluded.tokens.items() if key not in mine}
