"""Apply a pruning plan: write a new corpus without its documents and spans, with everything else byte for byte equal;
and prove it.

Where a span is cut out of a document, tokens that end and begin documents replace it: `gaps.py`. Sequences,
modes and documents without tokens are unchanged; shards keep their names. Files are read a run of documents at a time,
hashed before and after, and written on: memory grows by a few bytes for each sequence of a shard, and damage of the
original is not hidden by new hashes.

The proof (`verify_pruned`): the document map names every document of either corpus exactly once and in order, and
every piece of a cut one. What the original gives without the rest is computed again, and hashed: its hashes, counts,
splits and map must be those of the pruned corpus, whose files are read in full. Memory grows with the documents of one
shard.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megastable.base.durable import staged_directory, write_data_file
from megastable.base.errors import DataError
from megastable.base.text import count_noun
from megastable.config.recipe import find_recipe
from megastable.data.manifest import FILE as MANIFEST
from megastable.data.manifest import Manifest, Segment, Stream, TokenizerInfo
from megastable.data.shard_format import ShardInfo, chunk_slices
from megastable.data.shards import Shard, ShardWriter, hash_file
from megastable_tools.forensics.pruning.gaps import Gaps, Span, remaining_runs
from megastable_tools.forensics.pruning.prune_plan import NOTHING, Loss, Named, PrunePlan, read_plan
from megastable_tools.forensics.pruning.pruned import (
    FILE,
    MAP,
    Cut,
    MapWriter,
    Pruned,
    Rows,
    add_removed,
    gone_text,
    read_map,
)

Progress = Callable[[int], object]  # called for every block with its bytes in the original
Place = tuple[str, int, int]  # tokens [first, end) of a shard


def apply_plan(
    plan: Path, output: Path, corpus: Path | None = None, progress: Progress = lambda count: None,
    most: float = 1.0, say: Callable[[Loss], object] = lambda loss: None,
) -> Pruned:  # fmt: skip
    """Make `output`, the corpus of a plan without its documents and spans; complete or not at all.

    corpus: its current path, if it differs from the plan's. most: maximum share of tokens and of documents to
    remove; say: called with the loss before anything is written. Raises DataError for a plan that is of another
    corpus, empty, takes too much or names what does not exist, for a damaged corpus, and for an output that is
    occupied or in the way.
    """
    chosen_plan = read_plan(plan)
    corpus_directory = _corpus_of(chosen_plan, corpus)
    corpus_manifest = Manifest.load_manifest(corpus_directory)
    removals = chosen_plan.select_removals(corpus_directory, corpus_manifest)
    gaps = gaps_of(corpus_directory, corpus_manifest, removals)
    corpus_loss = Loss.of_corpus(
        corpus_manifest, documents=sum(gap.documents.size for gap in gaps.values()),
        cut=sum(len(gap.cuts) for gap in gaps.values()), tokens=sum(gap.gone for gap in gaps.values()),
    )  # fmt: skip
    corpus_loss.check_limit(
        most, str(plan), "delete lines of documents to keep", "cut only the bad parts (plan --spans)"
    )
    _keep_apart(corpus_directory, output)
    tokenizer_content = tokenizer_bytes(corpus_directory, corpus_manifest)
    say(corpus_loss)
    with staged_directory(output) as staging:
        try:
            pruned_corpus = _write(chosen_plan, corpus_directory, corpus_manifest, gaps, staging, progress)
        except OSError as error:
            raise DataError(f"{output} could not be written: {error.strerror or error}") from error
        write_data_file(staging / corpus_manifest.tokenizer.file, tokenizer_content)
        pruned_corpus.save_file(staging)
    return pruned_corpus


def gaps_of(directory: Path, manifest: Manifest, named: dict[str, Named]) -> dict[str, Gaps]:
    """The removed parts of every shard, by a plan. Raises DataError for a span that does not exist."""
    # Shards are opened one at a time: there may be more than the limit of open files.
    gaps_by_shard = {}
    tokenizer = manifest.tokenizer
    for info in manifest.shards:
        of = named.get(info.name, NOTHING)
        shard = Shard(directory / info.name, info)
        gaps_by_shard[info.name] = Gaps.of_shard(shard, of.documents, of.spans, tokenizer.eod, tokenizer.bos)
    return gaps_by_shard


def _write(
    plan: PrunePlan, directory: Path, manifest: Manifest, all_gaps: dict[str, Gaps], staging: Path, progress: Progress
) -> Pruned:  # fmt: skip
    """Write all files except the tokenizer's and pruned.json, which is returned."""
    split_places_by_name = move_splits(directory, manifest, all_gaps)
    for split, split_places in split_places_by_name.items():
        if not split_places and manifest.splits[split]:
            segment = manifest.splits[split][0]
            document = Shard(directory / segment.shard).document_of(segment.first_token)
            raise DataError(
                f"{plan.path} leaves nothing of the split {split!r}: delete its line "
                f"{plan.line_of(segment.shard, document)}, for one, to keep that document"
            )
    infos, shard_cuts, removed_digest = list[ShardInfo](), list[Cut](), hashlib.sha256()
    with closing(MapWriter(staging)) as map_writer:
        for shard_info in manifest.shards:
            shard, shard_gaps = Shard(directory / shard_info.name, shard_info), all_gaps[shard_info.name]
            for part in chunk_slices(shard.documents):
                map_writer.add_documents(shard_info.name, part.start, part.stop - part.start, shard_gaps)
            add_removed(removed_digest, shard_info.name, shard_gaps)
            shard_cuts.append(_prune_shard(shard, shard_info, shard_gaps, staging, progress, infos))
    with (staging / MAP).open("rb") as map_file:
        os.fsync(map_file.fileno())
    pruned_data = pruned_facts(shard_cuts, removed_digest.hexdigest(), infos, all_gaps)
    removed_text = count_noun(pruned_data["documents"], "document")
    removed_text += f" and {count_noun(pruned_data['tokens'], 'token')}" if pruned_data["cut"] else ""
    source_text = f"{manifest.source}; {removed_text} pruned of {manifest.fingerprint()}".lstrip("; ")
    pruned = Manifest(
        name=manifest.name, tokenizer=manifest.tokenizer, dtype=manifest.dtype, shards=infos, source=source_text,
        splits=splits_at(staging, split_places_by_name),
    )  # fmt: skip
    check_splits(staging, pruned)
    pruned.save_manifest(staging)
    return Pruned(
        original=str(directory.resolve()), fingerprint=manifest.fingerprint(), plan=plan.path.name,
        plan_sha256=plan.sha256, made=datetime.now(UTC), manifest_xxh3=hash_file(staging / MANIFEST),
        map_xxh3=hash_file(staging / MAP), **pruned_data,
    ).add_seal()  # fmt: skip


