"""Append-only files of a run that decide what it reads: a model per line, on the disk before `append` returns."""

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
    """Add a line to a ledger and wait until it is on the disk. Raises DataError when that fails."""
    append_all(path, [entry])


def append_all(path: Path, entries: Sequence[LedgerEntry]) -> None:
    """Add lines that belong together, all at once. Raises DataError when that fails."""
    now = datetime.now(UTC)
    stamped = [e if e.time is not None else e.model_copy(update={"time": now}) for e in entries]
    if stamped:
        jsonl.append(path, "\n".join(entry.model_dump_json(exclude_none=True) for entry in stamped))


def read(path: Path, kind: Callable[[Any], type[E]], odd: list[str] | None = None) -> list[E]:
    """The entries of a ledger, oldest first, each of the `kind` that is chosen by its content; none when there is no
    such file. Empty lines are ignored.

    A torn last line (a crash while it was written) is reported as a warning and left out. Raises DataError
    naming the line for anything else that is not a valid entry; where `odd` is given, what is wrong goes in there
    instead, and the line is left out: a run that works goes on.
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
    """Line `number` of `path`, of the kind that is chosen by its content. Raises DataError that says what is wrong."""
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
    """What to do about a wrong line."""
    return f"correct or delete line {number} of {path}, nothing else depends on it"
