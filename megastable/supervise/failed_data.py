"""Checks the data behind a failure of processes: are the corpora readable, and which samples did the step have?"""

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

RECHECK = 20.0  # seconds in which unreadable data may recover, as on a flaky file system
LOOK = 0.2  # seconds between polls


def can_be_read(config: RunConfig, run: RunDirectory) -> bool:
    """Whether the corpora can be opened on this host, which may not be one of the training hosts."""
    try:
        _open(config, run)
    except MegastableError:
        return False
    return True


def bad_data(config: RunConfig, run: RunDirectory, hurry: Callable[[], bool]) -> str:
    """What is wrong with the corpora now, such as a shard truncated in mid-run; "" = nothing. hurry: whether to stop
    retrying."""
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
    """The samples of a failed step: positions, and lines that skip them; missing: those not on the ledger yet."""

    positions: list[int]
    entries: list[SampleEntry]
    missing: bool


def samples_of(config: RunConfig, run: RunDirectory, end: End, cursor: int, incident: int) -> FailedSamples:
    """The samples of the failed step, which began at position `cursor`.

    Innocent samples of the step are skipped along with the guilty one. Left in, that one would return in another step
    of every epoch and kill processes again before it is suspected.
    """
    order = _open(config, run).train.order
    reason = f"{end.what} at step {end.step}, again and again"
    ledger = Ledger.read(run.skips, [])
    # Ignore the lines of this incident, which a supervisor that was killed may have written: the next batch is
    # innocent.
    before = ledger.without(incident, reason)
    left, _ = before.usable(run.skips, order, config.data.skip)
    positions, _ = left.next_kept(cursor, config.batches.at(cursor))
    entries = sample_entries(order, positions, reason, incident=incident, step=end.step)
    return FailedSamples(
        positions.tolist(), entries, len(ledger.entries) - len(before.entries) < len(entries)
    )


def _open(config: RunConfig, run: RunDirectory) -> Corpora:
    return open_corpora(
        config.data.corpora, config.model.sequence_length, config.run.seed, read_blends(run.blends)
    )