def pruned_facts(
    cuts: list[Cut], removed: str, infos: list[ShardInfo], all_gaps: dict[str, Gaps]
) -> dict[str, Any]:
    """What pruned.json says of the documents."""
    return {
        "shards": cuts, "removed": removed,
        "documents": sum(shard_cut.documents for shard_cut in cuts),
        "tokens": sum(shard_cut.tokens for shard_cut in cuts),
        "documents_left": sum(shard_info.documents for shard_info in infos),
        "tokens_left": sum(shard_info.tokens for shard_info in infos),
        "cut": sum(shard_cut.cut for shard_cut in cuts),
        "added": sum(shard_gaps.added for shard_gaps in all_gaps.values()),
    }  # fmt: skip


def _prune_shard(
    shard: Shard, info: ShardInfo, gaps: Gaps, directory: Path | None, progress: Progress, left: list[ShardInfo]
) -> Cut:  # fmt: skip
    """As `write_shard`, unless nothing of the shard is left; else it is added to those `left`. Returns its loss."""
    is_left = gaps.documents.size < shard.documents or not gaps.documents.size
    if is_left:
        left.append(write_shard(shard, info, gaps, directory, progress))
    return Cut(
        shard=info.name, documents=gaps.documents.size, tokens=gaps.gone, left=is_left, cut=len(gaps.cuts)
    )


