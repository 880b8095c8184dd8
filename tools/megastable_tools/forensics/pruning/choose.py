"""Make a pruning plan: documents, or spans of them, from an incident, from steps or positions of a run, from a scan's
findings, or from a list."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megastable.base import durable
from megastable.base.errors import DataError
from megastable.base.text import plural, ranges
from megastable.config.recipe import read_yaml
from megastable.data.blends import BlendEntry
from megastable.data.documents import DocumentPart, parts_by_position
from megastable.data.manifest import Manifest
from megastable.data.shards import Shard
from megastable.data.skips import Skips, numbers_of
from megastable.run.events.data_events import OrderChanged
from megastable.run.events.event import Event
from megastable.run.events.stability_events import IncidentEvent
from megastable_tools.forensics.pruning.gaps import Span
from megastable_tools.forensics.pruning.prune_plan import EXCERPT, Removal, loss_of, read_plan, text_of
from megastable_tools.forensics.pruning.token_loss import Loss
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
    found = list[Why]()
    for path in lists:
        found += _listed(path, shelf.directory, shelf.manifest, spans)
    for incident in incidents:
        found += _of_incident(incident, shelf.manifest, spans)
    for named in steps:
        found += _of_steps(named, shelf.manifest, spans)
    for named in positions:
        found += _of_positions(named, shelf.manifest, spans)
    if scan is not None:
        found += _suspects(corpus, shelf, shelf.manifest, scan, score, kinds, duplicates, spans)
    removals = list(_removals(shelf, found))
    if not removals:
        only = ", only what begins or ends one, which stays" if found else ""
        raise DataError(f"no document of {corpus} is named{only}: there is nothing to plan")
    loss = loss_of(removals, shelf.manifest)
    # The plan is not yet written, so its lines cannot be deleted.
    cut = "" if spans else "cut only what is bad (plan --spans, or first:end in a list)"
    loss.check(most, "the plan", "narrow what it is made of (the list, the steps, --score, --kind)", cut)
    durable.write_output(output, text_of(removals, shelf.directory.resolve(), shelf.manifest))
    return removals, loss


def _listed(path: Path, directory: Path, manifest: Manifest, spans: bool) -> Iterator[Why]:
    plan = read_plan(path)
    for shard, named in plan.checked(directory, manifest, twice=True).items():
        if spans and named.documents.size:
            line = next(line for line in plan.lines[shard] if line.span is None)
            raise DataError(
                f"{path} line {line.number} names all of document {line.document} of {shard}, and --spans takes spans "
                "only: write SHARD DOCUMENT FIRST:END (inspect step --csv has the columns), or leave out --spans"
            )
        for document in named.touched.tolist():
            yield Why(shard, document, f"listed in {path.name}", spans=named.spans.get(document))


def _suspects(
    corpus: Path,
    shelf: Shelf,
    manifest: Manifest,
    folder: Path,
    score: float | None,
    kinds: Sequence[str],
    duplicates: bool,
    spans: bool,
) -> Iterator[Why]:
    from megastable_tools.forensics.scanning.scanned import Scan, odd_spans, suspects

    found = Scan.load(folder)
    if score is None and not kinds and not duplicates:
        advice = "" if found.advised is None else f" {found.advised:g}, which is its advice"
        raise DataError(
            f"{folder}: none of its findings are selected: give --score{advice}, --kind or --duplicates"
        )
    if found.fingerprint != manifest.fingerprint():
        raise DataError(
            f"{folder} is the scan of another corpus, or {corpus} has changed since: scan {corpus}, then plan again"
        )
    for suspect in suspects(folder, score, kinds or None, duplicates):
        why = f"{suspect.kind}, score {suspect.score:.2f}: {suspect.why}"
        odd = None if not spans or suspect.copy else odd_spans(folder, shelf, suspect, score)
        yield Why(suspect.shard, suspect.document, why, suspect.piece, odd)


def _of_incident(incident: str, manifest: Manifest, spans: bool) -> Iterator[Why]:
    """The documents of `manifest` at the positions of an incident; spans: only the parts in its samples."""
    history, text = _run_of(incident, "incident", "run and number, e.g. runs/quickstart:1")
    run, number = history.run.root, int(text) if text.isdecimal() else 0
    if not number:
        raise DataError(f"incident {incident!r}: give run and number, e.g. runs/quickstart:1")
    summary, time = _summary(history.run.events(IncidentEvent, OrderChanged), number, str(run))
    told = [(int(first), int(end)) for first, end in summary.get("positions") or []]
    what = f"incident {number}"
    evidence = f"{what} ({summary.get('verdict')}, cause {summary.get('cause')})"
    yield from _at(
        history, history.library(time), _numbers(told, f"{what} of {run}"), manifest, evidence, spans
    )


def _of_steps(named: str, manifest: Manifest, spans: bool) -> Iterator[Why]:
    """As `_of_incident`, of all samples that some steps read, each time that they were done."""
    from megastable_tools.forensics.samples import step_range

    history, text = _run_of(named, "steps", "run and steps, e.g. runs/quickstart:90-91")
    done = history.at(*step_range(text))
    for one in done:
        history.library(one.time)  # refuses a step of another order, which `eras` leaves out
    for library, some in history.eras(done):
        for step in dict.fromkeys(one.step for one in some):
            read = [history.positions(one) for one in some if one.step == step]
            positions = np.unique(np.concatenate(read))
            yield from _at(history, library, positions, manifest, f"step {step} of {history.run.root}", spans)


def _of_positions(named: str, manifest: Manifest, spans: bool) -> Iterator[Why]:
    """As `_of_incident`, of the samples at positions first to last, which the run's present order has there."""
    history, text = _run_of(named, "positions", "run and positions, e.g. runs/quickstart:1908-1947")
    first, dash, last = text.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) < int(first):
        raise DataError(
            f"positions {named!r}: give the first and the last one, e.g. runs/quickstart:1908-1947"
        )
    wanted = _numbers([(int(first), int(last or first) + 1)], f"positions {text} of {history.run.root}")
    yield from _at(history, history.library(), wanted, manifest, f"positions of {history.run.root}", spans)


