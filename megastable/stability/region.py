"""Find the end of a bad region with few probes, at geometrically growing distances and by bisection.

Pure: `grow` gets a function that counts the bad samples of a batch. A region may be thin (4 bad samples of 16 in every
step), so a probed spot is as many neighbouring batches as distinguish inside from outside with the error rate `RISK`,
both ways. After `CLEAN` clean spots in a row, each twice as far as the one before, the region is over; then its end is
bisected. A region of n batches takes some 2 log2(n) + `CLEAN` spots.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from megastable.base.text import plural

RISK = 0.01  # error rate: a spot inside judged as outside, or vice versa
STRAY = 0.005  # share of harmless samples that look bad
SOLID = 0.85  # maximum required share of bad samples: some look ordinary even if all are bad
CLEAN = 3  # spots in a row
LARGEST = 16  # maximum batches per spot: anything thinner is not a region
FARTHEST = 256  # batches: what goes on for longer is a new phase
FORWARD = 3  # forward passes in the time of a step


@dataclass(frozen=True)
class Region:
    """Positions [first, end); how: a sentence on how both ends were found. measured: samples measured for it; steps:
    the cost, in steps of time. found: whether its end ahead was observed. probes: examined positions, with the number
    measured there and the number of bad ones, ascending."""

    first: int
    end: int
    how: str
    measured: int = 0
    steps: float = 0.0
    found: bool = True
    probes: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True)
class Side:
    """reach: batches that belong to the region on this side. counts: bad samples of each examined batch.
    found: whether its end was observed; endless: it continues beyond the search."""

    reach: int
    counts: dict[int, int]
    found: bool
    endless: bool
    clean: tuple[int, ...] = ()


@dataclass(frozen=True)
class Spot:
    """batches: neighbours examined together; least: number of bad samples that counts as inside: half-way between the
    fewest and the most that keep to `RISK`, as neither share is known exactly."""

    batches: int
    least: int


@lru_cache(maxsize=64)
def spot(size: int, share: float, stray: float = STRAY) -> Spot:
    """The spot for batches of `size` samples, `share` of which are bad inside the region; stray: of harmless ones."""
    share = min(share, SOLID)
    for batches in range(1, LARGEST + 1):
        n = batches * size
        outside, inside = _all_below(n, stray), _all_below(n, share)
        lowest = next(k for k in range(1, n + 2) if 1 - outside[k] <= RISK)
        highest = next((k for k in range(n, 0, -1) if inside[k] <= RISK), 0)
        if lowest <= highest:
            return Spot(batches, (lowest + highest) // 2)
    return Spot(LARGEST, 1)


def below(k: int, n: int, p: float) -> float:
    """The chance of fewer than k of n, each with chance p."""
    return _all_below(n, p)[min(k, n + 1)]


def _all_below(n: int, p: float) -> list[float]:
    """`below` for k from 0 to n + 1."""
    if not 0 < p < 1:
        return [0.0, *[float(p <= 0)] * n, 1.0]
    chances = (
        math.exp(
            math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1)
            + (i * math.log(p) if i else 0.0) + (n - i) * math.log1p(-p)
        )
        for i in range(n + 1)
    )  # fmt: skip
    return list(accumulate(chances, initial=0.0))


def grow(
    probe: Callable[[int], int | None], size: int, share: float, budget: int, farthest: int = FARTHEST,
    stray: float = STRAY, enough: int = CLEAN,
) -> Side:  # fmt: skip
    """How far a region extends from batch 0, the one next to its known part, to one side.

    probe: bad samples of a batch, None past the data. budget: maximum batches to examine; farthest: the last of them.
    share, stray: as for `spot`. enough: clean spots in a row.
    """
    look, counts, over = spot(size, share, stray), dict[int, int](), False

    def inside(at: int) -> bool | None:
        """None where the data or the budget ends."""
        nonlocal over
        found = 0
        for batch in range(at, at + look.batches):
            if batch not in counts:
                if len(counts) >= budget:
                    return None
                told = probe(batch)
                if told is None:
                    over = True
                    return None  # an incomplete spot is not clean
                counts[batch] = told
            found += counts[batch]
            if found >= look.least:
                return True
        return False

    last, first_clean, clean, at = -1, None, list[int](), 0
    ended = endless = False
    while True:
        there = inside(at)
        if there is None:
            ended = over  # the data ends on this side
            break
        if there:
            last, first_clean, clean = at, None, []
        else:
            first_clean = at if first_clean is None else first_clean
            clean.append(at)
            if len(clean) >= enough:
                ended = True
                break
        at = 2 * at + look.batches
        if at > farthest:
            endless = last >= farthest // 4  # one or two clean spots beyond that may be chance
            ended = not endless
            break
    hi = first_clean
    while hi is not None and hi - last > 1:
        middle = (last + hi) // 2
        there = inside(middle)
        if there is None:
            break
        last, hi = (middle, hi) if there else (last, middle)
    # The first clean spot may hold the region's last few.
    most = last if hi is None else hi
    reach = max(
        (batch + 1 for batch, bad in counts.items() if bad and batch < most + look.batches), default=0
    )
    return Side(reach, counts, ended, endless, tuple(clean))


def end_in_words(side: Side, last: int, budget: str) -> str:
    """How the end ahead was found. last: the position of the last guilty sample; budget: of the search."""
    *most, last_clean = [str(n + 1) for n in side.clean] or [""]
    clean = f"{', '.join(most)} and {last_clean}" if most else last_clean
    if side.endless:
        return "it extends beyond the search"
    if not side.found:
        return f"its end was not found within {budget}"
    if side.reach == 0:
        return f"nothing is bad beyond the window: the batches {clean} ahead of it are clean"
    return (
        f"it extends {side.reach} {'batch' if side.reach == 1 else 'batches'} beyond the window and ends at position "
        f"{last}, found by doubling the distance until {len(side.clean)} probes in a row were clean ({clean} batches "
        "ahead), and by bisection"
    )


def inferred_in_words(count: int) -> str:
    """An addition to how a region was found."""
    return f"; {plural(count, 'sample')} inside not measured, but like those that were" if count else ""


def spread(first: int, end: int, count: int) -> list[int]:
    """`count` of the numbers in [first, end), evenly spread, the coarsest first; all of them if there are no more."""
    numbers = range(first, end)
    bits = max(1, (len(numbers) - 1).bit_length())
    turned = (int(f"{i:0{bits}b}"[::-1], 2) for i in range(1 << bits))
    return [numbers[i] for i in turned if i < len(numbers)][:count]
