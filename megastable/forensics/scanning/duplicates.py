"""Find exact duplicates among the documents of a corpus, in memory independent of their number.

Hashes (xxh3-128 of a document's bytes) are partitioned by their first bits, so that all copies of a document are in
one partition. Results are sorted by document in the same way, and written as one Parquet file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from megastable.base.errors import DataError
from megastable.forensics.scanning.partition_files import Records, Spool, partitions_for

# A document: its hash, its number over all shards, its tokens.
HASHED = np.dtype([("high", "<u8"), ("low", "<u8"), ("document", "<i8"), ("tokens", "<i8")])
# A copy: its document, its original, their similarity, its tokens, and whether it is only nearly the same.
COPY = np.dtype([("document", "<i8"), ("of", "<i8"), ("similarity", "<f4"), ("tokens", "<i8"), ("near", "?")])

SCHEMA = pa.schema(
    [
        ("document", pa.int64()),
        ("of", pa.int64()),
        ("similarity", pa.float32()),
        ("tokens", pa.int64()),
        ("near", pa.bool_()),
    ]
)

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Duplicates:
    """Copies after the first of each group: number of documents, tokens and groups."""

    documents: int = 0
    tokens: int = 0
    groups: int = 0


class Copies:
    """Copies sorted by document: added in any order, read by ranges. A context manager."""

    def __init__(self, folder: Path, documents: int) -> None:
        count = partitions_for(documents * COPY.itemsize)
        self._width = max(1, -(-documents // count))
        self._spool = Spool(folder, count, COPY)
        self._held: tuple[int, Records] | None = None

    def __enter__(self) -> Copies:
        self._spool.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._spool.__exit__(None, None, None)

    def add(self, records: Records) -> None:
        """Add copies [n]."""
        self._spool.add(records, records["document"] // self._width)
        self._held = None

    def between(self, first: int, end: int) -> Records:
        """The copies among the documents [first, end), ascending."""
        parts = []
        for number in range(first // self._width, max(end - 1, first) // self._width + 1):
            held = self._sorted(number)
            low, high = np.searchsorted(held["document"], (first, end))
            parts.append(held[low:high])
        return np.concatenate(parts)

    def write(self, path: Path) -> None:
        """Write all copies as a Parquet file, ascending. Raises DataError if the disk fails."""
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            with pq.ParquetWriter(temporary, SCHEMA, compression="zstd") as writer:
                for number in range(self._spool.count):
                    found = self._sorted(number)
                    if len(found):
                        writer.write_table(
                            pa.table({name: found[name] for name in SCHEMA.names}, schema=SCHEMA)
                        )
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise DataError(f"{path} could not be written: {error.strerror or error}") from error

    def _sorted(self, number: int) -> Records:
        if self._held is None or self._held[0] != number:
            found = self._spool.read(number)
            self._held = number, found[np.argsort(found["document"], kind="stable")]
        return self._held[1]


def exact(hashed: Iterable[Records], documents: int, folder: Path, copies: Copies) -> Duplicates:
    """Add the documents to `copies` for which an earlier one has the same hash.

    hashed: `HASHED` records of `documents` documents in all; documents without tokens are not copies.
    """
    total = Duplicates()
    count = partitions_for(documents * HASHED.itemsize)
    with Spool(folder, count, HASHED) as spool:
        for records in hashed:
            full = records[records["tokens"] > 0]
            spool.add(full, (full["high"] % np.uint64(count)).astype(np.int64))
        for part in spool:
            found = _copies(part)
            copies.add(found)
            total = Duplicates(
                total.documents + len(found),
                total.tokens + int(found["tokens"].sum()),
                total.groups + len(np.unique(found["of"])),
            )
    return total


def _copies(part: Records) -> Records:
    """All documents of a partition but the first of each hash."""
    part = part[np.lexsort((part["document"], part["low"], part["high"]))]
    same = (part["high"][1:] == part["high"][:-1]) & (part["low"][1:] == part["low"][:-1])
    begins = np.flatnonzero(np.append(True, ~same)) if len(part) else np.empty(0, np.int64)
    first = np.repeat(part["document"][begins], np.diff(np.append(begins, len(part))))
    later = part["document"] != first
    found = np.empty(int(later.sum()), COPY)
    found["document"], found["of"], found["similarity"] = part["document"][later], first[later], 1.0
    found["tokens"], found["near"] = part["tokens"][later], False
    return found


def read_copies(path: Path) -> Iterator[Records]:
    """The copies in a file that `Copies.write` wrote, ascending, in batches. Raises DataError."""
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1 << 16):
                found = np.empty(batch.num_rows, COPY)
                for name in SCHEMA.names:
                    found[name] = batch.column(name).to_numpy(zero_copy_only=False)
                yield found
    except (OSError, pa.ArrowException, KeyError) as error:
        raise DataError(f"{path} cannot be read: {error}; scan again") from error
