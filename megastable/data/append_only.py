"""Append-only ledgers of a run that decide its data: a pydantic model per line, on disk before `append` returns."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from megastable.base import jsonl
from megastable.base.errors import DataError

log = logging.getLogger(__name__)


class LedgerEntry(BaseModel):
    """A line of a ledger."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    time: datetime | None = None  # `append` fills it in


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
    """The entries of a ledger, oldest first, each of the `kind` chosen by its content; empty if the file does not
    exist. Empty lines are ignored.

    A torn last line (a crash during the write) is left out with a warning. Any other invalid line raises a DataError
    that names it, unless `odd` is given: then the problem is added to `odd` and the line is left out, so that a
    running run continues.
    """
    lines, torn = jsonl.read(path)
    if torn:
        log.warning("%s: line %d was torn by a crash and is ignored: %r", path, len(lines) + 1, torn[:200])
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            found += [parse(path, number, line, kind)] if line.strip() else []
        except DataError as error:
            if odd is None:
                raise
            odd.append(str(error))
    return found


def parse(path: Path, number: int, line: bytes, kind: Callable[[Any], type[E]]) -> E:
    """Line `number` of `path`, of the kind chosen by its content. Raises DataError with the problem."""
    try:
        content = json.loads(line)
        return kind(content).model_validate(content)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, nested too deep, not an entry
        problem = error
    if isinstance(problem, ValidationError):
        detail = problem.errors()[0]
        message = ".".join(str(part) for part in detail["loc"]) + " " + str(detail["msg"])
        raise DataError(f"{path} line {number}: {message.strip()}: {remedy(path, number)}") from problem
    raise DataError(f"{path} line {number} is not JSON ({problem}): {remedy(path, number)}") from problem


def remedy(path: Path, number: int) -> str:
    """The advice for an invalid line."""
    return f"correct or delete line {number} of {path}, nothing else depends on it"
