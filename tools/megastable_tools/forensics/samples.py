"""Sheets of samples: the batch of a step, or the samples of an incident, document by document."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megastable.base.errors import DataError
from megastable.base.text import plural, put_off, ranges
from megastable.data.documents import DocumentPart, parts_by_position
from megastable.data.skips import Skips, numbers_of
from megastable.report.postmortem.facts import IncidentFacts
from megastable.report.postmortem.journal import Journal, named_when, summary_of
from megastable.report.postmortem.sample_texts import Library
from megastable.report.sheet import Column, Passage, Sheet
from megastable_tools.forensics.history import History
from megastable_tools.forensics.spans import spans

Int64s = npt.NDArray[np.int64]
TokenLosses = Callable[
    [Library, Int64s], npt.NDArray[np.floating]
]  # positions [n] -> nats [n, sequence length]

MOST = 200_000  # samples of one sheet

COLUMNS = (
    Column("step", "step", "count"),
    Column("state", "state", help="trained; refused: the update was not applied; undone: the run was rewound past it"),
    Column("guilty", "guilty", help="found guilty of an incident"),
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
    done = history.at(first, last)
    rows: list[dict[str, Any]] = []
    passages: dict[int, list[Passage]] = {}
    total = 0
    for one in done:
        positions = history.positions(one)
        total += positions.size
        if total > MOST:
            raise DataError(
                f"steps {first} to {last} have more than {MOST:,} samples: look at fewer at a time"
            )
        library = history.library(one.time)
        recorded = dict(zip(one.worst_positions, one.worst_losses))
        facts = {"step": one.step, "state": one.state}
        _add(history, library, positions, facts, recorded, texts, losses, rows, passages)
    which = f"step {first}" if first == last else f"steps {first} to {last}"
    times = [
        f"step {d.step}: loss {d.loss:.3f}, gradient norm {d.grad_norm:.3g}, {d.state}" for d in done[:20]
    ]
    again = len(done) - len({d.step for d in done})
    lead = [f"{plural(total, 'sample')}, {plural(_documents(rows), 'document')}."]
    if again:
        lead.append("The run was rewound: repeated steps are listed each time.")
    data = {
        "samples": total, "documents": _documents(rows),
        "steps": [{"step": d.step, "loss": d.loss, "grad_norm": d.grad_norm, "state": d.state} for d in done],
    }  # fmt: skip
    return Sheet(
        title=f"{history.run.root.name}, {which}", lead=[*lead, *times], columns=_columns(rows), rows=rows,
        passages=passages, notes=_notes(history, losses), legend="loss of a token",
        counts=("position", "sample"), data=data,
    )  # fmt: skip


def incident_sheet(history: History, number: int, texts: int, losses: TokenLosses | None = None) -> Sheet:
    """The samples of an incident: guilty ones first, then the others of the steps from its onset on.

    Raises DataError for a number that does not exist.
    """
    journal = Journal(history.run)
    if number not in journal.own:
        known = ranges([(n, n + 1) for n in sorted(journal.own)]) or "none"
        raise DataError(
            f"{history.run.journal}: there is no incident {number}; those of this run: {known}. Of a spike without "
            f"an incident (a dry run, the guard off) `megastable inspect step {history.run.root} STEP` shows the "
            f"samples and `megastable prune plan CORPUS --step {history.run.root}:STEP --spans` plans what to remove"
        )
    told = [journal.events[index] for index in journal.own[number]]
    incident = IncidentFacts.model_validate(summary_of(told[-1]))
    rows: list[dict[str, Any]] = []
    passages: dict[int, list[Passage]] = {}
    steps = [d for d in history.steps(incident.onset, incident.step) if d.time <= told[0]["time"] + 1]
    recorded = {p: loss for d in steps for p, loss in zip(d.worst_positions, d.worst_losses)}
    by_step = {p: d for d in steps for p in history.positions(d).tolist()}
    guilty = Skips.of(incident.positions)
    size = guilty.union(Skips.of(incident.deferred)).count()
    if size > MOST:
        raise DataError(f"incident {number} has {size:,} positions: look at its steps, a few at a time")
    # Each by the order of its time, and with its role.
    given = [
        (history.library(time), numbers_of(some), kind)
        for time, skipped, deferred in named_when(told)
        for some, kind in ((skipped, "guilty"), (deferred, "deferred"))
        if some
    ]
    left_out = np.concatenate([np.empty(0, np.int64), *(numbers for _, numbers, _ in given)])
    others = np.setdiff1d(np.array(list(by_step), dtype=np.int64), left_out)
    measured = {p: s.loss for p, s in history.suspects.items() if s.loss is not None}
    notes = _notes(history, losses)
    if left_out.size + others.size > MOST:
        others = others[-max(0, MOST - left_out.size) :] if left_out.size < MOST else others[:0]
        notes.append(f"Of the other samples of the same steps only the last {others.size:,} are shown.")

    def facts(position: int, kind: str) -> dict[str, Any]:
        step = by_step.get(position)
        return {
            "step": step.step if step else None,
            "state": step.state if step else "unread",
            "guilty": kind == "guilty" and guilty.contains(position) if incident.guilty else None,
            "deferred": kind == "deferred" if incident.deferred else None,
        }

    given.sort(key=lambda part: part[2], reverse=True)  # guilty ones first
    for library, positions, kind in [*given, (history.library(told[0]["time"]), others, "")]:
        if kind:
            worst = [-measured.get(p, recorded.get(p, -np.inf)) for p in positions.tolist()]
            positions = positions[np.argsort(worst, kind="stable")]
        of = partial(facts, kind=kind)
        _add(history, library, positions, of, recorded, texts, losses, rows, passages)
    count = guilty.count()
    documents = _documents([r for r in rows if not r["deferred"]], guilty.contains)
    found = "guilty" if incident.guilty else "left out"
    where = f"positions {ranges(incident.positions) or 'none'}"
    named = f"{plural(count, 'sample')} {found} ({where}), of {plural(documents, 'document')}"
    left = put_off(incident.deferred, incident.returns, incident.lost)
    what = "; ".join([*([named] if count or not left else []), *([left] if left else [])])
    lead = [
        f"Step {incident.onset}, acted on at step {incident.step}: {incident.verdict}, {incident.kind}, cause: "
        f"{incident.cause}; {incident.outcome}.",
        f"{what}; {plural(others.size, 'other sample')} of the same steps below them.",
        *incident.reasons[-2:],
    ]
    return Sheet(
        title=f"{history.run.root.name}, incident {number}", lead=lead, columns=_columns(rows), rows=rows,
        passages=passages, notes=notes, legend="loss of a token", counts=("position", "sample"),
        data={"samples_named": count, "other_samples": int(others.size), "incident": incident.model_dump(mode="json")},
    )  # fmt: skip


def step_range(text: str) -> tuple[int, int]:
    """STEP or STEP-STEP. Raises DataError for anything else."""
    first, dash, last = text.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) < int(first):
        raise DataError(f"{text!r} is not a step or a range of steps: write 120 or 120-122")
    return int(first), int(last or first)


def losses_under(checkpoint: Path | None) -> TokenLosses | None:
    """Token losses under a checkpoint, for colours. Imports torch only if there is a checkpoint."""
    if checkpoint is None:
        return None
    from megastable_tools.forensics.scoring.losses import losses_under

    return losses_under(checkpoint)


def _add(
    history: History,
    library: Library,
    positions: Int64s,
    facts: Mapping[str, Any] | Callable[[int], Mapping[str, Any]],
    recorded: Mapping[int, float],
    texts: int,
    losses: TokenLosses | None,
    rows: list[dict[str, Any]],
    passages: dict[int, list[Passage]],
) -> None:
    """Add a row for every part of a document in every sample, and the text of the first `texts` rows."""
    order = library.source.order
    places = order.locate(positions)
    now = history.left_out(library, positions)
    of = parts_by_position(library.source, positions)
    for index, position in enumerate(positions.tolist()):
        suspect = history.suspects.get(position)
        tokens = heat = None
        if len(rows) < texts:
            tokens = library.source.raw_sample(position)
            if losses is not None and tokens.min() >= 0 and tokens.max() < library.vocabulary:
                heat = losses(library, positions[index : index + 1])[0]
        loss = suspect.loss if suspect and suspect.loss is not None else recorded.get(position)
        sample = {
            **(facts(position) if callable(facts) else facts),
            "position": position,
            "loss": float(heat.mean()) if loss is None and heat is not None else loss,
            "z": suspect.z if suspect else None,
            "gradient_norm": suspect.gradient_norm if suspect else None,
            "corpus": order.corpora[int(places.corpus[index])].name,
            "epoch": int(places.epoch[index]),
            "skipped": bool(now[index]),
        }
        for part in of[position]:
            if tokens is not None and len(rows) < texts:
                passages[len(rows)] = [_passage(library, part, tokens, heat)]
            rows.append(sample | _place(part))


def _place(part: DocumentPart) -> dict[str, Any]:
    d, (first, end) = part.document, part.own_span
    return {
        "shard": d.shard, "document": d.document, "first": first, "end": end, "tokens": part.tokens,
        "of_tokens": d.tokens, "first_byte": part.first_byte, "bytes": part.bytes,
    }  # fmt: skip


def _passage(
    library: Library, part: DocumentPart, tokens: Int64s, heat: npt.NDArray[np.floating] | None
) -> Passage:
    ids = tokens[part.offset : part.offset + part.tokens].tolist()
    # The loss at index i is that of token i + 1: the first token of a sample has none of its own.
    own = None
    if heat is not None:
        shifted = np.concatenate([[np.nan], heat])[part.offset : part.offset + part.tokens]
        own = shifted.tolist()
    if ids and ids[-1] == library.source.eod:
        ids, own = ids[:-1], own[:-1] if own is not None else None
    d = part.document
    first, end = part.own_span
    where = f"document {d.document} of {d.shard}, its tokens {first:,} to {end - 1:,} of {d.tokens:,}"
    return Passage(where, spans(ids, library.tokenizer, own))


def _documents(rows: Sequence[Mapping[str, Any]], chosen: Callable[[int], bool] = lambda _: True) -> int:
    return len({(r["corpus"], r["shard"], r["document"]) for r in rows if chosen(r["position"])})


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """The columns with content."""
    return [c for c in COLUMNS if any(row.get(c.key) is not None for row in rows)]


def _notes(history: History, losses: TokenLosses | None) -> list[str]:
    notes = list(history.problems)
    if losses is None:
        notes.append("With --checkpoint the tokens are coloured by their loss.")
    return notes
