"""Measure the samples that a run will read next: the data order is a pure function, so they are known in advance.

Every part of a document in the coming samples is compared with its corpus's baseline (yardstick.py), never with itself:
a key from its first tokens says which half of the tables contains it, and the other half is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megastable.base.text import plural
from megastable.data.blends import GoneStream
from megastable.data.documents import Document, DocumentPart, parts_by_position
from megastable.data.manifest import Stream
from megastable.data.shards import Shard
from megastable.data.tokenizer import Tokenizer
from megastable.report.postmortem.sample_texts import Library
from megastable.report.sheet import Column, Passage, Sheet
from megastable_tools.forensics.history import History
from megastable_tools.forensics.oddness.kinds import KINDS
from megastable_tools.forensics.oddness.yardstick import (
    FEATURES,
    HEAD,
    Lexicon,
    Yardstick,
    cut,
    document_keys,
)
from megastable_tools.forensics.places import live_place
from megastable_tools.forensics.scanning.rows import long_key, sample_with_keys
from megastable_tools.forensics.scanning.units import BLOCK
from megastable_tools.forensics.spans import spans
from megastable_tools.prepare.coming import batches_ahead

Int64s = npt.NDArray[np.int64]

SAMPLE = 4 << 20  # tokens of a corpus from which its baseline is learnt
AT_ONCE = 1 << 20  # tokens measured at a time
CLEAR = 6.0  # minimum score of a suspect piece
COUNTED = 32  # tokens: shorter pieces are ignored

COLUMNS = (
    Column(
        "score", "score", "score", "about -log10 of the share of ordinary text that is as odd", limit=CLEAR
    ),
    Column("kind", "looks like"),
    Column("step", "step", "count", "at which it will be read, by the current order"),
    Column("position", "position", "count"),
    Column("corpus", "corpus"),
    Column("shard", "shard"),
    Column("document", "document", "count"),
    Column("odd", "odd tokens", "count", "of this part, in pieces with that score"),
    Column("tokens", "tokens", "count", "of this part of the document"),
    Column("first", "first token", "count", "of this part, counted in the document from 0", wide=True),
    Column("end", "end", "count", "the token of the document behind this part", wide=True),
    Column("why", "why"),
)


@dataclass(frozen=True)
class FoundPart:
    """A part of a document at a coming position. odd: number of its tokens in pieces with a score of at least CLEAR;
    score, kind, why: of the worst piece, which begins `worst` tokens into the part."""

    position: int
    part: DocumentPart
    score: float
    kind: str
    why: str
    odd: int
    worst: int

    @property
    def document(self) -> Document:
        return self.part.document


class Lookout:
    """Measures samples of a run before they are read. Raises DataError for damaged corpora."""

    def __init__(self, library: Library) -> None:
        self.library, self.source = library, library.source
        self._yardsticks: dict[int, Yardstick] = {}
        self._heads: dict[tuple[str, int], int] = {}

    def yardstick(self, corpus: int) -> Yardstick:
        """The baseline of a corpus, learnt once."""
        if corpus not in self._yardsticks:
            self._yardsticks[corpus] = learn(self.source.streams[corpus], self.library.tokenizer)
        return self._yardsticks[corpus]

    def look(self, positions: Int64s, least: float = CLEAR) -> list[FoundPart]:
        """The parts with a score of at least `least`, in the order of the positions."""
        length = self.source.order.sequence_length
        found = []
        for some in np.split(positions, range(AT_ONCE // length + 1, positions.size, AT_ONCE // length + 1)):
            found += self._look(some, least)
        return found

    def _look(self, positions: Int64s, least: float) -> list[FoundPart]:
        if not positions.size:
            return []
        names = [corpus.name for corpus in self.source.order.corpora]
        by_corpus: dict[int, list[tuple[int, DocumentPart]]] = {}
        for position, parts in parts_by_position(self.source, positions).items():
            for part in parts:
                by_corpus.setdefault(names.index(part.document.corpus), []).append((position, part))
        found = [f for corpus, parts in by_corpus.items() for f in self._measure(corpus, parts, least)]
        return sorted(found, key=lambda f: (f.position, f.part.offset))

    def _measure(
        self, corpus: int, parts: list[tuple[int, DocumentPart]], least: float
    ) -> Iterator[FoundPart]:
        stream, yardstick = self.source.streams[corpus], self.yardstick(corpus)
        # The shards one after the other, each opened once.
        parts.sort(key=lambda item: (item[1].document.shard, item[1].first_token))
        shards: dict[str, Shard] = {}
        ids, keys = [], []
        for _, part in parts:
            name = part.document.shard
            if name not in shards:
                shards = {name: stream.open(name)}
            ids.append(shards[name].raw(part.first_token, part.tokens))
            keys.append(self._key(shards[name], part.document))
        edges = np.cumsum([0, *(part.tokens for _, part in parts)], dtype=np.int64)
        pieces, owner = cut(edges)
        features = yardstick.measure(np.concatenate(ids), pieces, np.array(keys, dtype=np.uint64)[owner])
        judged = yardstick.judge(features)
        lengths = np.diff(pieces)
        score = np.where(lengths >= COUNTED, judged.score, 0.0)
        for number in np.unique(owner[score >= least]).tolist():
            mine = np.flatnonzero(owner == number)
            worst = int(mine[score[mine].argmax()])
            position, part = parts[number]
            values = {name: float(column[worst]) for name, column in features.items()}
            yield FoundPart(
                position, part, float(score[worst]), KINDS[int(judged.kind[worst])],
                yardstick.explain(values, FEATURES[int(judged.feature[worst])].name),
                int(lengths[mine][score[mine] >= least].sum()), int(pieces[worst] - edges[number]),
            )  # fmt: skip

    def _key(self, shard: Shard, document: Document) -> int:
        at = document.shard, document.document
        if at not in self._heads:
            if len(self._heads) > 1 << 17:
                self._heads.clear()
            self._heads[at] = key_of(shard, document.document, document.first_token, document.tokens)
        return self._heads[at]


def key_of(shard: Shard, number: int, first: int, tokens: int) -> int:
    """The key that decides which half of the tables a document belongs to."""
    if tokens > BLOCK:
        return long_key(shard.name, number)
    head = min(tokens, HEAD)
    return int(document_keys(shard.raw(first, head), np.array([0, head]))[0])


def learn(stream: Stream, tokenizer: Tokenizer | None, most: int = SAMPLE) -> Yardstick:
    """The baseline of a stream's corpus, from about `most` tokens spread over all of its shards."""
    assert not isinstance(stream, GoneStream)
    shards = [Shard(stream.directory / info.name, info) for info in stream.manifest.shards]

    info = stream.manifest.tokenizer
    return Yardstick.of(
        sample_with_keys(shards, document_keys, most), Lexicon.of(tokenizer, info.vocab_size, info.eod)
    )


