"""Account for the samples of a drilled run: bad ones that were convicted, clean ones that were lost.

Uses the run's own ledger and order, as the next process would read them, compared with the planted corruption. A
sample is its sequence in the corpus, at any position of the order: a deferred one is not lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from megastable.data.plant import Planted
from megastable.forensics.history import History
from megastable.report.postmortem.sample_texts import Library
from megastable.run.events.reading import latest
from megastable.run.events.stability_events import IncidentEvent


class Fate(BaseModel):
    """Samples of the first pass over the corpus. planted: bad ones; convicted: those of them that are skipped. lost:
    clean ones that are skipped. deferred: to be read later. documents: the planted ones; named: those of them
    that an incident names; wrong: others that one names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    planted: int = 0
    convicted: int = 0
    lost: int = 0
    deferred: int = 0
    documents: int = 0
    named: int = 0
    wrong: int = 0


def fate(run: Path, planted: Planted | None) -> Fate:
    """The fate of a started run's samples. Raises DataError if its directory or corpus cannot be read."""
    history = History(run)
    library = history.library()
    order = library.source.order
    positions = np.arange(order.sequences[0])
    out = positions[history.selection(library).mask(positions)]
    left_out = set(order.locate(out).sequence.tolist())
    bad = set[int]()
    if planted is not None:
        # In the corpus's own order, before any deferral.
        numbers = [position for first, end in planted.positions for position in range(first, end)]
        bad = set(Library(history.config).source.order.locate(numbers).sequence.tolist())
    incidents = list(latest(history.run.events(IncidentEvent)).values())
    deferred = sum(end - first for i in incidents for first, end in i.get("deferred", ()))
    named = _documents(document for i in incidents for document in i.get("documents", ()))
    guilty = _documents(d.model_dump() for d in planted.documents) if planted is not None else set()
    return Fate(
        planted=len(bad),
        convicted=len(left_out & bad),
        lost=len(left_out - bad),
        deferred=deferred,
        documents=len(guilty),
        named=len(named & guilty),
        wrong=len(named - guilty),
    )


def _documents(told: Iterable[dict[str, Any]]) -> set[tuple[str, str, int]]:
    return {(d["corpus"], d["shard"], d["document"]) for d in told}
