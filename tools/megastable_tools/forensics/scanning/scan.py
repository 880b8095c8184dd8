"""Scan every document of some shards against a baseline, in several processes; interrupted scans resume.

    scan = scan_shards(open_shelf([Path("data/mine")]), Path("scans/mine"), workers=8)

The baseline is learnt from a sample of the shards themselves, or of a reference known to be good. Rows are written to
disk unit by unit (`resumable_map.py`); then this process keeps counters, histograms and the worst documents.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from megastable import __version__
from megastable.base.errors import DataError
from megastable.base.text import count_noun
from megastable_tools.forensics import resumable_map
from megastable_tools.forensics.oddness.features import NAMES, Lexicon
from megastable_tools.forensics.oddness.yardstick import Yardstick
from megastable_tools.forensics.resumable_map import KeptPart, keep_rows, map_documents
from megastable_tools.forensics.scanning.duplicates import (
    COPY,
    HASHED,
    Records,
    find_exact,
    find_near,
    sign_unit,
    sort_copies,
    write_copies,
)
from megastable_tools.forensics.scanning.rows import (
    EMPTY,
    UInt64s,
    cached_yardstick,
    document_keys,
    keyed_sample,
    measure_rows,
    sample_with_keys,
)
from megastable_tools.forensics.scanning.scanned import (
    SHARES,
    STEP,
    THRESHOLDS,
    USUAL,
    CopyFacts,
    Scan,
    ScanSummary,
    ShardFacts,
    Threshold,
    WorstDocument,
    advise_score,
    expect_ordinary,
    explain_row,
    measure_excess,
    tally_rows,
)
from megastable_tools.forensics.scanning.units import (
    SAMPLE,
    Int64s,
    Raw,
    Unit,
    edges_of,
    open_unit,
    sample_documents,
    split_into_units,
    stamp_of,
    unit_size,
)
from megastable_tools.forensics.shard_set import Shelf
from megastable_tools.prepare.reporting import Meter

FORMAT = 4  # of what is in the folder
TOP = 100  # worst documents that the result holds
THRESHOLD = 0.8  # minimum similarity of near duplicates
LARGEST_VOCABULARY = 1 << 20  # of int32 shards without a tokenizer
ENOUGH = 1_000_000  # tokens of a sample below which scores are unreliable


def default_folder(shelf: Shelf) -> Path:
    """The default folder of a scan."""
    return Path("scans") / shelf.folder_name


def scan_shards(
    shelf: Shelf,
    folder: Path,
    *,
    against: Shelf | None = None,
    workers: int = 1,
    near: bool = False,
    threshold: float = THRESHOLD,
    top: int = TOP,
    again: bool = False,
    progress: bool = True,
) -> Scan:
    """Scan a shelf into `folder`; results of an earlier call with the same shelf and reference are reused.

    against: learn the baseline from that shelf. near: also find documents whose similarity is `threshold`.
    top: worst documents in the result. again: remove any earlier scan from `folder`.

    Raises DataError for shards without tokens, damaged, changed during the scan or made with another tokenizer than
    `against`, for a folder that is occupied or of another scan, and for a full disk; MegastableError if a worker is
    killed. Finished parts stay in the folder, and the next call resumes from there.
    """
    if workers < 1 or top < 1 or not 0.3 <= threshold <= 1:
        raise DataError(
            f"{workers} workers, the worst {top}, similarity {threshold}: give at least 1, at least 1, and 0.3 to 1"
        )
    for scanned_shelf in (shelf, against):
        if scanned_shelf is not None and not scanned_shelf.tokens:
            shard_count = count_noun(len(scanned_shelf.shards), "shard")
            raise DataError(f"{scanned_shelf.name} has no tokens in {shard_count}: there is nothing to scan")
    shelf_warnings = _compare(shelf, against)
    # The sizes and times of all files, as a manifest does not show later changes of a file.
    all_shards = [*shelf.shards, *(against.shards if against else ())]
    shard_stamps = [
        (all_shard.name, stamp_of(all_shard.bin_path.with_name(all_shard.name))) for all_shard in all_shards
    ]
    asked_settings = {
        "format": FORMAT, "version": __version__, "name": shelf.name, "fingerprint": shelf.fingerprint,
        "tokenizer": _tokenizer(shelf), "against": against.fingerprint if against else "",
        "files": xxhash.xxh3_128_hexdigest(repr(shard_stamps).encode()),
    }  # fmt: skip
    with resumable_map.occupy_folder(folder, asked_settings, again):
        scan_job = _ScanJob(shelf, folder, against, workers, near, threshold, top, progress, shelf_warnings)
        return scan_job.finished() or scan_job.run()


def _tokenizer(shelf: Shelf) -> str:
    if shelf.tokenizer is not None:
        return shelf.tokenizer.xxh3
    return shelf.manifest.tokenizer.xxh3 if shelf.manifest is not None else ""


def _compare(shelf: Shelf, against: Shelf | None) -> list[str]:
    """Warnings about the two; raises DataError if they are incompatible."""
    shelf_warnings = [shelf.problem] if shelf.problem else []
    if against is None:
        return shelf_warnings
    shelf_tokenizer, other = _tokenizer(shelf), _tokenizer(against)
    vocabulary_sizes = {shelf.vocab_size, against.vocab_size} - {None}
    if (shelf_tokenizer and other and shelf_tokenizer != other) or len(vocabulary_sizes) > 1:
        raise DataError(
            f"{shelf.name} and the reference {against.name} were made with different tokenizers "
            f"({_described(shelf)}; {_described(against)}): the same ids mean other texts; choose another reference"
        )
    if not shelf_tokenizer or not other:
        unknown_names = " and ".join(each.name for each in (shelf, against) if not _tokenizer(each))
        shelf_warnings.append(
            f"the tokenizer of {unknown_names} is not known: assuming that both were made with the same one"
        )
    return shelf_warnings


def _described(shelf: Shelf) -> str:
    return f"{shelf.name}: {shelf.vocab_size or 'unknown number of'} tokens, xxh3 {_tokenizer(shelf)[:8] or 'unknown'}"


def _measure_unit(unit: Unit, folder: Path, changed: int) -> pa.Table:
    """The rows of a unit, in a worker process. changed: of the baseline's file."""
    shard = open_unit(unit)
    yardstick = cached_yardstick(folder / resumable_map.YARDSTICK, changed)
    return measure_rows(yardstick, shard, unit.first_document, edges_of(shard, unit))


