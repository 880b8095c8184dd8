"""Trace one document to every step of some runs that trained on it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from megastable.base.errors import DataError
from megastable.base.text import plural
from megastable.config.recipe import find
from megastable.data.blends import GoneStream
from megastable.data.order import LAST_POSITION, Order
from megastable.data.shard_format import little_endian
from megastable.data.skips import Selection, Skips
from megastable.report.postmortem.sample_texts import Library
from megastable.report.sheet import Column, Passage, Sheet
from megastable.run.record_files import LAST_STEP
from megastable_tools.forensics.history import SPANS, History
from megastable_tools.forensics.shard_set import Shelf
from megastable_tools.forensics.spans import spans

Int64s = npt.NDArray[np.int64]

SHOWN = 20_000  # tokens of the document that are shown
AHEAD = 50  # future positions listed

COLUMNS = (
    Column("run", "run"),
    Column("step", "step", "count"),
    Column("state", "state", help="trained; refused; undone; skipped: not trained on; ahead: not yet read"),
    Column("position", "position", "count"),
    Column("epoch", "epoch", "count"),
    Column("first_token", "first token", "count", "of the document, from 0"),
    Column("tokens", "tokens", "count"),
    Column("loss", "loss of the step", "number"),
    Column("time", "time", wide=True),
)


def document_sheet(
    shelf: Shelf, shard_name: str, document: int, runs: Sequence[History], most: int = SHOWN
) -> Sheet:
    """Document number `document` of a shard, with its first `most` tokens as text.

    Raises DataError if there is none, or a run has no such shard.
    """
    shard = shelf.shard(shard_name)
    if not 0 <= document < shard.documents:
        raise DataError(f"{shard.idx_path} has the documents 0 to {shard.documents - 1}, not {document}")
    first, end = shard.document_bounds(document)
    width = little_endian(shard.dtype).itemsize
    facts = [
        ("tokens", f"{end - first:,}"), ("tokens of the shard", f"[{first:,}, {end:,})"),
        ("bytes of its .bin", f"[{first * width:,}, {end * width:,})"),
    ]  # fmt: skip
    rows = [row for history in runs for row in _rows(history, shelf, shard_name, first, end)]
    trained = sum(row["state"] == "trained" for row in rows)
    shown = shard.read(first, min(end - first, most)).tolist()
    cut = f", its first {most:,} tokens" if end - first > most else ""
    where = f"document {document} of {shard_name}"
    head: dict[str, Any] = {"run": "", "state": "the document", "first_token": 0, "tokens": end - first}
    lead = [f"{plural(end - first, 'token')}."]
    if runs:
        lead.append(f"Trained on in {plural(trained, 'sample')} of {plural(len(runs), 'run')}.")
    notes = [] if runs else ["With --run RUN (repeatable) every step that trained on it is listed."]
    return Sheet(
        title=where, lead=lead, facts=facts, columns=COLUMNS, rows=[head, *rows],
        passages={0: [Passage(f"{where}{cut}", spans(_text(shown, shelf.eod), shelf.tokenizer))]},
        notes=[*notes, *([shelf.problem] if shelf.problem else []), *(p for h in runs for p in h.problems)],
        data={
            "tokens": end - first, "first_token": first, "end_token": end, "first_byte": first * width,
            "end_byte": end * width, "trained_samples": trained, "runs": len(runs),
        },
    )  # fmt: skip


def stream_of(library: Library, shelf: Shelf, shard: str) -> int:
    """Index of the run's corpus that a shard belongs to. Raises DataError if it is none of them."""
    streams = library.source.streams
    found = [
        index
        for index, stream in enumerate(streams)
        if not isinstance(stream, GoneStream) and any(info.name == shard for info in stream.manifest.shards)
    ]
    given = shelf.shard(shard)
    here = given.bin_path.resolve().parent
    same = [i for i in found if find(streams[i].directory).resolve() == here]
    if not same:
        # Accepts a copy elsewhere, but not another corpus with shards of the same names.
        infos = {i: next(x for x in streams[i].manifest.shards if x.name == shard) for i in found}
        if given.info is not None:
            same = [i for i, x in infos.items() if x == given.info]
        else:
            sizes = given.bin_bytes, given.idx_bytes, given.documents
            same = [i for i, x in infos.items() if (x.bin_bytes, x.idx_bytes, x.documents) == sizes]
    if len(same) != 1:
        paths = ", ".join(str(s.directory) for s in streams if not isinstance(s, GoneStream))
        raise DataError(
            f"{given.bin_path} is not the run's training data, which was {paths}; give the shard of one of these"
        )
    return same[0]


