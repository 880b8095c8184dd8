"""Read and write pruning plans: text files that list documents to remove, for a person to edit before they are applied.

A line is a document: its shard, its number there, and after a # the evidence, for people only. With
`first:end` after the number it is a span of that document: its tokens from `first` on, counted from 0, and before
`end`. Keys before the lines (`fingerprint: ...`) identify the corpus. Lists by hand may lack those,
and may be CSV or JSON lines with `shard` and `document`, and with `first` and `end` for a span. A shard name that is
not a plain word is in double quotes, as in JSON.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from megastable.base.errors import DataError
from megastable.base.text import plural, visible
from megastable.data.manifest import Manifest
from megastable_tools.forensics.pruning.gaps import Span
from megastable_tools.forensics.pruning.token_loss import Loss

FORMAT = "1"
KEYS = ("format", "corpus", "fingerprint", "tokenizer")
WHY, EXCERPT = 300, 120  # characters of a line

Int64s = npt.NDArray[np.int64]

_LINE = re.compile(
    r'\s*("(?:[^"\\]|\\.)*"|[^\s"#{,](?:\S*?[^\s,])?)[\s,]+([0-9]{1,18})'
    r"(?:[\s,]+([0-9]{1,18}):([0-9]{1,18}))?\s*(?:#.*)?",
    re.DOTALL,
)
_KEY = re.compile(rf"({'|'.join(KEYS)}):\s+(.*)")
_WORD = re.compile(r"[\w.+=@%~-]*[\w.+=@%~-]", re.ASCII)


@dataclass(frozen=True)
class Removal:
    """A document to remove, or a span of it; tokens: their number. Evidence and excerpt are untrusted text."""

    shard: str
    document: int
    tokens: int = 0
    why: str = ""
    excerpt: str = ""
    span: Span | None = None


class PlanLine(NamedTuple):
    """A line of a plan, with its number in the file first. span: None for the whole document."""

    number: int
    document: int
    span: Span | None


@dataclass(frozen=True)
class Named:
    """What to remove from a shard: whole `documents`, ascending, int64 [n]; spans: of other documents."""

    documents: Int64s
    spans: dict[int, list[Span]]

    @property
    def touched(self) -> Int64s:
        """All documents concerned, ascending."""
        return np.union1d(self.documents, np.array(list(self.spans), np.int64))


NOTHING = Named(np.empty(0, np.int64), {})


@dataclass
class PrunePlan:
    """A parsed plan. corpus, fingerprint: None if missing. lines: by shard, in the order of the file."""

    path: Path
    sha256: str
    corpus: Path | None = None
    fingerprint: str | None = None
    lines: dict[str, list[PlanLine]] = field(default_factory=dict)

    def named(self, directory: Path, manifest: Manifest) -> dict[str, Named]:
        """What to remove from a corpus, by shard.

        Raises DataError naming the line for a document that does not exist or occurs twice, and for a plan that is
        empty or whose fingerprint does not match this very corpus. Whether a document has the tokens of a span, only
        its shard knows: `gaps.cut_document`.
        """
        if self.fingerprint is None:
            raise DataError(
                f"{self.path} has no fingerprint of its corpus: make a plan of it and look at that, "
                f"megastable prune plan {directory} --list {self.path}"
            )
        return self.checked(directory, manifest)

    def checked(self, directory: Path, manifest: Manifest, twice: bool = False) -> dict[str, Named]:
        """As `named`, but also for lists without a fingerprint. twice: a document may occur twice."""
        if self.fingerprint not in (None, manifest.fingerprint()):
            raise DataError(
                f"{self.path} was made for another corpus, or {directory} has changed since (its fingerprint is "
                f"{manifest.fingerprint()[:12]}..., the plan's {str(self.fingerprint)[:12]}...): make a new plan"
            )
        if not self.lines:
            raise DataError(f"{self.path} names no document: nothing to do")
        infos = {info.name: info for info in manifest.shards}
        found = {}
        for shard, lines in self.lines.items():
            if shard not in infos:
                known = ", ".join(list(infos)[:5]) + ", ..." * (len(infos) > 5)
                raise DataError(
                    f"{self.path} line {lines[0].number}: {directory} has no shard '{visible(shard, 80)}', it has "
                    f"{known}"
                )
            found[shard] = self._named(shard, lines, infos[shard].documents, twice)
        if sum(len(named.documents) for named in found.values()) == sum(
            info.documents for info in infos.values()
        ):
            last = max(lines[-1].number for lines in self.lines.values())
            raise DataError(
                f"{self.path} names every document of the corpus: nothing would be left; delete its line {last}, "
                "and those of all others to keep"
            )
        return found

    def _named(self, shard: str, lines: list[PlanLine], count: int, twice: bool) -> Named:
        whole, spans = dict[int, int](), dict[int, list[Span]]()
        for number, document, span in lines:
            if document >= count:
                raise DataError(
                    f"{self.path} line {number}: there is no document {document} in {shard}, "
                    f"which has {plural(count, 'document')}, counted from 0"
                )
            if document in whole and not twice:
                raise DataError(
                    f"{self.path} lines {whole[document]} and {number} name the same document: "
                    f"{document} of {shard}; delete one"
                )
            if span is None:
                whole[document] = number
            else:
                spans.setdefault(document, []).append(span)
        if not twice and (both := sorted(whole.keys() & spans.keys())):
            raise DataError(
                f"{self.path} line {whole[both[0]]} names document {both[0]} of {shard} as a whole, another line a "
                "span of it: delete one"
            )
        left = {document: sorted(of) for document, of in sorted(spans.items()) if document not in whole}
        return Named(np.array(sorted(whole), dtype=np.int64), left)

    def line_of(self, shard: str, document: int) -> int:
        """The line number of a document."""
        return next(line.number for line in self.lines[shard] if line.document == document)


def read_plan(path: Path) -> PrunePlan:
    """A plan, or a list by hand. Raises DataError naming the invalid line."""
    try:
        content = path.read_bytes()
        text = content.decode("utf-8-sig")
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such plan; megastable prune plan makes one") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in UTF-8 ({error}): it is not a plan") from error
    plan = PrunePlan(path, hashlib.sha256(content).hexdigest())
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    start = next((n for n, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#")), 0)
    try:
        columns = next(csv.reader([lines[start].strip()]), [])
    except csv.Error:  # a field that is too long: not a table
        columns = []
    parts = _table(path, lines, start) if {"shard", "document"} <= set(columns) else _lines(plan, lines)
    for shard, line in parts:
        if line.span is not None and line.span[0] >= line.span[1]:
            raise DataError(
                f"{path} line {line.number}: the span {line.span[0]}:{line.span[1]} is empty: give first and end, the "
                "end behind the last token"
            )
        plan.lines.setdefault(shard, []).append(line)
    return plan


def text_of(removals: Iterable[Removal], corpus: Path, manifest: Manifest) -> str:
    """A plan as text, in the order of the removals."""
    found = list(removals)
    head = [
        "# Documents to leave out of a corpus, one in a line: its shard, its number there, and what speaks against it;",
        "# with FIRST:END only these tokens of it. Delete a line to keep that; what is behind a # is for you. Then:",
        "#   megastable prune apply THIS_FILE OUTPUT",
        f"# {loss_of(found, manifest)}.",
        f"format: {FORMAT}",
        f"corpus: {_quoted(str(corpus))}",
        f"fingerprint: {manifest.fingerprint()}",
        f"tokenizer: {_quoted(manifest.tokenizer.file)} {manifest.tokenizer.xxh3}",
        "",
    ]
    return "\n".join([*head, *map(_line, found)]) + "\n"


def loss_of(removals: Iterable[Removal], manifest: Manifest) -> Loss:
    """The loss of a corpus."""
    whole, cut, tokens = 0, set[tuple[str, int]](), 0
    for removal in removals:
        tokens += removal.tokens
        if removal.span is None:
            whole += 1
        else:
            cut.add((removal.shard, removal.document))
    return Loss.of(manifest, documents=whole, cut=len(cut), tokens=tokens)


def _line(removal: Removal) -> str:
    parts = [plural(removal.tokens, "token"), visible(removal.why, WHY)]
    excerpt = f": {visible(removal.excerpt, EXCERPT)}" if removal.excerpt else ""
    name = removal.shard if _WORD.fullmatch(removal.shard) else json.dumps(removal.shard)
    span = "" if removal.span is None else f" {removal.span[0]}:{removal.span[1]}"
    return f"{name} {removal.document}{span}  # {'; '.join(part for part in parts if part)}{excerpt}"


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
            f"{path} line {number}: {visible(text, 80)} is an unterminated JSON string: correct or delete the line"
        ) from None


def _lines(plan: PrunePlan, lines: list[str]) -> Iterator[tuple[str, PlanLine]]:
    """Shard and content of plain and JSON lines; keys are stored in the plan."""
    for number, line in enumerate(lines, start=1):
        found = _LINE.fullmatch(line)
        if found and (
            plan.lines or not found[1].endswith(":")
        ):  # `format: 1` is a key only before the first document
            name = found[1]
            span = None if found[3] is None else (int(found[3]), int(found[4]))
            shard = _unquoted(plan.path, number, name) if name[0] == '"' else name
            yield shard, PlanLine(number, int(found[2]), span)
            continue
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("{"):
            try:
                yield _line_of_row(plan.path, number, line, json.loads(line))
            except (ValueError, RecursionError):
                _bad(plan.path, number, line)
        elif not plan.lines and (key := _KEY.fullmatch(line)):
            _take(plan, number, key[1], _unquoted(plan.path, number, key[2]))
        else:
            _bad(plan.path, number, line)


def _take(plan: PrunePlan, number: int, key: str, value: str) -> None:
    if key == "format" and value != FORMAT:
        raise DataError(
            f"{plan.path} line {number}: format {visible(value, 20)}, this megastable reads format {FORMAT}"
        )
    if key == "corpus":
        plan.corpus = Path(value)
    elif key == "fingerprint":
        plan.fingerprint = value


def _table(path: Path, lines: list[str], start: int) -> Iterator[tuple[str, PlanLine]]:
    rows = csv.DictReader(lines[start:])
    try:
        for row in rows:
            number = start + rows.line_num
            yield _line_of_row(path, number, lines[number - 1], row)
    except csv.Error as error:
        raise DataError(
            f"{path} line {start + rows.line_num + 1}: {error}: correct or delete the line"
        ) from None


def _line_of_row(path: Path, number: int, line: str, row: Mapping[str, Any]) -> tuple[str, PlanLine]:
    """Shard and content of a row of a table, or of a JSON object: a document, or a span of it with both ends."""
    try:
        shard, given = row["shard"], [row.get(name) for name in ("document", "first", "end")]
    except KeyError:
        _bad(path, number, line)
    cells = ["" if cell is None else str(cell).strip().replace(",", "") for cell in given]
    known = [bool(cell) for cell in cells]
    whole, span = [True, False, False], [True, True, True]
    numbers = [cell for cell in cells if cell]
    if not (
        isinstance(shard, str)
        and known in (whole, span)
        and all(re.fullmatch("[0-9]{1,18}", cell) for cell in numbers)
    ):
        _bad(path, number, line)
    document, *ends = map(int, numbers)
    return shard.strip(), PlanLine(number, document, (ends[0], ends[1]) if ends else None)


def _bad(path: Path, number: int, line: str) -> NoReturn:
    raise DataError(
        f"{path} line {number}: '{visible(line, 80)}' is not a shard and a document number: correct or delete the line"
    )
