"""Decodes the bad samples document by document, and compares their tokens with the corpus's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from megastable.base.errors import DataError
from megastable.config.recipe import find_recipe
from megastable.config.tree import RunConfig
from megastable.data.blends import Line, lines_until
from megastable.data.corpora import open_corpora
from megastable.data.samples import Document, Source, documents_by_position, token_counts, unigram_entropy
from megastable.data.skip_ledger import Ledger
from megastable.data.skips import Selection, Skips
from megastable.data.tokenizer import Tokenizer, load_tokenizer

SHOWN = 50  # samples whose whole text is written
COUNTED = 512  # samples whose tokens are counted
FAR = 1 << 16  # positions before them that are searched for ordinary samples
CORPUS = 1 << 21  # tokens of a corpus used for comparison
TOP = 10  # most frequent tokens named of either
FEW = 3000  # tokens needed to recognize random ones
POINTS = 80  # of a curve over ranks

Range = tuple[int, int]
Counts = npt.NDArray[np.int64]


class Facts(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DocumentText(Facts):
    """The part of a sample from one document. ends: the document ends here. shard, document: None if index and text
    disagree."""

    text: str
    ends: bool
    shard: str | None
    document: int | None


class SampleText(Facts):
    """A sample's own tokens, decoded. loss: nats per token on the good state, if measured."""

    position: int
    corpus: str
    loss: float | None
    pieces: list[DocumentText]


class TokenShare(Facts):
    """The share (0 to 1) of a token among the bad samples and in the corpus."""

    token: int
    text: str
    bad: float
    corpus: float


class Tokens(Facts):
    """Unigram statistics of bad samples (up to COUNTED, evenly spread) and of their corpora (up to CORPUS tokens).

    Entropies in nats per token. repeated: share of a bad sample's most frequent token, the median. distance: total
    variation between the two distributions, 0 to 1; usual_distance: of as many samples from before the bad ones that
    were not skipped, None where there are too few. *_by_rank: (rank, share), most frequent first.
    """

    samples: int
    bad_tokens: int
    corpus_tokens: int
    vocabulary: int
    bad_entropy: float
    corpus_entropy: float
    repeated: float
    distance: float
    usual_distance: float | None
    top: list[TokenShare]
    bad_by_rank: list[tuple[int, float]]
    corpus_by_rank: list[tuple[int, float]]

    @property
    def reading(self) -> str:
        """The interpretation, in a sentence."""
        if self.repeated > 0.5:
            return f"A single token makes {self.repeated:.0%} of a sample: it looks like a repetition."
        has_many = self.bad_tokens >= FEW  # with fewer, hardly any token repeats in any text
        if has_many and math.exp(self.bad_entropy) > 0.5 * min(self.vocabulary, self.bad_tokens):
            return "Almost every token of the vocabulary is as frequent as any other: it looks like random tokens."
        if self.usual_distance is None:
            return "There are no ordinary samples before them to compare their tokens with."
        if self.distance < 1.3 * self.usual_distance:
            return "Its tokens are as frequent as elsewhere in the corpus: look at their order and at what it says."
        return (
            "Other tokens are frequent here than elsewhere in the corpus: it looks like another kind of text."
        )


