"""Scan a run's data ahead of training and skip clearly corrupt samples before they can cause a spike:
`data.look_ahead`.

    python -m megastable_tools.forensics.prescan RUN RECIPE [key=value ...]

The supervisor starts it beside the training, on a spare core. Every skip is journaled with its evidence, and there is
a budget: if a scan finds half of the data odd, the scan is wrong, or a person is needed.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from megastable.base.errors import user_errors
from megastable.base.spared_output import spare_output
from megastable.base.text import plural, ranges, visible
from megastable.config import recipe
from megastable.config.tree import RunConfig
from megastable.data.blends import Line, read_blends
from megastable.data.order import Order
from megastable.data.skip_ledger import SkipLedger, append_all, sample_entries
from megastable.data.skips import Selection, ranges_of
from megastable.report.postmortem.sample_texts import Library
from megastable.run.beside_arguments import beside_arguments
from megastable.run.directory import RunDirectory, read_object
from megastable.run.events.data_events import LookAheadFailed, LookAheadSpent, LookedAhead
from megastable.run.events.event import whole
from megastable.run.log import RunLog
from megastable_tools.forensics.ahead import COUNTED, FoundPart, Lookout, passage
from megastable_tools.forensics.places import checkpoint_cursor
from megastable_tools.prepare.coming import batches_ahead

Int64s = npt.NDArray[np.int64]

REASON = "looked ahead: "  # prefix of the reasons written here
FREE = 64  # positions that may be skipped before the share is limited
PAUSE = 1.0  # seconds between two looks
CHUNK = 1 << 19  # tokens after which findings are written
SHOWN, EXCERPT = 8, 100  # pieces of evidence, and characters of each


class Scout:
    """The scan of one run. `looked` is the position up to which it has looked, from `begin` on; `seen` samples in
    all."""

    def __init__(self, config: RunConfig, run: RunDirectory) -> None:
        self.config, self.run, self.settings = config, run, config.data.look_ahead
        self.log = RunLog(run, partial(print, flush=True))
        self.looked = self.begin = self.seen = 0
        self._used = 0  # samples skipped from `begin` on
        self._ledger = SkipLedger(run.skips)
        self._selection: tuple[object, Selection] | None = None
        self._blends: list[Line] | None = None
        self._lookout: Lookout | None = None
        self._spent = False

    def look(self) -> bool:
        """Scan some of the coming samples; whether there was anything new. Raises MegastableError."""
        lookout, cursor = self._ready(), self._cursor()
        order, batches = lookout.source.order, self.config.batches
        if not self.looked or cursor < self.begin:
            self.begin = self.looked = cursor  # the first look, or the run was rewound past it
            self._used = self._skipped_before()
        self.looked = max(self.looked, cursor)
        selection = self._left(order)
        ahead = batches_ahead(selection, batches, cursor, self.settings.steps)
        end = int(ahead[-1][-1]) + 1 if ahead else cursor
        if self.looked >= end:
            return False
        positions, after = selection.next_kept(self.looked, max(1, CHUNK // order.sequence_length))
        positions = positions[positions < end]
        self.looked, self.seen = min(after, end), self.seen + positions.size
        if positions.size:
            self._skip(self._clear(lookout.look(positions, self.settings.score)))
        return True

    def _ready(self) -> Lookout:
        """The lookout for the current data order, which may change during training."""
        blends = read_blends(self.run.blends)
        if self._lookout is None or blends != self._blends:
            # The first line only repeats the recipe.
            if self._lookout is None or self._blends:
                self.looked, self._lookout = 0, Lookout(Library(self.config, blends))
            self._blends = blends
        return self._lookout

    def _cursor(self) -> int:
        """The run's position. Before it trains, where it will begin: a previous process's position is outdated."""
        told = read_object(self.run.progress)
        cursor = None if told.get("phase") in ("starting", "ended") else whole(told.get("cursor"))
        return checkpoint_cursor(self.run, max) if cursor is None else cursor

    def _left(self, order: Order) -> Selection:
        """The selection by the ledger, read again only if it changed: it may be long. The run reports invalid lines."""
        try:
            found = self.run.skips.stat()
            state = found.st_size, found.st_mtime_ns, order
        except OSError:
            state = 0, 0, order
        if self._selection is None or state != self._selection[0]:
            more = self.config.data.skip
            self._selection = state, Selection(order, self._ledger.usable(order, more)[0], more)
        return self._selection[1]

    def _skipped_before(self) -> int:
        """Number of samples from `begin` on skipped by an earlier scan, or by this one before a rewind."""
        told = [r for event in self.run.events(LookedAhead) for r in event.positions]
        return sum(end - first for first, end in told if first >= self.begin)

    def _clear(self, found: Sequence[FoundPart]) -> dict[int, list[FoundPart]]:
        """The samples with enough corrupt tokens, by position."""
        kinds, by_position = set(self.settings.kinds), dict[int, list[FoundPart]]()
        for one in found:
            if one.kind in kinds:
                by_position.setdefault(one.position, []).append(one)
        least = max(COUNTED, self.settings.share * self.config.model.sequence_length)
        return {p: some for p, some in by_position.items() if sum(one.odd for one in some) >= least}

    def _skip(self, clear: dict[int, list[FoundPart]]) -> None:
        # The budget is a share of what was scanned, independent of the run's length and of earlier skips.
        left = FREE + int(self.settings.most * self.seen) - self._used
        chosen = dict(list(clear.items())[: max(0, left)])
        if len(chosen) < len(clear) and not self._spent:
            self.log.emit(LookAheadSpent(
                found=len(clear), left=max(0, left), used=self._used, looked=self.looked,
                evidence=self._evidence(list(clear.values())[len(chosen) :]),
            ))  # fmt: skip
        self._spent = len(chosen) < len(clear)
        if not chosen:
            return
        kinds = Counter(max(some, key=lambda one: one.score).kind for some in chosen.values())
        what = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        positions = ranges_of(sorted(chosen))
        documents = dict.fromkeys(one.document for some in chosen.values() for one in some)
        assert self._lookout is not None
        order = self._lookout.source.order
        append_all(self.run.skips, sample_entries(order, np.array(sorted(chosen)), REASON + what, documents))
        self._used += len(chosen)
        event = LookedAhead(
            positions=positions, samples=len(chosen), kinds=dict(kinds), looked=self.looked,
            documents=[document.model_dump() for document in list(documents)[:200]],
            evidence=self._evidence(list(chosen.values())), budget_left=left - len(chosen),
        )  # fmt: skip
        self.log.emit(
            event,
            say=f"ahead of the run: {plural(len(chosen), 'sample')} of {plural(len(documents), 'document')} will be "
            f"skipped in every epoch, positions {ranges(positions, 4)} ({what})",
        )

    def _evidence(self, found: Sequence[Sequence[FoundPart]]) -> list[dict[str, object]]:
        assert self._lookout is not None
        worst = sorted((max(some, key=lambda one: one.score) for some in found), key=lambda one: -one.score)
        return [
            {
                "position": one.position, "shard": one.document.shard, "document": one.document.document,
                "score": round(one.score, 1), "kind": one.kind, "odd_tokens": one.odd, "why": one.why,
                "text": visible(passage(self._lookout.library, one).text, EXCERPT),
            }
            for one in worst[:SHOWN]
        ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    args = beside_arguments("megastable_tools.forensics.prescan", __doc__, arguments)
    spare_output()
    with user_errors():
        scout = Scout(recipe.load(args.recipe, args.overrides), RunDirectory(args.run))
        try:
            while os.getppid() == args.parent:  # end with the supervisor in any case
                if not scout.look():
                    time.sleep(PAUSE)
        except Exception as error:
            scout.log.emit(LookAheadFailed(problem=f"{type(error).__name__}: {error}"))
            raise


if __name__ == "__main__":
    main()
