"""What runs have read: how much of every corpus, and each step that trained on one document."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from megastable.base.errors import DataError
from megastable.base.text import count_noun
from megastable.config.recipe import find_recipe
from megastable.data.blends import GoneStream, blends_in_force
from megastable.data.order import LAST_POSITION, Order
from megastable.data.shard_format import little_endian
from megastable.data.skips import Range, Selection, Skips, numbers_of
from megastable.report.postmortem.sample_texts import Library
from megastable.report.sheet import Column, Passage, Sheet
from megastable.run.events.reading import find_latest
from megastable.run.events.stability_events import IncidentEvent
from megastable.run.record_files import LAST_STEP
from megastable_tools.forensics.history import SPANS, Done, History, blends_text
from megastable_tools.forensics.shard_set import Shelf, split_at_tokens

FEW = 1 << 24  # positions: longer ranges are not checked for earlier reads

CORPUS_COLUMNS = (
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
    library, cursor = history.library_at(), history.cursor
    order = library.source.order
    length = order.sequence_length
    samples_given = order.samples_before(cursor)
    done_steps = history.list_steps(0, LAST_STEP, SPANS)
    kept_steps = [done_step for done_step in done_steps if not done_step.undone]
    paths = {share.name: share.path for blend in blends_in_force(history.blends) for share in blend.corpora}
    corpus_rows: list[dict[str, Any]] = []
    out_of_all, current_shares = _out(history, kept_steps), order.quotas_at(cursor)
    for index, corpus in enumerate(order.corpora):
        out_ranges = Skips.from_ranges([*out_of_all, *_swapped_out(history, corpus.name, kept_steps)]).ranges
        skipped_samples = sum(
            order.samples_before(min(range_end, cursor))[index] - order.samples_before(range_first)[index]
            for range_first, range_end in out_ranges
            if range_first < cursor
        )
        read_samples = samples_given[index] - skipped_samples
        corpus_rows.append({
            "corpus": corpus.name, "weight": current_shares[index] / sum(current_shares), "samples": read_samples,
            "tokens": read_samples * length, "epochs": samples_given[index] / order.sequences[index],
            "skipped": skipped_samples, "skipped_tokens": skipped_samples * length,
            "left": -samples_given[index] % order.sequences[index], "path": paths.get(corpus.name, ""),
        })  # fmt: skip
    total = sum(corpus_row["samples"] for corpus_row in corpus_rows)
    for corpus_row in corpus_rows:
        corpus_row["share"] = corpus_row["samples"] / total if total else 0.0
    incidents = find_latest(history.run.iterate_events(IncidentEvent)).values()
    data = {
        "position": cursor, "steps": max((done_step.step for done_step in kept_steps), default=0), "samples": total,
        "tokens": total * length, "updates_refused": sum(not done_step.applied for done_step in done_steps),
        "steps_lost": sum(int(incident.get("steps_lost", 0)) for incident in incidents),
        "skipped_samples": sum(corpus_row["skipped"] for corpus_row in corpus_rows),
    }  # fmt: skip
    facts = [
        (key.replace("_", " "), f"{data[key]:,}")
        for key in ("position", "steps", "tokens", "updates_refused", "steps_lost", "skipped_samples")
    ]
    skip_reasons = history.ledger.reasons.most_common(20)
    notes = [
        f"skip ledger, {count_noun(lines, 'line')}: {skip_reason}" for skip_reason, lines in skip_reasons
    ]
    known_blends = blends_in_force(history.blends)
    if len(known_blends) > 1:
        notes += [f"blend {blend_text}" for blend_text in blends_text(known_blends)]
    return Sheet(
        title=f"{history.run.root.name}, read so far",
        lead=[
            f"{count_noun(total, 'sample')} of {length:,} tokens up to position {cursor:,}. Refused batches were "
            "read, but caused no update."
        ],
        facts=facts, columns=CORPUS_COLUMNS, rows=corpus_rows, notes=[*notes, *history.problems], data=data,
    )  # fmt: skip


def _out(history: History, done: Sequence[Done]) -> list[Range]:
    """Ranges skipped in any corpus: on the ledger, and not read before that."""
    # A sample that was released after its position was passed was not read there.
    selection = history.select_from(history.library_at(), ever=True)
    named_positions = selection.named_between(0, history.cursor)
    skipped_ranges = selection.positions.union(Skips.from_numbers(named_positions))
    inner_ranges = skipped_ranges.ranges_between(0, history.cursor)
    short_ranges = [
        (range_begin, range_end) for range_begin, range_end in inner_ranges if range_end - range_begin <= FEW
    ]
    steps_read = history.find_steps_that_read(numbers_of(short_ranges), done)
    read_ranges = [(position, position + 1) for _, read in steps_read for position in read.tolist()]
    return Skips.from_ranges([*skipped_ranges.gaps().ranges, *read_ranges]).gaps().ranges


def _swapped_out(history: History, corpus: str, done: Sequence[Done]) -> list[Range]:
    """Ranges in which a corpus was swapped out: positions read before that decision stay read."""
    order, unread_ranges = history.library_at().source.order, []
    for (swap_start, swap_end), swap_time in history.ledger.swapped_ranges(corpus):
        decision_time = -math.inf if swap_time is None else swap_time.timestamp()
        step_index = bisect_right(done, decision_time, key=lambda d: d.time)
        unread_start = max(swap_start, done[step_index - 1].next_position) if step_index else swap_start
        if 0 < step_index < len(done):
            # The step in progress.
            corpora_read = order.locate_samples(history.positions_of(done[step_index])).corpus
            if any(order.corpora[corpus_index].name == corpus for corpus_index in np.unique(corpora_read)):
                unread_start = max(unread_start, done[step_index].next_position)
        if unread_start < swap_end:
            unread_ranges.append((unread_start, swap_end))
    return unread_ranges


Int64s = npt.NDArray[np.int64]

SHOWN = 20_000  # tokens of the document that are shown
AHEAD = 50  # future positions listed

DOCUMENT_COLUMNS = (
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
    shard = shelf.find_shard(shard_name)
    if not 0 <= document < shard.documents:
        raise DataError(f"{shard.idx_path} has the documents 0 to {shard.documents - 1}, not {document}")
    first, end = shard.document_bounds(document)
    token_bytes = little_endian(shard.dtype).itemsize
    facts = [
        ("tokens", f"{end - first:,}"), ("tokens of the shard", f"[{first:,}, {end:,})"),
        ("bytes of its .bin", f"[{first * token_bytes:,}, {end * token_bytes:,})"),
    ]  # fmt: skip
    step_rows = [step_row for history in runs for step_row in _rows(history, shelf, shard_name, first, end)]
    trained_count = sum(step_row["state"] == "trained" for step_row in step_rows)
    shown_ids = shard.read_tokens(first, min(end - first, most)).tolist()
    if shown_ids and shown_ids[-1] == shelf.eod:
        shown_ids.pop()
    cut_note = f", its first {most:,} tokens" if end - first > most else ""
    document_name = f"document {document} of {shard_name}"
    head: dict[str, Any] = {"run": "", "state": "the document", "first_token": 0, "tokens": end - first}
    lead = [f"{count_noun(end - first, 'token')}."]
    if runs:
        lead.append(f"Trained on in {count_noun(trained_count, 'sample')} of {count_noun(len(runs), 'run')}.")
    notes = [] if runs else ["With --run RUN (repeatable) every step that trained on it is listed."]
    return Sheet(
        title=document_name, lead=lead, facts=facts, columns=DOCUMENT_COLUMNS, rows=[head, *step_rows],
        passages={0: [Passage(f"{document_name}{cut_note}", split_at_tokens(shown_ids, shelf.tokenizer))]},
        notes=[*notes, *([shelf.problem] if shelf.problem else []),
        *(run_problem for run_history in runs for run_problem in run_history.problems)],
        data={
            "tokens": end - first, "first_token": first, "end_token": end, "first_byte": first * token_bytes,
            "end_byte": end * token_bytes, "trained_samples": trained_count, "runs": len(runs),
        },
    )  # fmt: skip


def stream_of(library: Library, shelf: Shelf, shard: str) -> int:
    """Index of the run's corpus that a shard belongs to. Raises DataError if it is none of them."""
    streams = library.source.streams
    infos_by_index = {
        stream_index: shard_info
        for stream_index, stream in enumerate(streams)
        if not isinstance(stream, GoneStream)
        for shard_info in stream.manifest.shards
        if shard_info.name == shard
    }
    given_shard = shelf.find_shard(shard)
    given_folder = given_shard.bin_path.resolve().parent
    matching_indexes = [
        i for i in infos_by_index if find_recipe(streams[i].directory).resolve() == given_folder
    ]
    if not matching_indexes:
        # Accepts a copy elsewhere, but not another corpus with shards of the same names.
        given_sizes = given_shard.bin_bytes, given_shard.idx_bytes, given_shard.documents
        matching_indexes = [
            i
            for i, info in infos_by_index.items()
            if (info.bin_bytes, info.idx_bytes, info.documents) == given_sizes
            and given_shard.info in (None, info)
        ]
    if len(matching_indexes) != 1:
        known_streams = [run_stream for run_stream in streams if not isinstance(run_stream, GoneStream)]
        corpus_paths = ", ".join(str(run_stream.directory) for run_stream in known_streams)
        raise DataError(
            f"{given_shard.bin_path} is not the run's training data, which was {corpus_paths}; give the "
            "shard of one of these"
        )
    return matching_indexes[0]


