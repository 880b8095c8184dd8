"""Add documents, or a whole corpus, to a run's skip ledger: a live run skips them from its next step on.

Documents are identified by their tokens in the stream of their corpus: no sample that contains any of these is trained
on again, in any epoch, for any length of the run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megastable.base import durable
from megastable.base.errors import DataError
from megastable.base.login import login_name
from megastable.data.blends import GoneStream, in_force
from megastable.data.manifest import Manifest, Stream
from megastable.data.order import LAST_POSITION
from megastable.data.skip_ledger import (
    RANGES,
    AnyEntry,
    Ledger,
    SampleEntry,
    ShardDocuments,
    SkipEntry,
    append_all,
)
from megastable.data.skips import NONE, Identity, Range, Selection, Skips, sequences_of
from megastable.run.events.data_events import SkipsAdded, SkipsRead
from megastable.run.log import RunLog
from megastable_tools.forensics.history import History
from megastable_tools.forensics.places import checkpoint_cursor, live_place
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
            head = (
                f"nothing to do: the {self.documents:,} documents of corpus {self.corpus} are skipped already"
            )
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
    library = history.library()
    order = library.source.order
    corpus = [c.name for c in order.corpora].index(history.share(fingerprint).name)
    name, stream = order.corpora[corpus].name, library.source.streams[corpus]
    if isinstance(stream, GoneStream):
        raise DataError(f"the run no longer trains on corpus {name}: nothing to skip")
    chosen = {shard: of if isinstance(of, Named) else Named(of, {}) for shard, of in documents.items()}
    found = list(_tokens(stream, chosen))
    edges = np.array([tokens for _, _, tokens in found], dtype=np.int64).reshape(-1, 2)
    known = history.selection(library).sequences.get(corpus, NONE)
    samples = sequences_of(Skips.merged(edges), order.sequence_length, order.sequences[corpus])
    new = known.union(samples).count() - known.count()
    # By tokens: with shorter sequences only some of them may lie in skipped samples.
    named = history.ledger.exclusions.tokens.get(Identity(name, fingerprint), NONE)
    lacking = named.union(Skips.merged(edges)).count() > named.count()
    entries: list[AnyEntry] = []
    for part in (found[at : at + RANGES] for at in range(0, len(found) if lacking else 0, RANGES)):
        shards: dict[str, list[int]] = {}
        for shard, number, _ in part:
            shards.setdefault(shard, [])
            if number not in shards[shard][-1:]:
                shards[shard].append(number)
        of = [ShardDocuments(shard=shard, documents=numbers) for shard, numbers in shards.items()]
        tokens = [list(tokens) for _, _, tokens in part]
        entries.append(
            SampleEntry(corpus=name, fingerprint=fingerprint, tokens=tokens, reason=reason, documents=of)
        )
    count = sum(of.touched.size for of in chosen.values())
    return _add(history, entries, Skipped(name, count, new, len(entries), samples.count() - new, False, None))


def skip_plan(history: History, path: Path, reason: str | None = None) -> Skipped:
    """Skip the documents of a plan (pruning/prune_plan.py) for one of the run's corpora. reason: of a person, for the
    ledger. Raises DataError."""
    plan = read_plan(path)
    if plan.fingerprint is None:
        raise DataError(
            f"{path} does not name its corpus: make a plan of it with megastable prune plan --list"
        )
    # At its current path: the recipe may have followed a moved corpus.
    names = [corpus.name for corpus in history.library().source.order.corpora]
    stream = history.library().source.streams[names.index(history.share(plan.fingerprint).name)]
    if isinstance(stream, GoneStream):
        stream.pieces(0, 0)
    directory = stream.directory
    documents = plan.named(directory, Manifest.load(directory))
    named = f"plan {path.name}, {plan.sha256[:12]}"
    return skip_documents(history, plan.fingerprint, documents, f"{reason} ({named})" if reason else named)


def swap_out(history: History, corpus: str, reason: str = "swapped out by a person") -> Skipped:
    """Swap out a whole corpus, from the earliest position to which the run may be rewound.

    Raises DataError if there is no such corpus, or no other would be left.
    """
    _, cursor = live_place(history)
    blends = in_force(history.blends)
    names = [share.name for share in blends[-1].corpora] if blends else []
    if corpus not in names:
        raise DataError(
            f"{history.run.root} has no corpus {corpus!r} in its blend; it has {', '.join(names) or 'none'}"
        )
    if any(end == LAST_POSITION for (_, end), _ in history.ledger.swaps(corpus)):
        return Skipped(corpus, 0, 0, 0, 0, _is_live(history), None)
    first = goes_back_to(history, cursor)
    entry = SkipEntry(first=first, end=LAST_POSITION, reason=reason, corpus=corpus)
    return _add(history, [entry], Skipped(corpus, 0, 0, 1, 0, False, None))


def goes_back_to(history: History, cursor: int) -> int:
    """The lowest position that the run may read again: that of its oldest checkpoint, 0 if there is none."""
    return min(cursor, checkpoint_cursor(history.run, min))


def _tokens(stream: Stream, documents: Mapping[str, Named]) -> Iterator[tuple[str, int, Range]]:
    """Shard, number and stream tokens of each of the documents, or of each span. Documents for validation, and those
    in no split, have none."""
    for name, named in documents.items():
        shard = stream.open(name)
        for number in named.touched.tolist():
            first, end = shard.document_bounds(number)
            begin = stream.offset_of(name, first) if first < end else None
            spans = named.spans.get(number, [(0, end - first)])
            if number in named.spans and max(stop for _, stop in spans) > end - first:
                raise DataError(
                    f"document {number} of {name} has {end - first:,} tokens, the plan names a span of it up to "
                    f"{max(stop for _, stop in spans):,}: make a new plan"
                )
            if begin is not None:
                for low, high in spans:
                    yield name, number, (begin + low, begin + high)


def _add(history: History, entries: Sequence[AnyEntry], added: Skipped) -> Skipped:
    order, more = history.library().source.order, history.config.data.skip
    Selection(
        order, Ledger([*history.ledger.entries, *entries]).exclusions, more
    )  # refuses what would stop the run
    live, before = _is_live(history), len(_told(history))
    if not entries:
        return added
    append_all(history.run.skips, entries)
    told = SkipsAdded(
        corpus=added.corpus, documents=added.documents, samples=added.samples, lines=added.lines,
        already=added.already, who=login_name(), reason=entries[0].reason,
    )  # fmt: skip
    RunLog(history.run).emit(told)
    taken = _taken_up(history, before) if live else None
    return Skipped(**asdict(added) | {"live": live, "taken_up": taken})


def _is_live(history: History) -> bool:
    path = history.run.root / ".lock"
    try:
        file = durable.hold(path, 0.0)
    except OSError:
        return False
    if file is None:
        return True
    file.close()
    return False


def _told(history: History) -> list[int]:
    """The steps after which the run reported reading the ledger again."""
    return [int(event["step"]) for event in history.run.events(SkipsRead)]


def _taken_up(history: History, before: int) -> int | None:
    """The step after which the run read the ledger again, when it had done so `before` times."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and _is_live(history):
        if len(told := _told(history)) > before:
            return told[before]
        time.sleep(0.2)
    return None