def write_shard(
    shard: Shard, info: ShardInfo, gaps: Gaps, directory: Path | None, progress: Progress
) -> ShardInfo:
    """Write the shard without its gaps into `directory`, durably; None: only say what would be written.

    Raises DataError if it is not the shard that `info` describes, or the disk fails.
    """
    if hash_file(shard.idx_path) != info.idx_xxh3:
        raise DataError(f"{shard.idx_path} is not the file that its manifest describes: restore it")
    shard.verify_index()
    hash_before = xxhash.xxh3_128()
    new_path = (directory or shard.bin_path.parent) / shard.name
    with ShardWriter(new_path, 1, shard.has_modes, shard.dtype, directory is None) as shard_writer:
        for tokens, document_runs in remaining_runs(shard, gaps):
            hash_before.update(tokens.tobytes())
            progress(tokens.nbytes)
            for document_run in document_runs:
                shard_writer.add_documents(*document_run)
        if hash_before.hexdigest() != info.bin_xxh3:
            raise DataError(f"{shard.bin_path} is not the file that its manifest describes: restore it")
        return shard_writer.close()


def move_splits(directory: Path, manifest: Manifest, gaps: dict[str, Gaps]) -> dict[str, list[Place]]:
    """Where the splits of the corpus in `directory` lie in shards without `gaps`; segments without any token are
    dropped.

    Raises DataError for a split that does not consist of whole documents.
    """
    check_splits(directory, manifest)
    infos_by_name = {shard_info.name: shard_info for shard_info in manifest.shards}
    places: dict[str, list[Place]] = {split: [] for split in manifest.splits}
    for split, segments in manifest.splits.items():
        for segment in segments:
            shard, of = Shard(directory / segment.shard, infos_by_name[segment.shard]), gaps[segment.shard]
            first_token, end_token = (
                edge - of.tokens_lost_before(shard.documents_before(edge))
                for edge in (segment.first_token, segment.end)
            )
            if first_token < end_token:
                places[split].append((segment.shard, first_token, end_token))
    return places


def splits_at(directory: Path, places: dict[str, list[Place]]) -> dict[str, list[Segment]]:
    """The splits that lie at `places` of the shards in `directory`."""

    def segment(name: str, first: int, end: int) -> Segment:
        shard = Shard(directory / name)
        documents = shard.documents_before(end) - shard.documents_before(first)
        return Segment(shard=name, first_token=first, tokens=end - first, documents=documents)

    return {split: [segment(*place) for place in split_places] for split, split_places in places.items()}


def check_splits(directory: Path, manifest: Manifest) -> None:
    """Raises DataError where a split does not consist of whole documents."""
    for split, segments in manifest.splits.items():
        if segments:
            split_stream, first_token = Stream(directory, manifest, split), 0
            for segment in segments:
                split_stream.read_tokens(first_token, 1)  # checks the edges of the segment
                first_token += segment.tokens


def tokenizer_bytes(directory: Path, manifest: Manifest) -> bytes:
    """The tokenizer's file. Raises DataError when it is not the one of the manifest."""
    path = directory / manifest.tokenizer.file
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"the tokenizer {path} cannot be read: {error.strerror}: restore it") from error
    if xxhash.xxh3_128_hexdigest(content) != manifest.tokenizer.xxh3:
        raise DataError(f"{path} is not the tokenizer that {directory / MANIFEST} describes: restore it")
    return content


def _keep_apart(directory: Path, output: Path) -> None:
    corpus_path, output_path = directory.resolve(), output.resolve()
    if corpus_path == output_path:
        raise DataError(f"{output} is the corpus itself, which must not change: choose another output")
    if output_path.is_relative_to(corpus_path) or corpus_path.is_relative_to(output_path):
        raise DataError(f"{output} and the corpus {directory} lie in each other: choose another output")
    try:
        if output.exists() and not (output.is_dir() and not any(output.iterdir())):
            raise DataError(f"{output} exists already: choose another output, or remove it")
    except OSError as error:
        raise DataError(f"{output} cannot be used: {error.strerror}") from error


def corpus_bytes(plan: Path, corpus: Path | None = None) -> int:
    """Number of bytes that `apply_plan` will report as progress."""
    return sum(info.bin_bytes for info in Manifest.load_manifest(_corpus_of(read_plan(plan), corpus)).shards)


