"""Collects the logs, last words and stacks that an incident names; equal ones are shown once, for all their ranks.

Only files of the run directory are read. The copied end of each is made safe to open.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from megastable.base.text import plural, ranges
from megastable.data.skips import ranges_of
from megastable.report.postmortem.safe import log_text
from megastable.report.postmortem.sample_texts import Facts
from megastable.run.rank_ipc import LastWords

COPIED = 1 << 20  # last bytes of a log that are copied
TAIL = 60  # last lines shown, ...
WIDEST = 20_000  # ... and characters
MOST = 12  # logs shown
_UNUSUAL = re.compile(r"[^A-Za-z0-9._-]")
_RANK = re.compile(r"rank-(\d+)\.(json|stacks)")
_WHO = re.compile(r"\Arank .*\n|0x[0-9a-f]+")  # differs between the stacks of two ranks at the same place


class Log(Facts):
    """A log, or a file left by a rank. ranks: all with the same content, "" for a log of all. file: the copy of its
    end, control characters escaped, beside the report; tail: its last lines."""

    source: str
    ranks: str
    file: str
    bytes: int
    tail: str


def logs(root: Path, folder: str, paths: Iterable[str]) -> tuple[list[Log], list[str]]:
    """Of `paths` below the run directory `root`, those to be shown: whole logs, then last words, causes before
    consequences, then stacks; and what could not be read. folder: of the logs, left out of names."""
    found, problems = list[tuple[tuple[Any, ...], int | None, Any, Log]](), list[str]()
    for path in dict.fromkeys(paths):
        try:
            size, content = _end(root, path)
        except (OSError, ValueError) as error:
            why = (error.strerror or error) if isinstance(error, OSError) else error
            problems.append(f"{path}: {why}")
            continue
        text, named = log_text(content), _RANK.fullmatch(Path(path).name)
        parts = Path(path).parts
        name = "-".join(("log", *(parts[1:] if parts[0] == folder else parts)))
        tail = "\n".join(text.rstrip("\n").splitlines()[-TAIL:])[-WIDEST:]
        log = Log(source=path, ranks="", file=_UNUSUAL.sub("_", name), bytes=size, tail=tail)
        if named is None:
            found.append((("", 0.0, 0, path), None, path, log))
        else:
            time, same = _said(text) if named[2] == "json" else (0.0, _WHO.sub("", text))
            rank = int(named[1])
            found.append(((named[2], time, rank, path), rank, (Path(path).parent, named[2], same), log))
    alike: dict[Any, tuple[Log, list[int]]] = {}
    for _, number, key, log in sorted(found, key=itemgetter(0)):
        alike.setdefault(key, (log, []))[1].extend([] if number is None else [number])
    shown = [log.model_copy(update={"ranks": _ranks(numbers)}) for log, numbers in alike.values()]
    if len(shown) > MOST:
        problems.append(f"{plural(len(shown) - MOST, 'more log')}, all different, are not shown")
    return shown[:MOST], problems


def _said(text: str) -> tuple[float, Any]:
    """When a rank said its last words, and their content without the rank."""
    try:
        words = LastWords.model_validate_json(text)
    except ValueError:
        return math.inf, text
    return words.time, (re.sub(r"\d+", "", words.error), words.where)


def copy(root: Path, log: Log) -> bytes:
    """The content of `log.file`. Raises OSError and ValueError if it is gone."""
    return log_text(_end(root, log.source)[1]).encode()


def _end(root: Path, path: str) -> tuple[int, bytes]:
    """Size and last bytes of a file. Raises ValueError for one outside of `root`."""
    file = (root / path).resolve()
    if file.exists() and not file.is_file():
        raise ValueError("no file")
    if not file.is_relative_to(root.resolve()):
        raise ValueError("not in the run directory: not copied")
    with file.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(max(0, size - COPIED))
        return size, stream.read(COPIED)


def _ranks(numbers: Sequence[int]) -> str:
    if not numbers:
        return ""
    return ("rank " if len(numbers) == 1 else "ranks ") + ranges(ranges_of(numbers))