def to_come(history: History, steps: int) -> tuple[int, list[Int64s]]:
    """The run's current step, and the positions that each of its next `steps` steps will read, by today's skips."""
    step, cursor = live_place(history)
    selection = history.selection(history.library())
    return step, batches_ahead(selection, history.config.batches, cursor, steps)


def ahead_sheet(history: History, steps: int, texts: int) -> Sheet:
    """The parts of a run's next `steps` steps that look corrupt, the worst first."""
    step, batches = to_come(history, steps)
    library, positions = history.library(), np.concatenate(batches)
    lookout = Lookout(library)
    found = sorted(lookout.look(positions), key=lambda f: -f.score)
    at = {position: number for number, batch in enumerate(batches, step + 1) for position in batch.tolist()}
    rows = [
        {
            "score": f.score, "kind": f.kind, "step": at[f.position], "position": f.position,
            "corpus": f.document.corpus, "shard": f.document.shard, "document": f.document.document, "odd": f.odd,
            "tokens": f.part.tokens, **dict(zip(("first", "end"), f.part.own_span, strict=True)), "why": f.why,
        }
        for f in found
    ]  # fmt: skip
    passages = {number: [passage(library, f)] for number, f in enumerate(found[:texts])}
    bad = len({f.position for f in found})
    tokens = positions.size * library.source.order.sequence_length
    return Sheet(
        title=f"{history.run.root.name}, the next {plural(steps, 'step')}",
        lead=[
            f"Steps {step + 1} to {step + steps}: {plural(positions.size, 'sample')}, {tokens:,} tokens; "
            f"{plural(bad, 'sample')} with something as odd as {CLEAR:g} (one in 10^{CLEAR:g} of ordinary text).",
        ],
        columns=COLUMNS, rows=rows, passages=passages,
        data={
            "first_step": step + 1, "last_step": step + steps, "samples": int(positions.size), "tokens": tokens,
            "odd_samples": bad, "odd_score": CLEAR,
        },
        notes=["megastable prune skip RUN PLAN leaves documents out; data.look_ahead.steps does it by itself"]
        if found else [],
    )  # fmt: skip


def passage(library: Library, found: FoundPart) -> Passage:
    """The text of the part."""
    source = library.source
    tokens = source.streams[_index(source.order.corpora, found.document.corpus)].open(found.document.shard)
    ids = tokens.raw(found.part.first_token, found.part.tokens).tolist()
    where = f"document {found.document.document} of {found.document.shard}, position {found.position}"
    return Passage(where, spans(ids, library.tokenizer))


def _index(corpora: Sequence[Any], name: str) -> int:
    return [corpus.name for corpus in corpora].index(name)
