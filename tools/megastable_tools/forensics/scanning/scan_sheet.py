"""Present a scan as a sheet: the worst documents with their texts, histograms, and counts above each score."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megastable.base.errors import DataError
from megastable.base.text import count_noun, show_duration
from megastable.data.shards import Shard
from megastable.data.tokenizer import Tokenizer
from megastable.report.sheet import Column, CommandNote, Histogram, Passage, Sheet, Span
from megastable_tools.forensics.oddness.features import FEATURES
from megastable_tools.forensics.oddness.judgement import MOST, ODD
from megastable_tools.forensics.oddness.yardstick import PIECE
from megastable_tools.forensics.scanning.rows import EMPTY
from megastable_tools.forensics.scanning.scanned import CHECKED, RATE, USUAL, Scan, Threshold, WorstDocument
from megastable_tools.forensics.shard_set import Shelf, split_at_tokens

CONTEXT = 48  # tokens shown before and after a piece
SHOWN = 512  # tokens shown of a piece
HOTTEST = 12.0  # score with the strongest colour

COLUMNS = (
    Column("kind", "looks like"),
    Column("shard", "shard"),
    Column("document", "document", "count", "its number in the shard"),
    Column("tokens", "tokens", "count"),
    Column("why", "why"),
    Column("first_token", "first token", "count", "of the document, in the shard", wide=True),
    Column("piece", "worst at", "count", "first token of its worst piece, in the shard", wide=True),
    Column("piece_tokens", "piece tokens", "count", "length of its worst piece", wide=True),
    Column("compression", "compression", "number",
           "compression ratio of the bytes of its tokens by zstd (the first 64 KiB): noise 1, loops 10 and more",
           wide=True),
)  # fmt: skip


def scan_sheet_of(scan: Scan, shelf: Shelf, top: int = 50, kept: Path | None = None) -> Sheet:
    """The `top` worst documents of a scan of `shelf`, and all numbers. kept: where the scan is.

    Raises DataError for a shelf other than the scanned one, and if a text cannot be read.
    """
    if shelf.fingerprint != scan.fingerprint:
        raise DataError(f"{shelf.name} is not the scanned corpus, or has changed since: scan it again")
    worst = scan.worst[:top]
    score_about = "how unusual: about -log10 of the share of usual texts as odd"
    # Documents are coloured from the advised score on.
    columns = [Column("score", "score", "score", score_about, limit=scan.advised), *COLUMNS]
    for feature in FEATURES:
        columns.append(Column(feature.name, feature.name, "share" if feature.share else "score", wide=True))
    sheet_rows = [row.model_dump(exclude={"features", "feature", "value"}) | row.features for row in worst]
    text_passages = {row_number: [worst_passage(row, shelf)] for row_number, row in enumerate(worst)}
    # With the folder, if it has another name than the corpus: so it is of copies, planted or pruned.
    of_folder = "" if shelf.folder_name == scan.name else f" ({shelf.directory})"
    return Sheet(
        title=f"Scan of {scan.name}{of_folder}", lead=_lead(scan), facts=_facts(scan), columns=columns, rows=sheet_rows,
        passages=text_passages, histograms=_histograms(scan),
        notes=[*_notes(scan), *_next(scan, shelf, kept)], legend="the piece with the highest score", data=_data(scan),
    )  # fmt: skip


def worst_passage(row: WorstDocument, shelf: Shelf) -> Passage:
    """The text around the worst piece of a document; ids if there is no tokenizer, or outside its vocabulary."""
    shard, piece_end = shelf.find_shard(row.shard), row.piece + row.piece_tokens
    shown_end = min(piece_end, row.piece + SHOWN)
    span_heat = min(1.0, max(0.15, row.score / HOTTEST))
    text_before = _text(shard, max(row.first_token, row.piece - CONTEXT), row.piece, shelf.tokenizer)
    piece_text = _text(shard, row.piece, shown_end, shelf.tokenizer)
    after = _text(shard, shown_end, min(shown_end + CONTEXT, row.first_token + row.tokens), shelf.tokenizer)
    title = f"document {row.document} of {row.shard}, tokens {row.piece} to {piece_end - 1} of the shard: {row.why}"
    text_spans = [Span(text_before), Span(piece_text, span_heat, f"score {row.score:.1f}"), Span(after)]
    return Passage(title, [text_span for text_span in text_spans if text_span.text])


def _text(shard: Shard, first: int, end: int, tokenizer: Tokenizer | None) -> str:
    """Tokens [first, end) of a shard: runs of known ids as text, other ids in brackets."""
    ids = shard.read_raw(first, max(end - first, 0)).astype(np.int64)
    known = (ids >= 0) & (ids < (tokenizer.vocab_size if tokenizer is not None else np.iinfo(np.int64).max))
    text_parts = []
    for id_run in np.split(np.arange(len(ids)), np.flatnonzero(np.diff(known)) + 1):
        run_ids = ids[id_run].tolist()
        if len(id_run) and known[id_run[0]]:
            text_parts += [text_span.text for text_span in split_at_tokens(run_ids, tokenizer)]
        else:
            text_parts += [f"[{run_id}]" for run_id in run_ids]
    return "".join(text_parts)


def _lead(scan: Scan) -> list[str]:
    baseline_text = f"the baseline of {scan.against}" if scan.against else "its own baseline"
    was_or_were = "was" if scan.documents == 1 else "were"
    lead_lines = [
        f"{count_noun(scan.documents, 'document')} with {count_noun(scan.tokens, 'token')} in "
        f"{count_noun(len(scan.shards), 'shard')} {was_or_were} measured by {baseline_text}.",
        *scan.warnings,
    ]
    line = next((each for each in scan.thresholds if each.score == scan.advised), None)
    if line is None:
        lead_lines.append("None stands out: at every score this many ordinary documents are expected.")
    else:
        lead_lines.append(
            f"{_number(line.documents, 'document')} a score of {line.score:g} or more{_sorts(line)}; {_false(line)}."
        )
    if scan.copies.documents:
        copies_text = f"{_number(scan.copies.documents, 'document')} an exact copy earlier in it"
        lead_lines.append(f"{copies_text}: {count_noun(scan.copies.tokens, 'token')}.")
    if scan.near is not None and scan.near.documents:
        lead_lines.append(
            f"{_number(scan.near.documents, 'more document')} an earlier one that is at least "
            f"{scan.near_threshold:.0%} the same: {count_noun(scan.near.tokens, 'token')}."
        )
    return lead_lines


def _number(count: int, noun: str) -> str:
    return f"{count_noun(count, noun)} {'has' if count == 1 else 'have'}"


def _sorts(line: Threshold) -> str:
    sorts = sorted(line.kinds.items(), key=lambda item: -item[1])
    return f" ({', '.join(f'{kind_name}: {count:,}' for kind_name, count in sorts)})" if sorts else ""


def _facts(scan: Scan) -> list[tuple[str, str]]:
    sample = f"{count_noun(scan.sample_documents, 'document')}, {count_noun(scan.sample_tokens, 'token')}"
    scan_facts = [
        ("documents", f"{scan.documents:,}"),
        ("tokens", f"{scan.tokens:,}"),
        ("exact copies", f"{scan.copies.documents:,}"),
        ("near duplicates", "not looked for" if scan.near is None else f"{scan.near.documents:,}"),
        ("without tokens", f"{scan.empty:,}"),
        ("reference", scan.against or "itself"),
        ("sample", sample),
    ]
    last_documents = None
    for threshold_line in scan.thresholds:
        # Skip a score above which no fewer documents lie than above a lower one.
        if threshold_line.documents != last_documents:
            scan_facts.append((f"score {threshold_line.score:g} or more", _above(threshold_line, scan)))
        last_documents = threshold_line.documents
    if scan.tokens_per_second:
        processes = f"{scan.workers} process" + "es" * (scan.workers > 1)
        speed = f"{scan.tokens_per_second / 1e6:,.1f} M tokens/s with {processes}"
        duration = show_duration(scan.seconds)
        baseline_time = f"{show_duration(scan.yardstick_seconds)} to learn the baseline"
        scan_facts.append(("time", f"{duration}, {speed}; {baseline_time}"))
    return scan_facts


def _data(scan: Scan) -> dict[str, Any]:
    lines = [
        {
            "score": line.score, "documents": line.documents, "share": line.share, "tokens": line.tokens,
            "kinds": line.kinds, "expected_false_positives": line.ordinary, "share_of_reference": line.usual,
        }
        for line in scan.thresholds
    ]  # fmt: skip
    return {
        "documents": scan.documents, "tokens": scan.tokens, "shards": len(scan.shards),
        "exact_copies": scan.copies.documents, "near_duplicates": scan.near and scan.near.documents,
        "without_tokens": scan.empty, "reference": scan.against, "sample_documents": scan.sample_documents,
        "sample_tokens": scan.sample_tokens, "advised_score": scan.advised, "scores": lines, "seconds": scan.seconds,
        "tokens_per_second": scan.tokens_per_second, "processes": scan.workers,
        "yardstick_seconds": scan.yardstick_seconds,
    }  # fmt: skip


def _above(line: Threshold, scan: Scan) -> str:
    document_text = f"{count_noun(line.documents, 'document')} ({line.share:.3%})"
    line_text = f"{document_text}, {count_noun(line.tokens, 'token')}{_sorts(line)}"
    if not scan.against:
        return f"{line_text}; {_false(line)}"
    # The share of a good corpus that scores as high: measured false positives. None of n: the share is below 3 / n with
    # 95 % confidence ("rule of three", Hanley and Lippman-Hand, JAMA 1983).
    held = f"{line.usual:.3%}"
    if not line.usual and scan.sample_documents:
        held = f"below {min(1.0, 3 / scan.sample_documents):.3%}"
    return f"{line_text}; {_false(line)}; of {scan.against} {held}"


def _false(line: Threshold) -> str:
    """How many of those above may be ordinary."""
    if line.ordinary >= line.documents:
        return "all may be false positives" if line.documents else "no false positive"
    return f"expected false positives: {'fewer than 0.1' if line.ordinary < 0.1 else f'about {line.ordinary:,.1f}'}"


def _histograms(scan: Scan) -> list[Histogram]:
    marks = [(line.score, f"{line.documents:,} above") for line in scan.thresholds if line.documents]
    last = max((bar_number for bar_number, bar_count in enumerate(scan.scores) if bar_count), default=0)
    edges = [scan.score_step * bar_number for bar_number in range(last + 2)]
    histograms_found = [
        Histogram("score", edges, scan.scores[: last + 1], marks, "documents by their score", column="score")
    ]
    if len(scan.lengths) > 1:
        # Bar i holds lengths of i bits; logarithms keep the bars equally wide.
        begin = next(bar_number for bar_number, bar_count in enumerate(scan.lengths) if bar_count)
        powers = [float(bar_number - 1) for bar_number in range(begin, len(scan.lengths) + 1)]
        note = f"powers of two; from {2 ** max(begin - 1, 0):,} to {2 ** (len(scan.lengths) - 1):,} tokens"
        histograms_found.append(Histogram("length", powers, scan.lengths[begin:], note=note))
    notes = {feature.name: feature.text.format("…") for feature in FEATURES}
    for name, note in (notes | {"compression": "how many times smaller zstd makes a document"}).items():
        bars, feature_quantiles = scan.histograms.get(name), scan.quantiles.get(name)
        if bars is None or feature_quantiles is None or feature_quantiles[0] == feature_quantiles[-1]:
            continue
        quantiles_by_share = dict(zip(scan.shares, feature_quantiles))
        quantile_sides = [(quantiles_by_share[0.01], "1 %"), (quantiles_by_share[0.99], "99 %")]
        sides_inside = [side for side in quantile_sides if bars.edges[0] <= side[0] <= bars.edges[-1]]
        histograms_found.append(Histogram(name, bars.edges, bars.counts, sides_inside, note, column=name))
    return histograms_found


def _next(scan: Scan, shelf: Shelf, kept: Path | None) -> list[str]:
    """The next commands for the user."""
    if kept is None:
        return []
    if shelf.directory is None or scan.advised is None:
        return [f"Kept in {kept}."]
    quoted_corpus, quoted_scan = shlex.quote(str(shelf.directory)), shlex.quote(str(kept))
    plan = f"megastable prune plan {quoted_corpus} --scan {quoted_scan} --score {scan.advised:g} --spans"
    what_to_do = f"Kept in {kept}. To plan the removal of everything with {scan.advised:g} or more:"
    return [what_to_do, CommandNote(plan)]


def _notes(scan: Scan) -> list[str]:
    notes = [
        "A score of s means that about one in 10^s pieces of usual text is as odd, extrapolated from the tail up "
        f"to one in 33. It ends at {MOST:g}. A document has the score of its worst piece of up to {PIECE:,} tokens, so "
        "long documents have higher ones; an odd piece that is worse in one half has the score of that half. Odd is "
        "not bad: read before you prune.",
        "Expected false positives: how many documents would score as high if all were ordinary, by the definition of "
        f"a score and by how many of {scan.against or 'the corpus'} have {CHECKED:g} or more. The advised score is "
        f"the lowest at which they are at most {RATE:.0%} of the documents above it.",
    ]
    if not scan.against:
        notes.append(
            "The baseline was learnt from the same shards, so frequent problems count as usual. "
            "A reference that is known to be good (--against) shows more."
        )
    kinds: Sequence[tuple[str, int]] = sorted(scan.kinds.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{kind}: {kind_count:,}" for kind, kind_count in kinds if kind not in (USUAL, EMPTY))
    return [*notes, f"Kinds of documents with a score of {ODD:g} or more: {shown}."] if shown else notes
