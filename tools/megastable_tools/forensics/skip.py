"""Add documents, or a whole corpus, to a run's skip ledger: a live run skips them from its next step on.

Documents are identified by their tokens in the stream of their corpus: no sample that contains any of these is trained
on again, in any epoch, for any length of the run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megastable.base import durable
from megastable.base.errors import DataError
from megastable.base.process import login_name
from megastable.data.blends import GoneStream, blends_in_force
from megastable.data.manifest import Manifest, Stream
from megastable.data.order import LAST_POSITION
from megastable.data.skip_ledger import (
    RANGES,
    AnyEntry,
    Ledger,
    SampleEntry,
    ShardDocuments,
    SkipEntry,
    append_entries,
)
from megastable.data.skips import NONE, Identity, Range, Selection, Skips, sequences_of
from megastable.run.events.data_events import SkipsAdded, SkipsRead
from megastable.run.log import RunLog
from megastable_tools.forensics.history import History, checkpoint_cursor, live_place
from megastable_tools.forensics.pruning.prune_plan import Named, read_plan

Int64s = npt.NDArray[np.int64]

PATIENCE = 60.0  # seconds to wait for a live run to read it


@dataclass(frozen=True)
class Skipped:
    """Result of an addition. samples: different ones skipped by it, in every epoch; already: those of the documents'
    samples that were skipped before; taken_up: the step from which a live run skips them, None if no run is
    live (it reads the ledger when it starts) or has not reported it yet."""

    corpus: str
    documents: int
    samples: int
    lines: int
    already: int
    live: bool
    taken_up: int | None

    @property
    def text(self) -> str:
        if not self.documents:
            head = f"corpus {self.corpus} is swapped out{'' if self.lines else ' already'}"
        elif not self.lines:
            documents_text = f"the {self.documents:,} documents of corpus {self.corpus}"
            head = f"nothing to do: {documents_text} are skipped already"
        elif not self.samples:
            head = f"{self.documents:,} documents of corpus {self.corpus}: all of their samples are skipped already; "
            head += "the documents are named now, too, which holds for any sequence length"
        else:
            head = f"{self.documents:,} documents of corpus {self.corpus}: {self.samples:,} samples are skipped in "
            head += "every epoch from now on"
            head += f" ({self.already:,} of its samples were skipped already)" if self.already else ""
        if not self.lines:
            return head
        if self.taken_up is not None:
            return f"{head}; taken up by the run after step {self.taken_up}"
        return f"{head}; {'the run has not confirmed it yet' if self.live else 'no process is training there now'}"


def skip_documents(
    history: History, fingerprint: str, documents: Mapping[str, Int64s | Named], reason: str
) -> Skipped:
    """documents: their numbers, or also spans of some, by shard, of the corpus with that manifest fingerprint.

    Raises DataError if the run has no such corpus, or nothing would be left.
    """
    library = history.library_at()
    order, (corpus_index, stream) = library.source.order, _find_stream(history, fingerprint)
    name = order.corpora[corpus_index].name
    if isinstance(stream, GoneStream):
        raise DataError(f"the run no longer trains on corpus {name}: nothing to skip")
    chosen = {shard: of if isinstance(of, Named) else Named(of, {}) for shard, of in documents.items()}
    found = list(_tokens(stream, chosen))
    token_edges = np.array([tokens for _, _, tokens in found], dtype=np.int64).reshape(-1, 2)
    known_skips = history.select_from(library).sequences.get(corpus_index, NONE)
    token_skips = Skips.from_edges(token_edges)
    samples = sequences_of(token_skips, order.sequence_length, order.sequences[corpus_index])
    new = known_skips.union(samples).count() - known_skips.count()
    # By tokens: with shorter sequences only some of them may lie in skipped samples.
    named_tokens = history.ledger.exclusions.tokens.get(Identity(name, fingerprint), NONE)
    lacks_tokens = named_tokens.union(token_skips).count() > named_tokens.count()
    entries: list[AnyEntry] = []
    for begin in range(0, len(found) if lacks_tokens else 0, RANGES):
        token_part = found[begin : begin + RANGES]
        documents_by_shard: dict[str, dict[int, None]] = {}
        for shard, number, _ in token_part:
            documents_by_shard.setdefault(shard, {})[number] = None
        of = [
            ShardDocuments(shard=shard, documents=list(named)) for shard, named in documents_by_shard.items()
        ]
        tokens = [list(tokens) for _, _, tokens in token_part]
        entries.append(
            SampleEntry(corpus=name, fingerprint=fingerprint, tokens=tokens, reason=reason, documents=of)
        )
    count = sum(of.touched.size for of in chosen.values())
    return _add(history, entries, Skipped(name, count, new, len(entries), samples.count() - new, False, None))


def _find_stream(history: History, fingerprint: str) -> tuple[int, Stream]:
    """The run's corpus with that manifest fingerprint: its index and its tokens. Raises DataError if it has none."""
    source, share = history.library_at().source, history.find_share(fingerprint)
    corpus_index = [corpus.name for corpus in source.order.corpora].index(share.name)
    return corpus_index, source.streams[corpus_index]


