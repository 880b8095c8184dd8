"""Make a pruning plan: documents, or spans of them, from an incident, from steps or positions of a run, from a scan's
findings, or from a list."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from megastable.base import durable
from megastable.base.errors import DataError
from megastable.base.text import count_noun, show_ranges
from megastable.config.recipe import read_yaml
from megastable.data.blends import BlendEntry
from megastable.data.manifest import Manifest
from megastable.data.samples import DocumentPart, parts_by_position
from megastable.data.shards import Shard
from megastable.data.skips import Skips, numbers_of
from megastable.run.events.data_events import OrderChanged
from megastable_tools.forensics.pruning.gaps import Span
from megastable_tools.forensics.pruning.prune_plan import (
    EXCERPT,
    Loss,
    Removal,
    format_plan,
    read_plan,
    sum_up_loss,
)
from megastable_tools.forensics.shard_set import Shelf, open_shelf

if TYPE_CHECKING:
    from megastable.report.postmortem.sample_texts import Library
    from megastable_tools.forensics.history import History

MOST = 10_000_000  # positions of an incident or a range: more cannot be a window of training
BEGINNING = 64  # tokens of a document in its excerpt


class Why(NamedTuple):
    """The evidence against a document; at: the token of the shard where it begins, None for the document's beginning.
    spans: the parts of the document to remove; None for all of it."""

    shard: str
    document: int
    text: str
    at: int | None = None
    spans: Sequence[Span] | None = None


def make_plan(
    corpus: Path,
    output: Path,
    *,
    lists: Sequence[Path] = (),
    incidents: Sequence[str] = (),
    steps: Sequence[str] = (),
    positions: Sequence[str] = (),
    scan: Path | None = None,
    score: float | None = None,
    kinds: Sequence[str] = (),
    duplicates: bool = False,
    spans: bool = False,
    most: float = 1.0,
    overwrite: bool = False,
) -> tuple[list[Removal], Loss]:
    """Write a plan for `corpus` to the file `output`, in the order of the corpus. Returns the plan,
    and what the corpus would lose.

    incidents: RUN:NUMBER each; steps, positions: RUN:FIRST or RUN:FIRST-LAST each, with all samples of these steps or
    positions; score, kinds, duplicates: which findings of the scan (`scan.suspects`). spans: of the documents of an
    incident, of steps and positions remove only the tokens of the samples, of a scan's findings only the odd spans.
    Raises DataError for unreadable input, input of another corpus, an empty selection, a list of whole documents with
    `spans`, or a plan for more than `most` of the corpus.
    """
    if output.exists() and not overwrite:
        raise DataError(f"{output} exists already: choose another --output, or replace it with --overwrite")
    if not lists and not incidents and not steps and not positions and scan is None:
        raise DataError(
            "no documents are selected: give --incident RUN:NUMBER, --step RUN:STEP, --positions RUN:FIRST-LAST, "
            "--scan FOLDER or --list FILE"
        )
    if scan is None and (score is not None or kinds or duplicates):
        raise DataError("--score, --kind and --duplicates select findings of a scan: give it with --scan")
    shelf = open_shelf([corpus])
    if shelf.manifest is None or shelf.directory is None:
        raise DataError(f"{corpus} is not a corpus with a manifest: megastable prepare manifest makes it one")
    reasons_found = list[Why]()
    for list_path in lists:
        reasons_found += _listed(list_path, shelf.directory, shelf.manifest, spans)
    for incident in incidents:
        reasons_found += _of_incident(incident, shelf.manifest, spans)
    for range_named in steps:
        reasons_found += _of_steps(range_named, shelf.manifest, spans)
    for range_named in positions:
        reasons_found += _of_positions(range_named, shelf.manifest, spans)
    if scan is not None:
        reasons_found += _suspects(corpus, shelf, shelf.manifest, scan, score, kinds, duplicates, spans)
    removals = list(_removals(shelf, reasons_found))
    if not removals:
        only = ", only what begins or ends one, which stays" if reasons_found else ""
        raise DataError(f"no document of {corpus} is named{only}: there is nothing to plan")
    loss = sum_up_loss(removals, shelf.manifest)
    # The plan is not yet written, so its lines cannot be deleted.
    cut = "" if spans else "cut only what is bad (plan --spans, or first:end in a list)"
    narrower = "narrow what it is made of (the list, the steps, --score, --kind)"
    loss.check_limit(most, "the plan", narrower, cut)
    durable.write_output(output, format_plan(removals, shelf.directory.resolve(), shelf.manifest))
    return removals, loss


def _listed(path: Path, directory: Path, manifest: Manifest, spans: bool) -> Iterator[Why]:
    list_plan = read_plan(path)
    for shard, shard_removals in list_plan.check_removals(directory, manifest, twice=True).items():
        if spans and shard_removals.documents.size:
            line = next(line for line in list_plan.lines[shard] if line.span is None)
            raise DataError(
                f"{path} line {line.number} names all of document {line.document} of {shard}, and --spans takes spans "
                "only: write SHARD DOCUMENT FIRST:END (inspect step --csv has the columns), or leave out --spans"
            )
        for document in shard_removals.touched.tolist():
            yield Why(shard, document, f"listed in {path.name}", spans=shard_removals.spans.get(document))


def _suspects(
    corpus: Path, shelf: Shelf, manifest: Manifest, folder: Path, score: float | None, kinds: Sequence[str],
    duplicates: bool, spans: bool,
) -> Iterator[Why]:  # fmt: skip
    from megastable_tools.forensics.scanning.scanned import Scan, find_suspects, odd_spans

    loaded_scan = Scan.load_result(folder)
    if score is None and not kinds and not duplicates:
        score_advice = "" if loaded_scan.advised is None else f" {loaded_scan.advised:g}, which is its advice"
        raise DataError(
            f"{folder}: none of its findings are selected: give --score{score_advice}, --kind or --duplicates"
        )
    if loaded_scan.fingerprint != manifest.fingerprint():
        raise DataError(
            f"{folder} is the scan of another corpus, or {corpus} has changed since: scan {corpus}, then plan again"
        )
    for suspect in find_suspects(folder, score, kinds or None, duplicates):
        suspect_reason = f"{suspect.kind}, score {suspect.score:.2f}: {suspect.why}"
        odd_parts = None if not spans or suspect.copy else odd_spans(folder, shelf, suspect, score)
        yield Why(suspect.shard, suspect.document, suspect_reason, suspect.piece, odd_parts)


def _of_incident(named: str, manifest: Manifest, spans: bool) -> Iterator[Why]:
    """The documents of `manifest` at the positions of an incident; spans: only the parts in its samples."""
    history, number_text = _run_of(named, "incident", "run and number, e.g. runs/quickstart:1")
    run, number = history.run.root, int(number_text) if number_text.isdecimal() else 0
    if not number:
        raise DataError(f"incident {named!r}: give run and number, e.g. runs/quickstart:1")
    incident, told, _ = history.incident(number)
    opening_time = float(told[0]["time"])
    if any(order_event["time"] > opening_time for order_event in history.run.iterate_events(OrderChanged)):
        raise DataError(
            f"{run}: the order of its data changed after incident {number}, whose positions mean other samples now: "
            f"name the documents in a list; those of its report are in {run}/incidents/{number:04d}/documents.csv"
        )
    evidence = f"incident {number} ({incident.verdict}, cause {incident.cause})"
    positions = _numbers(incident.positions, f"incident {number} of {run}")
    yield from _at(history, history.library_at(opening_time), positions, manifest, evidence, spans)


def _of_steps(named: str, manifest: Manifest, spans: bool) -> Iterator[Why]:
    """As `_of_incident`, of all samples that some steps read, each time that they were done."""
    from megastable_tools.forensics.samples import step_range

    history, steps_text = _run_of(named, "steps", "run and steps, e.g. runs/quickstart:90-91")
    steps_done = history.require_steps(*step_range(steps_text))
    for done_step in steps_done:
        history.library_at(done_step.time)  # refuses a step of another order, which `eras` leaves out
    for library, era_steps in history.split_into_eras(steps_done):
        for step in dict.fromkeys(done_step.step for done_step in era_steps):
            repeats = [done_step for done_step in era_steps if done_step.step == step]
            positions = np.unique(np.concatenate([history.positions_of(done_step) for done_step in repeats]))
            yield from _at(history, library, positions, manifest, f"step {step} of {history.run.root}", spans)


def _of_positions(named: str, manifest: Manifest, spans: bool) -> Iterator[Why]:
    """As `_of_incident`, of the samples at positions first to last, which the run's present order has there."""
    history, text = _run_of(named, "positions", "run and positions, e.g. runs/quickstart:1908-1947")
    first, dash, last_text = text.partition("-")
    if not first.isdecimal() or (dash and not last_text.isdecimal()) or int(last_text or first) < int(first):
        raise DataError(
            f"positions {named!r}: give the first and the last one, e.g. runs/quickstart:1908-1947"
        )
    wanted = _numbers([(int(first), int(last_text or first) + 1)], f"positions {text} of {history.run.root}")
    yield from _at(history, history.library_at(), wanted, manifest, f"positions of {history.run.root}", spans)


