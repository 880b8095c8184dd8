"""Prove that a pruned corpus is the original without the documents and spans of its plan, and nothing else.

The document map names every document of either exactly once and in order, and every piece of a cut one. What the
original gives without the rest is computed again, and hashed: its hashes, counts, splits and map must be those of the
pruned corpus, whose files are read in full. Memory grows with the documents of one shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from megastable.base.errors import DataError
from megastable.base.text import plural
from megastable.config.recipe import find
from megastable.data.manifest import FILE as MANIFEST
from megastable.data.manifest import Manifest, TokenizerInfo
from megastable.data.shard_format import ShardInfo
from megastable.data.shards import Shard, hash_file
from megastable_tools.forensics.pruning.gaps import Gaps, Span
from megastable_tools.forensics.pruning.prune import (
    Progress,
    check_splits,
    cut_of,
    gaps_of,
    moved,
    pruned_facts,
    splits_at,
    tokenizer_bytes,
    write_shard,
)
from megastable_tools.forensics.pruning.prune_plan import read_plan
from megastable_tools.forensics.pruning.pruned import (
    FILE,
    MAP,
    Cut,
    Pruned,
    Removed,
    Rows,
    gone_text,
    read_map,
)


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
        same = f"{plural(self.documents, 'document')} and {plural(self.tokens, 'token')} are those of {self.original}"
        return f"{same}; {gone_text(self.gone, self.gone_tokens, self.cut, self.added)}"


def verify(
    directory: Path,
    original: Path | None = None,
    plan: Path | None = None,
    progress: Progress = lambda count: None,
) -> Proof:
    """Compare a pruned corpus with its original (default: its recorded path); plan: compare that, too.

    Raises DataError naming the first difference.
    """
    directory = find(directory)
    pruned = Pruned.load(directory)
    for name, wanted in ((MANIFEST, pruned.manifest_xxh3), (MAP, pruned.map_xxh3)):
        if hash_file(directory / name) != wanted:
            raise DataError(
                f"{directory / name} was changed after {FILE} was written: restore it, or prune again"
            )
    new = Manifest.load(directory)
    original = find(original or Path(pruned.original))
    old = Manifest.load(original)
    if old.fingerprint() != pruned.fingerprint:
        raise DataError(
            f"{original} is not what {directory} was pruned of: its fingerprint is {old.fingerprint()[:12]}..., not "
            f"{pruned.fingerprint[:12]}...; give the original with --original"
        )
    if (new.name, new.dtype, new.tokenizer) != (old.name, old.dtype, old.tokenizer):
        raise DataError(f"{directory / MANIFEST}: name, dtype or tokenizer is not that of {original}")
    for folder, manifest in ((original, old), (directory, new)):
        tokenizer_bytes(folder, manifest)
    _no_others(directory, new)
    return _compare(directory, new, original, old, pruned, plan, progress)


def original_bytes(directory: Path, original: Path | None = None) -> int:
    """Number of bytes that `verify` will report as progress."""
    found = find(original or Path(Pruned.load(find(directory)).original))
    return sum(info.bin_bytes for info in Manifest.load(found).shards)


def _compare(
    directory: Path, new: Manifest, original: Path, old: Manifest, pruned: Pruned, plan: Path | None,
    progress: Progress,
) -> Proof:  # fmt: skip
    listed = None if plan is None else gaps_of(original, old, read_plan(plan).named(original, old))
    maps = groupby(read_map(directory), key=lambda item: item[0])
    named, group = next(maps, ("", iter(())))
    all_gaps, removed, cuts, infos = dict[str, Gaps](), Removed(), list[Cut](), list[ShardInfo]()
    for info in old.shards:
        shard, rows = Shard(original / info.name, info), list[Rows]()
        if named == info.name:
            rows = [some for _, some in group]
            named, group = next(maps, ("", iter(())))
        gaps = all_gaps[info.name] = _gaps_of_map(directory, shard, rows, old.tokenizer)
        if listed is not None and (gaps.documents.tolist(), gaps.cuts) != (
            listed[info.name].documents.tolist(), listed[info.name].cuts
        ):  # fmt: skip
            raise DataError(f"{plan} does not name what {directory} lacks of {info.name}")
        removed.add(info.name, gaps)
        left = gaps.documents.size < info.documents or not gaps.documents.size
        if left:
            infos.append(write_shard(shard, info, gaps, None, progress))
        cuts.append(cut_of(info.name, gaps, left, pruned.cut is not None))
    if named:
        raise DataError(f"{directory / MAP} names the shard {named!r}, which is not there: prune again")
    _check_shards(directory, new, infos, original)
    spans = pruned.cut is not None or any(gaps.cuts for gaps in all_gaps.values())
    for key, value in pruned_facts(cuts, removed, infos, all_gaps, spans).items():
        if getattr(pruned, key) != value:
            raise DataError(f"{directory / FILE}: {key} does not match map and shards: prune again")
    if new.splits != splits_at(directory, moved(original, old, all_gaps)):
        raise DataError(
            f"{directory / MANIFEST}: its splits are not those of {original} without the documents"
        )
    check_splits(directory, new)
    documents, tokens = pruned.documents_left, pruned.tokens_left
    cut, added = pruned.cut or 0, pruned.added or 0
    return Proof(documents, tokens, pruned.documents, pruned.tokens, cut, added, original)


def _check_shards(directory: Path, new: Manifest, infos: list[ShardInfo], original: Path) -> None:
    """Check that the shards are those that the original gives now, in the manifest and on disk."""
    expected = {info.name: info for info in infos}
    for info in new.shards:
        if info.name not in expected:
            raise DataError(
                f"{directory / MANIFEST}: the shard {info.name} should not be there: none of its documents is left"
            )
        for suffix, facts in ((".idx", ("idx_xxh3", "idx_bytes")), (".bin", ("bin_xxh3", "bin_bytes"))):
            if any(getattr(info, fact) != getattr(expected[info.name], fact) for fact in facts):
                raise DataError(
                    f"{directory / info.name}{suffix} is not what {original} gives without the documents and spans "
                    f"of {MAP}: prune again"
                )
        Shard(directory / info.name, info).verify()
    if new.shards != infos:
        raise DataError(
            f"{directory / MANIFEST}: a shard is missing, out of order, or not as it is: prune again"
        )


def _gaps_of_map(directory: Path, shard: Shard, rows: list[Rows], tokenizer: TokenizerInfo) -> Gaps:
    """The removed parts of a shard by its rows of the map, which must be what these parts give."""
    damaged = f"{directory / MAP}: the rows of {shard.name} are not those of its documents: prune again"
    found = (
        Rows(*(np.concatenate(some) for some in zip(*(of.columns for of in rows), strict=True)))
        if rows
        else None
    )
    old = np.empty(0, np.int64) if found is None else found.old
    if not np.array_equal(np.unique(old), np.arange(shard.documents)) or np.any(np.diff(old) < 0):
        raise DataError(damaged)
    if found is None:
        return Gaps.of(shard, old, {}, tokenizer.eod, tokenizer.bos)
    spans = dict[int, list[Span]]()
    for number in np.unique(old[found.end >= 0]).tolist():
        begin, end = shard.document_bounds(number)
        pieces = slice(*np.searchsorted(old, [number, number + 1]).tolist())
        edges = [0, *np.stack([found.first[pieces], found.end[pieces]], axis=1).ravel().tolist(), end - begin]
        if edges != sorted(edges):
            raise DataError(damaged)
        spans[number] = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
    gaps = Gaps.of(shard, old[found.new < 0], spans, tokenizer.eod, tokenizer.bos)
    expected = Rows.of(0, shard.documents, gaps)
    if not all(map(np.array_equal, found.columns, expected.columns)):
        raise DataError(damaged)
    return gaps


def _no_others(directory: Path, manifest: Manifest) -> None:
    own = {info.name for info in manifest.shards}
    for path in sorted(directory.iterdir()):
        if path.suffix in (".bin", ".idx") and path.name[: -len(path.suffix)] not in own:
            raise DataError(f"{path} is not a shard of this corpus: remove it")
