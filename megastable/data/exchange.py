"""Exchanges of samples within a corpus: a sample is read later than planned, in return for a later one.

An **exchange** swaps two ranges of the samples that a corpus gives to the run, one for one: the slots first + i and
second + i hold each other's samples. Exchanges compose, so the order stays a permutation: nothing is lost, nothing is
read twice. Slots are counted within the corpus, so a change of the blend's weights does not affect an exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Swap = tuple[int, int, int]  # first slot of one range, of the other, and their length


@dataclass(frozen=True)
class Exchange:
    """Swaps [first, second, count] within `corpus`, applied in order."""

    corpus: str
    swaps: tuple[Swap, ...]


class Exchanged:
    """The slots of one corpus that hold other samples than their own: two sorted tables, a lookup takes O(log n).

    `moved`: these slots, ascending, and their samples, int64 [n, 2]. `deferred`: slots whose sample comes from an
    earlier slot, ascending, int64 [n].
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
        """The samples that n slots hold."""
        return _looked_up(slots, self._slots, self._samples)

    def slots(self, samples: Int64s) -> Int64s:
        """The slots that hold n samples."""
        return _looked_up(samples, *self._back)


def swaps_of(firsts: Int64s, seconds: Int64s) -> tuple[Swap, ...]:
    """The exchange of the slots firsts[i] and seconds[i], all different, in as few ranges as possible."""
    if not firsts.size:
        return ()
    breaks = np.flatnonzero((np.diff(firsts) != 1) | (np.diff(seconds) != 1)) + 1
    edges = [0, *breaks.tolist(), firsts.size]
    return tuple((int(firsts[a]), int(seconds[a]), b - a) for a, b in pairwise(edges))


def _looked_up(numbers: Int64s, keys: Int64s, values: Int64s) -> Int64s:
    """values[i] for each of `numbers` that equals keys[i] (ascending), the number itself otherwise."""
    if not keys.size:
        return numbers
    at = np.minimum(np.searchsorted(keys, numbers), keys.size - 1)
    return np.where(keys[at] == numbers, values[at], numbers)
