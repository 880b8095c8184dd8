"""Looks for a new kind of text in the training data every few steps, without running the model. Collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megastable.config.stability import SampleConfig
from megastable.stability import groups, novelty
from megastable.stability.sample_history import Waiting
from megastable.stability.signals import Verdict

if TYPE_CHECKING:
    from megastable.recovery.sample_replay import Laboratory, Trained

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# First samples examined per step, and most in all of the latest steps: enough to fill a pool.
SAMPLES, LATEST = 256, 16384
EARLIER = 8  # steps before the first hard sample of a kind in which it may have occurred already


Pools = dict[int, novelty.Pool]  # by corpus


def look(
    trained: Sequence[Trained], laboratory: Laboratory, config: SampleConfig, pools: Pools
) -> list[Waiting]:
    """Cases to examine, one per corpus with a new kind. trained: the latest steps. pools: of the last search, updated.
    Raises DataError."""
    applied = [t for t in trained if t.applied]
    if not applied:
        return []
    applied = applied[-(LATEST // min(SAMPLES, applied[-1].positions.size)) :]
    positions = np.concatenate([t.positions[:SAMPLES] for t in applied])
    losses = np.concatenate([t.losses[:SAMPLES] for t in applied])
    steps = np.repeat([t.step for t in applied], [min(SAMPLES, t.positions.size) for t in applied])
    corpora = laboratory.corpora(positions)
    judged = [c for c, n in zip(*np.unique(corpora, return_counts=True), strict=True) if n >= config.known]
    z = np.nan_to_num(groups.deviations(losses, corpora), nan=0.0)
    hard = (z > novelty.HARD) & ~laboratory.loader.skips.mask(positions)
    found = list[Waiting]()
    for corpus in judged:
        pool = _first(np.flatnonzero(hard & (corpora == corpus)), steps, novelty.OF_STEP)[-novelty.POOL :]
        if pool.size < novelty.FEWEST:
            continue
        known = pools.setdefault(int(corpus), novelty.Pool())
        # Read by the leading rank alone: a thousand ranks would each read as much.
        new = known.scan(positions[pool], laboratory.read_tokens(known.missing(positions[pool])))
        # All searches in 10,000 steps together may raise this many false cases.
        if new.p <= config.false_alarms / 1e4 * novelty.PERIOD / len(judged):
            found.append(_case(pool[new.kind], positions, losses, steps, new.p))
    return found


def _first(chosen: Int64s, steps: Int64s, most: int) -> Int64s:
    """Indexes of the chosen samples in the order of their steps, the first `most` of each step."""
    _, begin, count = np.unique(steps[chosen], return_index=True, return_counts=True)
    return chosen[np.arange(chosen.size) - np.repeat(begin, count) < most]


def _case(kind: Int64s, positions: Int64s, losses: Floats, steps: Int64s, p: float) -> Waiting:
    # The first ones may be less hard, or less alike.
    first, last = max(int(steps.min()), int(steps[kind[0]]) - EARLIER), int(steps.max())
    reason = (
        f"since step {steps[kind[0]]} a kind of text has come that was not there before: {kind.size} hard samples are "
        f"alike, and by chance as many come so late once in {1 / p:.2g} looks at most"
    )
    return Waiting(
        kind="kind", first=first, last=last, verdict=Verdict.TRICKLE, reason=reason,
        positions=positions[kind].tolist(), losses=losses[kind].tolist(),
    )  # fmt: skip