def positions_with(library: Library, corpus: int, first: int, end: int, start: int, stop: int) -> Int64s:
    """The positions in [start, stop) whose samples hold any of the tokens [first, end) of a corpus's stream."""
    order = library.source.order
    length, last = order.sequence_length, order.sequences[corpus] - 1
    sequences = np.arange(first // length, min((end - 1) // length, last) + 1)
    return order.positions_of(corpus, sequences, start, stop)


def _rows(history: History, shelf: Shelf, shard: str, first: int, end: int) -> list[dict[str, Any]]:
    run = history.run.root.name
    library = history.library()
    corpus = stream_of(library, shelf, shard)
    stream, order = library.source.streams[corpus], library.source.order
    at = stream.offset_of(shard, first)
    if at is None:
        return [{"run": run, "state": "not in the part that is trained on"}]
    step, cursor, selection = history.step, history.cursor, history.selection(library)
    horizon = _horizon(history, selection, step, cursor)
    # Undone steps may have gone further than the run's current position.
    most = max(horizon, _horizon(history, selection, 0, 0))
    span = at, at + end - first
    positions = positions_with(library, corpus, *span, 0, most)
    past = positions[positions < cursor]
    ahead = positions[(positions >= cursor) & (positions < horizon)][:AHEAD]
    found: list[dict[str, Any]] = []
    met = set[int]()

    def row(position: int, order: Order = order, **facts: Any) -> dict[str, Any]:
        place = order.locate_one(position)
        low, high = max(place.first_token, span[0]), min(place.first_token + order.sequence_length, span[1])
        facts |= {"first_token": low - at, "tokens": high - low}
        return {"run": run, "position": position, "epoch": place.epoch, **facts}

    # The document's position when each step was done: it may have moved since.
    for then, steps in history.eras(history.steps(0, LAST_STEP, SPANS)):
        names = [c.name for c in then.source.order.corpora]
        if order.corpora[corpus].name not in names:
            continue
        begin, stop = min(d.first_position for d in steps), max(d.next_position for d in steps)
        there = positions_with(then, names.index(order.corpora[corpus].name), *span, begin, stop)
        for done, mine in history.that_read(there, steps):
            for position in mine.tolist():
                met.add(position)
                facts = {"step": done.step, "state": done.state, "loss": done.loss, "time": _clock(done.time)}
                found.append(row(position, then.source.order, **facts))
    passed_over = history.selection(library, ever=True).mask(past)
    for position, left_out in zip(past.tolist(), passed_over.tolist(), strict=True):
        if position not in met:
            found.append(row(position, state="skipped" if left_out else "not recorded"))
    batches, furthest = history.config.batches, int(ahead.max(initial=cursor))
    named = selection.named_between(cursor, furthest)
    passed = selection.positions.union(Skips.of_numbers(named))
    for position, left_out in zip(ahead.tolist(), selection.mask(ahead).tolist(), strict=True):
        before = sum(b - a for a, b in passed.between(cursor, position))
        when = step + 1 + batches.steps(cursor, position - before)
        if left_out:
            found.append(row(position, state="skipped"))
        elif when <= history.config.train.steps:
            found.append(row(position, state="ahead", step=when))
    return found


def _horizon(history: History, selection: Selection, step: int, cursor: int) -> int:
    """A position beyond the recipe's remaining steps after `step`, with a tenth to spare for later skips."""
    steps = max(0, history.config.train.steps - step)
    left = (history.config.batches.reach(cursor, steps) - cursor) / selection.kept
    end, before = cursor + int(1.1 * left), -1
    while end > before:
        before = end
        skipped = sum(last - first for first, last in selection.positions.between(cursor, end))
        end = min(LAST_POSITION, cursor + int(1.1 * left) + skipped)
    return end


def _clock(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).isoformat(" ", "seconds")


def _text(ids: list[int], eod: int | None) -> list[int]:
    return ids[:-1] if ids and ids[-1] == eod else ids
