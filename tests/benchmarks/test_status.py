"""The benchmark of `status` measures what it says: every line of its journal is counted."""

from __future__ import annotations

from collections import Counter

from benchmarks.status_speed import events, measure
from megastable.run.events.stability_events import Discarded


def test_nothing_of_the_journal_is_missed() -> None:
    lines = 60_000  # more than a block that is skimmed
    kinds = Counter(type(event) for event in events(lines))
    seconds, _, status = measure(lines, rounds=1)
    assert status.refused == kinds[Discarded] and len(status.incidents) == 3 and status.starts == 2
    assert seconds > 0 and not status.problems