def _run_of(named: str, what: str, form: str) -> tuple[History, str]:
    """The run before the last colon of `named`, and what is behind it."""
    from megastable_tools.forensics.history import History

    run_path, _, named_text = named.rpartition(":")
    if not run_path or not named_text:
        raise DataError(f"{what} {named!r}: give {form}")
    return History(Path(run_path)), named_text


def _numbers(spans: Sequence[tuple[int, int]], what: str) -> npt.NDArray[np.int64]:
    if sum(range_end - range_start for range_start, range_end in spans) > MOST:
        raise DataError(f"{what}: more than {MOST:,} positions: name the documents in a list")
    return numbers_of(spans)


def _at(
    history: History, library: Library, positions: npt.NDArray[np.int64], manifest: Manifest, evidence: str, spans: bool
) -> Iterator[Why]:  # fmt: skip
    """The documents of `manifest` in the samples at `positions` of the order of `library`; spans: only the parts in
    these samples. evidence: what names the samples. Raises DataError if the run did not train on that corpus."""
    fingerprint, run_root = manifest.fingerprint(), history.run.root
    blends = [entry for entry in history.blends if isinstance(entry, BlendEntry)]
    trained = {corpus_share.fingerprint for blend in blends for corpus_share in blend.corpora}
    trained |= set(read_yaml(history.run.recipe).get("manifests") or [])
    source = library.source
    own_indexes = [
        corpus_index for corpus_index, corpus in enumerate(source.order.corpora)
        if corpus.name == manifest.name and source.streams[corpus_index].manifest.fingerprint() == fingerprint
    ]  # fmt: skip
    if not own_indexes or (trained and fingerprint not in trained):
        names = ", ".join(corpus.name for corpus in source.order.corpora)
        raise DataError(
            f"{run_root} did not train on this corpus as it is now (it trained on {names}; this is {manifest.name}, "
            f"fingerprint {fingerprint[:12]}...): give the corpus that its recipe.yaml names, unchanged"
        )
    positions = positions[source.order.locate_samples(positions).corpus == own_indexes[0]]
    parts: dict[tuple[str, int], list[tuple[int, DocumentPart]]] = {}
    for position, position_parts in parts_by_position(source, positions).items():
        for position_part in position_parts:
            parts.setdefault((position_part.document.shard, position_part.document.document), []).append(
                (position, position_part)
            )
    for part_key, document_parts in parts.items():
        sample_positions = sorted({position for position, _ in document_parts})
        places_text = show_ranges(
            [(sample_position, sample_position + 1) for sample_position in sample_positions], most=3
        )
        reason_text = f"{evidence}: in {count_noun(len(sample_positions), 'sample')}, at {places_text}"
        inside_spans = [part.own_span for _, part in document_parts]
        yield Why(*part_key, reason_text, document_parts[0][1].first_token, inside_spans if spans else None)