def _corpus_of(plan: PrunePlan, given: Path | None) -> Path:
    if given is None and plan.corpus is None:
        raise DataError(
            f"{plan.path} does not name its corpus: make a plan of it that does, "
            f"megastable prune plan CORPUS --list {plan.path}, or give --corpus"
        )
    return find_recipe(given or plan.corpus or "")


@dataclass(frozen=True)
class Proof:
    """What was compared: remaining documents and tokens, and the number of removed ones; cut documents, and
    added tokens that begin and end documents, which count among the remaining tokens."""

    documents: int
    tokens: int
    gone: int
    gone_tokens: int
    cut: int
    added: int
    original: Path

    def __str__(self) -> str:
        kept_text = f"{count_noun(self.documents, 'document')} and {count_noun(self.tokens, 'token')}"
        same = f"{kept_text} are those of {self.original}"
        return f"{same}; {gone_text(self.gone, self.gone_tokens, self.cut, self.added)}"


def verify_pruned(
    directory: Path,
    original: Path | None = None,
    plan: Path | None = None,
    progress: Progress = lambda count: None,
) -> Proof:
    """Compare a pruned corpus with its original (default: its recorded path); plan: compare that, too.

    Raises DataError naming the first difference.
    """
    directory = find_recipe(directory)
    pruned = Pruned.load_file(directory)
    for file_name, wanted_hash in ((MANIFEST, pruned.manifest_xxh3), (MAP, pruned.map_xxh3)):
        if hash_file(directory / file_name) != wanted_hash:
            raise DataError(
                f"{directory / file_name} was changed after {FILE} was written: restore it, or prune again"
            )
    new = Manifest.load_manifest(directory)
    original = find_recipe(original or Path(pruned.original))
    old = Manifest.load_manifest(original)
    if old.fingerprint() != pruned.fingerprint:
        raise DataError(
            f"{original} is not what {directory} was pruned of: its fingerprint is {old.fingerprint()[:12]}..., not "
            f"{pruned.fingerprint[:12]}...; give the original with --original"
        )
    if (new.name, new.dtype, new.tokenizer) != (old.name, old.dtype, old.tokenizer):
        raise DataError(f"{directory / MANIFEST}: name, dtype or tokenizer is not that of {original}")
    for checked_folder, checked_manifest in ((original, old), (directory, new)):
        tokenizer_bytes(checked_folder, checked_manifest)
    own_names = {shard_info.name for shard_info in new.shards}
    for path in sorted(directory.iterdir()):
        if path.suffix in (".bin", ".idx") and path.name[: -len(path.suffix)] not in own_names:
            raise DataError(f"{path} is not a shard of this corpus: remove it")
    return _compare(directory, new, original, old, pruned, plan, progress)


def original_bytes(directory: Path, original: Path | None = None) -> int:
    """Number of bytes that `verify_pruned` will report as progress."""
    original_directory = find_recipe(original or Path(Pruned.load_file(find_recipe(directory)).original))
    return sum(shard_info.bin_bytes for shard_info in Manifest.load_manifest(original_directory).shards)