class Library:
    """The corpora of a run, opened for reading. Raises MegastableError if they cannot be opened."""

    def __init__(self, config: RunConfig, blends: Sequence[Line] = ()) -> None:
        """blends: the lines of blends.jsonl valid at the time."""
        corpora = open_corpora(config.data.corpora, config.model.sequence_length, config.run.seed, blends)
        self.source: Source = corpora.train
        self.pieces = config.pieces  # that the samples are cut into
        info = corpora.manifests[0].tokenizer
        self.problem = ""
        self.tokenizer: Tokenizer | None = None
        try:
            self.tokenizer = load_tokenizer(find_recipe(config.data.corpora[0].path) / info.file, info.eod)
        except DataError as error:
            self.problem = f"texts are shown as token ids: {error}"
        self.vocabulary = corpora.vocab_size

    def decode_ids(self, ids: Sequence[int]) -> str:
        """The text of token ids, or the ids if there is no tokenizer for them."""
        if self.tokenizer is not None and max(ids, default=0) < self.tokenizer.vocab_size:
            return self.tokenizer.decode(ids)
        return " ".join(map(str, ids))

    def read_samples(self, ranges: Sequence[Range], losses: dict[int, float]) -> list[SampleText]:
        """The first SHOWN samples of `ranges`. Raises DataError for a damaged corpus."""
        positions = take_positions(ranges, SHOWN)
        documents = documents_by_position(self.source, np.array(positions, dtype=np.int64))
        return [self._sample(p, documents[p], losses.get(p)) for p in positions]

    def _sample(self, position: int, documents: list[Document], loss: float | None) -> SampleText:
        sample_tokens = self.source.read_sample(position)[:-1]
        sample_place = self.source.order.locate_sample(position)
        ends = np.flatnonzero(sample_tokens == self.source.eod) + 1
        token_parts = [part for part in np.split(sample_tokens, ends) if part.size]
        counts_agree = len(token_parts) == len(documents)
        text_pieces = []
        for piece_number, part in enumerate(token_parts):
            is_closed = int(part[-1]) == self.source.eod
            text = self.decode_ids(part[:-1].tolist() if is_closed else part.tolist())
            of = documents[piece_number] if counts_agree else None
            shard, number = (of.shard, of.document) if of else (None, None)
            text_pieces.append(DocumentText(text=text, ends=is_closed, shard=shard, document=number))
        corpus_name = self.source.order.corpora[sample_place.corpus].name
        return SampleText(position=position, corpus=corpus_name, loss=loss, pieces=text_pieces)

    def compare_tokens(self, ranges: Sequence[Range], selection: Skips | Selection) -> Tokens:
        """The token distribution of `ranges`, and of ordinary samples, which `selection` keeps.

        Raises DataError for a damaged corpus.
        """
        positions = spread_positions(ranges, COUNTED)
        bad_counts = self._counts(positions)
        repeated = [np.bincount(sample[:-1]).max() for sample in self.source.read_samples(positions)]
        corpora = np.unique(self.source.order.locate_samples(positions).corpus).tolist()
        streams = [self.source.streams[index] for index in corpora]
        corpus = sum(
            (token_counts(s, self.vocabulary, CORPUS // len(streams)) for s in streams),
            np.zeros(self.vocabulary, dtype=np.int64),
        )
        before = np.arange(max(0, ranges[0][0] - FAR), ranges[0][0])
        before = before[~selection.mask_skipped(before)][-positions.size :]
        shares, usual = bad_counts / bad_counts.sum(), corpus / corpus.sum()
        top_tokens = list[TokenShare]()
        for token in dict.fromkeys((*_top(bad_counts), *_top(corpus))):
            text = self.decode_ids([token]) or f"token {token}"
            text = "end of document" if token == self.source.eod else text
            bad_share, usual_share = float(shares[token]), float(usual[token])
            top_tokens.append(TokenShare(token=token, text=text, bad=bad_share, corpus=usual_share))
        return Tokens(
            samples=positions.size, bad_tokens=int(bad_counts.sum()), corpus_tokens=int(corpus.sum()),
            vocabulary=self.vocabulary,
            bad_entropy=unigram_entropy(bad_counts), corpus_entropy=unigram_entropy(corpus),
            repeated=float(np.median(repeated)) / self.source.order.sequence_length,
            distance=_distance(bad_counts, corpus),
            usual_distance=_distance(self._counts(before), corpus) if before.size == positions.size else None,
            top=top_tokens, bad_by_rank=_by_rank(bad_counts), corpus_by_rank=_by_rank(corpus),
        )  # fmt: skip

    def _counts(self, positions: npt.NDArray[np.int64]) -> Counts:
        sample_tokens = self.source.read_samples(positions)[:, :-1]
        return np.bincount(sample_tokens.ravel(), minlength=self.vocabulary)


def count_positions(ranges: Sequence[Range]) -> int:
    """Number of positions in `ranges` [first, end)."""
    return sum(end_position - first_position for first_position, end_position in ranges)


def take_positions(ranges: Sequence[Range], most: int) -> list[int]:
    """The first `most` positions of `ranges`."""
    return list(
        islice(
            (position for range_first, range_end in ranges for position in range(range_first, range_end)),
            most,
        )
    )


def spread_positions(ranges: Sequence[Range], most: int) -> npt.NDArray[np.int64]:
    """Up to `most` positions, evenly spread over `ranges`: int64 [n], ascending where they are."""
    total = count_positions(ranges)
    wanted_numbers = np.arange(min(total, most), dtype=np.int64) * total // max(1, min(total, most))
    range_firsts = np.array([first for first, _ in ranges], dtype=np.int64)
    before = np.cumsum([0, *(end_position - first for first, end_position in ranges)], dtype=np.int64)[:-1]
    at = np.searchsorted(before, wanted_numbers, side="right") - 1
    return np.asarray(range_firsts[at] + wanted_numbers - before[at], dtype=np.int64)


def _top(counts: Counts) -> list[int]:
    token_order = np.argsort(-counts, kind="stable")[:TOP]
    return [int(token) for token in token_order if counts[token]]


def _distance(one: Counts, other: Counts) -> float:
    return float(np.abs(one / one.sum() - other / other.sum()).sum() / 2)


def _by_rank(counts: Counts) -> list[tuple[int, float]]:
    sorted_shares = np.sort(counts[counts > 0])[::-1] / counts.sum()
    chosen_ranks = np.unique(np.geomspace(1, sorted_shares.size, POINTS).round().astype(np.int64))
    return [(int(chosen_rank), float(sorted_shares[chosen_rank - 1])) for chosen_rank in chosen_ranks]


@dataclass(frozen=True)
class SampleSource:
    """The samples of one run. order: the lines of blends.jsonl; ledger: of its skips, read from the file `skips`."""

    config: RunConfig
    order: Sequence[Line]
    ledger: Ledger
    skips: Path
    _libraries: dict[int, Library] = field(default_factory=dict)

    def open_library(self, time: float = math.inf) -> Library:
        """The corpora in the order valid at a time, by default now. Raises MegastableError if they cannot be opened."""
        line_count = len(lines_until(self.order, time) or self.order[:1])
        if line_count not in self._libraries:
            self._libraries[line_count] = Library(self.config, self.order[:line_count])
        return self._libraries[line_count]

    def select_usable(self, library: Library) -> Selection:
        """The samples that are trained on."""
        return self.ledger.select_usable(self.skips, library.source.order, self.config.data.skip)[0]


@dataclass(frozen=True)
class PublicView:
    """How a report is written for readers who have nothing of the run but its published record. text: of a message what
    may be published; name: the public name of a "corpus" or a "shard"; source: of the texts of samples, None if they
    are not shown. The record has public names, and the order inside a corpus depends on its own: so the source is that
    of the run itself."""

    text: Callable[[str], str]
    name: Callable[[str, str], str]
    source: SampleSource | None = None

    def hide_names(self, sample: SampleText) -> SampleText:
        """A sample with the public names of its corpus and shards."""
        pieces = list[DocumentText]()
        for piece in sample.pieces:
            shard = None if piece.shard is None else self.name("shard", piece.shard)
            pieces.append(piece.model_copy(update={"shard": shard}))
        return sample.model_copy(update={"corpus": self.name("corpus", sample.corpus), "pieces": pieces})
