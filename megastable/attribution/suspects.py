"""Select the samples of a batch that was refused on good weights. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megastable.attribution import groups
from megastable.attribution.conclusion import Suspect

Floats = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]


class Seen(NamedTuple):
    """Samples: positions, losses (nats) and corpora, each [n]."""

    positions: Int64s
    losses: Floats
    corpora: Int64s

    def of(self, chosen: Int64s) -> Seen:
        return Seen(self.positions[chosen], self.losses[chosen], self.corpora[chosen])


def suspects(met: Seen, usual: Seen, threshold: float) -> Int64s:
    """The samples since the onset in excess of what harmless ones explain: indexes, the worst first. All samples met
    are judged together, so that selection causes no bias.

    met: losses before their samples were trained on; likewise `usual`, earlier harmless ones, oldest first. As an
    excess is already established, the individual threshold is lower (groups.MOST).
    """
    z, p = groups.compare(met.losses, met.corpora, usual.losses, usual.corpora)
    bad = np.flatnonzero(groups.guilty_by_loss(z, p, groups.MOST * threshold))
    return np.asarray(bad[np.argsort(-z[bad], kind="stable")])


def numbers(guilty: Seen, usual: Seen) -> list[Suspect]:
    """The suspects' numbers for the record, the worst first."""
    z, _ = groups.compare(guilty.losses, guilty.corpora, usual.losses, usual.corpora)
    columns = guilty.positions.tolist(), guilty.losses.tolist(), z.tolist()
    return sorted((Suspect(*row) for row in zip(*columns, strict=True)), key=lambda s: -s.z)