def _compare(
    directory: Path, new: Manifest, original: Path, old: Manifest, pruned: Pruned, plan: Path | None,
    progress: Progress,
) -> Proof:  # fmt: skip
    listed_gaps = None
    if plan is not None:
        listed_gaps = gaps_of(original, old, read_plan(plan).select_removals(original, old))
    map_groups = groupby(read_map(directory), key=lambda item: item[0])
    shard_named, map_group = next(map_groups, ("", iter(())))
    all_gaps, removed, shard_cuts, infos = dict[str, Gaps](), hashlib.sha256(), list[Cut](), list[ShardInfo]()
    for shard_info in old.shards:
        shard, map_rows = Shard(original / shard_info.name, shard_info), list[Rows]()
        if shard_named == shard_info.name:
            map_rows = [map_part for _, map_part in map_group]
            shard_named, map_group = next(map_groups, ("", iter(())))
        shard_gaps = all_gaps[shard_info.name] = _gaps_of_map(directory, shard, map_rows, old.tokenizer)
        listed = shard_gaps if listed_gaps is None else listed_gaps[shard_info.name]
        if shard_gaps.cuts != listed.cuts or not np.array_equal(shard_gaps.documents, listed.documents):
            raise DataError(f"{plan} does not name what {directory} lacks of {shard_info.name}")
        add_removed(removed, shard_info.name, shard_gaps)
        shard_cuts.append(_prune_shard(shard, shard_info, shard_gaps, None, progress, infos))
    if shard_named:
        raise DataError(f"{directory / MAP} names the shard {shard_named!r}, which is not there: prune again")
    _check_shards(directory, new, infos, original)
    for fact_name, fact_value in pruned_facts(shard_cuts, removed.hexdigest(), infos, all_gaps).items():
        if getattr(pruned, fact_name) != fact_value:
            raise DataError(f"{directory / FILE}: {fact_name} does not match map and shards: prune again")
    if new.splits != splits_at(directory, move_splits(original, old, all_gaps)):
        raise DataError(
            f"{directory / MANIFEST}: its splits are not those of {original} without the documents"
        )
    check_splits(directory, new)
    counts = pruned.documents_left, pruned.tokens_left, pruned.documents, pruned.tokens
    return Proof(*counts, pruned.cut, pruned.added, original)


def _check_shards(directory: Path, new: Manifest, infos: list[ShardInfo], original: Path) -> None:
    """Check that the shards are those that the original gives now, in the manifest and on disk."""
    expected_infos = {info.name: info for info in infos}
    for info in new.shards:
        if info.name not in expected_infos:
            raise DataError(
                f"{directory / MANIFEST}: the shard {info.name} should not be there: none of its documents is left"
            )
        for suffix, fact_names in ((".idx", ("idx_xxh3", "idx_bytes")), (".bin", ("bin_xxh3", "bin_bytes"))):
            if any(getattr(info, fact) != getattr(expected_infos[info.name], fact) for fact in fact_names):
                raise DataError(
                    f"{directory / info.name}{suffix} is not what {original} gives without the documents and spans "
                    f"of {MAP}: prune again"
                )
        Shard(directory / info.name, info).verify_shard()
    if new.shards != infos:
        raise DataError(
            f"{directory / MANIFEST}: a shard is missing, out of order, or not as it is: prune again"
        )


def _gaps_of_map(directory: Path, shard: Shard, rows: list[Rows], tokenizer: TokenizerInfo) -> Gaps:
    """The removed parts of a shard by its rows of the map, which must be what these parts give."""
    damage_text = f"{directory / MAP}: the rows of {shard.name} are not those of its documents: prune again"
    if not rows and not shard.documents:
        return Gaps.of_shard(shard, np.empty(0, np.int64), {}, tokenizer.eod, tokenizer.bos)
    if not rows:
        raise DataError(damage_text)
    columns = zip(*(rows_part.columns for rows_part in rows), strict=True)
    found = Rows(*(np.concatenate(column_parts) for column_parts in columns))
    old = found.old
    if not np.array_equal(np.unique(old), np.arange(shard.documents)) or np.any(np.diff(old) < 0):
        raise DataError(damage_text)
    spans = dict[int, list[Span]]()
    for document_number in np.unique(old[found.end >= 0]).tolist():
        begin, end = shard.document_bounds(document_number)
        pieces = slice(*np.searchsorted(old, [document_number, document_number + 1]).tolist())
        edges = [0, *np.stack([found.first[pieces], found.end[pieces]], axis=1).ravel().tolist(), end - begin]
        if edges != sorted(edges):
            raise DataError(damage_text)
        removed_spans = zip(edges[::2], edges[1::2], strict=True)
        spans[document_number] = [
            (range_begin, range_end) for range_begin, range_end in removed_spans if range_begin < range_end
        ]
    shard_gaps = Gaps.of_shard(shard, old[found.new < 0], spans, tokenizer.eod, tokenizer.bos)
    expected_rows = Rows.of_gaps(0, shard.documents, shard_gaps)
    if not all(map(np.array_equal, found.columns, expected_rows.columns)):
        raise DataError(damage_text)
    return shard_gaps
