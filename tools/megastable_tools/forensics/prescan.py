"""Scan a run's data ahead of training and skip clearly corrupt samples before they can cause a spike:
`data.look_ahead`.

    python -m megastable_tools.forensics.prescan RUN RECIPE [key=value ...]

The data order is a pure function, so the coming samples are known. Every part of a document in them is compared with
its corpus's baseline (yardstick.py), never with itself: a key from its first tokens says which half of the tables
contains it, and the other half is used. The supervisor starts this on a spare core. Every skip is
journaled with its evidence, and there is a budget: if a scan finds half of the data odd, the scan is wrong, or a person
is needed. `ahead_sheet` shows the same to a person, and skips nothing.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from megastable.base.errors import user_errors
from megastable.base.process import spare_output
from megastable.base.text import count_noun, make_visible, show_ranges
from megastable.config import recipe
from megastable.config.tree import RunConfig
from megastable.data.blends import GoneStream, Line, read_blends
from megastable.data.order import Order
from megastable.data.samples import Document, DocumentPart, parts_by_position
from megastable.data.shards import Shard
from megastable.data.skip_ledger import Ledger, append_entries, sample_entries
from megastable.data.skips import Selection, batches_ahead, ranges_of
from megastable.report.postmortem.sample_texts import Library
from megastable.report.sheet import Column, Passage, Sheet
from megastable.run.directory import RunDirectory, read_object
from megastable.run.events.data_events import LookAheadFailed, LookAheadSpent, LookedAhead
from megastable.run.events.event import read_whole
from megastable.run.log import RunLog
from megastable.run.rank_ipc import parse_arguments
from megastable_tools.forensics.history import History, checkpoint_cursor, live_place
from megastable_tools.forensics.oddness.features import FEATURES, Lexicon
from megastable_tools.forensics.oddness.judgement import KINDS
from megastable_tools.forensics.oddness.yardstick import HEAD, Yardstick, cut_documents, document_keys
from megastable_tools.forensics.scanning.rows import long_key, sample_with_keys
from megastable_tools.forensics.scanning.units import BLOCK
from megastable_tools.forensics.shard_set import split_at_tokens

Int64s = npt.NDArray[np.int64]

SAMPLE = 4 << 20  # tokens of a corpus from which its baseline is learnt
AT_ONCE = 1 << 20  # tokens measured at a time
CLEAR = 6.0  # minimum score of a suspect piece
COUNTED = 32  # tokens: shorter pieces are ignored

ABOUT_SCORE = "about -log10 of the share of ordinary text that is as odd"
COLUMNS = (
    Column("score", "score", "score", ABOUT_SCORE, limit=CLEAR),
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

    def yardstick_of(self, corpus: int) -> Yardstick:
        """The baseline of a corpus, learnt once, from about SAMPLE tokens spread over all of its shards."""
        if corpus not in self._yardsticks:
            stream = self.source.streams[corpus]
            assert not isinstance(stream, GoneStream)
            if stream.remote is not None:
                stream.remote.check_unlimited("the scan of text learns from all shards")
                shards = [stream.open_shard(info.name) for info in stream.manifest.shards]
            else:
                shards = [Shard(stream.directory / info.name, info) for info in stream.manifest.shards]
            vocabulary = stream.manifest.tokenizer
            lexicon = Lexicon.of_tokenizer(self.library.tokenizer, vocabulary.vocab_size, vocabulary.eod)
            sample = sample_with_keys(shards, document_keys, SAMPLE)
            self._yardsticks[corpus] = Yardstick.learn_from(sample, lexicon)
        return self._yardsticks[corpus]

    def find_suspects(self, positions: Int64s, least: float = CLEAR) -> list[FoundPart]:
        """The parts with a score of at least `least`, in the order of the positions."""
        samples_at_once = AT_ONCE // self.source.order.sequence_length + 1
        corpus_names = [corpus.name for corpus in self.source.order.corpora]
        suspect_parts = list[FoundPart]()
        for begin in range(0, positions.size, samples_at_once):
            by_corpus = defaultdict[int, list[tuple[int, DocumentPart]]](list)
            some_positions = positions[begin : begin + samples_at_once]
            for position, parts in parts_by_position(self.source, some_positions).items():
                for part in parts:
                    by_corpus[corpus_names.index(part.document.corpus)].append((position, part))
            for corpus, corpus_parts in by_corpus.items():
                suspect_parts += self._measure(corpus, corpus_parts, least)
        return sorted(suspect_parts, key=lambda f: (f.position, f.part.offset))

    def _measure(
        self, corpus: int, parts: list[tuple[int, DocumentPart]], least: float
    ) -> Iterator[FoundPart]:
        stream, yardstick = self.source.streams[corpus], self.yardstick_of(corpus)
        # The shards one after the other, each opened once.
        parts.sort(key=lambda item: (item[1].document.shard, item[1].first_token))
        opened_shards: dict[str, Shard] = {}
        part_ids, keys = [], []
        for _, document_part in parts:
            shard_name = document_part.document.shard
            if shard_name not in opened_shards:
                opened_shards = {shard_name: stream.open_shard(shard_name)}
            shard = opened_shards[shard_name]
            part_ids.append(shard.read_raw(document_part.first_token, document_part.tokens))
            keys.append(self._key(shard, document_part.document))
        part_edges = np.cumsum([0, *(document_part.tokens for _, document_part in parts)], dtype=np.int64)
        pieces, owner = cut_documents(part_edges)
        piece_keys = np.array(keys, dtype=np.uint64)[owner]
        features = yardstick.measure_features(np.concatenate(part_ids), pieces, piece_keys)
        piece_judgement = yardstick.judge_features(features)
        lengths = np.diff(pieces)
        score = np.where(lengths >= COUNTED, piece_judgement.score, 0.0)
        for part_number in np.unique(owner[score >= least]).tolist():
            own_pieces = np.flatnonzero(owner == part_number)
            worst = int(own_pieces[score[own_pieces].argmax()])
            position, document_part = parts[part_number]
            feature_name = FEATURES[int(piece_judgement.feature[worst])].name
            worst_value = float(features[feature_name][worst])
            why = yardstick.explain_piece(int(lengths[worst]), feature_name, worst_value)
            yield FoundPart(
                position, document_part, float(score[worst]), KINDS[int(piece_judgement.kind[worst])],
                why, int(lengths[own_pieces][score[own_pieces] >= least].sum()),
                int(pieces[worst] - part_edges[part_number]),
            )  # fmt: skip

    def _key(self, shard: Shard, document: Document) -> int:
        """The key that decides which half of the tables a document belongs to."""
        if document.tokens > BLOCK:
            return long_key(shard.name, document.document)
        document_place = document.shard, document.document
        if document_place not in self._heads:
            if len(self._heads) > 1 << 17:
                self._heads.clear()
            head_ids = shard.read_raw(document.first_token, min(document.tokens, HEAD))
            self._heads[document_place] = int(document_keys(head_ids, np.array([0, len(head_ids)]))[0])
        return self._heads[document_place]


def ahead_sheet(history: History, steps: int, texts: int) -> Sheet:
    """The parts of a run's next `steps` steps that look corrupt, the worst first."""
    library, (step, cursor) = history.library_at(), live_place(history)
    batches = batches_ahead(history.select_from(library), history.config.batches, cursor, steps)
    positions = np.concatenate(batches)
    lookout = Lookout(library)
    suspect_parts = sorted(lookout.find_suspects(positions), key=lambda f: -f.score)
    numbered_batches = enumerate(batches, step + 1)
    step_by_position = {position: number for number, batch in numbered_batches for position in batch.tolist()}
    suspect_rows = [
        {
            "score": f.score, "kind": f.kind, "step": step_by_position[f.position], "position": f.position,
            "corpus": f.document.corpus, "shard": f.document.shard, "document": f.document.document, "odd": f.odd,
            "tokens": f.part.tokens, **dict(zip(("first", "end"), f.part.own_span, strict=True)), "why": f.why,
        }
        for f in suspect_parts
    ]  # fmt: skip
    text_passages = {number: [passage_of(library, f)] for number, f in enumerate(suspect_parts[:texts])}
    bad = len({f.position for f in suspect_parts})
    token_total = positions.size * library.source.order.sequence_length
    return Sheet(
        title=f"{history.run.root.name}, the next {count_noun(steps, 'step')}",
        lead=[
            f"Steps {step + 1} to {step + steps}: {count_noun(positions.size, 'sample')}, {token_total:,} tokens; "
            f"{count_noun(bad, 'sample')} with something as odd as {CLEAR:g} (one in 10^{CLEAR:g} of ordinary text).",
        ],
        columns=COLUMNS, rows=suspect_rows, passages=text_passages,
        data={
            "first_step": step + 1, "last_step": step + steps, "samples": int(positions.size), "tokens": token_total,
            "odd_samples": bad, "odd_score": CLEAR,
        },
        notes=["megastable prune skip RUN PLAN leaves documents out; data.look_ahead.steps does it by itself"]
        if suspect_parts else [],
    )  # fmt: skip


