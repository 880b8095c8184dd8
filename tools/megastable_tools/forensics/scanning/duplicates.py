"""Find exact duplicates among the documents of a corpus. Memory grows with the findings only, 33 bytes each.

Documents are compared by their hashes (xxh3-128 of the bytes), of which a bounded number is in memory: those of a large
corpus are read several times, each time for another share of all hashes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from megastable.base.errors import DataError
from megastable_tools.forensics.document_map import write_rows

BYTES = 1 << 29  # of records in memory

Records = npt.NDArray[np.void]

# A document: its hash, its number over all shards, its tokens.
HASHED = np.dtype([("high", "<u8"), ("low", "<u8"), ("document", "<i8"), ("tokens", "<i8")])
# A copy: its document, its original, their similarity, its tokens, and whether it is only nearly the same.
COPY = np.dtype([("document", "<i8"), ("of", "<i8"), ("similarity", "<f4"), ("tokens", "<i8"), ("near", "?")])


def count_passes(size: int) -> int:
    """How often records of `size` bytes are read, so that those of one share fit into memory."""
    return max(1, -(-size // BYTES))


def find_exact(read_hashes: Callable[[], Iterable[Records]], documents: int) -> Records:
    """The documents for which an earlier one has the same hash: `COPY` [n], ascending.

    Args:
        read_hashes: Gives `HASHED` records of all documents; those without tokens are not copies.
        documents: How many they are.
    """
    passes, copies = count_passes(documents * HASHED.itemsize), [np.empty(0, COPY)]
    for number in range(passes):
        share = [np.empty(0, HASHED)]
        for records in read_hashes():
            mine = (records["tokens"] > 0) & (records["high"] % np.uint64(passes) == number)
            share.append(records[mine])
        copies.append(_find_copies(np.concatenate(share)))
    return sort_copies(copies)


def sort_copies(copies: Iterable[Records]) -> Records:
    """Several copies [n] as one array, by their document."""
    found = np.concatenate(list(copies))
    return found[np.argsort(found["document"], kind="stable")]


def _find_copies(share: Records) -> Records:
    """All documents but the first of each hash."""
    share = share[np.lexsort((share["document"], share["low"], share["high"]))]
    same = (share["high"][1:] == share["high"][:-1]) & (share["low"][1:] == share["low"][:-1])
    begins = np.flatnonzero(np.append(True, ~same)) if len(share) else np.empty(0, np.int64)
    first = np.repeat(share["document"][begins], np.diff(np.append(begins, len(share))))
    later = share["document"] != first
    found = np.empty(int(later.sum()), COPY)
    found["document"], found["of"], found["similarity"] = share["document"][later], first[later], 1.0
    found["tokens"], found["near"] = share["tokens"][later], False
    return found


def write_copies(path: Path, copies: Records) -> None:
    """Write copies as a Parquet file. Raises DataError if the disk fails."""
    write_rows(path, pa.table({name: copies[name] for name in COPY.names or ()}))


def read_copies(path: Path) -> Records:
    """The copies in a file that `write_copies` wrote, ascending. Raises DataError."""
    try:
        table = pq.read_table(path, partitioning=None)
        found = np.empty(len(table), COPY)
        for name in COPY.names or ():
            found[name] = table[name].to_numpy()
        return found
    except (OSError, pa.ArrowException, KeyError) as error:
        raise DataError(f"{path} cannot be read: {error}; scan again") from error
