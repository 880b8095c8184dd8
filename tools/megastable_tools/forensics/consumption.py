"""Report a run's data consumption: samples, tokens and epochs of every corpus, and skipped samples with reasons."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np

from megastable.base.text import plural
from megastable.data.blends import in_force
from megastable.data.skips import Range, Skips, numbers_of
from megastable.report.sheet import Column, Sheet
from megastable.run.events.reading import latest
from megastable.run.events.stability_events import IncidentEvent
from megastable.run.record_files import LAST_STEP
from megastable_tools.forensics.history import SPANS, Done, History, blends_text

FEW = 1 << 24  # positions: longer ranges are not checked for earlier reads

COLUMNS = (
    Column("corpus", "corpus"),
    Column("weight", "share now", "share", "of the blend"),
    Column("share", "share so far", "share", "of what was read"),
    Column("samples", "samples", "count"),
    Column("tokens", "tokens", "count"),
    Column("epochs", "epochs", "number", "times through the corpus"),
    Column("skipped", "skipped samples", "count"),
    Column("skipped_tokens", "skipped tokens", "count", wide=True),
    Column("left", "left in this epoch", "count", "samples"),
    Column("path", "path", wide=True),
)


def run_sheet(history: History) -> Sheet:
    """Tokens by corpus up to the run's cursor. Raises DataError where ledger or corpora cannot be read."""
    library, cursor = history.library(), history.cursor
    order = library.source.order
    length = order.sequence_length
    given = order.samples_before(cursor)
    done = history.steps(0, LAST_STEP, SPANS)
    last = [d for d in done if not d.undone]
    rows: list[dict[str, Any]] = []
    total = 0
    out_of_all, now = _out(history, last), order.quotas_at(cursor)
    for index, corpus in enumerate(order.corpora):
        ranges = Skips.of([*out_of_all, *_swapped_out(history, corpus.name, last)]).ranges
        out = _samples(ranges, index, order.samples_before, cursor)
        samples = given[index] - out
        total += samples
        path = next(
            (s.path for e in reversed(in_force(history.blends)) for s in e.corpora if s.name == corpus.name),
            "",
        )
        rows.append({
            "corpus": corpus.name, "weight": now[index] / sum(now), "samples": samples,
            "tokens": samples * length, "epochs": given[index] / order.sequences[index], "skipped": out,
            "skipped_tokens": out * length, "left": -given[index] % order.sequences[index], "path": path,
        })  # fmt: skip
    for row in rows:
        row["share"] = row["samples"] / total if total else 0.0
    refused = [d for d in done if not d.applied]
    lost = sum(int(i.get("steps_lost", 0)) for i in latest(history.run.events(IncidentEvent)).values())
    facts = [
        ("position", f"{cursor:,}"), ("steps", f"{max((d.step for d in last), default=0):,}"),
        ("tokens", f"{total * length:,}"), ("updates refused", f"{len(refused):,}"),
        ("steps lost", f"{lost:,}"), ("skipped samples", f"{sum(r['skipped'] for r in rows):,}"),
    ]  # fmt: skip
    data = {
        "position": cursor, "steps": max((d.step for d in last), default=0), "samples": total, "tokens": total * length,
        "updates_refused": len(refused), "steps_lost": lost, "skipped_samples": sum(r["skipped"] for r in rows),
    }  # fmt: skip
    reasons = history.ledger.reasons.most_common(20)
    notes = [f"skip ledger, {plural(count, 'line')}: {reason}" for reason, count in reasons]
    blends = in_force(history.blends)
    if len(blends) > 1:
        notes += [f"blend {text}" for text in blends_text(blends)]
    return Sheet(
        title=f"{history.run.root.name}, read so far",
        lead=[
            f"{plural(total, 'sample')} of {length:,} tokens up to position {cursor:,}. Refused batches were read, but "
            "caused no update."
        ],
        facts=facts, columns=COLUMNS, rows=rows, notes=[*notes, *history.problems], data=data,
    )  # fmt: skip


def _out(history: History, done: Sequence[Done]) -> list[Range]:
    """Ranges skipped in any corpus: on the ledger, and not read before that."""
    # A sample that was released after its position was passed was not read there.
    selection = history.selection(history.library(), ever=True)
    named = selection.named_between(0, history.cursor)
    told = selection.positions.union(Skips.of_numbers(named))
    few = [(first, end) for first, end in told.between(0, history.cursor) if end - first <= FEW]
    positions = numbers_of(few)
    read = (p for _, mine in history.that_read(positions, done) for p in mine.tolist())
    return Skips.of([*told.gaps().ranges, *((p, p + 1) for p in read)]).gaps().ranges


def _swapped_out(history: History, corpus: str, done: Sequence[Done]) -> list[Range]:
    """Ranges in which a corpus was swapped out: positions read before that decision stay read."""
    order, found = history.library().source.order, []
    for (begin, end), time in history.ledger.swaps(corpus):
        then = -math.inf if time is None else time.timestamp()
        at = bisect_right(done, then, key=lambda d: d.time)
        first = max(begin, done[at - 1].next_position) if at else begin
        if 0 < at < len(done):
            # The step in progress.
            places = order.locate(history.positions(done[at])).corpus
            if any(order.corpora[index].name == corpus for index in np.unique(places)):
                first = max(first, done[at].next_position)
        if first < end:
            found.append((first, end))
    return found


def _samples(ranges: Sequence[Range], corpus: int, before: Any, cursor: int) -> int:
    """How many samples of a corpus are in `ranges`, up to `cursor`."""
    inside = ((first, min(end, cursor)) for first, end in ranges if first < cursor)
    return sum(before(end)[corpus] - before(first)[corpus] for first, end in inside)
