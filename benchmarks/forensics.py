"""Measure how well a scan finds corrupt documents: plant each kind in a real corpus, and find it by its score."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megastable.base.errors import DataError
from megastable.data.manifest import Manifest
from megastable.data.shards import Shard
from megastable.data.tokenizer import Tokenizer, load_tokenizer
from megastable.forensics.oddness.corruption import PLANTED, corrupt, corrupt_span
from megastable.forensics.oddness.lexicon import Lexicon
from megastable.forensics.oddness.windows import judge_pieces
from megastable.forensics.oddness.yardstick import KINDS, Yardstick, cut, document_keys
from megastable.forensics.scanning.scan_summary import BINS, LENGTHS, STEP, ScanSummary
from megastable.forensics.scanning.score_threshold import advised, excess, ordinary

Ids = npt.NDArray[np.int64]
Row = dict[str, Any]

SHORTEST, LONGEST = 200, 2000  # tokens of the pieces of long documents
PRECISION = 0.9
SPAN = 600  # tokens of a document that are corrupt, for `span`
LEAST_PLANTED = 20
BLOCK = 1 << 19  # tokens measured at once


@dataclass(frozen=True)
class Scanned:
    """Of d documents: score [d], kind [d] (index in KINDS) and lengths [d] in tokens."""

    score: npt.NDArray[np.float32]
    kind: npt.NDArray[np.int16]
    lengths: Ids


def evaluate(corpus: Path, seed: int = 0, share: float = 0.005) -> list[Row]:
    """Plant each kind of corruption in `share` of the documents of a corpus, and scan it.

    The corpus's documents are cut into ones of SHORTEST to LONGEST tokens. A row per kind and way: "alone", planted on
    its own; "together", all kinds in the same corpus, other planted documents left out of the ranking; "span", alone
    and only in SPAN tokens of a document. In a row: documents, planted; recall at precision PRECISION; precision at the
    number planted; average precision; named: the share of all planted documents with the right kind, found or not;
    names: the count of each kind given; median_score; advised: the score that a scan advises, None if there is none,
    with named_advised and false_advised, the planted and other documents above it, and expected_false, the expected
    false positives. Raises DataError for a corpus that cannot be read.
    """
    manifest = Manifest.load(corpus)
    tokenizer = load_tokenizer(corpus / manifest.tokenizer.file)
    newline = line_ends(tokenizer)
    stream = [Shard(corpus / shard.name, shard) for shard in manifest.shards]
    documents = [
        part
        for shard in stream
        for number in range(shard.documents)
        for part in cut_at_lines(_read(shard, number, tokenizer.eod), newline, seed + number)
    ]
    if len(documents) * share < 1:
        raise DataError(f"{corpus}: {len(documents)} documents are too few to plant {share:.1%} of them")
    return evaluate_documents(documents, tokenizer, seed, share)


def evaluate_documents(
    documents: Sequence[Ids],
    tokenizer: Tokenizer,
    seed: int,
    share: float,
    kinds: Sequence[str] = tuple(PLANTED),
) -> list[Row]:
    """As `evaluate`, for documents without their end-of-document tokens; kinds: those to plant."""
    count = max(round(share * len(documents)), min(LEAST_PLANTED, len(documents) // 60))
    rows: list[Row] = []
    random = np.random.default_rng(seed)
    for way in ("alone", "span"):
        for kind in kinds:
            where = _choose(documents, count, random, 2 * SPAN if way == "span" else 0)
            if not len(where):
                continue  # no document is long enough
            planted = list(documents)
            for at in where:
                planted[at] = (
                    corrupt_span(kind, planted[at], tokenizer, random, SPAN)[0]
                    if way == "span"
                    else corrupt(kind, planted[at], tokenizer, random)
                )
            rows.append(_row(way, kind, scan(planted, tokenizer), where, np.zeros(0, np.int64)))
    count = max(round(share * len(documents)), 3)
    planted, places = (
        list(documents),
        _choose(documents, count * len(kinds), random, 0).reshape(len(kinds), count),
    )
    for kind, where in zip(kinds, places):
        for at in where:
            planted[at] = corrupt(kind, planted[at], tokenizer, random)
    scanned = scan(planted, tokenizer)
    for number, kind in enumerate(kinds):
        rows.append(
            _row("together", kind, scanned, places[number], np.delete(places, number, axis=0).ravel())
        )
    return rows


def scan(documents: Sequence[Ids], tokenizer: Tokenizer) -> Scanned:
    """Score documents by a baseline learnt from themselves."""
    whole = [np.append(document, tokenizer.eod) for document in documents]
    tokens = np.concatenate(whole).astype(np.int32)
    edges = np.append(0, np.cumsum([len(document) for document in whole]))
    keys = document_keys(tokens, edges)
    yardstick = Yardstick.of([(tokens, edges, keys)], Lexicon.of(tokenizer, tokenizer.vocab_size))
    pieces, owner = cut(edges)
    judged = judge_pieces(yardstick, tokens, pieces, keys[owner])
    order = np.lexsort((-judged.worst.score, owner))
    worst = order[np.searchsorted(owner[order], np.arange(len(documents)))]
    return Scanned(judged.worst.score[worst], judged.worst.kind[worst], np.diff(edges))


def speed(yardstick: Yardstick, tokens: npt.NDArray[np.integer], length: int, repeats: int = 3) -> float:
    """Tokens per second of one core: cutting, measuring and judging `tokens` as documents of `length` each; the best of
    `repeats`. Excludes reading."""
    edges = np.append(np.arange(0, len(tokens), length), len(tokens)).astype(np.int64)
    pieces, owner = cut(edges)
    keys = owner.astype(np.uint64)
    step = max(int(BLOCK // (len(tokens) / len(owner))), 1)
    best = 0.0
    for _ in range(repeats):
        begin = time.process_time()
        cut(edges)
        for at in range(0, len(owner), step):
            yardstick.judge(yardstick.measure(tokens, pieces[at : at + step + 1], keys[at : at + step]))
        best = max(best, len(tokens) / (time.process_time() - begin))
    return best


def line_ends(tokenizer: Tokenizer) -> npt.NDArray[np.bool_]:
    """Which tokens contain the end of a line: bool [vocab_size]."""
    return np.array(["\n" in tokenizer.decode([token]) for token in range(tokenizer.vocab_size)])


def cut_at_lines(ids: Ids, newline: npt.NDArray[np.bool_], seed: int) -> list[Ids]:
    """A long document in parts of SHORTEST to about LONGEST tokens that end at line ends, if there are any; a shorter
    last part is left out. newline: `line_ends`."""
    random = np.random.default_rng(seed)
    ends = np.flatnonzero(newline[ids]) + 1
    parts, begin = [], 0
    while len(ids) - begin >= SHORTEST:
        aim = begin + int(np.exp(random.uniform(np.log(SHORTEST), np.log(LONGEST))))
        after = ends[np.searchsorted(ends, aim) :]
        end = min(int(after[0]) if after.size and after[0] - begin <= 2 * LONGEST else aim, len(ids))
        parts.append(ids[begin:end])
        begin = end
    return parts


def _read(shard: Shard, document: int, eod: int) -> Ids:
    first, end = shard.document_bounds(document)
    ids = shard.read(first, end - first)
    return ids[:-1] if len(ids) and ids[-1] == eod else ids


def _choose(documents: Sequence[Ids], count: int, random: np.random.Generator, least: int) -> Ids:
    able = np.flatnonzero([len(document) >= least for document in documents])
    return np.asarray(random.permutation(able)[:count], dtype=np.int64)


def _row(way: str, kind: str, scanned: Scanned, where: Ids, left_out: Ids) -> Row:
    planted = np.zeros(len(scanned.score), dtype=bool)
    planted[where] = True
    ranked = np.argsort(-scanned.score, kind="stable")
    hits = planted[ranked[~np.isin(ranked, left_out)]]
    found = np.cumsum(hits)
    precision = found / np.arange(1, len(hits) + 1)
    good = np.flatnonzero(precision >= PRECISION)
    named = [KINDS[number] in PLANTED[kind] for number in scanned.kind[where]]
    advice, expected = _advice(scanned)
    above = scanned.score >= (np.inf if advice is None else advice)
    bad = planted.copy()
    bad[left_out] = True
    return {
        "way": way,
        "kind": kind,
        "documents": len(scanned.score),
        "planted": len(where),
        "recall": float(found[good[-1]] / len(where)) if good.size else 0.0,
        "precision": float(precision[len(where) - 1]),
        "average_precision": float(precision[hits].sum() / len(where)),
        "named": float(np.mean(named)),
        "names": {KINDS[k]: int(n) for k, n in enumerate(np.bincount(scanned.kind[where])) if n},
        "median_score": float(np.median(scanned.score[where])),
        "advised": advice,
        "named_advised": int((above & planted).sum()),
        "false_advised": int((above & ~bad).sum()),
        "expected_false": expected,
    }


def _advice(scanned: Scanned) -> tuple[float | None, float]:
    """The score that a scan of these documents advises, and its expected number of false positives."""
    tally = ScanSummary(top=1)
    tally.documents[0] += np.bincount((scanned.score / STEP).astype(np.int64), minlength=BINS)
    tally.lengths += np.bincount(np.frexp(scanned.lengths.astype(np.float64))[1], minlength=LENGTHS)
    times = excess(tally)
    score = advised(tally, times)
    return score, 0.0 if score is None else times * ordinary(tally.lengths, score)
