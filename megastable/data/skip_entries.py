"""The lines of the skip ledger as objects, by position or by identity (skip_ledger.py reads them)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, StrictInt, field_validator, model_validator

from megastable.data.append_only import LedgerEntry
from megastable.data.documents import Document
from megastable.data.order import LAST_POSITION, Order
from megastable.data.skips import Skips

Int64s = npt.NDArray[np.int64]
Place = Annotated[StrictInt, Field(ge=0, le=LAST_POSITION)]
Number = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]  # the range of the columns
Pair = Annotated[list[Place], Field(min_length=2, max_length=2)]

RANGES = 4096  # per line: a longer line would not be repaired after a crash (jsonl.py)


class SkipEntry(LedgerEntry):
    """A line by position: [first, end), the reason, its incident, the step at which it was noticed.

    corpus: skip only the positions of that corpus, which is swapped out from `first` on.
    """

    first: Place
    end: Place
    reason: str
    incident: Number | None = None
    step: Number | None = None
    corpus: str | None = None

    @model_validator(mode="after")
    def _forward(self) -> Self:
        if self.first >= self.end:
            raise ValueError(f"first {self.first} is not below end {self.end}")
        return self


class ShardDocuments(BaseModel):
    """Documents by their number in a shard."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shard: str
    documents: list[Number]


class SampleEntry(LedgerEntry):
    """A line by identity: skips every sample of `corpus`, while its manifest has `fingerprint`, that has any of
    `tokens` (ranges [first, end) of the training stream) among its own. documents: theirs, for people. released: the
    reverse: earlier lines about these tokens no longer hold; later lines may name them again."""

    corpus: Annotated[str, Field(min_length=1)]
    fingerprint: Annotated[str, Field(min_length=1)]
    tokens: Annotated[list[Pair], Field(min_length=1)]
    reason: str
    incident: Number | None = None
    step: Number | None = None
    documents: list[ShardDocuments] | None = None
    released: Literal[True] | None = None

    @field_validator("tokens")
    @classmethod
    def _forward(cls, tokens: list[list[int]]) -> list[list[int]]:
        if wrong := next(((first, end) for first, end in tokens if first >= end), None):
            raise ValueError(f"first {wrong[0]} is not below end {wrong[1]}")
        return tokens


AnyEntry = SkipEntry | SampleEntry


def sample_entries(
    order: Order,
    positions: Int64s,
    reason: str,
    documents: Iterable[Document] = (),
    incident: int | None = None,
    step: int | None = None,
) -> list[SampleEntry]:
    """The lines that skip the samples at `positions`, n integers, for the rest of the run: at least one for each of
    their corpora. documents: of the named ones, for people."""
    places, length = order.locate(positions), order.sequence_length
    named = list(documents)
    found = []
    for index in np.unique(places.corpus).tolist():
        corpus = order.corpora[index]
        firsts = places.first_token[places.corpus == index]
        edges = Skips.merged(np.column_stack([firsts, firsts + length])).edges
        shards: dict[str, list[int]] = {}
        for document in named:
            if document.corpus == corpus.name:
                shards.setdefault(document.shard, []).append(document.document)
        of = [ShardDocuments(shard=shard, documents=numbers) for shard, numbers in shards.items()]
        for number, part in enumerate(np.split(edges, range(RANGES, len(edges), RANGES))):
            found.append(
                SampleEntry(
                    corpus=corpus.name, fingerprint=corpus.fingerprint, tokens=part.tolist(), reason=reason,
                    incident=incident, step=step, documents=of if of and not number else None,
                )
            )  # fmt: skip
    return found


def kind_of_line(content: Any) -> type[SkipEntry] | type[SampleEntry]:
    """The class of a line, by its content."""
    named = isinstance(content, dict) and ("tokens" in content or "fingerprint" in content)
    return SampleEntry if named else SkipEntry
