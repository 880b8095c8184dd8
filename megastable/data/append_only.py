"""Append-only ledgers of a run that decide its data: a pydantic model per line, on disk before `append` returns."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from megastable.base import jsonl
from megastable.base.errors import DataError

log = logging.getLogger(__name__)


def _as_utc(time: datetime) -> datetime:
    try:
        return time.astimezone(UTC)
    except OverflowError as error:
        raise ValueError(str(error)) from error


Time = Annotated[datetime, AfterValidator(_as_utc)]


class LedgerEntry(BaseModel):
    """A line of a ledger."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    time: Time | None = None  # `append` fills it in


E = TypeVar("E", bound=LedgerEntry)


def append(path: Path, entry: LedgerEntry) -> None:
    """Append a line to a ledger and wait until it is on disk. Raises DataError on failure."""
    append_all(path, [entry])


def append_all(path: Path, entries: Sequence[LedgerEntry]) -> None:
    """Append several lines atomically. Raises DataError on failure."""
    now = datetime.now(UTC)
    stamped = [e if e.time is not None else e.model_copy(update={"time": now}) for e in entries]
    if stamped:
        jsonl.append(path, "\n".join(entry.model_dump_json(exclude_none=True) for entry in stamped))


def read(path: Path, kind: Callable[[Any], type[E]], odd: list[str] | None = None) -> list[E]:
    """The entries of a ledger, oldest first; empty if the file does not exist.

    A torn last line (a crash during the write) is left out with a warning.

    Args:
        path: Of the ledger.
        kind: Chooses the class of a line by its content.
        odd: Gets the problems of invalid lines, which are left out, so that a running run continues.

    Raises:
        DataError: for an invalid line, which it names, if `odd` is not given; if the file cannot be read.
    """
    whole, torn = jsonl.content(path)
    warn_of_torn(path, whole, torn)
    return list(parse_lines(path, whole, 1, kind, odd))


def warn_of_torn(path: Path, whole: bytes, torn: bytes) -> None:
    """Log that the last line of a ledger is ignored, if a crash tore it (`jsonl.content`)."""
    if torn:
        number = whole.count(b"\n") + 1
        log.warning("%s: line %d was torn by a crash and is ignored: %r", path, number, torn[:200])


def parse_lines(
    path: Path, content: bytes, first_number: int, kind: Callable[[Any], type[E]], odd: list[str] | None
) -> Iterator[E]:
    """The entries of the lines of `content`, of which the first has the number `first_number` in the file. Empty lines
    are ignored; `kind`, `odd` and errors as in `read`."""
    for number, line in enumerate(content.split(b"\n"), start=first_number):
        try:
            if line.strip():
                yield _parse_line(path, number, line, kind)
        except DataError as error:
            if odd is None:
                raise
            odd.append(str(error))


def _parse_line(path: Path, number: int, line: bytes, kind: Callable[[Any], type[E]]) -> E:
    remedy = f"correct or delete line {number} of {path}, nothing else depends on it"
    try:
        # Python's parser refuses what is nested too deep; pydantic's refuses strings that cannot be written again.
        return kind(json.loads(line)).model_validate_json(line)
    except ValidationError as error:
        detail = error.errors()[0]
        message = ".".join(str(part) for part in detail["loc"]) + " " + str(detail["msg"])
        raise DataError(f"{path} line {number}: {message.strip()}: {remedy}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, nested too deep
        raise DataError(f"{path} line {number} is not JSON ({error}): {remedy}") from error
