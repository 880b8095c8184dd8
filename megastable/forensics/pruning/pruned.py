"""What a pruned corpus says of how it was made: `pruned.json`, and the map from old documents to new ones.

`documents.parquet` has a row for every document of the original: `shard`, `old`, its number there, and `new`, its
number in the shard of the same name, null where it was left out. `pruned.json` holds the hashes of map and manifest and
a seal over itself: a byte that is changed anywhere is found.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megastable.data.staging import write_file
from megastable.errors import DataError
from megastable.report.told import plural

FILE, MAP = "pruned.json", "documents.parquet"
SCHEMA = pa.schema(
    [("shard", pa.dictionary(pa.int32(), pa.string())), ("old", pa.int64()), ("new", pa.int64())]
)

Int64s = npt.NDArray[np.int64]


class Cut(BaseModel):
    """What a shard lost. left: it is among the shards of the pruned corpus; one without any document is not."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shard: str
    documents: int = Field(ge=0)
    tokens: int = Field(ge=0)
    left: bool


class Pruned(BaseModel):
    """original: where the corpus lay; fingerprint: its own, not the new one's. plan_sha256: of the plan's file.

    removed: SHA-256 of the lines "shard document" of all documents that were left out, in order. documents, tokens: of
    those.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    original: str
    fingerprint: str
    plan: str
    plan_sha256: str
    removed: str
    documents: int
    tokens: int
    documents_left: int
    tokens_left: int
    shards: list[Cut]
    made: datetime
    manifest_xxh3: str
    map_xxh3: str
    seal: str = ""

    def __str__(self) -> str:
        gone = f"{plural(self.documents, 'document')} and {plural(self.tokens, 'token')} are gone"
        left = f"{plural(self.documents_left, 'document')} and {plural(self.tokens_left, 'token')} are left"
        lost = [
            f"\nthe shard {cut.shard} is gone: nothing was left of it" for cut in self.shards if not cut.left
        ]
        return f"{gone}, {left}{''.join(lost)}"

    def sealed(self) -> Pruned:
        return self.model_copy(update={"seal": self._digest()})

    def save(self, directory: Path) -> None:
        write_file(directory / FILE, self._text())

    @classmethod
    def load(cls, directory: Path) -> Pruned:
        """Raises DataError for a directory that is no pruned corpus, and for a file that was changed."""
        path = directory / FILE
        try:
            content = path.read_bytes()
            found = cls.model_validate_json(content)
        except FileNotFoundError:
            raise DataError(
                f"{path} is not there: {directory} is no pruned corpus (tools/prune_data.py apply makes them)"
            ) from None
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}: restore it") from error
        except ValidationError as error:
            what = ".".join(map(str, error.errors()[0]["loc"])) or "it"
            raise DataError(f"{path} is damaged ({what}: {error.errors()[0]['msg']}): prune again") from error
        if found.seal != found._digest() or content != found._text():
            raise DataError(f"{path} was changed after it was written: prune again")
        return found

    def _digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(self.model_dump_json(exclude={"seal"}).encode())

    def _text(self) -> bytes:
        return (self.model_dump_json(indent=1) + "\n").encode()


class Removed:
    """The digest of the documents that are left out, taken as they come, shard after shard."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, shard: str, documents: Int64s) -> None:
        lines = (f"{shard} {document}\n" for document in documents.tolist())
        self._digest.update("".join(lines).encode())

    def __str__(self) -> str:
        return self._digest.hexdigest()


class MapWriter:
    """Writes the map, a piece of a shard at a time."""

    def __init__(self, directory: Path) -> None:
        # Numbers that ascend take next to no room as differences.
        options: dict[str, Any] = {"use_dictionary": ["shard"], "compression": "zstd", "store_schema": False}
        delta = {"old": "DELTA_BINARY_PACKED", "new": "DELTA_BINARY_PACKED"}
        self._writer = pq.ParquetWriter(directory / MAP, SCHEMA, column_encoding=delta, **options)

    def add(self, shard: str, first: int, new: Int64s) -> None:
        """The documents from number `first` on; new: their new numbers, -1 without."""
        names = pa.DictionaryArray.from_arrays(pa.array(np.zeros(new.size, np.int32)), pa.array([shard]))
        old = pa.array(np.arange(first, first + new.size))
        table = pa.table([names, old, pa.array(new, mask=new < 0)], schema=SCHEMA)
        self._writer.write_table(table, row_group_size=max(new.size, 1))

    def close(self) -> None:
        self._writer.close()


def read_map(directory: Path) -> Iterator[tuple[str, Int64s, Int64s]]:
    """The map in its pieces: shard, old numbers, new ones (-1 without). Raises DataError where it is damaged."""
    path = directory / MAP
    try:
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, columns=SCHEMA.names).combine_chunks()
                names = table["shard"].unique().to_pylist()
                if len(names) != 1:
                    raise DataError(f"{path}: its part {group} is not of one shard: prune again")
                new = table["new"].fill_null(-1)
                yield str(names[0]), table["old"].to_numpy(), new.to_numpy()
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} cannot be read: {error}: prune again") from error
