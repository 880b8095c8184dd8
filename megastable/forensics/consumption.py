"""What a run has read so far: samples, tokens and epochs of every corpus, and what it left out, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from megastable.data.blends import in_force
from megastable.data.skips import Range, Skips
from megastable.forensics.history import SPANS, History, blends_text
from megastable.report.postmortem.passes import LAST
from megastable.report.sheet import Column, Sheet
from megastable.report.told import plural

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
    rows: list[dict[str, Any]] = []
    total = 0
    for index, corpus in enumerate(order.corpora):
        out = _samples(_out(history, corpus.name), index, order.samples_before, cursor)
        samples = given[index] - out
        total += samples
        path = next(
            (s.path for e in reversed(history.blends) for s in e.corpora if s.name == corpus.name), ""
        )
        rows.append({
            "corpus": corpus.name, "weight": order.quotas[index] / sum(order.quotas), "samples": samples,
            "tokens": samples * length, "epochs": given[index] / order.sequences[index], "skipped": out,
            "skipped_tokens": out * length, "left": -given[index] % order.sequences[index], "path": path,
        })  # fmt: skip
    for row in rows:
        row["share"] = row["samples"] / total if total else 0.0
    done = history.steps(0, LAST, SPANS)
    last = [d for d in done if not d.undone]
    refused = [d for d in last if not d.applied]
    undone = [d for d in done if d.undone]
    facts = [
        ("position", f"{cursor:,}"), ("steps", f"{max((d.step for d in last), default=0):,}"),
        ("tokens", f"{total * length:,}"), ("refused batches", f"{len(refused):,}"),
        ("steps undone", f"{len(undone):,}"), ("skipped samples", f"{sum(r['skipped'] for r in rows):,}"),
    ]  # fmt: skip
    reasons = Counter(e.reason for e in history.ledger)
    notes = [f"skip ledger, {plural(count, 'line')}: {reason}" for reason, count in reasons.most_common(20)]
    blends = in_force(history.blends)
    if len(blends) > 1:
        notes += [f"blend {text}" for text in blends_text(blends)]
    return Sheet(
        title=f"{history.run.root.name}, read so far",
        lead=[
            f"{plural(total, 'sample')} of {length:,} tokens up to position {cursor:,}. Refused batches were read, but "
            "no update was made of them."
        ],
        facts=facts, columns=COLUMNS, rows=rows, notes=[*notes, *history.problems],
    )  # fmt: skip


def _out(history: History, corpus: str) -> list[Range]:
    told = ((e.first, e.end) for e in history.ledger if e.corpus in (None, corpus))
    return Skips.of([*history.config.data.skip, *told]).ranges


def _samples(ranges: Sequence[Range], corpus: int, before: Any, cursor: int) -> int:
    """How many samples of a corpus are in `ranges`, up to `cursor`."""
    inside = ((first, min(end, cursor)) for first, end in ranges if first < cursor)
    return sum(before(end)[corpus] - before(first)[corpus] for first, end in inside)