def skip_plan(history: History, path: Path, reason: str | None = None) -> Skipped:
    """Skip the documents of a plan (pruning/prune_plan.py) for one of the run's corpora. reason: of a person, for the
    ledger. Raises DataError."""
    plan = read_plan(path)
    if plan.fingerprint is None:
        raise DataError(
            f"{path} does not name its corpus: make a plan of it with megastable prune plan --list"
        )
    # At its current path: the recipe may have followed a moved corpus.
    _, stream = _find_stream(history, plan.fingerprint)
    if isinstance(stream, GoneStream):
        stream.split_range(0, 0)
    corpus_directory = stream.directory
    documents = plan.select_removals(corpus_directory, Manifest.load_manifest(corpus_directory))
    named = f"plan {path.name}, {plan.sha256[:12]}"
    return skip_documents(history, plan.fingerprint, documents, f"{reason} ({named})" if reason else named)


def swap_out(history: History, corpus: str, reason: str = "swapped out by a person") -> Skipped:
    """Swap out a whole corpus, from the earliest position to which the run may be rewound.

    Raises DataError if there is no such corpus, or no other would be left.
    """
    _, cursor = live_place(history)
    blends = blends_in_force(history.blends)
    corpus_names = [corpus_share.name for corpus_share in blends[-1].corpora] if blends else []
    if corpus not in corpus_names:
        raise DataError(
            f"{history.run.root} has no corpus {corpus!r} in its blend; it has {', '.join(corpus_names) or 'none'}"
        )
    if any(swap_end == LAST_POSITION for (_, swap_end), _ in history.ledger.swapped_ranges(corpus)):
        return Skipped(corpus, 0, 0, 0, 0, _is_live(history), None)
    first_position = min(cursor, checkpoint_cursor(history.run, min))
    skip_entry = SkipEntry(first=first_position, end=LAST_POSITION, reason=reason, corpus=corpus)
    return _add(history, [skip_entry], Skipped(corpus, 0, 0, 1, 0, False, None))


def _tokens(stream: Stream, documents: Mapping[str, Named]) -> Iterator[tuple[str, int, Range]]:
    """Shard, number and stream tokens of each of the documents, or of each span. Documents for validation, and those
    in no split, have none."""
    for shard_name, shard_removals in documents.items():
        shard = stream.open_shard(shard_name)
        for number in shard_removals.touched.tolist():
            first, end = shard.document_bounds(number)
            stream_offset = stream.offset_of(shard_name, first) if first < end else None
            spans = shard_removals.spans.get(number, [(0, end - first)])
            last_token = max(span_stop for _, span_stop in spans)
            if last_token > end - first:
                raise DataError(
                    f"document {number} of {shard_name} has {end - first:,} tokens, the plan names a span of it up to "
                    f"{last_token:,}: make a new plan"
                )
            if stream_offset is not None:
                for span_begin, span_end in spans:
                    yield shard_name, number, (stream_offset + span_begin, stream_offset + span_end)


def _add(history: History, entries: Sequence[AnyEntry], added: Skipped) -> Skipped:
    order, recipe_skips = history.library_at().source.order, history.config.data.skip
    exclusions = Ledger([*history.ledger.entries, *entries]).exclusions
    Selection(order, exclusions, recipe_skips)  # refuses what would stop the run
    is_live, reads_before = _is_live(history), len(_told(history))
    if not entries:
        return added
    append_entries(history.run.skips, entries)
    added_event = SkipsAdded(
        corpus=added.corpus, documents=added.documents, samples=added.samples, lines=added.lines,
        already=added.already, who=login_name(), reason=entries[0].reason,
    )  # fmt: skip
    RunLog(history.run).emit_event(added_event)
    # A live run tells after which step it read the ledger again.
    taken_up, wait_until = None, time.monotonic() + PATIENCE
    while is_live and taken_up is None and time.monotonic() < wait_until and _is_live(history):
        taken_up = next(iter(_told(history)[reads_before:]), None)
        if taken_up is None:
            time.sleep(0.2)
    return replace(added, live=is_live, taken_up=taken_up)


def _is_live(history: History) -> bool:
    try:
        lock_file = durable.lock_file(history.run.root / ".lock", 0.0)
    except OSError:
        return False
    if lock_file is None:
        return True
    lock_file.close()
    return False


def _told(history: History) -> list[int]:
    """The steps after which the run reported reading the ledger again."""
    return [int(event["step"]) for event in history.run.iterate_events(SkipsRead)]
