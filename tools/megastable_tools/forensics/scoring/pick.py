"""Select documents of some shards: all, some evenly spread, or those of a list; in runs of a bounded size."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megastable.base.errors import DataError
from megastable.data.shards import Shard
from megastable_tools.forensics.pruning.prune_plan import read_plan
from megastable_tools.forensics.scanning.units import units
from megastable_tools.forensics.shard_set import Shelf

Int64s = npt.NDArray[np.int64]
Picked = Mapping[str, Int64s]  # by shard, the numbers of its documents, ascending


@dataclass(frozen=True)
class Parcel:
    """Documents of one shard processed together: their numbers [d], and tokens [first, end) of each."""

    number: int
    shard: Shard
    numbers: Int64s
    first: Int64s
    end: Int64s

    @property
    def tokens(self) -> int:
        return int((self.end - self.first).sum())


def listed(shelf: Shelf, path: Path) -> dict[str, Int64s]:
    """The documents that a plan or a list by hand names. Raises DataError for one that is not in `shelf`."""
    plan = read_plan(path)
    if shelf.manifest is not None and shelf.directory is not None:
        named = plan.checked(shelf.directory, shelf.manifest, twice=True)
        return {shard: of.touched for shard, of in named.items()}
    found = {shard: [line.document for line in lines] for shard, lines in plan.lines.items()}
    return checked(shelf, {shard: np.array(of, np.int64) for shard, of in found.items()})


def between(shelf: Shelf, first: int, end: int) -> dict[str, Int64s]:
    """The documents [first, end), counted over all shards. Raises DataError when there are none."""
    if not 0 <= first < min(end, shelf.documents):
        raise DataError(
            f"{shelf.name} has the documents 0 to {shelf.documents - 1}, none of {first} to {end - 1}"
        )
    return _by_shard(shelf, np.arange(first, min(end, shelf.documents)))


def spread(shelf: Shelf, count: int, among: Picked | None = None) -> dict[str, Int64s]:
    """`count` documents evenly spread over all, or over those of `among`; all of them if there are no more."""
    if count < 1:
        raise DataError(f"a sample of {count} documents: give at least 1")
    total = shelf.documents if among is None else sum(map(len, among.values()))
    wanted = (np.arange(min(count, total)) * total + total // 2) // max(min(count, total), 1)
    if among is None:
        return _by_shard(shelf, wanted)
    found, before = {}, 0
    for shard in shelf.shards:
        documents = among.get(shard.name, np.empty(0, np.int64))
        inside = wanted[(wanted >= before) & (wanted < before + len(documents))] - before
        if inside.size:
            found[shard.name] = documents[inside]
        before += len(documents)
    return found


def checked(shelf: Shelf, picked: Picked) -> dict[str, Int64s]:
    """Each once, ascending. Raises DataError for documents that are not in `shelf`, and for an empty selection."""
    found = {}
    for name, documents in picked.items():
        shard = shelf.shard(name)
        documents = np.unique(documents)
        if documents.size and not 0 <= documents[0] <= documents[-1] < shard.documents:
            wrong = documents[0] if documents[0] < 0 else documents[-1]
            raise DataError(
                f"there is no document {wrong} in {name}, which has {shard.documents:,}, counted from 0"
            )
        if documents.size:
            found[name] = documents
    if not found:
        raise DataError(f"no document of {shelf.name} is named: nothing to do")
    return found


def digest(picked: Picked | None) -> str:
    """A digest to compare two selections; "" for all."""
    if picked is None:
        return ""
    parts = [(name, picked[name].tobytes()) for name in sorted(picked)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def parcels(shelf: Shelf, picked: Picked | None, size: int) -> Iterator[Parcel]:
    """The documents in the order of the shards, in runs of about `size` tokens; a longer one is alone."""
    if picked is None:
        for unit in units(shelf.shards, size):
            shard = shelf.shards[unit.shard]
            edges = shard.document_edges(unit.first_document, unit.documents)
            yield Parcel(unit.number, shard, unit.numbers, edges[:-1], edges[1:])
        return
    number = 0
    for shard in shelf.shards:
        documents = picked.get(shard.name, np.empty(0, np.int64))
        bounds = np.array([shard.document_bounds(d) for d in documents.tolist()], np.int64).reshape(-1, 2)
        total = np.cumsum(bounds[:, 1] - bounds[:, 0])
        begin = 0
        while begin < len(documents):
            done = int(total[begin - 1]) if begin else 0
            end = max(begin + 1, int(np.searchsorted(total, done + size, side="right")))
            some = slice(begin, end)
            yield Parcel(number, shard, documents[some], bounds[some, 0], bounds[some, 1])
            number, begin = number + 1, end


def _by_shard(shelf: Shelf, wanted: Int64s) -> dict[str, Int64s]:
    """Documents counted over all shards, ascending, by shard."""
    found, before = {}, 0
    for shard in shelf.shards:
        inside = wanted[(wanted >= before) & (wanted < before + shard.documents)] - before
        if inside.size:
            found[shard.name] = inside
        before += shard.documents
    return found
