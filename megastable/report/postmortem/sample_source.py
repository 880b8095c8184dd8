"""Opens the corpora of a run in the order that was valid at a time, for the texts of its samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megastable.config.tree import RunConfig
from megastable.data.blends import Line, until
from megastable.data.skip_ledger import Ledger
from megastable.data.skips import Selection
from megastable.report.postmortem.sample_texts import Library, SampleText


@dataclass(frozen=True)
class SampleSource:
    """The samples of one run. order: the lines of blends.jsonl; ledger: of its skips, read from the file `skips`."""

    config: RunConfig
    order: Sequence[Line]
    ledger: Ledger
    skips: Path
    _libraries: dict[int, Library] = field(default_factory=dict)

    def library(self, time: float = math.inf) -> Library:
        """The corpora in the order valid at a time, by default now. Raises MegastableError if they cannot be opened."""
        count = len(until(self.order, time) or self.order[:1])
        if count not in self._libraries:
            self._libraries[count] = Library(self.config, self.order[:count])
        return self._libraries[count]

    def selection(self, library: Library) -> Selection:
        """The samples that are trained on."""
        return self.ledger.usable(self.skips, library.source.order, self.config.data.skip)[0]


@dataclass(frozen=True)
class PublicView:
    """How a report is written for readers who have nothing of the run but its published record. text: of a message what
    may be published; name: the public name of a "corpus" or a "shard"; source: of the texts of samples, None if they
    are not shown. The record has public names, and the order inside a corpus depends on its own: so the source is that
    of the run itself."""

    text: Callable[[str], str]
    name: Callable[[str, str], str]
    source: SampleSource | None = None

    def sample(self, sample: SampleText) -> SampleText:
        """A sample with the public names of its corpus and shards."""
        pieces = [
            piece.model_copy(
                update={"shard": None if piece.shard is None else self.name("shard", piece.shard)}
            )
            for piece in sample.pieces
        ]
        return sample.model_copy(update={"corpus": self.name("corpus", sample.corpus), "pieces": pieces})