def _run_of(named: str, what: str, form: str) -> tuple[History, str]:
    """The run before the last colon of `named`, and what is behind it."""
    from megastable_tools.forensics.history import History

    run, _, text = named.rpartition(":")
    if not run or not text:
        raise DataError(f"{what} {named!r}: give {form}")
    return History(Path(run)), text


def _numbers(spans: Sequence[tuple[int, int]], what: str) -> npt.NDArray[np.int64]:
    if sum(end - first for first, end in spans) > MOST:
        raise DataError(f"{what}: more than {MOST:,} positions: name the documents in a list")
    return numbers_of(spans)


def _at(
    history: History,
    library: Library,
    positions: npt.NDArray[np.int64],
    manifest: Manifest,
    evidence: str,
    spans: bool,
) -> Iterator[Why]:
    """The documents of `manifest` in the samples at `positions` of the order of `library`; spans: only the parts in
    these samples. evidence: what names the samples. Raises DataError if the run did not train on that corpus."""
    fingerprint, run = manifest.fingerprint(), history.run.root
    trained = {
        share.fingerprint
        for blend in history.blends
        if isinstance(blend, BlendEntry)
        for share in blend.corpora
    }
    trained |= set(read_yaml(history.run.recipe).get("manifests") or [])
    source = library.source
    mine = [
        index for index, corpus in enumerate(source.order.corpora)
        if corpus.name == manifest.name and source.streams[index].manifest.fingerprint() == fingerprint
    ]  # fmt: skip
    if not mine or (trained and fingerprint not in trained):
        names = ", ".join(corpus.name for corpus in source.order.corpora)
        raise DataError(
            f"{run} did not train on this corpus as it is now (it trained on {names}; this is {manifest.name}, "
            f"fingerprint {fingerprint[:12]}...): give the corpus that its recipe.yaml names, unchanged"
        )
    positions = positions[source.order.locate(positions).corpus == mine[0]]
    parts: dict[tuple[str, int], list[tuple[int, DocumentPart]]] = {}
    for position, some in parts_by_position(source, positions).items():
        for part in some:
            parts.setdefault((part.document.shard, part.document.document), []).append((position, part))
    for key, found in parts.items():
        where = sorted({position for position, _ in found})
        places = ranges([(position, position + 1) for position in where], most=3)
        text = f"{evidence}: in {plural(len(where), 'sample')}, at {places}"
        inside = [part.own_span for _, part in found]
        yield Why(*key, text, found[0][1].first_token, inside if spans else None)