def _removals(shelf: Shelf, found: Iterable[Why]) -> Iterator[Removal]:
    """One removal for each document, or for each span of it, in the order of the corpus, with all evidence."""
    bos = None if shelf.manifest is None else shelf.manifest.tokenizer.bos
    reasons_by_shard: dict[str, dict[int, list[Why]]] = {}
    for why in found:
        reasons_by_shard.setdefault(why.shard, {}).setdefault(why.document, []).append(why)
    for shard in shelf.shards:
        for document, of in sorted(reasons_by_shard.get(shard.name, {}).items()):
            first, end = shard.document_bounds(document)
            texts = "; ".join(dict.fromkeys(why.text for why in of))
            # A document's begin and end tokens stay, or go with all of it.
            count = end - first
            text_end = count - int(count > 0 and int(shard.read_raw(end - 1, 1)[0]) == shelf.eod)
            bos_tokens = int(text_end > 0 and bos is not None and int(shard.read_raw(first, 1)[0]) == bos)
            if all(why.spans for why in of):
                spans = Skips.from_edges(np.array([span for why in of for span in why.spans or ()])).ranges
                if spans[-1][1] > count:
                    raise DataError(
                        f"document {document} of {shard.name} has {count_noun(count, 'token')}, a list names a span of "
                        f"it up to {spans[-1][1]}: correct it"
                    )
                spans = [(max(span_begin, bos_tokens), min(stop, text_end)) for span_begin, stop in spans]
                spans = [(span_begin, stop) for span_begin, stop in spans if span_begin < stop]
            else:
                spans = [(bos_tokens, text_end)]
            if spans[:1] == [(bos_tokens, text_end)]:
                excerpt_start = next((why.at for why in of if why.at is not None), first)
                excerpt = _excerpt(shelf, shard, first, excerpt_start, end)
                yield Removal(shard.name, document, count, texts, excerpt)
                continue
            for span_begin, stop in spans:
                excerpt = _excerpt(shelf, shard, first, first + span_begin, first + stop)
                yield Removal(shard.name, document, stop - span_begin, texts, excerpt, (span_begin, stop))


def _excerpt(shelf: Shelf, shard: Shard, first: int, at: int, end: int) -> str:
    """The text from token `at` on, before `end`, of a document that begins at `first`."""
    excerpt_ids = shard.read_raw(at, min(end - at, BEGINNING)).tolist()
    if shelf.tokenizer is not None and all(0 <= token < shelf.tokenizer.vocab_size for token in excerpt_ids):
        excerpt_text = " ".join(shelf.tokenizer.decode(excerpt_ids).split())[: EXCERPT + 1]
    else:
        excerpt_text = " ".join(map(str, excerpt_ids))
    return "…" * (at > first) + excerpt_text
