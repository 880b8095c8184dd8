"""Summary of a command's work on a corpus, as text and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, Self

from rich.filesize import decimal

from megastable.base.text import plural, show_share, visible
from megastable.data.manifest import Manifest
from megastable.data.tokenizer import Tokenizer
from megastable_tools.prepare.left_out import CountedFiles, told


@dataclass(frozen=True)
class EdgeToken:
    """The token that ends or begins every document. why: it is that one; "" if only the manifest says so."""

    id: int
    spelled: str
    why: str = ""

    def __str__(self) -> str:
        return f"token {self.id} ({visible(self.spelled)})" + (f", {self.why}" if self.why else "")


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
    def of(
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
        tokens = {split: manifest.tokens(split) for split in manifest.splits}
        return cls(
            action=action,
            directory=str(directory),
            name=manifest.name,
            fingerprint=manifest.fingerprint(),
            vocab_size=manifest.tokenizer.vocab_size,
            eod=EdgeToken(tokenizer.eod, tokenizer.spelled(tokenizer.eod), tokenizer.why_eod),
            bos=None
            if tokenizer.bos is None
            else EdgeToken(tokenizer.bos, tokenizer.spelled(tokenizer.bos), tokenizer.why_bos),
            shards=len(manifest.shards),
            documents={
                split: sum(part.documents for part in parts) for split, parts in manifest.splits.items()
            },
            tokens=tokens,
            text_bytes=manifest.text_bytes,
            seconds=round(seconds, 3) if seconds else None,
            tokens_per_second=round(sum(tokens.values()) / seconds, 1) if seconds else None,
            lost_share=lost_share,
            read=dict(read.counts) if read else {},
            read_files=read.files if read else {},
            left_out=dict(left_out.counts) if left_out else {},
            left_out_files=left_out.files if left_out else {},
            warnings=warnings or [],
        )

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        lines = [
            f"{self.action} {self.directory}: {plural(self.shards, 'shard')}, vocabulary of {self.vocab_size:,}"
        ]
        lines += [
            f"  {split}: {plural(self.documents[split], 'document')}, {plural(tokens, 'token')}"
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
        lines += [f"  read: {text}" for text in told(self.read, self.read_files)]
        lines += [f"  left out: {text}" for text in told(self.left_out, self.left_out_files)]
        lines += [f"  warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)