def passage_of(library: Library, found: FoundPart) -> Passage:
    """The text of the part."""
    source = library.source
    corpus_index = [order_corpus.name for order_corpus in source.order.corpora].index(found.document.corpus)
    shard = source.streams[corpus_index].open_shard(found.document.shard)
    part_ids = shard.read_raw(found.part.first_token, found.part.tokens).tolist()
    part_place = f"document {found.document.document} of {found.document.shard}, position {found.position}"
    return Passage(part_place, split_at_tokens(part_ids, library.tokenizer))


REASON = "looked ahead: "  # prefix of the reasons written here
FREE = 64  # positions that may be skipped before the share is limited
PAUSE = 1.0  # seconds between two looks
CHUNK = 1 << 19  # tokens after which findings are written
SHOWN, EXCERPT = 8, 100  # pieces of evidence, and characters of each


class Scout:
    """The scan of one run. `looked` is the position up to which it has looked, from `begin` on; `seen` samples in
    all."""

    def __init__(self, config: RunConfig, run: RunDirectory) -> None:
        self.config, self.run, self.settings = config, run, config.data.look_ahead
        self.log = RunLog(run, partial(print, flush=True))
        self.looked = self.begin = self.seen = 0
        self._used = 0  # samples skipped from `begin` on
        self._selection: tuple[object, Selection] | None = None
        self._blends: list[Line] | None = None
        self._lookout: Lookout | None = None
        self._spent = False

    def look_ahead(self) -> bool:
        """Scan some of the coming samples; whether there was anything new. Raises MegastableError."""
        lookout, cursor = self._ready(), self._cursor()
        order, batch_plan = lookout.source.order, self.config.batches
        if not self.looked or cursor < self.begin:
            self.begin = self.looked = cursor  # the first look, or the run was rewound past it
            self._used = self._skipped_before()
        self.looked = max(self.looked, cursor)
        selection = self._left(order)
        batches_ahead_now = batches_ahead(selection, batch_plan, cursor, self.settings.steps)
        end_position = int(batches_ahead_now[-1][-1]) + 1 if batches_ahead_now else cursor
        if self.looked >= end_position:
            return False
        positions, cursor_after = selection.next_kept(self.looked, max(1, CHUNK // order.sequence_length))
        positions = positions[positions < end_position]
        self.looked, self.seen = min(cursor_after, end_position), self.seen + positions.size
        if positions.size:
            self._skip(self._clear(lookout.find_suspects(positions, self.settings.score)))
        return True

    def _ready(self) -> Lookout:
        """The lookout for the current data order, which may change during training."""
        blends_now = read_blends(self.run.blends)
        if self._lookout is None or blends_now != self._blends:
            # The first line only repeats the recipe.
            if self._lookout is None or self._blends:
                self.looked, self._lookout = 0, Lookout(Library(self.config, blends_now))
            self._blends = blends_now
        return self._lookout

    def _cursor(self) -> int:
        """The run's position. Before it trains, where it will begin: a previous process's position is outdated."""
        told = read_object(self.run.progress)
        cursor = None if told.get("phase") in ("starting", "ended") else read_whole(told.get("cursor"))
        return checkpoint_cursor(self.run, max) if cursor is None else cursor

    def _left(self, order: Order) -> Selection:
        """The selection by the ledger, read again only if it changed: it may be long. The run reports invalid lines."""
        try:
            ledger_stat = self.run.skips.stat()
            ledger_state = ledger_stat.st_size, ledger_stat.st_mtime_ns, order
        except OSError:
            ledger_state = 0, 0, order
        if self._selection is None or ledger_state != self._selection[0]:
            ledger = Ledger.read_ledger(self.run.skips, [])
            usable, _ = ledger.select_usable(self.run.skips, order, self.config.data.skip)
            self._selection = ledger_state, usable
        return self._selection[1]

    def _skipped_before(self) -> int:
        """Number of samples from `begin` on skipped by an earlier scan, or by this one before a rewind."""
        look_events = self.run.iterate_events(LookedAhead)
        skipped_ranges = [skipped_range for event in look_events for skipped_range in event.positions]
        return sum(
            range_end - range_first for range_first, range_end in skipped_ranges if range_first >= self.begin
        )

    def _clear(self, found: Sequence[FoundPart]) -> dict[int, list[FoundPart]]:
        """The samples with enough corrupt tokens, by position."""
        by_position = defaultdict[int, list[FoundPart]](list)
        for one in found:
            if one.kind in self.settings.kinds:
                by_position[one.position].append(one)
        least_tokens = max(COUNTED, self.settings.share * self.config.model.sequence_length)
        return {p: some for p, some in by_position.items() if sum(one.odd for one in some) >= least_tokens}

    def _skip(self, clear: dict[int, list[FoundPart]]) -> None:
        # The budget is a share of what was scanned, independent of the run's length and of earlier skips.
        budget_left = FREE + int(self.settings.most * self.seen) - self._used
        chosen = dict(list(clear.items())[: max(0, budget_left)])
        if len(chosen) < len(clear) and not self._spent:
            self.log.emit_event(LookAheadSpent(
                found=len(clear), left=max(0, budget_left), used=self._used, looked=self.looked,
                evidence=self._evidence(list(clear.values())[len(chosen) :]),
            ))  # fmt: skip
        self._spent = len(chosen) < len(clear)
        if not chosen:
            return
        worst_parts = [max(parts, key=lambda one: one.score) for parts in chosen.values()]
        kind_counts = Counter(worst_part.kind for worst_part in worst_parts)
        what = ", ".join(f"{kind_count} {kind_name}" for kind_name, kind_count in kind_counts.most_common())
        position_ranges = ranges_of(sorted(chosen))
        documents = dict.fromkeys(part.document for parts in chosen.values() for part in parts)
        assert self._lookout is not None
        order = self._lookout.source.order
        entries = sample_entries(order, np.array(sorted(chosen)), REASON + what, documents)
        append_entries(self.run.skips, entries)
        self._used += len(chosen)
        look_event = LookedAhead(
            positions=position_ranges, samples=len(chosen), kinds=dict(kind_counts), looked=self.looked,
            documents=[document.model_dump() for document in list(documents)[:200]],
            evidence=self._evidence(list(chosen.values())), budget_left=budget_left - len(chosen),
        )  # fmt: skip
        what_is_skipped = f"{count_noun(len(chosen), 'sample')} of {count_noun(len(documents), 'document')}"
        where = f"positions {show_ranges(position_ranges, 4)} ({what})"
        told = f"ahead of the run: {what_is_skipped} will be skipped in every epoch, {where}"
        self.log.emit_event(look_event, say=told)

    def _evidence(self, found: Sequence[Sequence[FoundPart]]) -> list[dict[str, object]]:
        assert self._lookout is not None
        worst = sorted((max(some, key=lambda one: one.score) for some in found), key=lambda one: -one.score)
        return [
            {
                "position": one.position, "shard": one.document.shard, "document": one.document.document,
                "score": round(one.score, 1), "kind": one.kind, "odd_tokens": one.odd, "why": one.why,
                "text": make_visible(passage_of(self._lookout.library, one).text, EXCERPT),
            }
            for one in worst[:SHOWN]
        ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments("megastable_tools.forensics.prescan", __doc__, arguments)
    spare_output()
    with user_errors():
        scout = Scout(recipe.load_recipe(args.recipe, args.overrides), RunDirectory(args.run))
        try:
            while os.getppid() == args.parent:  # end with the supervisor in any case
                if not scout.look_ahead():
                    time.sleep(PAUSE)
        except Exception as error:
            scout.log.emit_event(LookAheadFailed(problem=f"{type(error).__name__}: {error}"))
            raise


if __name__ == "__main__":
    main()