@dataclass
class _ScanJob:
    shelf: Shelf
    folder: Path
    against: Shelf | None
    workers: int
    near: bool
    threshold: float
    top: int
    progress: bool
    warnings: list[str]
    units: list[Unit] = field(default_factory=list)

    def finished(self) -> Scan | None:
        """The result, if an earlier call has completed it."""
        if not (self.folder / resumable_map.RESULT).exists():
            return None
        earlier_scan = Scan.load_result(self.folder)
        is_alike = not self.near or earlier_scan.near_threshold == self.threshold
        if earlier_scan.top < self.top or not is_alike:
            return None
        return earlier_scan.model_copy(update={"top": self.top, "worst": earlier_scan.worst[: self.top]})

    def run(self) -> Scan:
        begin_time = time.monotonic()
        self.units = list(split_into_units(self.shelf.shards, unit_size(self.shelf.tokens)))
        yardstick, usual_summary = self._yardstick()
        ready_time = time.monotonic()
        changed_time = (self.folder / resumable_map.YARDSTICK).stat().st_mtime_ns
        measure_unit = partial(_measure_unit, folder=self.folder, changed=changed_time)
        keep_unit = partial(keep_rows, measure=measure_unit, folder=self.folder)
        measured_tokens = self._map(keep_unit, "scanning", "scanned")
        measured_time = time.monotonic()
        exact_copies, near_copies = self._duplicates()
        scan_summary = ScanSummary(self.top)
        for unit, rows in zip(self.units, self._read_rows()):
            unit_summary = tally_rows(rows, unit.shard, unit.before, self.shelf.documents, self.top)
            scan_summary.add_summary(unit_summary)
        timings = {
            "yardstick_seconds": ready_time - begin_time,
            "seconds": measured_time - ready_time,
            "measured_tokens": measured_tokens,
            "duplicates_seconds": time.monotonic() - measured_time,
        }
        scan = self._result(yardstick, usual_summary, scan_summary, exact_copies, near_copies, timings)
        scan.save_result(self.folder)
        return scan

    def _yardstick(self) -> tuple[Yardstick, ScanSummary]:
        """The baseline, from the folder if it is there, and the results of its own sample by it."""
        path, reference = self.folder / resumable_map.YARDSTICK, self.against or self.shelf
        usual, done, count = ScanSummary(1), 0, 0
        total = 2 * min(reference.tokens, SAMPLE)  # it is read, and later measured by what was learnt of it
        with Meter(total, not self.progress, "learning the baseline", "learnt", "tokens") as meter:

            def noted() -> Iterator[tuple[Raw, Int64s, UInt64s]]:
                nonlocal done, count
                for tokens, sample_edges, sample_keys in sample_with_keys(reference.shards, document_keys):
                    done, count = done + len(tokens), count + len(sample_keys)
                    meter.show_progress(done, count, done)
                    yield tokens, sample_edges, sample_keys

            try:
                yardstick = Yardstick.load_file(path)
            except DataError:  # not there, or damaged
                yardstick = Yardstick.learn_from(noted(), _lexicon(self.shelf, reference))
                yardstick.save_file(path)
            for shard, edges, documents, key in keyed_sample(reference.shards):
                rows = measure_rows(yardstick, shard, int(documents[0]), edges, key)
                usual.add_summary(tally_rows(rows, 0, 0, 1 << 62, 1))
                done, count = done + int(edges[-1] - edges[0]), count + len(rows)
                meter.show_progress(done, count, done)
        return yardstick, usual

    def _map(self, keep: Callable[[Unit], KeptPart], doing: str, done: str) -> int:
        """Complete the part of every unit; how many tokens were measured for it."""
        labels, total_tokens = (doing, done), self.shelf.tokens
        _, measured_tokens = map_documents(
            self.units, keep, total_tokens, labels=labels, progress=self.progress, workers=self.workers
        )
        return measured_tokens

    def _read_rows(self, columns: list[str] | None = None) -> Iterator[pa.Table]:
        return resumable_map.read_parts(self.folder, len(self.units), "scan again", columns)

    def _duplicates(self) -> tuple[Records, Records | None]:
        """Find exact copies and near ones, and write them."""
        exact_copies = find_exact(self._hashes, self.shelf.documents)
        near_copies = None
        if self.near:
            self._map(partial(sign_unit, folder=self.folder), "signing", "signed")
            near_copies = find_near(self.shelf.shards, self.units, self.folder, exact_copies, self.threshold)
        all_copies = sort_copies([exact_copies, np.empty(0, COPY) if near_copies is None else near_copies])
        write_copies(self.folder / resumable_map.DUPLICATES, all_copies)
        return exact_copies, near_copies

    def _hashes(self) -> Iterator[Records]:
        for unit, unit_rows in zip(self.units, self._read_rows(["high", "low", "tokens"])):
            hash_records = np.empty(len(unit_rows), HASHED)
            for column_name in ("high", "low", "tokens"):
                hash_records[column_name] = unit_rows[column_name].to_numpy()
            hash_records["document"] = np.arange(len(unit_rows)) + unit.before + unit.first_document
            yield hash_records

    def _result(
        self, yardstick: Yardstick, usual: ScanSummary, found: ScanSummary, copies: Records, near: Records | None,
        timings: dict[str, Any],
    ) -> Scan:  # fmt: skip
        shelf, before = self.shelf, 0
        shard_facts = []
        for shard in shelf.shards:
            facts = ShardFacts(name=shard.name, documents=shard.documents, tokens=shard.tokens, before=before)
            shard_facts.append(facts)
            before += shard.documents
        times = measure_excess(usual)
        length_counts = found.lengths[: int(np.flatnonzero(found.lengths)[-1]) + 1]
        return Scan(
            name=shelf.name, fingerprint=shelf.fingerprint, tokenizer=_tokenizer(shelf),
            vocab_size=yardstick.lexicon.vocab_size, against=self.against.name if self.against else "",
            shards=shard_facts, units=len(self.units), documents=shelf.documents, tokens=shelf.tokens,
            empty=int(found.lengths[0]), sample_documents=usual.count_above(0.0)[0],
            sample_tokens=int(usual.tokens.sum()), kinds=found.by_kind(), quantiles=found.compute_quantiles(SHARES),
            histograms=found.draw_histograms(), lengths=length_counts.tolist(), score_step=STEP,
            scores=found.count_by_score().tolist(), advised=advise_score(found, times),
            thresholds=_thresholds(found, usual, times),
            top=self.top, worst=[_worst(worst_row, yardstick) for worst_row in found.worst],
            copies=CopyFacts.of_copies(copies), near=None if near is None else CopyFacts.of_copies(near),
            near_threshold=self.threshold if self.near else None, workers=self.workers, **timings,
            warnings=[*self.warnings, *_doubts(shelf, self.against or shelf, yardstick, usual)],
        )  # fmt: skip


