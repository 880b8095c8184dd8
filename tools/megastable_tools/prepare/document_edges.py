"""Count the tokens that documents begin and end with: what a corpus of another program says of its own documents."""

from __future__ import annotations

from collections import Counter

import numpy as np

from megastable.data.shard_format import Tokens
from megastable.data.shards import Shard
from megastable.data.tokenizer import Tokenizer
from megastable_tools.prepare.token_files import Ids


class DocumentEdges:
    """The first and last tokens of the non-empty documents of a corpus.

    firsts, lasts: how many documents begin and end with a token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.firsts, self.lasts = Counter[int](), Counter[int]()

    def count_tokens(self, shard: Shard, first: int, tokens: Tokens) -> None:
        """Count the tokens of a shard from offset `first` on, as `Shard.verify` passes them."""
        after = first + tokens.size
        edges = shard.document_starts(first, min(after + 1, shard.tokens) - first)
        begins, ends = edges[edges < after], edges[edges > first]
        if after == shard.tokens:
            ends = np.append(ends, after)
        for counts, at in ((self.firsts, begins - first), (self.lasts, ends - first - 1)):
            found, times = np.unique(tokens[at], return_counts=True)
            counts.update(dict(zip(found.tolist(), times.tolist(), strict=True)))

    def count_document(self, ids: Ids) -> None:
        """Count one document, 1-D, not empty."""
        self.firsts[int(ids[0])] += 1
        self.lasts[int(ids[-1])] += 1

    def uncount(self, first: int, last: int) -> None:
        """Take back the beginning and the end of a file that may lie inside documents: its first and last token."""
        self.firsts -= Counter([first])
        self.lasts -= Counter([last])

    @property
    def bos(self) -> int | None:
        """The special token that every document begins with and that does not end documents; None if there is none."""
        if len(self.firsts) != 1:
            return None
        (token,) = self.firsts
        return token if token != self.tokenizer.eod and self.tokenizer.is_special(token) else None

    def warnings(self, bos: int | None, documents: int) -> list[str]:
        """What does not fit the end-of-document token, or `bos`, the begin-of-document token of the manifest.

        Args:
            bos: None for none.
            documents: of the corpus, with those that were not counted.
        """
        found, eod = list[str](), self.tokenizer.eod
        special = [token for token in self.firsts if token != eod and self.tokenizer.is_special(token)]
        if bos is not None and (others := self.firsts.total() - self.firsts[bos]):
            found.append(
                f"{others:,} of {documents:,} documents do not begin with token {bos}, contrary to "
                "--bos: leave it out if most do not, or write the shards again with one"
            )
        elif bos is None and special:
            usual = max(special, key=self.firsts.__getitem__)
            found.append(
                f"{self.firsts[usual]:,} of {documents:,} documents begin with token {usual} "
                f"({self.tokenizer.spelled(usual)}), and the manifest names none that begins documents, so prompts and "
                "exports have none: adopt the shards with --bos if most begin with the tokenizer's own, or write them "
                "again, all with one or all without"
            )
        if open_ends := self.lasts.total() - self.lasts[eod]:
            found.append(
                f"{open_ends:,} of {documents:,} documents do not end with the end-of-document token "
                f"({eod}): a model trained on them does not learn where texts end; name their last "
                "token by --eod, or write the shards again with one"
            )
        return found
