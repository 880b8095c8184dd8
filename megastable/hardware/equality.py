"""Finds out in one sum over all ranks whether groups of ranks hold equal fingerprints, and which rank is the odd one.
Pure.

Every group has its own columns in the sum: of the four quarters x of a fingerprint, the sums of x and of x^2. By the
inequality of Cauchy and Schwarz n * sum(x^2) = sum(x)^2 only if all x are equal; the sums are integers below 2^53, so
fp64 holds them exactly for up to 2^21 ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

QUARTERS = 4
COLUMNS = 2 * QUARTERS  # of a group
MOST = 1 << 21  # ranks of a group


def columns(fingerprint: int) -> list[float]:
    """What a rank adds to the columns of its group. fingerprint: 64 bits, signed or not."""
    quarters = [(fingerprint >> 16 * i) & 0xFFFF for i in range(QUARTERS)]
    return [float(value) for q in quarters for value in (q, q * q)]


def equal(sums: Sequence[float], ranks: int) -> bool:
    """Whether all `ranks` fingerprints of a group are equal. sums: its columns, summed."""
    pairs = zip(sums[::2], sums[1::2], strict=True)
    # As integers: the products are beyond fp64.
    return all(ranks * int(squares) == int(total) ** 2 for total, squares in pairs)


class Odd(NamedTuple):
    """Ranks whose copy differs from that of more than half of the group; proven: there is such a majority. Else all
    ranks of the group, in the order of their numbers."""

    ranks: tuple[int, ...]
    proven: bool


def odd_ones(held: Mapping[int, int]) -> Odd:
    """held: by rank, its fingerprint of the same thing; not all are equal."""
    common, count = Counter(held.values()).most_common(1)[0]
    if 2 * count <= len(held):
        return Odd(tuple(sorted(held)), False)
    return Odd(tuple(sorted(rank for rank, value in held.items() if value != common)), True)
