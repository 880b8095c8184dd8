"""Prove that a pruned corpus is the original without the documents and spans of its plan, and nothing else.

Both are read in full, side by side, and compared along the document map: the map names every document of either
exactly once and in order, and every piece of a cut one; the remainder has the same sequences, lengths, modes and
tokens, except the tokens that the map says were added to begin and end pieces; and hashes, splits
and tokenizer match the manifests. Memory does not grow with the corpora, except 8 bytes per removed document.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import xxhash

from megastable.base.errors import DataError
from megastable.base.text import plural
from megastable.config.recipe import find
from megastable.data.manifest import FILE as MANIFEST
from megastable.data.manifest import Manifest
from megastable.data.shard_format import HEADER, ShardInfo, chunks, little_endian
from megastable.data.shards import Shard, hash_file
from megastable.forensics.pruning.gaps import Gaps, Span, blocks, without
from megastable.forensics.pruning.prune import (
    Progress,
    check_splits,
    cut_of,
    gaps_of,
    moved,
    splits_at,
    tokenizer_bytes,
)
from megastable.forensics.pruning.prune_plan import read_plan
from megastable.forensics.pruning.pruned import FILE, MAP, Cut, Pruned, Removed, Rows, gone_text, read_map

Int64s = npt.NDArray[np.int64]


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
    news = {info.name: info for info in new.shards}
    rows = _MapRows(directory)
    all_gaps, removed, cuts = dict[str, Gaps](), Removed(), list[Cut]()
    for info in old.shards:
        shard = Shard(original / info.name, info)
        gone, spans = rows.gone(info.name, shard)
        gaps = all_gaps[info.name] = Gaps.of(shard, gone, spans, old.tokenizer.eod, old.tokenizer.bos)
        rows.check(info.name, shard.documents, gaps)
        if listed is not None and (gaps.documents.tolist(), gaps.cuts) != (
            listed[info.name].documents.tolist(), listed[info.name].cuts
        ):  # fmt: skip
            raise DataError(f"{plan} does not name what {directory} lacks of {info.name}")
        removed.add(info.name, gaps)
        left = gone.size < info.documents or not gone.size
        if left != (info.name in news):
            there = "is missing" if left else "should not be there: none of its documents is left"
            raise DataError(f"{directory / MANIFEST}: the shard {info.name} {there}")
        if left:
            _same(shard, info, Shard(directory / info.name, news[info.name]), news[info.name], gaps, progress)
        cuts.append(cut_of(info.name, gaps, left, pruned.cut is not None))
    rows.end()
    _told(directory, new, pruned, cuts, str(removed), sum(gaps.added for gaps in all_gaps.values()))
    if new.splits != splits_at(directory, moved(old, all_gaps)):
        raise DataError(
            f"{directory / MANIFEST}: its splits are not those of {original} without the documents"
        )
    check_splits(directory, new)
    documents, tokens = pruned.documents_left, pruned.tokens_left
    cut, added = pruned.cut or 0, pruned.added or 0
    return Proof(documents, tokens, pruned.documents, pruned.tokens, cut, added, original)


class _MapRows:
    """The map, shard by shard."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / MAP
        self._parts = read_map(directory)
        self._seen = list[Rows]()

    def gone(self, name: str, shard: Shard) -> tuple[Int64s, dict[int, list[Span]]]:
        """The removed documents of a shard, and the removed spans of others. Every document must have its row."""
        old_next, new_next, gone, self._seen = 0, 0, [np.empty(0, np.int64)], []
        spans: dict[int, list[Span]] = {}
        while old_next < shard.documents:
            of, rows = next(self._parts, ("", None))
            numbers = np.empty(0, np.int64) if rows is None else np.unique(rows.old)
            if rows is None or of != name or not np.array_equal(
                numbers, np.arange(old_next, old_next + numbers.size)
            ):  # fmt: skip
                raise DataError(
                    f"{self.path}: document {old_next} of {name} is missing or out of order: prune again"
                )
            kept = rows.new[rows.new >= 0]
            if not np.array_equal(kept, np.arange(new_next, new_next + kept.size)):
                raise DataError(
                    f"{self.path}: the new numbers of {name} are not 0, 1, 2, ... near its document {old_next}: "
                    "prune again"
                )
            old_next, new_next = old_next + numbers.size, new_next + kept.size
            if old_next > shard.documents:
                break
            gone.append(rows.old[rows.new < 0])
            for number in np.unique(rows.old[rows.end >= 0]).tolist():
                spans[number] = self._spans(name, shard, number, rows)
            self._seen.append(rows)
        if old_next > shard.documents:
            raise DataError(f"{self.path}: {name} has {shard.documents} documents, the map more: prune again")
        return np.concatenate(gone), spans

    def _spans(self, name: str, shard: Shard, number: int, rows: Rows) -> list[Span]:
        """The parts between the pieces of a document."""
        begin, end = shard.document_bounds(number)
        mine = rows.old == number
        edges = [0, *np.stack([rows.first[mine], rows.end[mine]], axis=1).ravel().tolist(), end - begin]
        if edges != sorted(edges):
            raise DataError(
                f"{self.path}: the pieces of document {number} of {name} do not ascend, or are not in it: prune again"
            )
        return [(first, stop) for first, stop in zip(edges[::2], edges[1::2], strict=True) if first < stop]

    def check(self, name: str, documents: int, gaps: Gaps) -> None:
        """Check that each row of a shard is the one that `gaps` gives."""
        at = 0
        for rows in self._seen:
            count = int(np.unique(rows.old).size)
            if not all(map(np.array_equal, rows.columns, Rows.of(at, count, gaps).columns)):
                raise DataError(
                    f"{self.path}: the rows of {name} from its document {at} on are not what is left of it: prune again"
                )
            at += count

    def end(self) -> None:
        """Check that nothing follows the last shard."""
        if (extra := next(self._parts, None)) is not None:
            raise DataError(f"{self.path} names the shard {extra[0]!r}, which is not there: prune again")


