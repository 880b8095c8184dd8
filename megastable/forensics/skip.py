"""Documents, or a whole corpus, onto the skip ledger of a run: a live one leaves them out from its next step on.

A skip is a range of positions. The order is a pure function, so that all positions to come whose samples hold a
document are known: to the end of the run as its recipe says.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megastable import durable
from megastable.data.blends import GoneStream
from megastable.data.manifest import Manifest
from megastable.data.order import LAST_POSITION
from megastable.data.skips import Selection, SkipEntry, append_all
from megastable.errors import DataError
from megastable.forensics.history import History
from megastable.forensics.pruning.plan import read_plan
from megastable.forensics.whereabouts import positions_with
from megastable.recipe import find
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
            head = f"corpus {self.corpus} is swapped out"
        else:
            head = f"{self.documents:,} documents of corpus {self.corpus}: {self.samples:,} samples to come are skipped"
            head += f" (up to position {self.until:,}, the end of the run"
            head += f"; {self.already:,} of its samples were skipped already)" if self.already else ")"
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
    order = library.source.order
    corpus = [c.name for c in order.corpora].index(history.share(fingerprint).name)
    selection = Selection(order, history.ledger, history.config.data.skip)
    stream, until = library.source.streams[corpus], end_of(history, selection, step, cursor)
    found = [np.empty(0, np.int64)]
    for first, end in _stretches(history, corpus, documents):
        begin = stream.offset_of(first[0], first[1])
        if begin is not None:  # else it is for validation, or in no split: never trained on
            found.append(positions_with(library, corpus, begin, begin + end - first[1], cursor, until))
    positions = np.unique(np.concatenate(found))
    new = positions[~selection.skips.mask(positions)]
    entries = [SkipEntry(first=a, end=b, reason=reason) for a, b in as_ranges(new.tolist())]
    count = sum(numbers.size for numbers in documents.values())
    return _add(
        history, entries,
        Skipped(order.corpora[corpus].name, count, int(new.size), len(entries), int(positions.size - new.size), until,
                False, None),
    )  # fmt: skip


def skip_plan(history: History, path: Path) -> Skipped:
    """The documents of a plan (pruning/plan.py), which must be of one of the run's corpora. Raises DataError."""
    plan = read_plan(path)
    if plan.fingerprint is None:
        raise DataError(
            f"{path} does not say of which corpus it is: make a plan of it with prune_data.py plan --list"
        )
    share = history.share(plan.fingerprint)
    directory = find(Path(share.path))
    documents = plan.documents(directory, Manifest.load(directory))
    return skip_documents(history, plan.fingerprint, documents, f"plan {path.name}, {plan.sha256[:12]}")


def swap_out(history: History, corpus: str, reason: str = "swapped out by a person") -> Skipped:
    """A whole corpus, from the run's cursor on. Raises DataError where there is none, or no other would be left."""
    _, cursor = live_place(history)
    entry = SkipEntry(first=cursor, end=LAST_POSITION, reason=reason, corpus=corpus)
    return _add(history, [entry], Skipped(corpus, 0, 0, 1, 0, LAST_POSITION, False, None))


def live_place(history: History) -> tuple[int, int]:
    """Step and cursor of a run, as its processes say, or its records."""
    try:
        told = json.loads(history.run.progress.read_text())
        return int(told["step"]), int(told["cursor"])
    except (OSError, ValueError, KeyError, TypeError):
        return history.step, history.cursor


def end_of(history: History, selection: Selection, step: int, cursor: int) -> int:
    """A position that a run does not come to in the steps that its recipe has left, with a tenth to spare for what will
    be skipped on the way."""
    c = history.config
    left = max(0, c.train.steps - step) * c.train.global_batch / selection.share_without()
    return cursor + int(1.1 * left) + selection.skips.count() + c.train.global_batch


def _stretches(
    history: History, corpus: int, documents: Mapping[str, Int64s]
) -> Sequence[tuple[tuple[str, int], int]]:
    """((shard, first token), end) of documents, neighbours joined."""
    stream = history.library().source.streams[corpus]
    assert not isinstance(stream, GoneStream)
    found: list[tuple[tuple[str, int], int]] = []
    for name, numbers in documents.items():
        shard = stream.open(name)
        for number in np.sort(numbers).tolist():
            first, end = shard.document_bounds(number)
            if first == end:
                continue
            if found and found[-1][0][0] == name and found[-1][1] == first:
                found[-1] = (found[-1][0], end)
            else:
                found.append(((name, first), end))
    return found


def _add(history: History, entries: list[SkipEntry], added: Skipped) -> Skipped:
    order = history.library().source.order
    Selection(
        order, [*history.ledger, *entries], history.config.data.skip
    )  # nothing that a run could not live with
    live, before = _is_live(history), len(_told(history))
    append_all(history.run.skips, entries)
    history.run.note("skips_added", **asdict(added))
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
