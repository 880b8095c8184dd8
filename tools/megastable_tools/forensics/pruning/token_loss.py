"""Compute the share of a corpus that a plan removes, and check its limit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from megastable.base.errors import DataError
from megastable.base.text import plural
from megastable.data.manifest import Manifest

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
    def of(cls, manifest: Manifest, documents: int, cut: int, tokens: int) -> Self:
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
        shares = {"document_share": self.document_share, "token_share": self.token_share}
        return {"documents": self.documents, "cut": self.cut, "tokens": self.tokens, **shares}

    def __str__(self) -> str:
        cut = f", {plural(self.cut, 'more document')} cut" if self.cut else ""
        return (
            f"{plural(self.documents, 'document')} of {self.of_documents:,} ({self.document_share:.3%}){cut}, "
            f"{plural(self.tokens, 'token')} of {self.of_tokens:,} ({self.token_share:.3%})"
        )

    def check(self, most: float, what: str, less: str, spans: str = "") -> None:
        """Raises DataError if more than the share `most` of the tokens or of the documents would be removed. less:
        advice to remove less; spans: advice to cut documents instead of removing whole ones."""
        share = max(self.document_share, self.token_share)
        if share <= most:
            return
        cut = f", {spans}" if spans and self.documents else ""
        raise DataError(
            f"{what} would take {self}: more than {100 * most:g} % of it; {less}{cut}, or "
            f"allow it with --most {_above(share)}"
        )


def _above(share: float) -> str:
    """A percentage that allows this share."""
    return f"{min(100.0, -(-share * 1000 // 1) / 10):g}%"


def share_of(text: str) -> float:
    """A share such as "5%" or "0.05". Raises DataError for anything else, and for one above 1."""
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(%?)\s*", text)
    share = float(found[1]) / (100 if found[2] else 1) if found else -1.0
    if not 0 <= share <= 1:
        raise DataError(f"--most {text}: give a share of the corpus, such as 5% or 0.05")
    return share