def _same(
    old: Shard, old_info: ShardInfo, new: Shard, new_info: ShardInfo, gaps: Gaps, progress: Progress
) -> None:
    """Raises DataError unless `new` is `old` without `gaps`, and both match their manifests."""
    less = gaps.fewer, gaps.sequences.less, gaps.tokens.less
    counts = old.documents - less[0], old.sequences - less[1], old.tokens - less[2]
    found = new.documents, new.sequences, new.tokens
    if counts != found or old.dtype != new.dtype or (new.sequences and old.has_modes != new.has_modes):
        raise DataError(
            f"{new.idx_path}: documents, sequences and tokens are {found}, without the documents left out "
            f"the original has {counts}, or type or modes differ"
        )
    for shard, info in ((old, old_info), (new, new_info)):
        shard.verify_index()
        if hash_file(shard.idx_path) != info.idx_xxh3:
            _damaged(shard.idx_path)
    _same_sequences(old, new, gaps)
    itemsize = little_endian(old.dtype).itemsize
    (holes, put), before, after = gaps.token_holes(itemsize), xxhash.xxh3_128(), xxhash.xxh3_128()

    def left() -> Iterator[memoryview | bytes]:
        for first, block in blocks(old.bin_path, end=old.bin_bytes):
            before.update(block)
            progress(len(block))
            yield without(first, block, holes, put)

    at, others = 0, _Reader(new)
    for part in left():
        other = others.next(len(part))
        after.update(other)
        if part != other:
            wrong = np.frombuffer(part, np.uint8) != np.frombuffer(other, np.uint8)
            _different(old, new, gaps, (at + int(np.argmax(wrong))) // itemsize)
        at += len(part)
    for shard, digest, info in ((old, before, old_info), (new, after, new_info)):
        if digest.hexdigest() != info.bin_xxh3:
            _damaged(shard.bin_path)


class _Reader:
    """A shard's `.bin`, read one piece after another."""

    def __init__(self, shard: Shard) -> None:
        self._shard, self._at = shard, 0

    def next(self, size: int) -> memoryview:
        itemsize = little_endian(self._shard.dtype).itemsize
        tokens = self._shard.raw(self._at // itemsize, size // itemsize)
        self._at += size
        return tokens.data.cast("B") if tokens.size else memoryview(b"")


def _same_sequences(old: Shard, new: Shard, gaps: Gaps) -> None:
    """Check that every remaining document has the same number of sequences, of the same lengths and modes."""
    at = 0
    for part in chunks(old.documents):
        count = part.stop - part.start
        sizes = gaps.sequence_counts(part.start, np.diff(old.document_sequences(part.start, count)))
        found = np.diff(new.document_sequences(at, sizes.size))
        if (differ := np.flatnonzero(sizes != found)).size:
            document = at + int(differ[0])
            raise DataError(
                f"{new.idx_path}: document {document} has {found[differ[0]]} sequences; as document "
                f"{gaps.original(document)[0]} of the original it has {sizes[differ[0]]}"
            )
        at += sizes.size
    kinds = [("lengths", 4, HEADER.size, HEADER.size, gaps.length_holes(HEADER.size))]
    if old.has_modes:
        begins = old.idx_bytes - old.sequences, new.idx_bytes - new.sequences
        kinds.append(("modes", 1, *begins, gaps.mode_holes(begins[0])))
    for what, size, old_at, new_at, holes in kinds:
        done = 0
        for first, block in blocks(old.idx_path, old_at, old_at + size * old.sequences):
            kept, begin = bytes(without(first, block, *holes)), new_at + done
            others = b"".join(bytes(piece) for _, piece in blocks(new.idx_path, begin, begin + len(kept)))
            if kept != others:
                wrong = np.frombuffer(kept, f"<i{size}") != np.frombuffer(others, f"<i{size}")
                sequence = done // size + int(np.argmax(wrong))
                raise DataError(f"{new.idx_path}: {what}[{sequence}] differs from the original")
            done += len(kept)


def _different(old: Shard, new: Shard, gaps: Gaps, token: int) -> NoReturn:
    document = new.document_of(token)
    first, (was, begin) = new.document_bounds(document)[0], gaps.original(document)
    found = f"{new.bin_path}: token {token - first} of document {document} is {new.raw(token, 1)[0]}"
    piece = next((p for cut in gaps.cut_among(was, 1) for p in cut.pieces if p.first == begin), None)
    at = begin + token - first - (piece is not None and piece.opened)
    if piece is not None and at in (piece.first - 1, piece.end):
        kind = "an end" if at == piece.end else "a begin"
        raise DataError(f"{found}; {kind}-of-document token should be there, where document {was} was cut")
    there = old.document_bounds(was)[0] + at
    raise DataError(
        f"{found}; in the original, as document {was} of {old.bin_path}, it is {old.raw(there, 1)[0]}"
    )


def _told(directory: Path, new: Manifest, pruned: Pruned, cuts: list[Cut], removed: str, added: int) -> None:
    """Check that pruned.json states what was found."""
    found = {
        "shards": cuts,
        "removed": removed,
        "documents": sum(cut.documents for cut in cuts),
        "tokens": sum(cut.tokens for cut in cuts),
        "documents_left": sum(info.documents for info in new.shards),
        "tokens_left": sum(info.tokens for info in new.shards),
    }
    if pruned.cut is not None or added:
        found |= {"cut": sum(cut.cut or 0 for cut in cuts), "added": added}
    for key, value in found.items():
        if getattr(pruned, key) != value:
            raise DataError(f"{directory / FILE}: {key} does not match map and shards: prune again")


def _no_others(directory: Path, manifest: Manifest) -> None:
    own = {info.name for info in manifest.shards}
    for path in sorted(directory.iterdir()):
        if path.suffix in (".bin", ".idx") and path.name[: -len(path.suffix)] not in own:
            raise DataError(f"{path} is not a shard of this corpus: remove it")


def _damaged(path: Path) -> NoReturn:
    raise DataError(f"{path} is not the file that its manifest describes: restore it")