def _thresholds(found: ScanSummary, usual: ScanSummary, times: float) -> list[Threshold]:
    """Number of documents above each score, up to the worst one."""
    full_count, sampled_count = found.count_above(0.0)[0], usual.count_above(0.0)[0]
    threshold_table = []
    for score in sorted({*THRESHOLDS, advise_score(found, times) or THRESHOLDS[0]}):
        documents_above, tokens_above = found.count_above(score)
        counted_kinds = [kind for kind in found.by_kind() if kind not in (EMPTY, USUAL)]
        kinds = {counted_kind: found.count_above(score, counted_kind)[0] for counted_kind in counted_kinds}
        threshold_table.append(
            Threshold(
                score=score, documents=documents_above, tokens=tokens_above, share=documents_above / max(full_count, 1),
                ordinary=times * expect_ordinary(found.lengths, score),
                usual=usual.count_above(score)[0] / max(sampled_count, 1),
                kinds={kind_name: kind_count for kind_name, kind_count in kinds.items() if kind_count},
            )
        )  # fmt: skip
        if not documents_above:
            break
    return threshold_table


def _worst(row: dict[str, Any], yardstick: Yardstick) -> WorstDocument:
    return WorstDocument(
        **{column_name: row[column_name] for column_name in WorstDocument.model_fields if column_name in row},
        why=explain_row(yardstick, row), features={column_name: row[column_name] for column_name in NAMES},
    )  # fmt: skip


