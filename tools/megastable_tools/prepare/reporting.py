"""What a command on a corpus tells: its progress on stderr, a summary as text and as JSON, and the input files by what
became of them."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from rich.filesize import decimal
from rich.progress import TextColumn

from megastable.base.progress_bar import make_progress
from megastable.base.text import count_noun, make_visible, show_share
from megastable.data.manifest import Manifest
from megastable.data.tokenizer import Tokenizer

NAMES_SHOWN = 3  # file names shown per reason
NOUN = re.compile(r"(file|folder|text|table|archive|document|part|link|cache|pipe|socket|device)s\b")


class CountedFiles:
    """Files and documents by what became of them (nouns in the plural: "binary files", "files and folders")."""

    def __init__(self, files: Mapping[str, Sequence[str]] | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self._names: dict[str, dict[str, tuple[str, int]]] = {}
        for reason, names in (files or {}).items():
            for name in names:
                self.count_file(reason, name)

    def count_document(self, reason: str) -> None:
        """Count one more document, which has no name."""
        self.counts[reason] += 1

    def count_file(self, reason: str, name: str, group: str | None = None) -> None:
        """Add a file, or a place in one. Those of one `group` (an archive's members with one ending, the lines of a
        file) are reported as the first one and a count: there may be millions."""
        self.counts[reason] += 1
        names_of_reason = self._names.setdefault(reason, {})
        first_name, earlier_count = names_of_reason.get(group or name, (name, 0))
        names_of_reason[group or name] = (first_name, earlier_count + 1)

    def add_counts(self, other: CountedFiles) -> None:
        """Add what became of the files of another reading, which may have groups of this one."""
        self.counts.update(other.counts)
        for reason, names in other._names.items():
            own_names = self._names.setdefault(reason, {})
            for file_group, (first_name, count) in names.items():
                earlier_entry = own_names.get(file_group, (first_name, 0))
                own_names[file_group] = (earlier_entry[0], earlier_entry[1] + count)

    @property
    def files(self) -> dict[str, list[str]]:
        """The names by reason."""
        return {
            reason: [
                first + (f" and {count - 1:,} more" if count > 1 else "") for first, count in names.values()
            ]
            for reason, names in self._names.items()
        }


def tell_counts(
    counts: Mapping[str, int], files: Mapping[str, Sequence[str]], where_all: str = ": --json has all"
) -> list[str]:
    """One text per reason: count, reason and the first names. where_all: added after "N more"."""
    texts = []
    for count_reason, count in counts.items():
        text = f"{count:,} {count_reason}"
        if count == 1:  # "binary file", "hidden file or folder"
            parts = count_reason.split(" and ")
            text = "1 " + " or ".join(NOUN.sub(r"\1", part, count=part.count(",") + 1) for part in parts)
        if names := files.get(count_reason):
            names_left = len(names) - NAMES_SHOWN
            more = f", and {names_left:,} more{where_all}" if names_left > 0 else ""
            text += f" ({', '.join(map(make_visible, names[:NAMES_SHOWN]))}{more})"
        texts.append(text)
    return texts


@dataclass(frozen=True)
class EdgeToken:
    """The token that ends or begins every document. why: it is that one; "" if only the manifest says so."""

    id: int
    spelled: str
    why: str = ""

    def __str__(self) -> str:
        return f"token {self.id} ({make_visible(self.spelled)})" + (f", {self.why}" if self.why else "")


@dataclass(frozen=True)
class Summary:
    """Counts of a corpus; `documents` and `tokens` (with end-of-document tokens) by split."""

    action: Literal["prepared", "reused", "adopted", "verified"]
    directory: str
    name: str
    fingerprint: str
    vocab_size: int
    eod: EdgeToken
    bos: EdgeToken | None
    shards: int
    documents: dict[str, int]
    tokens: dict[str, int]
    text_bytes: int | None
    seconds: float | None = None
    tokens_per_second: float | None = None
    lost_share: float | None = None  # of the text: without a token, or unknown
    read: dict[str, int] = field(default_factory=dict)  # counts of files by how they were read
    read_files: dict[str, list[str]] = field(default_factory=dict)  # the first names of each
    left_out: dict[str, int] = field(default_factory=dict)  # counts by reason
    left_out_files: dict[str, list[str]] = field(default_factory=dict)  # names by reason
    warnings: list[str] = field(default_factory=list)

    @classmethod
    def of_corpus(
        cls,
        action: Literal["prepared", "reused", "adopted", "verified"],
        directory: Path,
        manifest: Manifest,
        tokenizer: Tokenizer,
        *,
        seconds: float | None = None,
        lost_share: float | None = None,
        read: CountedFiles | None = None,
        left_out: CountedFiles | None = None,
        warnings: list[str] | None = None,
    ) -> Self:
        tokens_by_split = {split: manifest.count_tokens(split) for split in manifest.splits}
        return cls(
            action=action,
            directory=str(directory),
            name=manifest.name,
            fingerprint=manifest.fingerprint(),
            vocab_size=manifest.tokenizer.vocab_size,
            eod=EdgeToken(tokenizer.eod, tokenizer.spell_token(tokenizer.eod), tokenizer.why_eod),
            bos=None
            if tokenizer.bos is None
            else EdgeToken(tokenizer.bos, tokenizer.spell_token(tokenizer.bos), tokenizer.why_bos),
            shards=len(manifest.shards),
            documents={
                split: sum(part.documents for part in parts) for split, parts in manifest.splits.items()
            },
            tokens=tokens_by_split,
            text_bytes=manifest.text_bytes,
            seconds=round(seconds, 3) if seconds else None,
            tokens_per_second=round(sum(tokens_by_split.values()) / seconds, 1) if seconds else None,
            lost_share=lost_share,
            read=dict(read.counts) if read else {},
            read_files=read.files if read else {},
            left_out=dict(left_out.counts) if left_out else {},
            left_out_files=left_out.files if left_out else {},
            warnings=warnings or [],
        )

    def __str__(self) -> str:
        lines = [
            f"{self.action} {self.directory}: {count_noun(self.shards, 'shard')}, vocabulary of {self.vocab_size:,}"
        ]
        lines += [
            f"  {split}: {count_noun(self.documents[split], 'document')}, {count_noun(tokens, 'token')}"
            for split, tokens in self.tokens.items()
        ]
        lines.append(f"  documents end with {self.eod}")
        lines.append(f"  documents begin with {self.bos or 'no token of their own'}")
        if self.text_bytes is not None:
            per_token = self.text_bytes / sum(self.tokens.values())
            lost = "" if self.lost_share is None else f", {show_share(self.lost_share)} of it lost or unknown"
            lines.append(f"  {decimal(self.text_bytes)} of text, {per_token:.2f} bytes per token{lost}")
        if self.tokens_per_second is not None:
            lines.append(f"  {self.seconds:.1f} s, {self.tokens_per_second:,.0f} tokens/s")
        lines += [f"  read: {text}" for text in tell_counts(self.read, self.read_files)]
        lines += [f"  left out: {text}" for text in tell_counts(self.left_out, self.left_out_files)]
        lines += [f"  warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)


SECONDS_PER_LINE = 10.0


class Meter:
    """Shows how much of `total` bytes or tokens was read, documents/s and tokens/s; a context manager.

    doing, done: labels before these figures.
    """

    def __init__(
        self,
        total: int,
        silent: bool,
        doing: str = "preparing",
        done: str = "prepared",
        unit: Literal["bytes", "tokens"] = "bytes",
    ) -> None:
        self._total, self._silent, self._done, self._unit = total, silent, done, unit
        self._begin = self._last_line = time.monotonic()
        self._bar = make_progress(
            TextColumn("{task.fields[share]}"), TextColumn("{task.fields[rates]}"), silent=silent
        )
        self._lines = not silent and not self._bar.console.is_terminal
        self._task = self._bar.add_task(doing, total=total, rates="", share="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show_progress(self, read: int, documents: int, tokens: int, note: str = "") -> None:
        """Totals so far; `read` in the unit of the total, bytes or tokens, the others for the rates, which `note`
        follows."""
        current_time = time.monotonic()
        seconds = max(current_time - self._begin, 1e-9)
        rates_text = (
            f"{documents / seconds:,.0f} documents/s {tokens / seconds:,.0f} tokens/s" + f" {note}".rstrip()
        )
        show = decimal if self._unit == "bytes" else lambda n: f"{n / 1e6:,.1f} M"
        share_text = f"{show(read)} of {show(self._total)}" + (" tokens" if self._unit == "tokens" else "")
        self._bar.update(self._task, completed=read, rates=rates_text, share=share_text)
        if self._lines and current_time - self._last_line >= SECONDS_PER_LINE:
            self._last_line = current_time
            print(f"{self._done} {share_text}, {rates_text}", file=sys.stderr, flush=True)
