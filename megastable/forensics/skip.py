"""Documents, or a whole corpus, onto the skip ledger of a run: a live one leaves them out from its next step on.

A skip is a range of positions. The order is a pure function, so that all positions to come whose samples hold a
document are known: to the end of the run as its recipe says.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megastable import durable
from megastable.data.blends import GoneStream
from megastable.data.manifest import Manifest, Stream
from megastable.data.order import LAST_POSITION
from megastable.data.skips import Selection, SkipEntry, Skips, append_all
from megastable.errors import DataError
from megastable.forensics.history import History
from megastable.forensics.places import checkpoint_cursor, live_place
from megastable.forensics.pruning.plan import read_plan
from megastable.stability.attribution import ranges as as_ranges

Int64s = npt.NDArray[np.int64]

PATIENCE = 60.0  # seconds that a live run has to take it up


@dataclass(frozen=True)
class Skipped:
    """What was added. until: positions up to there were looked at; taken_up: the step after which a live run reads
    without them, None where none is live (it reads the ledger when it starts) or did not say so yet."""

    corpus: str
    documents: int
    samples: int
    lines: int
    already: int
    until: int
    live: bool
    taken_up: int | None

    @property
    def text(self) -> str:
        if not self.documents:
            head = f"corpus {self.corpus} is swapped out{'' if self.lines else ' already'}"
        elif not self.samples:
            head = f"nothing to do: none of the {self.documents:,} documents of corpus {self.corpus} is in a sample to "
            head += f"come that is not skipped already (up to position {self.until:,}, the end of the run)"
        else:
            head = f"{self.documents:,} documents of corpus {self.corpus}: {self.samples:,} samples to come are skipped"
            head += f" (up to position {self.until:,}, the end of the run"
            head += f"; {self.already:,} of its samples were skipped already)" if self.already else ")"
        if not self.lines:
            return head
        if self.taken_up is not None:
            return f"{head}; taken up by the run after step {self.taken_up}"
        return f"{head}; {'the run has not said yet that it took it up' if self.live else 'nothing trains there now'}"


def skip_documents(
    history: History, fingerprint: str, documents: Mapping[str, Int64s], reason: str
) -> Skipped:
    """documents: their numbers by shard, of the corpus with that manifest fingerprint.

    Raises DataError where the run has no such corpus, or nothing would be left.
    """
    library = history.library()
    step, cursor = live_place(history)
    order, back = library.source.order, goes_back_to(history, cursor)
    corpus = [c.name for c in order.corpora].index(history.share(fingerprint).name)
    selection = Selection(order, history.ledger, history.config.data.skip)
    stream = library.source.streams[corpus]
    if isinstance(stream, GoneStream):
        raise DataError(f"the run no longer trains on corpus {order.corpora[corpus].name}: nothing to skip")
    sequences = _sequences(stream, documents, order.sequence_length, order.sequences[corpus])
    share = selection.share_without()
    until, before, entries = end_of(history, selection.skips, share, step, cursor), -1, list[SkipEntry]()
    while until > before:  # what is left out moves the end, and more of it comes before that
        before = until
        positions = order.positions_of(corpus, sequences, back, until)
        new = positions[~selection.skips.mask(positions)]
        ranges = as_ranges(new.tolist())
        until = end_of(history, selection.skips.union(Skips.of(ranges)), share, step, cursor)
    entries = [SkipEntry(first=a, end=b, reason=reason) for a, b in ranges]
    count = sum(numbers.size for numbers in documents.values())
    # Those behind the cursor come again only if the run goes back to a checkpoint.
    ahead, samples = int((positions >= cursor).sum()), int((new >= cursor).sum())
    return _add(
        history,
        entries,
        Skipped(
            order.corpora[corpus].name, count, samples, len(entries), ahead - samples, until, False, None
        ),
    )


def skip_plan(history: History, path: Path) -> Skipped:
    """The documents of a plan (pruning/plan.py), which must be of one of the run's corpora. Raises DataError."""
    plan = read_plan(path)
    if plan.fingerprint is None:
        raise DataError(
            f"{path} does not say of which corpus it is: make a plan of it with prune_data.py plan --list"
        )
    # Where it is today: the recipe may have followed a corpus that moved.
    names = [corpus.name for corpus in history.library().source.order.corpora]
    stream = history.library().source.streams[names.index(history.share(plan.fingerprint).name)]
    if isinstance(stream, GoneStream):
        stream.pieces(0, 0)
    directory = stream.directory
    documents = plan.documents(directory, Manifest.load(directory))
    return skip_documents(history, plan.fingerprint, documents, f"plan {path.name}, {plan.sha256[:12]}")