def _lexicon(shelf: Shelf, reference: Shelf) -> Lexicon:
    """Of the tokenizer of either: `_compare` has checked that they are the same, or assumed so."""
    vocabulary_size = reference.vocab_size or shelf.vocab_size
    if not vocabulary_size:
        # The power of two above all ids of a sample. With the largest id itself, every rare id missing from the sample
        # would be outside the vocabulary.
        largest = 0
        for shard, edges, _ in sample_documents(reference.shards):
            some_ids = shard.read_raw(int(edges[0]), int(edges[-1] - edges[0]))
            largest = max(largest, int(some_ids.max(initial=0)))
        vocabulary_size = min(1 << max(largest.bit_length(), 1), LARGEST_VOCABULARY)
    eod = shelf.eod if reference.eod is None else reference.eod
    return Lexicon.of_tokenizer(reference.tokenizer or shelf.tokenizer, vocabulary_size, eod)


def _doubts(shelf: Shelf, reference: Shelf, yardstick: Yardstick, usual: ScanSummary) -> list[str]:
    """Limitations of this scan's numbers."""
    tokens, doubts_found = int(usual.tokens.sum()), []
    if tokens < ENOUGH:
        doubts_found.append(
            f"The baseline was learnt from only {count_noun(tokens, 'token')}: below {ENOUGH:,}, scores and kinds are "
            "unreliable. Give a larger reference of the same tokenizer (--against)."
        )
    if shelf.vocab_size is None and reference.vocab_size is None:
        doubts_found.append(
            f"The vocabulary is not known: ids from {yardstick.lexicon.vocab_size:,} on were taken for outside of it."
        )
    return doubts_found