def _summary(events: Iterable[Event], number: int, run: str) -> tuple[dict[str, Any], float]:
    """The content of an incident's last event, and its time."""
    found, time, known, changed = None, 0.0, set[int](), 0.0
    for event in events:
        if isinstance(event, OrderChanged):
            changed = float(event.get("time") or 0.0)
        elif isinstance(event.get("summary"), dict):
            known.add(int(event.get("number") or 0))
            if event.get("number") == number:
                # The order in force when it was noticed.
                found, time = event["summary"], time or float(event.get("time") or 0.0)
    if found is None:
        there = ", ".join(map(str, sorted(known))) or "none"
        raise DataError(
            f"{run} has no incident {number}: its journal knows {there}; for a spike without an incident name its "
            f"steps, --step {run}:FIRST-LAST"
        )
    if changed > time:
        raise DataError(
            f"{run}: the order of its data changed after incident {number}, whose positions mean other samples now: "
            f"name the documents in a list; those of its report are in {run}/incidents/{number:04d}/documents.csv"
        )
    return found, time


def _removals(shelf: Shelf, found: Iterable[Why]) -> Iterator[Removal]:
    """One removal for each document, or for each span of it, in the order of the corpus, with all evidence."""
    bos = None if shelf.manifest is None else shelf.manifest.tokenizer.bos
    reasons: dict[str, dict[int, list[Why]]] = {}
    for why in found:
        reasons.setdefault(why.shard, {}).setdefault(why.document, []).append(why)
    for shard in shelf.shards:
        for document, of in sorted(reasons.get(shard.name, {}).items()):
            first, end = shard.document_bounds(document)
            texts = "; ".join(dict.fromkeys(why.text for why in of))
            # A document's begin and end tokens stay, or go with all of it.
            count = end - first
            text = count - int(count > 0 and int(shard.raw(end - 1, 1)[0]) == shelf.eod)
            begins = int(text > 0 and bos is not None and int(shard.raw(first, 1)[0]) == bos)
            if all(why.spans for why in of):
                spans = Skips.merged(np.array([span for why in of for span in why.spans or ()])).ranges
                if spans[-1][1] > count:
                    raise DataError(
                        f"document {document} of {shard.name} has {plural(count, 'token')}, a list names a span of "
                        f"it up to {spans[-1][1]}: correct it"
                    )
                spans = [(max(begin, begins), min(stop, text)) for begin, stop in spans]
                spans = [(begin, stop) for begin, stop in spans if begin < stop]
            else:
                spans = [(begins, text)]
            if spans[:1] == [(begins, text)]:
                at = next((why.at for why in of if why.at is not None), first)
                yield Removal(shard.name, document, count, texts, _excerpt(shelf, shard, first, at, end))
                continue
            for begin, stop in spans:
                excerpt = _excerpt(shelf, shard, first, first + begin, first + stop)
                yield Removal(shard.name, document, stop - begin, texts, excerpt, (begin, stop))


def _excerpt(shelf: Shelf, shard: Shard, first: int, at: int, end: int) -> str:
    """The text from token `at` on, before `end`, of a document that begins at `first`."""
    ids = shard.raw(at, min(end - at, BEGINNING)).tolist()
    if shelf.tokenizer is not None and all(0 <= token < shelf.tokenizer.vocab_size for token in ids):
        text = " ".join(shelf.tokenizer.decode(ids).split())[: EXCERPT + 1]
    else:
        text = " ".join(map(str, ids))
    return "…" * (at > first) + text
