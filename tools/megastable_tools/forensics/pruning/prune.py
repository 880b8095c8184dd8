"""Apply a pruning plan: write a new corpus without its documents and spans, with everything else byte for byte equal.

Where a span is cut out of a document, tokens that end and begin documents replace it: `gaps.py`. Sequences,
modes and documents without tokens are unchanged; shards keep their names. Files are read a run of documents at a time,
hashed before and after, and written on: memory grows by a few bytes for each sequence of a shard, and damage of the
original is not hidden by new hashes. The proof: `proof.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import xxhash

from megastable.base.errors import DataError
from megastable.base.text import plural
from megastable.config.recipe import find
from megastable.data.local_copy import staged_directory, write_file
from megastable.data.manifest import FILE as MANIFEST
from megastable.data.manifest import Manifest, Segment, Stream
from megastable.data.shard_format import ShardInfo, chunks
from megastable.data.shards import Shard, ShardWriter, hash_file
from megastable_tools.forensics.pruning.gaps import Gaps, remaining_runs
from megastable_tools.forensics.pruning.prune_plan import NOTHING, Named, PrunePlan, read_plan
from megastable_tools.forensics.pruning.pruned import MAP, Cut, MapWriter, Pruned, Removed
from megastable_tools.forensics.pruning.token_loss import Loss

Progress = Callable[[int], object]  # called for every block with its bytes in the original
Place = tuple[str, int, int]  # tokens [first, end) of a shard


def apply(
    plan: Path, output: Path, corpus: Path | None = None, progress: Progress = lambda count: None,
    most: float = 1.0, say: Callable[[Loss], object] = lambda loss: None,
) -> Pruned:  # fmt: skip
    """Make `output`, the corpus of a plan without its documents and spans; complete or not at all.

    corpus: its current path, if it differs from the plan's. most: maximum share of tokens and of documents to
    remove; say: called with the loss before anything is written. Raises DataError for a plan that is of another
    corpus, empty, takes too much or names what does not exist, for a damaged corpus, and for an output that is
    occupied or in the way.
    """
    chosen = read_plan(plan)
    directory = _corpus_of(chosen, corpus)
    manifest = Manifest.load(directory)
    gaps = gaps_of(directory, manifest, chosen.named(directory, manifest))
    loss = Loss.of(
        manifest, documents=sum(gap.documents.size for gap in gaps.values()),
        cut=sum(len(gap.cuts) for gap in gaps.values()), tokens=sum(gap.gone for gap in gaps.values()),
    )  # fmt: skip
    loss.check(
        most,
        str(plan),
        "delete lines of documents to keep",
        "cut only the bad parts (plan --spans)",
    )
    _keep_apart(directory, output)
    tokenizer = tokenizer_bytes(directory, manifest)
    say(loss)
    with staged_directory(output) as staging:
        try:
            made = _write(chosen, directory, manifest, gaps, staging, progress)
        except OSError as error:
            raise DataError(f"{output} could not be written: {error.strerror or error}") from error
        write_file(staging / manifest.tokenizer.file, tokenizer)
        made.save(staging)
    return made


def gaps_of(directory: Path, manifest: Manifest, named: dict[str, Named]) -> dict[str, Gaps]:
    """The removed parts of every shard, by a plan. Raises DataError for a span that does not exist."""
    # Shards are opened one at a time: there may be more than the limit of open files.
    found = {}
    for info in manifest.shards:
        of = named.get(info.name, NOTHING)
        shard = Shard(directory / info.name, info)
        found[info.name] = Gaps.of(
            shard, of.documents, of.spans, manifest.tokenizer.eod, manifest.tokenizer.bos
        )
    return found


def _write(
    plan: PrunePlan,
    directory: Path,
    manifest: Manifest,
    all_gaps: dict[str, Gaps],
    staging: Path,
    progress: Progress,
) -> Pruned:
    """Write all files except the tokenizer's and pruned.json, which is returned."""
    places = moved(directory, manifest, all_gaps)
    for split, found in places.items():
        if not found and manifest.splits[split]:
            _nothing_left(plan, split, directory, manifest.splits[split][0])
    infos, cuts, removed = list[ShardInfo](), list[Cut](), Removed()
    spans = any(line.span is not None for lines in plan.lines.values() for line in lines)
    writer = MapWriter(staging)
    try:
        for info in manifest.shards:
            shard, gaps = Shard(directory / info.name, info), all_gaps[info.name]
            removed.add(info.name, gaps)
            for part in chunks(shard.documents):
                writer.add(info.name, part.start, part.stop - part.start, gaps)
            left = gaps.documents.size < shard.documents or not gaps.documents.size
            if left:
                infos.append(write_shard(shard, info, gaps, staging, progress))
            cuts.append(cut_of(info.name, gaps, left, spans))
    finally:
        writer.close()
    with (staging / MAP).open("rb") as file:
        os.fsync(file.fileno())
    facts = pruned_facts(cuts, removed, infos, all_gaps, spans)
    what = plural(facts["documents"], "document")
    what += f" and {plural(facts['tokens'], 'token')}" if spans else ""
    source = f"{manifest.source}; {what} pruned of {manifest.fingerprint()}".lstrip("; ")
    pruned = Manifest(
        name=manifest.name, tokenizer=manifest.tokenizer, dtype=manifest.dtype, shards=infos, source=source,
        splits=splits_at(staging, places),
    )  # fmt: skip
    check_splits(staging, pruned)
    pruned.save(staging)
    return Pruned(
        original=str(directory.resolve()), fingerprint=manifest.fingerprint(), plan=plan.path.name,
        plan_sha256=plan.sha256, made=datetime.now(UTC), manifest_xxh3=hash_file(staging / MANIFEST),
        map_xxh3=hash_file(staging / MAP), **facts,
    ).sealed()  # fmt: skip


