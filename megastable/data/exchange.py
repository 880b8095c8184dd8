"""Samples of a corpus that changed places: read later than the order would have it, in exchange for later ones.

An **exchange** swaps two stretches of the samples that a corpus gives to the run, one for one: the slots first + i and
second + i hold each other's samples. Each is made on top of those before it, so the order stays a permutation: nothing
is lost, nothing is read twice. Slots are counted within the corpus: where the weights of a blend change, an exchange
stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Swap = tuple[int, int, int]  # first slot of one stretch, of the other, and how many


@dataclass(frozen=True)
class Exchange:
    """Of the corpus `corpus`: each swap [first, second, count] of `swaps` after the one before it."""

    corpus: str
    swaps: tuple[Swap, ...]


class Exchanged:
    """The slots of one corpus that hold other samples than their own: two sorted tables, a lookup takes O(log n).

    `moved`: these slots, ascending, and the samples that they hold, int64 [n, 2]. `deferred`: slots whose sample an
    exchange has put there from an earlier one, ascending, int64 [n].
    """

    def __init__(self, swaps: Sequence[Swap]) -> None:
        held, deferred = dict[int, int](), set[int]()  # held: the number of the sample, by its slot
        for first, second, count in swaps:
            for a, b in zip(range(first, first + count), range(second, second + count), strict=True):
                held[a], held[b] = held.get(b, b), held.get(a, a)
                deferred.discard(a)
                deferred.add(b)
        moved = sorted((slot, sample) for slot, sample in held.items() if slot != sample)
        self.moved = np.array(moved, dtype=np.int64).reshape(-1, 2)
        self.deferred = np.array([slot for slot, _ in moved if slot in deferred], dtype=np.int64)
        self._slots, self._samples = np.ascontiguousarray(self.moved.T)
        by_sample = np.argsort(self._samples)
        self._back = self._samples[by_sample], self._slots[by_sample]

    def samples(self, slots: Int64s) -> Int64s:
        """Which samples n slots hold."""
        return _looked_up(slots, self._slots, self._samples)

    def slots(self, samples: Int64s) -> Int64s:
        """Which slots hold n samples."""
        return _looked_up(samples, *self._back)


def swaps_of(firsts: Int64s, seconds: Int64s) -> tuple[Swap, ...]:
    """The exchange of the slots firsts[i] and seconds[i], all different, in as few stretches as there are."""
    if not firsts.size:
        return ()
    breaks = np.flatnonzero((np.diff(firsts) != 1) | (np.diff(seconds) != 1)) + 1
    edges = [0, *breaks.tolist(), firsts.size]
    return tuple((int(firsts[a]), int(seconds[a]), b - a) for a, b in pairwise(edges))


def _looked_up(numbers: Int64s, keys: Int64s, values: Int64s) -> Int64s:
    """values[i] for those of `numbers` that are keys[i] (ascending), the others as they are."""
    if not keys.size:
        return numbers
    at = np.minimum(np.searchsorted(keys, numbers), keys.size - 1)
    return np.where(keys[at] == numbers, values[at], numbers)
