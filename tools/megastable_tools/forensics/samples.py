"""Sheets of samples: the batch of a step, or the samples of an incident, document by document."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megastable.base.errors import DataError
from megastable.base.text import count_noun, describe_deferral, show_ranges
from megastable.data.samples import DocumentPart, parts_by_position
from megastable.data.skips import Skips, numbers_of
from megastable.report.postmortem.journal import named_when
from megastable.report.postmortem.sample_texts import Library
from megastable.report.sheet import Column, Passage, Sheet
from megastable_tools.forensics.history import History
from megastable_tools.forensics.shard_set import split_at_tokens

Int64s = npt.NDArray[np.int64]
# positions [n] -> nats [n, sequence length]
TokenLosses = Callable[[Library, Int64s], npt.NDArray[np.floating]]

MOST = 200_000  # samples of one sheet

COLUMNS = (
    Column("step", "step", "count"),
    Column("state", "state", help="trained; refused: the update was not applied; undone: the run was rewound past it"),
    Column("bad", "bad", help="found bad in an incident"),
    Column("deferred", "deferred", help="deferred: the sample is read again later"),
    Column("position", "position", "count", "absolute number of the sample in the run"),
    Column("loss", "loss", "number", "nats per token of the sample, where it was recorded or measured"),
    Column("z", "z", "number", "its loss relative to ordinary ones, in robust standard deviations", wide=True),
    Column("gradient_norm", "gradient", "number", "norm of the sample's gradient, if measured", wide=True),
    Column("corpus", "corpus"),
    Column("epoch", "epoch", "count", "of the corpus, from 0", wide=True),
    Column("shard", "shard"),
    Column("document", "document", "count", "number of the document in its shard"),
    Column("first", "first token", "count", "of the document that the sample holds, counted in the document from 0"),
    Column("end", "end", "count", "the token of the document behind the last one that the sample holds", wide=True),
    Column("tokens", "tokens", "count", "of the document that the sample holds"),
    Column("of_tokens", "of", "count", "tokens of the whole document", wide=True),
    Column("first_byte", "first byte", "count", "in the shard's .bin", wide=True),
    Column("bytes", "bytes", "count", wide=True),
    Column("skipped", "skipped now", help="on the skip ledger by now", wide=True),
)  # fmt: skip


def step_sheet(
    history: History, first: int, last: int, texts: int, losses: TokenLosses | None = None
) -> Sheet:
    """The samples of the steps [first, last], for every execution. texts: number of rows with text.

    Raises DataError for steps that were not recorded.
    """
    done_steps = history.require_steps(first, last)
    rows: list[dict[str, Any]] = []
    text_passages: dict[int, list[Passage]] = {}
    sample_count = 0
    for done_step_now in done_steps:
        positions = history.positions_of(done_step_now)
        sample_count += positions.size
        if sample_count > MOST:
            raise DataError(
                f"steps {first} to {last} have more than {MOST:,} samples: look at fewer at a time"
            )
        step_library = history.library_at(done_step_now.time)
        recorded = dict(zip(done_step_now.worst_positions, done_step_now.worst_losses))
        step_facts = {"step": done_step_now.step, "state": done_step_now.state}
        _add(history, step_library, positions, step_facts, recorded, texts, losses, rows, text_passages)
    which = f"step {first}" if first == last else f"steps {first} to {last}"
    step_lines = [
        f"step {d.step}: loss {d.loss:.3f}, gradient norm {d.grad_norm:.3g}, {d.state}"
        for d in done_steps[:20]
    ]
    repeated_steps = len(done_steps) - len({d.step for d in done_steps})
    lead_lines = [f"{count_noun(sample_count, 'sample')}, {count_noun(_documents(rows), 'document')}."]
    if repeated_steps:
        lead_lines.append("The run was rewound: repeated steps are listed each time.")
    sheet_data = {
        "samples": sample_count, "documents": _documents(rows),
        "steps": [{"step": d.step, "loss": d.loss, "grad_norm": d.grad_norm, "state": d.state} for d in done_steps],
    }  # fmt: skip
    return Sheet(
        title=f"{history.run.root.name}, {which}", lead=[*lead_lines, *step_lines], columns=_columns(rows), rows=rows,
        passages=text_passages, notes=_notes(history, losses), legend="loss of a token",
        counts=("position", "sample"), data=sheet_data,
    )  # fmt: skip


def incident_sheet(history: History, number: int, texts: int, losses: TokenLosses | None = None) -> Sheet:
    """The samples of an incident: bad ones first, then the others of the steps from its onset on.

    Raises DataError for a number that does not exist.
    """
    incident, told, _ = history.incident(number)
    sample_rows: list[dict[str, Any]] = []
    text_passages: dict[int, list[Passage]] = {}
    steps = [d for d in history.list_steps(incident.onset, incident.step) if d.time <= told[0]["time"] + 1]
    recorded = {p: loss for d in steps for p, loss in zip(d.worst_positions, d.worst_losses)}
    by_step = {p: d for d in steps for p in history.positions_of(d).tolist()}
    bad_skips = Skips.from_ranges(incident.positions)
    named_size = bad_skips.union(Skips.from_ranges(incident.deferred)).count()
    if named_size > MOST:
        raise DataError(f"incident {number} has {named_size:,} positions: look at its steps, a few at a time")
    # Each by the order of its time, and with its role.
    parts_named = [
        (history.library_at(naming_time), numbers_of(some), kind)
        for naming_time, skipped_ranges, deferred_ranges in named_when(told)
        for some, kind in ((skipped_ranges, "skipped"), (deferred_ranges, "deferred"))
        if some
    ]
    left_out = np.concatenate([np.empty(0, np.int64), *(numbers for _, numbers, _ in parts_named)])
    others = np.setdiff1d(np.array(list(by_step), dtype=np.int64), left_out)
    measured_losses = {p: s.loss for p, s in history.suspects.items() if s.loss is not None}
    notes = _notes(history, losses)
    if left_out.size + others.size > MOST:
        others = others[-max(0, MOST - left_out.size) :] if left_out.size < MOST else others[:0]
        notes.append(f"Of the other samples of the same steps only the last {others.size:,} are shown.")

    def facts(position: int, kind: str) -> dict[str, Any]:
        done_step = by_step.get(position)
        return {
            "step": done_step.step if done_step else None,
            "state": done_step.state if done_step else "unread",
            "bad": kind == "skipped" and bad_skips.contains(position) if incident.bad else None,
            "deferred": kind == "deferred" if incident.deferred else None,
        }

    parts_named.sort(key=lambda part: part[2] == "deferred")  # after those that were skipped
    for part_library, positions, kind in [*parts_named, (history.library_at(told[0]["time"]), others, "")]:
        if kind:
            worst_first = [-measured_losses.get(p, recorded.get(p, -np.inf)) for p in positions.tolist()]
            positions = positions[np.argsort(worst_first, kind="stable")]
        facts_of = partial(facts, kind=kind)
        _add(history, part_library, positions, facts_of, recorded, texts, losses, sample_rows, text_passages)
    count = bad_skips.count()
    bad_rows = [r for r in sample_rows if not r["deferred"] and bad_skips.contains(r["position"])]
    document_count = _documents(bad_rows)
    found = "bad" if incident.bad else "left out"
    where_text = f"positions {show_ranges(incident.positions) or 'none'}"
    documents_text = count_noun(document_count, "document")
    bad_text = f"{count_noun(count, 'sample')} {found} ({where_text}), of {documents_text}"
    left = describe_deferral(incident.deferred, incident.returns, incident.lost)
    what_text = "; ".join([*([bad_text] if count or not left else []), *([left] if left else [])])
    lead = [
        f"Step {incident.onset}, acted on at step {incident.step}: {incident.verdict}, {incident.kind}, cause: "
        f"{incident.cause}; {incident.outcome}.",
        f"{what_text}; {count_noun(others.size, 'other sample')} of the same steps below them.",
        *incident.reasons[-2:],
    ]
    return Sheet(
        title=f"{history.run.root.name}, incident {number}", lead=lead, columns=_columns(sample_rows), rows=sample_rows,
        passages=text_passages, notes=notes, legend="loss of a token", counts=("position", "sample"),
        data={"samples_named": count, "other_samples": int(others.size), "incident": incident.model_dump(mode="json")},
    )  # fmt: skip


def step_range(text: str) -> tuple[int, int]:
    """STEP or STEP-STEP. Raises DataError for anything else."""
    first, dash, last_text = text.partition("-")
    if not first.isdecimal() or (dash and not last_text.isdecimal()) or int(last_text or first) < int(first):
        raise DataError(f"{text!r} is not a step or a range of steps: write 120 or 120-122")
    return int(first), int(last_text or first)


def losses_under(checkpoint: Path | None) -> TokenLosses | None:
    """Token losses under a checkpoint, for colours. Imports torch only if there is a checkpoint."""
    if checkpoint is None:
        return None
    from megastable_tools.forensics.scoring.losses import losses_under

    return losses_under(checkpoint)


def _add(
    history: History, library: Library, positions: Int64s,
    facts: Mapping[str, Any] | Callable[[int], Mapping[str, Any]], recorded: Mapping[int, float], texts: int,
    losses: TokenLosses | None, rows: list[dict[str, Any]], passages: dict[int, list[Passage]],
) -> None:  # fmt: skip
    """Add a row for every part of a document in every sample, and the text of the first `texts` rows."""
    order = library.source.order
    sample_places = order.locate_samples(positions)
    skipped_now = history.left_out(library, positions)
    parts_of_position = parts_by_position(library.source, positions)
    for sample_index, position in enumerate(positions.tolist()):
        suspect = history.suspects.get(position)
        sample_tokens = heat = None
        if len(rows) < texts:
            sample_tokens = library.source.read_raw_sample(position)
            if losses is not None and sample_tokens.min() >= 0 and sample_tokens.max() < library.vocabulary:
                heat = losses(library, positions[sample_index : sample_index + 1])[0]
        sample_loss = suspect.loss if suspect and suspect.loss is not None else recorded.get(position)
        sample_facts = {
            **(facts(position) if callable(facts) else facts),
            "position": position,
            "loss": float(heat.mean()) if sample_loss is None and heat is not None else sample_loss,
            "z": suspect.z if suspect else None,
            "gradient_norm": suspect.gradient_norm if suspect else None,
            "corpus": order.corpora[int(sample_places.corpus[sample_index])].name,
            "epoch": int(sample_places.epoch[sample_index]),
            "skipped": bool(skipped_now[sample_index]),
        }
        for document_part in parts_of_position[position]:
            if sample_tokens is not None and len(rows) < texts:
                passages[len(rows)] = [_passage(library, document_part, sample_tokens, heat)]
            document, (first, end) = document_part.document, document_part.own_span
            rows.append(sample_facts | {
                "shard": document.shard, "document": document.document, "first": first, "end": end,
                "tokens": document_part.tokens, "of_tokens": document.tokens,
                "first_byte": document_part.first_byte, "bytes": document_part.bytes,
            })  # fmt: skip


def _passage(
    library: Library, part: DocumentPart, tokens: Int64s, heat: npt.NDArray[np.floating] | None
) -> Passage:
    inside = slice(part.offset, part.offset + part.tokens)
    part_ids, own_losses = tokens[inside].tolist(), None
    if heat is not None:
        # The loss at index i is that of token i + 1: the first token of a sample has none of its own.
        own_losses = np.concatenate([[np.nan], heat])[inside].tolist()
    if part_ids and part_ids[-1] == library.source.eod:
        part_ids, own_losses = part_ids[:-1], own_losses[:-1] if own_losses is not None else None
    part_document = part.document
    first, span_end = part.own_span
    where = f"document {part_document.document} of {part_document.shard}, its tokens {first:,} to {span_end - 1:,} of "
    where += f"{part_document.tokens:,}"
    return Passage(where, split_at_tokens(part_ids, library.tokenizer, own_losses))


def _documents(rows: Sequence[Mapping[str, Any]]) -> int:
    return len({(r["corpus"], r["shard"], r["document"]) for r in rows})


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """The columns with content."""
    return [c for c in COLUMNS if any(sample_row.get(c.key) is not None for sample_row in rows)]


def _notes(history: History, losses: TokenLosses | None) -> list[str]:
    notes = list(history.problems)
    if losses is None:
        notes.append("With --checkpoint the tokens are coloured by their loss.")
    return notes