def pruned_facts(
    cuts: list[Cut], removed: Removed, infos: list[ShardInfo], all_gaps: dict[str, Gaps], spans: bool
) -> dict[str, Any]:
    """What pruned.json says of the documents. spans: the plan has some."""
    return {
        "shards": cuts,
        "removed": str(removed),
        "documents": sum(cut.documents for cut in cuts),
        "tokens": sum(cut.tokens for cut in cuts),
        "documents_left": sum(info.documents for info in infos),
        "tokens_left": sum(info.tokens for info in infos),
        "cut": sum(cut.cut or 0 for cut in cuts) if spans else None,
        "added": sum(gaps.added for gaps in all_gaps.values()) if spans else None,
    }


def cut_of(shard: str, gaps: Gaps, left: bool, spans: bool) -> Cut:
    """The loss of a shard. spans: the plan has some."""
    cut = len(gaps.cuts) if spans else None
    return Cut(shard=shard, documents=gaps.documents.size, tokens=gaps.gone, left=left, cut=cut)


def write_shard(
    shard: Shard, info: ShardInfo, gaps: Gaps, directory: Path | None, progress: Progress
) -> ShardInfo:
    """Write the shard without its gaps into `directory`, durably; None: only say what would be written.

    Raises DataError if it is not the shard that `info` describes, or the disk fails.
    """
    if hash_file(shard.idx_path) != info.idx_xxh3:
        raise DataError(f"{shard.idx_path} is not the file that its manifest describes: restore it")
    shard.verify_index()
    before = xxhash.xxh3_128()
    with ShardWriter(
        (directory or shard.bin_path.parent) / shard.name, 1, shard.has_modes, shard.dtype, directory is None
    ) as writer:
        for tokens, runs in remaining_runs(shard, gaps):
            before.update(tokens.tobytes())
            progress(tokens.nbytes)
            for run in runs:
                writer.add_documents(*run)
        if before.hexdigest() != info.bin_xxh3:
            raise DataError(f"{shard.bin_path} is not the file that its manifest describes: restore it")
        return writer.close()


def moved(directory: Path, manifest: Manifest, gaps: dict[str, Gaps]) -> dict[str, list[Place]]:
    """Where the splits of the corpus in `directory` lie in shards without `gaps`; segments without any token are
    dropped.

    Raises DataError for a split that does not consist of whole documents.
    """
    check_splits(directory, manifest)
    infos = {info.name: info for info in manifest.shards}
    places: dict[str, list[Place]] = {}
    for split, segments in manifest.splits.items():
        places[split] = []
        for segment in segments:
            shard, of = Shard(directory / segment.shard, infos[segment.shard]), gaps[segment.shard]
            first, end = (
                edge - of.tokens_lost_before(shard.documents_before(edge))
                for edge in (segment.first_token, segment.end)
            )
            if first < end:
                places[split].append((segment.shard, first, end))
    return places


def splits_at(directory: Path, places: dict[str, list[Place]]) -> dict[str, list[Segment]]:
    """The splits that lie at `places` of the shards in `directory`."""

    def segment(name: str, first: int, end: int) -> Segment:
        shard = Shard(directory / name)
        documents = shard.documents_before(end) - shard.documents_before(first)
        return Segment(shard=name, first_token=first, tokens=end - first, documents=documents)

    return {split: [segment(*place) for place in found] for split, found in places.items()}


def check_splits(directory: Path, manifest: Manifest) -> None:
    """Raises DataError where a split does not consist of whole documents."""
    for split, segments in manifest.splits.items():
        if segments:
            stream, first = Stream(directory, manifest, split), 0
            for segment in segments:
                stream.read(first, 1)  # checks the edges of the segment
                first += segment.tokens


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
    one, other = directory.resolve(), output.resolve()
    if one == other:
        raise DataError(f"{output} is the corpus itself, which must not change: choose another output")
    if other.is_relative_to(one) or one.is_relative_to(other):
        raise DataError(f"{output} and the corpus {directory} lie in each other: choose another output")
    try:
        if output.exists() and not (output.is_dir() and not any(output.iterdir())):
            raise DataError(f"{output} exists already: choose another output, or remove it")
    except OSError as error:
        raise DataError(f"{output} cannot be used: {error.strerror}") from error


def corpus_bytes(plan: Path, corpus: Path | None = None) -> int:
    """Number of bytes that `apply` will report as progress."""
    return sum(info.bin_bytes for info in Manifest.load(_corpus_of(read_plan(plan), corpus)).shards)


def _corpus_of(plan: PrunePlan, given: Path | None) -> Path:
    if given is None and plan.corpus is None:
        raise DataError(
            f"{plan.path} does not name its corpus: make a plan of it that does, "
            f"megastable prune plan CORPUS --list {plan.path}, or give --corpus"
        )
    return find(given or plan.corpus or "")


def _nothing_left(plan: PrunePlan, split: str, directory: Path, segment: Segment) -> NoReturn:
    document = Shard(directory / segment.shard).document_of(segment.first_token)
    raise DataError(
        f"{plan.path} leaves nothing of the split {split!r}: delete its line {plan.line_of(segment.shard, document)}, "
        "for one, to keep that document"
    )
