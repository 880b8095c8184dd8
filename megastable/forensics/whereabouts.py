"""One document, and every step of some runs that ever trained on it: the way back from a text to the steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megastable.data.blends import GoneStream
from megastable.data.shard_format import little_endian
from megastable.errors import DataError
from megastable.forensics.history import History
from megastable.forensics.shelf import Shelf
from megastable.forensics.spans import spans
from megastable.recipe import find
from megastable.report.postmortem.texts import Library
from megastable.report.sheet import Column, Passage, Sheet
from megastable.report.told import plural

Int64s = npt.NDArray[np.int64]

SHOWN = 20_000  # tokens of the document that are shown
AHEAD = 4  # epochs from now on that are looked at

COLUMNS = (
    Column("run", "run"),
    Column("step", "step", "count"),
    Column("state", "state", help="trained; refused; undone; skipped: passed over; ahead: not yet read"),
    Column("position", "position", "count"),
    Column("epoch", "epoch", "count"),
    Column("first_token", "first token", "count", "of the document, from 0"),
    Column("tokens", "tokens", "count"),
    Column("loss", "loss of the step", "number"),
    Column("time", "Unix time", "count", wide=True),
)


def document_sheet(shelf: Shelf, shard_name: str, document: int, runs: Sequence[History]) -> Sheet:
    """Document number `document` of a shard. Raises DataError where there is none, or a run has no such shard."""
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
    shown = shard.read(first, min(end - first, SHOWN)).tolist()
    cut = f", its first {SHOWN:,} tokens" if end - first > SHOWN else ""
    where = f"document {document} of {shard_name}"
    head: dict[str, Any] = {"run": "", "state": "the document", "first_token": 0, "tokens": end - first}
    lead = [f"{where}: {plural(end - first, 'token')}."]
    if runs:
        lead.append(f"Trained on in {plural(trained, 'sample')} of {plural(len(runs), 'run')}.")
    notes = [] if runs else ["With --run RUN (repeatable) every step that trained on it is listed."]
    return Sheet(
        title=f"{where}, {shelf.name}", lead=lead, facts=facts, columns=COLUMNS, rows=[head, *rows],
        passages={0: [Passage(f"{where}{cut}", spans(_text(shown, shelf.eod), shelf.tokenizer))]},
        notes=[*notes, *([shelf.problem] if shelf.problem else []), *(p for h in runs for p in h.problems)],
    )  # fmt: skip


def stream_of(library: Library, shelf: Shelf, shard: str) -> int:
    """Which of a run's corpora, by index, a shard belongs to. Raises DataError where it is none of them."""
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
        # A copy elsewhere, not another corpus whose shards have the same names.
        sizes = given.bin_bytes, given.idx_bytes, given.documents
        infos = {i: next(x for x in streams[i].manifest.shards if x.name == shard) for i in found}
        same = [i for i, x in infos.items() if (x.bin_bytes, x.idx_bytes, x.documents) == sizes]
    if len(same) != 1:
        names = ", ".join(corpus.name for corpus in library.source.order.corpora)
        raise DataError(f"shard {shard} belongs to {len(same)} corpora of the run, which has {names}")
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
    # To the end of this epoch, and a few more: when it comes next.
    n, cursor = order.sequences[corpus], history.cursor
    share = max(order.quotas[corpus], 1) / sum(order.quotas)
    stop = cursor + int(AHEAD * n / share) + order.block
    positions = positions_with(library, corpus, at, at + end - first, 0, stop)
    past = positions[positions < cursor]
    # Steps that were undone may have gone further than where the run is now.
    found: list[dict[str, Any]] = []
    met = set[int]()

    def row(position: int, **facts: Any) -> dict[str, Any]:
        place = order.locate_one(position)
        low, high = (
            max(place.first_token, at),
            min(place.first_token + order.sequence_length, at + end - first),
        )
        facts |= {"first_token": low - at, "tokens": high - low}
        return {"run": run, "position": position, "epoch": place.epoch, **facts}

    for done, mine in history.that_read(positions):
        for position in mine.tolist():
            met.add(position)
            found.append(row(position, step=done.step, state=done.state, loss=done.loss, time=int(done.time)))
    skipped = history.skipped
    for position in past.tolist():
        if position not in met:
            state = "skipped" if skipped.contains(position) else "not recorded"
            found.append(row(position, state=state))
    for position in positions[positions >= cursor][:50].tolist():
        found.append(row(position, state="skipped" if skipped.contains(position) else "ahead"))
    return found


def _text(ids: list[int], eod: int | None) -> list[int]:
    return ids[:-1] if ids and ids[-1] == eod else ids


def open_runs(paths: Sequence[Path]) -> list[History]:
    """Raises DataError for a directory that is no run's."""
    return [History(path) for path in paths]