def swap_out(history: History, corpus: str, reason: str = "swapped out by a person") -> Skipped:
    """A whole corpus, from where the run may go back to on.

    Raises DataError where there is none, or no other would be left.
    """
    _, cursor = live_place(history)
    names = [share.name for share in history.blends[-1].corpora] if history.blends else []
    if corpus not in names:
        raise DataError(
            f"{history.run.root} has no corpus {corpus!r} in its blend; it has {', '.join(names) or 'none'}"
        )
    if any(e.corpus == corpus and e.end == LAST_POSITION for e in history.ledger):
        return Skipped(corpus, 0, 0, 0, 0, LAST_POSITION, _is_live(history), None)
    first = goes_back_to(history, cursor)
    entry = SkipEntry(first=first, end=LAST_POSITION, reason=reason, corpus=corpus)
    return _add(history, [entry], Skipped(corpus, 0, 0, 1, 0, LAST_POSITION, False, None))


def goes_back_to(history: History, cursor: int) -> int:
    """The lowest position that the run may read again: that of its oldest checkpoint, 0 where there is none."""
    return min(cursor, checkpoint_cursor(history.run, min))


def end_of(history: History, skips: Skips, share: float, step: int, cursor: int) -> int:
    """A position that a run does not come to in the steps that its recipe has left, with a tenth to spare for what will
    be skipped on the way. share: of the blend that is not swapped out."""
    c = history.config
    left = max(0, c.train.steps - step) * c.train.global_batch / share
    end, before = cursor + int(1.1 * left), -1
    while end > before:
        before = end
        skipped = sum(last - first for first, last in skips.between(cursor, end))
        end = min(LAST_POSITION, cursor + int(1.1 * left) + skipped)
    return end


def _sequences(stream: Stream, documents: Mapping[str, Int64s], length: int, count: int) -> Int64s:
    """Those of the `count` sequences of a stream that hold a token of any of the documents, ascending. Documents for
    validation, and those in no split, are in none."""
    found = [np.empty(0, np.int64)]
    for name, numbers in documents.items():
        shard = stream.open(name)
        for number in numbers.tolist():
            first, end = shard.document_bounds(number)
            begin = stream.offset_of(name, first) if first < end else None
            if begin is not None:
                last = (begin + end - first - 1) // length
                found.append(np.arange(begin // length, min(last, count - 1) + 1))
    return np.unique(np.concatenate(found))


def _add(history: History, entries: list[SkipEntry], added: Skipped) -> Skipped:
    order = history.library().source.order
    Selection(
        order, [*history.ledger, *entries], history.config.data.skip
    )  # nothing that a run could not live with
    live, before = _is_live(history), len(_told(history))
    append_all(history.run.skips, entries)
    told = {key: value for key, value in asdict(added).items() if key not in ("live", "taken_up")}
    history.run.note("skips_added", **told)
    taken = _taken_up(history, before) if live and entries else None
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
    """The steps after which the run said that it read the ledger again."""
    return [int(event["step"]) for event in history.run.events("skips_read")]


def _taken_up(history: History, before: int) -> int | None:
    """The step after which the run read the ledger again, when it had done so `before` times."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and _is_live(history):
        if len(told := _told(history)) > before:
            return told[before]
        time.sleep(0.2)
    return None
