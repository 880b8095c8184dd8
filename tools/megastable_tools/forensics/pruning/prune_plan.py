"""Read and write pruning plans: text files that list documents to remove, for a person to edit before they are applied;
and the share of a corpus that a plan removes, with its limit.

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
from typing import Any, NamedTuple, NoReturn, Self

import numpy as np
import numpy.typing as npt

from megastable.base.errors import DataError
from megastable.base.text import count_noun, make_visible
from megastable.data.manifest import Manifest
from megastable_tools.forensics.pruning.gaps import Span

MOST = 0.05  # default maximum share of a corpus, in tokens or in documents


@dataclass(frozen=True)
class Loss:
    """Removed documents, cut documents and removed tokens; and the totals."""

    documents: int
    cut: int
    tokens: int
    of_documents: int
    of_tokens: int

    @classmethod
    def of_corpus(cls, manifest: Manifest, documents: int, cut: int, tokens: int) -> Self:
        """The loss relative to the corpus of `manifest`."""
        shards = manifest.shards
        return cls(documents, cut, tokens, sum(s.documents for s in shards), sum(s.tokens for s in shards))

    @property
    def document_share(self) -> float:
        return self.documents / max(self.of_documents, 1)

    @property
    def token_share(self) -> float:
        return self.tokens / max(self.of_tokens, 1)

    @property
    def told(self) -> dict[str, float]:
        """As numbers for JSON."""
        share_numbers = {"document_share": self.document_share, "token_share": self.token_share}
        return {"documents": self.documents, "cut": self.cut, "tokens": self.tokens, **share_numbers}

    def __str__(self) -> str:
        cut_text = f", {count_noun(self.cut, 'more document')} cut" if self.cut else ""
        return (
            f"{count_noun(self.documents, 'document')} of {self.of_documents:,} ({self.document_share:.3%}){cut_text}, "
            f"{count_noun(self.tokens, 'token')} of {self.of_tokens:,} ({self.token_share:.3%})"
        )

    def check_limit(self, most: float, what: str, less: str, spans: str = "") -> None:
        """Raises DataError if more than the share `most` of the tokens or of the documents would be removed. less:
        advice to remove less; spans: advice to cut documents instead of removing whole ones."""
        lost_share = max(self.document_share, self.token_share)
        if lost_share <= most:
            return
        cut_advice = f", {spans}" if spans and self.documents else ""
        allowing = min(100.0, -(-lost_share * 1000 // 1) / 10)  # a percentage that allows this share
        raise DataError(
            f"{what} would take {self}: more than {100 * most:g} % of it; {less}{cut_advice}, or "
            f"allow it with --most {allowing:g}%"
        )


def parse_share(text: str) -> float:
    """A share such as "5%" or "0.05". Raises DataError for anything else, and for one above 1."""
    share_match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(%?)\s*", text)
    share_given = float(share_match[1]) / (100 if share_match[2] else 1) if share_match else -1.0
    if not 0 <= share_given <= 1:
        raise DataError(f"--most {text}: give a share of the corpus, such as 5% or 0.05")
    return share_given


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

    def select_removals(self, directory: Path, manifest: Manifest) -> dict[str, Named]:
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
        return self.check_removals(directory, manifest)

    def check_removals(self, directory: Path, manifest: Manifest, twice: bool = False) -> dict[str, Named]:
        """As `select_removals`, but also for lists without a fingerprint. twice: a document may occur twice."""
        if self.fingerprint not in (None, manifest.fingerprint()):
            raise DataError(
                f"{self.path} was made for another corpus, or {directory} has changed since (its fingerprint is "
                f"{manifest.fingerprint()[:12]}..., the plan's {str(self.fingerprint)[:12]}...): make a new plan"
            )
        if not self.lines:
            raise DataError(f"{self.path} names no document: nothing to do")
        infos_by_name = {shard_info.name: shard_info for shard_info in manifest.shards}
        removals_found = {}
        for shard, lines in self.lines.items():
            if shard not in infos_by_name:
                known_shards = ", ".join(list(infos_by_name)[:5]) + ", ..." * (len(infos_by_name) > 5)
                raise DataError(
                    f"{self.path} line {lines[0].number}: {directory} has no shard '{make_visible(shard, 80)}', it has "
                    f"{known_shards}"
                )
            removals_found[shard] = self._named(shard, lines, infos_by_name[shard].documents, twice)
        named_count = sum(len(shard_removals.documents) for shard_removals in removals_found.values())
        if named_count == sum(shard_info.documents for shard_info in infos_by_name.values()):
            last_line = max(lines[-1].number for lines in self.lines.values())
            raise DataError(
                f"{self.path} names every document of the corpus: nothing would be left; delete its line {last_line}, "
                "and those of all others to keep"
            )
        return removals_found

    def _named(self, shard: str, lines: list[PlanLine], count: int, twice: bool) -> Named:
        whole, spans = dict[int, int](), dict[int, list[Span]]()
        for line_number, document, document_span in lines:
            if document >= count:
                raise DataError(
                    f"{self.path} line {line_number}: there is no document {document} in {shard}, "
                    f"which has {count_noun(count, 'document')}, counted from 0"
                )
            if document in whole and not twice:
                both_lines = f"{self.path} lines {whole[document]} and {line_number}"
                raise DataError(f"{both_lines} name the same document: {document} of {shard}; delete one")
            if document_span is None:
                whole[document] = line_number
            else:
                spans.setdefault(document, []).append(document_span)
        if not twice and (named_twice := sorted(whole.keys() & spans.keys())):
            raise DataError(
                f"{self.path} line {whole[named_twice[0]]} names document {named_twice[0]} of {shard} as a whole, "
                "another line a span of it: delete one"
            )
        spans_left = {document: sorted(of) for document, of in sorted(spans.items()) if document not in whole}
        return Named(np.array(sorted(whole), dtype=np.int64), spans_left)

    def line_of(self, shard: str, document: int) -> int:
        """The line number of a document."""
        return next(plan_line.number for plan_line in self.lines[shard] if plan_line.document == document)


def read_plan(path: Path) -> PrunePlan:
    """A plan, or a list by hand. Raises DataError naming the invalid line."""
    try:
        file_content = path.read_bytes()
        file_text = file_content.decode("utf-8-sig")
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such plan; megastable prune plan makes one") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in UTF-8 ({error}): it is not a plan") from error
    plan = PrunePlan(path, hashlib.sha256(file_content).hexdigest())
    lines = file_text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    start = next((n for n, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#")), 0)
    try:
        columns = next(csv.reader([lines[start].strip()]), [])
    except csv.Error:  # a field that is too long: not a table
        columns = []
    plan_parts = _table(path, lines, start) if {"shard", "document"} <= set(columns) else _lines(plan, lines)
    for shard, line in plan_parts:
        if line.span is not None and line.span[0] >= line.span[1]:
            raise DataError(
                f"{path} line {line.number}: the span {line.span[0]}:{line.span[1]} is empty: give first and end, the "
                "end behind the last token"
            )
        plan.lines.setdefault(shard, []).append(line)
    return plan


def format_plan(removals: Iterable[Removal], corpus: Path, manifest: Manifest) -> str:
    """A plan as text, in the order of the removals."""
    removal_list = list(removals)
    head_lines = [
        "# Documents to leave out of a corpus, one in a line: its shard, its number there, and what speaks against it;",
        "# with FIRST:END only these tokens of it. Delete a line to keep that; what is behind a # is for you. Then:",
        "#   megastable prune apply THIS_FILE OUTPUT",
        f"# {sum_up_loss(removal_list, manifest)}.",
        f"format: {FORMAT}",
        f"corpus: {_quoted(str(corpus))}",
        f"fingerprint: {manifest.fingerprint()}",
        f"tokenizer: {_quoted(manifest.tokenizer.file)} {manifest.tokenizer.xxh3}",
        "",
    ]
    return "\n".join([*head_lines, *map(_line, removal_list)]) + "\n"


def sum_up_loss(removals: Iterable[Removal], manifest: Manifest) -> Loss:
    """The loss of a corpus."""
    whole_count, cut_documents, token_count = 0, set[tuple[str, int]](), 0
    for removal in removals:
        token_count += removal.tokens
        if removal.span is None:
            whole_count += 1
        else:
            cut_documents.add((removal.shard, removal.document))
    return Loss.of_corpus(manifest, documents=whole_count, cut=len(cut_documents), tokens=token_count)


def _line(removal: Removal) -> str:
    evidence_parts = [count_noun(removal.tokens, "token"), make_visible(removal.why, WHY)]
    excerpt_text = f": {make_visible(removal.excerpt, EXCERPT)}" if removal.excerpt else ""
    name = removal.shard if _WORD.fullmatch(removal.shard) else json.dumps(removal.shard)
    span = "" if removal.span is None else f" {removal.span[0]}:{removal.span[1]}"
    return f"{name} {removal.document}{span}  # {'; '.join(part for part in evidence_parts if part)}{excerpt_text}"


def _quoted(text: str) -> str:
    is_plain = text.isprintable() and text == text.strip() and not text.startswith('"')
    return text if is_plain else json.dumps(text)


def _unquoted(path: Path, number: int, text: str) -> str:
    if not text.startswith('"'):
        return text
    try:
        return str(json.loads(text))
    except ValueError:
        raise DataError(
            f"{path} line {number}: {make_visible(text, 80)} is an unterminated JSON string: correct or delete the line"
        ) from None


def _lines(plan: PrunePlan, lines: list[str]) -> Iterator[tuple[str, PlanLine]]:
    """Shard and content of plain and JSON lines; keys are stored in the plan."""
    for line_number, text_line in enumerate(lines, start=1):
        line_match = _LINE.fullmatch(text_line)
        # `format: 1` is a key only before the first document.
        if line_match and (plan.lines or not line_match[1].endswith(":")):
            line_span = None if line_match[3] is None else (int(line_match[3]), int(line_match[4]))
            shard = _unquoted(plan.path, line_number, line_match[1])
            yield shard, PlanLine(line_number, int(line_match[2]), line_span)
            continue
        text_line = text_line.strip()
        if not text_line or text_line.startswith("#"):
            continue
        if text_line.startswith("{"):
            try:
                yield _line_of_row(plan.path, line_number, text_line, json.loads(text_line))
            except (ValueError, RecursionError):
                _bad(plan.path, line_number, text_line)
        elif not plan.lines and (key_match := _KEY.fullmatch(text_line)):
            key, value = key_match[1], _unquoted(plan.path, line_number, key_match[2])
            if key == "format" and value != FORMAT:
                known = f"this megastable reads format {FORMAT}"
                raise DataError(f"{plan.path} line {line_number}: format {make_visible(value, 20)}, {known}")
            if key == "corpus":
                plan.corpus = Path(value)
            elif key == "fingerprint":
                plan.fingerprint = value
        else:
            _bad(plan.path, line_number, text_line)


def _table(path: Path, lines: list[str], start: int) -> Iterator[tuple[str, PlanLine]]:
    table_rows = csv.DictReader(lines[start:])
    try:
        for table_row in table_rows:
            line_number = start + table_rows.line_num
            yield _line_of_row(path, line_number, lines[line_number - 1], table_row)
    except csv.Error as error:
        raise DataError(
            f"{path} line {start + table_rows.line_num + 1}: {error}: correct or delete the line"
        ) from None


def _line_of_row(path: Path, number: int, line: str, row: Mapping[str, Any]) -> tuple[str, PlanLine]:
    """Shard and content of a row of a table, or of a JSON object: a document, or a span of it with both ends."""
    cells = [row.get(column_name) for column_name in ("document", "first", "end")]
    cell_texts = ["" if cell is None else str(cell).strip().replace(",", "") for cell in cells]
    number_texts = [cell_text for cell_text in cell_texts if cell_text]
    shard, is_whole, is_span = row.get("shard"), cell_texts[1:] == ["", ""], "" not in cell_texts
    are_numbers = all(re.fullmatch("[0-9]{1,18}", cell_text) for cell_text in number_texts)
    if not (isinstance(shard, str) and number_texts and (is_whole or is_span) and are_numbers):
        _bad(path, number, line)
    document, *span_ends = map(int, number_texts)
    return shard.strip(), PlanLine(number, document, (span_ends[0], span_ends[1]) if span_ends else None)


def _bad(path: Path, number: int, line: str) -> NoReturn:
    raise DataError(
        f"{path} line {number}: '{make_visible(line, 80)}' is not a shard and a document number: correct or "
        "delete the line"
    )
