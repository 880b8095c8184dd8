"""Select suspects after an alarm of sample_history.py, and decide which are guilty. Pure."""

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

REMAINS = (
    0.5  # times the threshold: how far a guilty suspect is still above its corpus after it was trained on
)


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
    """The samples since the onset in excess of what harmless ones explain: indexes, the worst first. All samples met
    are judged together, so that selection causes no bias.

    met: losses before their samples were trained on; likewise `usual`, earlier harmless ones, oldest first. As an
    excess is already established, the individual threshold is lower (groups.MOST).
    """
    z, p = groups.compare(met.losses, met.corpora, usual.losses, usual.corpora)
    bad = np.flatnonzero(groups.guilty_by_loss(z, p, groups.MOST * threshold))
    return np.asarray(bad[np.argsort(-z[bad], kind="stable")])


def still_bad(again: Seen, usual: Seen, threshold: float) -> Int64s:
    """The suspects that are bad on the present state as well: indexes. Samples trained on once are slightly better than
    before."""
    z, _ = groups.compare(again.losses, again.corpora, usual.losses, usual.corpora)
    return np.flatnonzero(z > REMAINS * threshold)


def numbers(guilty: Seen, usual: Seen) -> list[Suspect]:
    """The suspects' numbers for the record, the worst first."""
    z, _ = groups.compare(guilty.losses, guilty.corpora, usual.losses, usual.corpora)
    columns = guilty.positions.tolist(), guilty.losses.tolist(), z.tolist()
    return sorted((Suspect(*row) for row in zip(*columns, strict=True)), key=lambda s: -s.z)


# Repetitive text is soon memorised: its loss falls far below its corpus's, other text is forgotten

FEW_TOKENS = 0.01  # share of harmless samples with as few different tokens as a repetitive one
# The bar is a quantile of some hundred samples: it allows at most as many harmless ones below it.
FEW_AT_MOST = 0.03
HALF = 0.5  # of the usual number of different tokens; also the share of a region that must be far below


def repetitive(tokens: Tokens, harmless: Tokens) -> Bools:
    """Which samples, tokens [n, L], have far fewer different tokens than harmless ones [m, L]: bool [n]."""
    own, usual = different(tokens), different(harmless)
    return np.asarray(own <= min(HALF * float(np.median(usual)), float(np.quantile(usual, FEW_TOKENS))))


def different(tokens: Tokens) -> Int64s:
    """How many different tokens each sample [n, L] has: int64 [n]."""
    ordered = np.sort(tokens, axis=1)
    return 1 + np.count_nonzero(np.diff(ordered, axis=1), axis=1)


def easy(met: Seen, usual: Seen, threshold: float) -> bool:
    """Whether at least half of the samples are farther below their corpora than harmless ones explain."""
    below = suspects(met._replace(losses=-met.losses), usual._replace(losses=-usual.losses), threshold)
    return below.size >= HALF * met.positions.size
