"""A resumable map over the documents of some shards: a folder with a part for every run of documents.

`scan` and `score` compute a row for each document. A part that is complete is not computed again, so that an
interrupted call goes on where it was; the folder is locked against other processes.

begun.json         settings: it resumes only with the same ones
yardstick.npz      the baseline of a scan
parts/N.parquet    the rows of run N, complete when it has its name
near/N.npy         signatures of its documents, for near duplicates
duplicates.parquet copies, ascending
scan.json, scores.json  the result: it is complete when it exists
"""

from __future__ import annotations

import fcntl
import io
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, ValidationError

from megastable.base.durable import lock_file, write_data_file
from megastable.base.errors import DataError
from megastable_tools.prepare.prepare import ordered_map
from megastable_tools.prepare.reporting import Meter

BEGUN, RESULT, YARDSTICK = "begun.json", "scan.json", "yardstick.npz"
SCORES = "scores.json"  # the result in a folder of scores
DUPLICATES, PARTS, NEAR, LOCK = "duplicates.parquet", "parts", "near", ".lock"
SETTINGS = {
    "fingerprint": "the shards",
    "files": "the shards or the reference, whose files changed",
    "tokenizer": "the tokenizer",
    "against": "the reference",
    "format": "the version",
    "checkpoint": "the checkpoint",
    "documents": "the choice of documents",
    "precision": "the precision, see --exact",
    "gradients": "--gradients",
}


class DocumentRun(Protocol):
    """Documents of a shard that make one part; `numbers` int64 [d]: in their shard, `number`: of the part."""

    @property
    def number(self) -> int: ...
    @property
    def numbers(self) -> npt.NDArray[np.int64]: ...
    @property
    def tokens(self) -> int: ...


Run = TypeVar("Run", bound=DocumentRun)


@dataclass(frozen=True)
class KeptPart:
    """A part that is complete now; measured: in this call."""

    tokens: int
    documents: int
    measured: bool


def map_documents(
    runs: Iterable[Run],
    keep: Callable[[Run], KeptPart],
    total: int,
    *,
    labels: tuple[str, str],
    progress: bool,
    workers: int = 1,
) -> tuple[int, int]:
    """Complete the parts of all runs.

    Args:
        runs: Of documents, in the order of their parts.
        keep: Completes the part of one, unless it is; `keep_rows` for tables. Runs in the worker processes.
        total: Tokens of all runs.
        labels: Of the progress: what is done, and what was ("scanning", "scanned").
        progress: Shown on stderr.
        workers: Processes; with 1, `keep` runs in this one.

    Returns:
        The number of parts, and how many tokens were measured in this call.
    """
    part_count = tokens_read = documents = measured = 0
    with (
        Meter(total, not progress, *labels, "tokens") as meter,
        closing(ordered_map(keep, runs, workers)) as all_kept,
    ):
        for kept_part in all_kept:
            part_count, tokens_read = part_count + 1, tokens_read + kept_part.tokens
            if kept_part.measured:
                documents, measured = documents + kept_part.documents, measured + kept_part.tokens
            meter.show_progress(tokens_read, documents, measured)
    return part_count, measured


def keep_rows(run: Run, measure: Callable[[Run], pa.Table], folder: Path) -> KeptPart:
    """Write the rows that `measure` computes of a run, unless its part has them."""
    rows_path, document_numbers = part_path(folder, run.number), run.numbers
    rows_there = read_rows(rows_path, ["document"])
    is_missing = rows_there is None or not np.array_equal(rows_there["document"].to_numpy(), document_numbers)
    if is_missing:
        write_rows(rows_path, measure(run))
    return KeptPart(run.tokens, len(document_numbers), is_missing)


