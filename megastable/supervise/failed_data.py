"""The data behind a failure of processes: whether the corpora can be read at all, and which samples a step had."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from megastable.base.errors import MegastableError
from megastable.config.tree import RunConfig
from megastable.data.blends import read_blends
from megastable.data.corpora import Corpora, open_corpora
from megastable.data.skip_ledger import Ledger, SampleEntry, sample_entries
from megastable.run.directory import RunDirectory
from megastable.supervise.exit_cause import End

RECHECK = 20.0  # seconds in which data that cannot be read may come back, as on a file system that stutters
LOOK = 0.2  # seconds between two looks


def can_be_read(config: RunConfig, run: RunDirectory) -> bool:
    """Whether the corpora can be opened on this host, which may be another one than those that train."""
    try:
        _open(config, run)
    except MegastableError:
        return False
    return True


def bad_data(config: RunConfig, run: RunDirectory, hurry: Callable[[], bool]) -> str:
    """What is wrong with the corpora as they are now, such as a shard that was cut in mid-run; "" = nothing. hurry:
    whether a person waits."""
    until = time.monotonic() + RECHECK
    while True:
        try:
            _open(config, run)
        except MegastableError as error:
            if hurry() or time.monotonic() >= until:
                return str(error)
        else:
            return ""
        time.sleep(LOOK)


@dataclass(frozen=True)
class FailedSamples:
    """Those of a step: its positions, and the lines that leave them out; missing: these are not on the ledger yet."""

    positions: list[int]
    entries: list[SampleEntry]
    missing: bool


def samples_of(config: RunConfig, run: RunDirectory, end: End, cursor: int, incident: int) -> FailedSamples:
    """The samples of the step that failed, which began at the position `cursor`; where they stand.

    The innocent among them are lost with the one that ends processes. But that one would come again in every epoch,
    in another step, and end as many of them there before it is suspected anew.
    """
    order = _open(config, run).train.order
    reason = f"{end.what} at step {end.step}, again and again"
    ledger = Ledger.read(run.skips, [])
    # As if a supervisor that was killed before it noted the end had not written its lines: the batch behind this
    # one is innocent.
    before = ledger.without(incident, reason)
    left, _ = before.usable(run.skips, order, config.data.skip)
    positions, _ = left.next_kept(cursor, config.train.global_batch)
    entries = sample_entries(order, positions, reason, incident=incident, step=end.step)
    return FailedSamples(positions.tolist(), entries, len(ledger.table) - len(before.table) < len(entries))


def _open(config: RunConfig, run: RunDirectory) -> Corpora:
    return open_corpora(
        config.data.corpora, config.model.sequence_length, config.run.seed, read_blends(run.blends)
    )
