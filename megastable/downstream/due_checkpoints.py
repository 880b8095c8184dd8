"""Decides which checkpoint is evaluated next. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple


class SavedCheckpoint(NamedTuple):
    """manifest: hash of its manifest; another checkpoint of the same step, after a rewind, has another one."""

    name: str
    step: int
    manifest: str


def next_due(
    there: Sequence[SavedCheckpoint], settled: Collection[tuple[int, str]], interval: int, last: int
) -> tuple[SavedCheckpoint | None, list[SavedCheckpoint]]:
    """The newest checkpoint that is due, and the older ones that are due, too, and are passed over for it.

    Due are the first one at or after each multiple of `interval`, and those from step `last` on. settled: (step,
    manifest) of those that were evaluated or passed over, there or not.
    """
    due, periods = list[SavedCheckpoint](), {step // interval: step for step, _ in settled}
    for one in sorted(there, key=lambda c: c.step):
        period = one.step // interval
        taken = periods.setdefault(period, one.step)
        wanted = one.step >= last or (period > 0 and taken == one.step)
        if wanted and (one.step, one.manifest) not in settled:
            due.append(one)
    return (due[-1], due[:-1]) if due else (None, [])