class MapResult(BaseModel):
    """What is said of all documents together: a JSON file in the folder, which is complete when it exists."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")
    file: ClassVar[str]
    doing: ClassVar[str]  # the command that makes it

    def save_result(self, folder: Path) -> None:
        """Write the file. Raises DataError when the disk refuses."""
        write_data_file(folder / self.file, (self.model_dump_json(indent=1) + "\n").encode())

    @classmethod
    def load_result(cls, folder: Path) -> Self:
        """The result in a folder. Raises DataError when there is none, or it is damaged."""
        path = folder / cls.file
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            if (folder / BEGUN).exists():
                problem = f"holds a {cls.doing} that was interrupted: repeat the command to resume it"
            else:
                problem = f"holds no {cls.doing}: make one with megastable inspect {cls.doing} SHARDS --keep {folder}"
            raise DataError(f"{folder} {problem}") from None
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        except ValidationError as error:
            detail = error.errors()[0]
            where = ".".join(str(location_part) for location_part in detail["loc"])
            raise DataError(
                f"{path} is damaged or of another version ({where}: {detail['msg']}): {cls.doing} again with --again"
            ) from error


def part_path(folder: Path, number: int) -> Path:
    """The file of the rows of unit `number`."""
    return folder / PARTS / f"{number:06d}.parquet"


def near_part_path(folder: Path, number: int) -> Path:
    """The file of the signatures of unit `number`."""
    return folder / NEAR / f"{number:06d}.npy"


@contextmanager
def occupy_folder(folder: Path, asked: dict[str, Any], again: bool) -> Iterator[None]:
    """Lock the folder for a scan with the settings `asked`: an earlier one is resumed, or removed (again).

    Raises DataError for a folder with other content, in use by another process, or not writable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        other_names = [folder_entry.name for folder_entry in folder.iterdir() if folder_entry.name != LOCK]
        if other_names and BEGUN not in other_names:
            raise DataError(
                f"{folder} is not the folder of a scan, {other_names[0]} is in it: choose another --keep"
            )
        folder_lock = lock_file(folder / LOCK)
        if folder_lock is None:
            raise DataError(f"{folder}: another process scans into it: wait for it, or choose another --keep")
        with folder_lock:
            try:
                _begin(folder, asked, again)
                yield
            finally:
                fcntl.flock(folder_lock, fcntl.LOCK_UN)
    except OSError as error:
        raise DataError(f"{folder} cannot be used: {error.strerror or error}") from error


def _begin(folder: Path, asked: dict[str, Any], again: bool) -> None:
    settings_path = folder / BEGUN
    if settings_path.exists() and not again:
        try:
            there = json.loads(settings_path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{settings_path} cannot be read ({error}): start over with --again") from error
        if there == asked:
            return
        other_keys = [key for key in asked if not isinstance(there, dict) or there.get(key) != asked[key]]
        other_settings = ", ".join(
            dict.fromkeys(SETTINGS.get(other_key, other_key) for other_key in other_keys)
        )
        raise DataError(
            f"{folder} holds the results of something else (other: {other_settings}): choose another --keep, or "
            "replace them with --again"
        )
    # The settings are removed last: a half-cleared folder is still recognised.
    for file_name in (RESULT, SCORES, YARDSTICK, DUPLICATES):
        (folder / file_name).unlink(missing_ok=True)
    for file_name in (PARTS, NEAR):
        shutil.rmtree(folder / file_name, ignore_errors=True)
    write_data_file(settings_path, (json.dumps(asked, indent=1) + "\n").encode())
    for file_name in (PARTS, NEAR):
        (folder / file_name).mkdir(exist_ok=True)


def write_rows(path: Path, rows: pa.Table) -> None:
    """Write a part atomically. Raises DataError if the disk fails."""
    parquet_content = io.BytesIO()
    pq.write_table(rows, parquet_content, compression="zstd", compression_level=1)
    write_data_file(path, parquet_content.getvalue())


def read_parts(folder: Path, count: int, again: str, columns: list[str] | None = None) -> Iterator[pa.Table]:
    """The rows of all parts. Raises DataError for one that is missing or damaged; again: the command that repairs
    it."""
    for part_number in range(count):
        rows = read_rows(rows_path := part_path(folder, part_number), columns)
        if rows is None:
            raise DataError(f"{rows_path} is missing or damaged: {again} with --again")
        yield rows


def read_rows(path: Path, columns: list[str] | None = None) -> pa.Table | None:
    """The rows of a part; None when it is missing or damaged. Raises DataError when it cannot be read."""
    try:
        return pq.read_table(path, columns=columns, memory_map=False, partitioning=None)
    except (FileNotFoundError, pa.ArrowException):
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
