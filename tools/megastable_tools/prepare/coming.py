"""Lists what the coming steps of a run will train on. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megastable.config.warmups import Stages
from megastable.data.skips import Selection, Skips

Int64s = npt.NDArray[np.int64]


def batches_ahead(selection: Skips | Selection, batches: Stages, cursor: int, steps: int) -> list[Int64s]:
    """The positions of each of the next `steps` steps from `cursor` on, int64 [global batch]. Raises DataError if fewer
    are left."""
    found: list[Int64s] = []
    for size, end in batches.from_position(cursor):
        count = steps - len(found)
        if end is not None:  # those that begin before it
            count = max(0, min(count, -((cursor - end) // size)))
        positions, _ = selection.next_kept(cursor, count * size)
        for batch in positions.reshape(count, size):
            if end is not None and cursor >= end:
                break
            found.append(batch)
            cursor = int(batch[-1]) + 1
    return found
