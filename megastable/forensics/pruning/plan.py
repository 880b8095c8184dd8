"""Which documents are to be left out of a corpus, as a text file that a person reads and edits before it is applied.

A line is a document: its shard, its number there, and behind a # what speaks against it, for people alone. Before them
stand keys (`fingerprint: ...`) that say of which corpus it is. Lists by hand may lack those, and may be CSV or JSON
lines with `shard` and `document`. A shard's name that is not one plain word stands in double quotes, as in JSON.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from megastable.data.manifest import Manifest
from megastable.errors import DataError
from megastable.report.told import plural, visible

FORMAT = "1"
KEYS = ("format", "corpus", "fingerprint", "tokenizer")
WHY, EXCERPT = 300, 120  # characters of a line

Int64s = npt.NDArray[np.int64]

_LINE = re.compile(
    r'\s*("(?:[^"\\]|\\.)*"|[^\s"#{,](?:\S*?[^\s,])?)[\s,]+([0-9]{1,18})\s*(?:#.*)?', re.DOTALL
)
_KEY = re.compile(rf"({'|'.join(KEYS)}):\s+(.*)")
_WORD = re.compile(r"[\w.+=@%~-]*[\w.+=@%~-]", re.ASCII)


@dataclass(frozen=True)
class Removal:
    """A document to leave out, and what a person should know of it (both texts may say anything)."""

    shard: str
    document: int
    tokens: int = 0
    why: str = ""
    excerpt: str = ""


@dataclass
class Plan:
    """A plan as it was read. corpus, fingerprint: None where it does not say. lines: by shard, in the order of the
    file: document numbers, and the lines that they stand in."""

    path: Path
    sha256: str
    corpus: Path | None = None
    fingerprint: str | None = None
    lines: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)

    def documents(self, directory: Path, manifest: Manifest) -> dict[str, Int64s]:
        """The documents to leave out of a corpus, ascending, by shard.

        Raises DataError naming the line for a document that is not there or stands twice, and for a plan that is empty
        or does not say, by the fingerprint, that it was made for this very corpus.
        """
        if self.fingerprint is None:
            raise DataError(
                f"{self.path} has no fingerprint of its corpus: make a plan of it and look at that, "
                f"python tools/prune_data.py plan {directory} --list {self.path}"
            )
        return self.checked(directory, manifest)

    def checked(self, directory: Path, manifest: Manifest, twice: bool = False) -> dict[str, Int64s]:
        """As `documents`, but a list by hand has no fingerprint. twice: a document may stand twice."""
        if self.fingerprint not in (None, manifest.fingerprint()):
            raise DataError(
                f"{self.path} was made for another corpus, or {directory} has changed since (its fingerprint is "
                f"{manifest.fingerprint()[:12]}..., the plan's {str(self.fingerprint)[:12]}...): make a new plan"
            )
        if not self.lines:
            raise DataError(f"{self.path} names no document: there is nothing to do")
        infos = {info.name: info for info in manifest.shards}
        found = {}
        for shard, (documents, lines) in self.lines.items():
            if shard not in infos:
                known = ", ".join(list(infos)[:5]) + ", ..." * (len(infos) > 5)
                raise DataError(
                    f"{self.path} line {lines[0]}: {directory} has no shard '{visible(shard, 80)}', it has {known}"
                )
            numbers, count = np.array(documents, dtype=np.int64), infos[shard].documents
            if (wrong := np.flatnonzero(numbers >= count)).size:
                raise DataError(
                    f"{self.path} line {lines[wrong[0]]}: there is no document {numbers[wrong[0]]} in {shard}, "
                    f"which has {plural(count, 'document')}, counted from 0"
                )
            order = np.argsort(numbers, kind="stable")
            again = np.flatnonzero(np.diff(numbers[order]) == 0)
            if again.size and not twice:
                first, second = order[again[0]], order[again[0] + 1]
                raise DataError(
                    f"{self.path} lines {lines[first]} and {lines[second]} name the same document: "
                    f"{numbers[first]} of {shard}; delete one"
                )
            found[shard] = numbers[order][np.append(True, np.diff(numbers[order]) > 0)]
        if sum(len(documents) for documents in found.values()) == sum(
            info.documents for info in infos.values()
        ):
            last = max(lines[-1] for _, lines in self.lines.values())
            raise DataError(
                f"{self.path} names every document of the corpus: nothing would be left; delete its line {last}, "
                "and those of all others to keep"
            )
        return found

    def line_of(self, shard: str, document: int) -> int:
        """The line in which a document stands."""
        documents, lines = self.lines[shard]
        return lines[documents.index(document)]


def read_plan(path: Path) -> Plan:
    """A plan, or a list by hand. Raises DataError naming the line that is none."""
    try:
        content = path.read_bytes()
        text = content.decode("utf-8-sig")
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such plan; tools/prune_data.py plan makes one") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in UTF-8 ({error}): it is no plan") from error
    plan = Plan(path, hashlib.sha256(content).hexdigest())
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    start = next((n for n, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#")), 0)
    try:
        columns = next(csv.reader([lines[start].strip()]), [])
    except csv.Error:  # a field that is too long: no table, whatever else it is
        columns = []
    parts = _table(path, lines, start) if {"shard", "document"} <= set(columns) else _lines(plan, lines)
    for number, shard, document in parts:
        documents, at = plan.lines.setdefault(shard, ([], []))
        documents.append(document)
        at.append(number)
    return plan


def text_of(removals: Iterable[Removal], corpus: Path, manifest: Manifest) -> str:
    """A plan as text, the removals in the order that they come in."""
    found = list(removals)
    tokens = sum(removal.tokens for removal in found)
    documents, whole = sum(info.documents for info in manifest.shards), sum(i.tokens for i in manifest.shards)
    share = f"{plural(tokens, 'token')} of {whole:,} ({tokens / max(whole, 1):.3%})"
    head = [
        "# Documents to leave out of a corpus, one in a line: its shard, its number there, and what speaks against it.",
        "# Delete a line to keep its document; what is behind a # is for you alone. Then:",
        "#   python tools/prune_data.py apply THIS_FILE OUTPUT",
        f"# {plural(len(found), 'document')} of {documents:,}, {share}.",
        f"format: {FORMAT}",
        f"corpus: {_quoted(str(corpus))}",
        f"fingerprint: {manifest.fingerprint()}",
        f"tokenizer: {_quoted(manifest.tokenizer.file)} {manifest.tokenizer.xxh3}",
        "",
    ]
    return "\n".join([*head, *map(_line, found)]) + "\n"


def _line(removal: Removal) -> str:
    parts = [plural(removal.tokens, "token"), visible(removal.why, WHY)]
    excerpt = f": {visible(removal.excerpt, EXCERPT)}" if removal.excerpt else ""
    name = removal.shard if _WORD.fullmatch(removal.shard) else json.dumps(removal.shard)
    return f"{name} {removal.document}  # {'; '.join(part for part in parts if part)}{excerpt}"


def _quoted(text: str) -> str:
    plain = text.isprintable() and text == text.strip() and not text.startswith('"')
    return text if plain else json.dumps(text)


def _unquoted(path: Path, number: int, text: str) -> str:
    if not text.startswith('"'):
        return text
    try:
        return str(json.loads(text))
    except ValueError:
        raise DataError(
            f"{path} line {number}: {visible(text, 80)} is not closed as a JSON string is: mend or delete the line"
        ) from None


def _lines(plan: Plan, lines: list[str]) -> Iterator[tuple[int, str, int]]:
    """(number of the line, shard, document) of plain lines and JSON ones; keys go into the plan."""
    for number, line in enumerate(lines, start=1):
        found = _LINE.fullmatch(line)
        if found and (
            plan.lines or not found[1].endswith(":")
        ):  # `format: 1` is a key as long as no document came
            name = found[1]
            yield number, _unquoted(plan.path, number, name) if name[0] == '"' else name, int(found[2])
            continue
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("{"):
            yield number, *_json(plan.path, number, line)
        elif not plan.lines and (key := _KEY.fullmatch(line)):
            _take(plan, number, key[1], _unquoted(plan.path, number, key[2]))
        else:
            _bad(plan.path, number, line)


def _take(plan: Plan, number: int, key: str, value: str) -> None:
    if key == "format" and value != FORMAT:
        raise DataError(
            f"{plan.path} line {number}: format {visible(value, 20)}, this megastable reads format {FORMAT}"
        )
    if key == "corpus":
        plan.corpus = Path(value)
    elif key == "fingerprint":
        plan.fingerprint = value


def _json(path: Path, number: int, line: str) -> tuple[str, int]:
    try:
        entry = json.loads(line)
        shard, document = entry["shard"], entry["document"]
    except (ValueError, KeyError, RecursionError):
        _bad(path, number, line)
    if not isinstance(shard, str) or type(document) is not int or not 0 <= document < 10**18:
        _bad(path, number, line)
    return shard, int(document)


def _table(path: Path, lines: list[str], start: int) -> Iterator[tuple[int, str, int]]:
    rows = csv.DictReader(lines[start:])
    try:
        for row in rows:
            number = start + rows.line_num
            shard, document = row["shard"], (row["document"] or "").strip().replace(",", "")
            if shard is None or not re.fullmatch("[0-9]{1,18}", document):
                _bad(path, number, lines[number - 1])
            yield number, shard.strip(), int(document)
    except csv.Error as error:
        raise DataError(
            f"{path} line {start + rows.line_num + 1}: {error}: mend or delete the line"
        ) from None


def _bad(path: Path, number: int, line: str) -> NoReturn:
    raise DataError(
        f"{path} line {number}: '{visible(line, 80)}' is not a shard and a document number: mend or delete the line"
    )
