"""Who is guilty, once an alarm of sample_history.py was raised: suspects, and what becomes of them. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megastable.stability import groups
from megastable.stability.attribution import Suspect
from megastable.stability.likeness import Tokens

Floats = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

REMAINS = 0.5  # of the threshold, by which a suspect is still above its corpus after it was trained on


class Seen(NamedTuple):
    """Samples: positions, losses (nats) and corpora, each [n]."""

    positions: Int64s
    losses: Floats
    corpora: Int64s

    def of(self, chosen: Int64s) -> Seen:
        return Seen(self.positions[chosen], self.losses[chosen], self.corpora[chosen])

    def with_(self, other: Seen) -> Seen:
        return Seen(
            np.append(self.positions, other.positions),
            np.append(self.losses, other.losses),
            np.append(self.corpora, other.corpora),
        )


def suspects(met: Seen, usual: Seen, threshold: float) -> Int64s:
    """Which of the samples since the onset are more, and farther out, than harmless ones account for: indexes, the
    worst first. All that were met are judged together, so that none is chosen for having been chosen.

    met: losses before their samples were trained on; so of `usual`, harmless ones of before, oldest first. As it is
    known that there are more than usual, none must be as far out by itself (groups.MOST).
    """
    z, p = groups.compare(met.losses, met.corpora, usual.losses, usual.corpora)
    bad = np.flatnonzero(groups.guilty_by_loss(z, p, groups.MOST * threshold))
    return np.asarray(bad[np.argsort(-z[bad], kind="stable")])


def still_bad(again: Seen, usual: Seen, threshold: float) -> Int64s:
    """Which of the suspects are bad on the present state, too: indexes. Those that the model has learnt from once are a
    little better than they were."""
    z, _ = groups.compare(again.losses, again.corpora, usual.losses, usual.corpora)
    return np.flatnonzero(z > REMAINS * threshold)


def numbers(guilty: Seen, usual: Seen) -> list[Suspect]:
    """For the record, the worst first."""
    z, _ = groups.compare(guilty.losses, guilty.corpora, usual.losses, usual.corpora)
    columns = guilty.positions.tolist(), guilty.losses.tolist(), z.tolist()
    return sorted((Suspect(*row) for row in zip(*columns, strict=True)), key=lambda s: -s.z)


# Text that repeats itself is soon learnt by heart: its loss falls far below its corpus's, the rest is forgotten

FEW_TOKENS = 0.01  # share of harmless samples that have as few different tokens as one that repeats itself
# The bar is a quantile of some hundred samples: as many harmless ones may be below it, at most.
FEW_AT_MOST = 0.03
HALF = (
    0.5  # of the usual number of different tokens; and of the samples of a region, so many must be far below
)


def repetitive(tokens: Tokens, harmless: Tokens) -> Bools:
    """Which samples, tokens [n, L], have far fewer different tokens than harmless ones [m, L]: bool [n]."""
    own, usual = different(tokens), different(harmless)
    return np.asarray(own <= min(HALF * float(np.median(usual)), float(np.quantile(usual, FEW_TOKENS))))


def different(tokens: Tokens) -> Int64s:
    """How many different tokens each sample [n, L] has: int64 [n]."""
    ordered = np.sort(tokens, axis=1)
    return 1 + np.count_nonzero(np.diff(ordered, axis=1), axis=1)


def easy(met: Seen, usual: Seen, threshold: float) -> bool:
    """Whether at least half of the samples are farther below their corpora than harmless ones account for."""
    below = suspects(met._replace(losses=-met.losses), usual._replace(losses=-usual.losses), threshold)
    return below.size >= HALF * met.positions.size