def positions_with(order: Order, corpus: int, first: int, end: int, start: int, stop: int) -> Int64s:
    """The positions in [start, stop) whose samples hold any of the tokens [first, end) of a corpus's stream."""
    sequence_length, last_sequence = order.sequence_length, order.sequences[corpus] - 1
    sequences = np.arange(first // sequence_length, min((end - 1) // sequence_length, last_sequence) + 1)
    return order.positions_of(corpus, sequences, start, stop)


def _rows(history: History, shelf: Shelf, shard: str, first: int, end: int) -> list[dict[str, Any]]:
    run = history.run.root.name
    library = history.library_at()
    corpus = stream_of(library, shelf, shard)
    stream, order = library.source.streams[corpus], library.source.order
    at = stream.offset_of(shard, first)
    if at is None:
        return [{"run": run, "state": "not in the part that is trained on"}]
    step, cursor, selection = history.step, history.cursor, history.select_from(library)
    horizon = _horizon(history, selection, step, cursor)
    # Undone steps may have gone further than the run's current position.
    most = max(horizon, _horizon(history, selection, 0, 0))
    span = at, at + end - first
    positions = positions_with(order, corpus, *span, 0, most)
    past = positions[positions < cursor]
    future_positions = positions[(positions >= cursor) & (positions < horizon)][:AHEAD]
    found: list[dict[str, Any]] = []
    met = set[int]()

    def row(position: int, order: Order = order, **facts: Any) -> dict[str, Any]:
        place = order.locate_sample(position)
        low, high = max(place.first_token, span[0]), min(place.first_token + order.sequence_length, span[1])
        facts |= {"first_token": low - at, "tokens": high - low}
        return {"run": run, "position": position, "epoch": place.epoch, **facts}

    # The document's position when each step was done: it may have moved since.
    for era_library, steps in history.split_into_eras(history.list_steps(0, LAST_STEP, SPANS)):
        era_order, corpus_name = era_library.source.order, order.corpora[corpus].name
        era_corpora = [era_corpus.name for era_corpus in era_order.corpora]
        if corpus_name not in era_corpora:
            continue
        begin, stop = min(d.first_position for d in steps), max(d.next_position for d in steps)
        era_positions = positions_with(era_order, era_corpora.index(corpus_name), *span, begin, stop)
        for done, mine in history.find_steps_that_read(era_positions, steps):
            clock = datetime.fromtimestamp(done.time, UTC).isoformat(" ", "seconds")
            for position in mine.tolist():
                met.add(position)
                facts = {"step": done.step, "state": done.state, "loss": done.loss, "time": clock}
                found.append(row(position, era_order, **facts))
    passed_over = history.select_from(library, ever=True).mask_skipped(past)
    for position, left_out in zip(past.tolist(), passed_over.tolist(), strict=True):
        if position not in met:
            found.append(row(position, state="skipped" if left_out else "not recorded"))
    batches, furthest = history.config.batches, int(future_positions.max(initial=cursor))
    named = selection.named_between(cursor, furthest)
    passed = selection.positions.union(Skips.from_numbers(named))
    for position, left_out in zip(
        future_positions.tolist(), selection.mask_skipped(future_positions).tolist(), strict=True
    ):
        before = sum(b - range_start for range_start, b in passed.ranges_between(cursor, position))
        when = step + 1 + batches.count_steps(cursor, position - before)
        if left_out:
            found.append(row(position, state="skipped"))
        elif when <= history.config.train.steps:
            found.append(row(position, state="ahead", step=when))
    return found


def _horizon(history: History, selection: Selection, step: int, cursor: int) -> int:
    """A position beyond the recipe's remaining steps after `step`, with a tenth to spare for later skips."""
    steps_left = max(0, history.config.train.steps - step)
    positions_left = (history.config.batches.reach_after(cursor, steps_left) - cursor) / selection.kept
    horizon_end, end_before = cursor + int(1.1 * positions_left), -1
    while horizon_end > end_before:
        end_before = horizon_end
        skipped_ranges = selection.positions.ranges_between(cursor, horizon_end)
        skipped_positions = sum(range_end - range_start for range_start, range_end in skipped_ranges)
        horizon_end = min(LAST_POSITION, cursor + int(1.1 * positions_left) + skipped_positions)
    return horizon_end
