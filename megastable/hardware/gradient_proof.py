"""Finds out from repetitions of a doubtful step which ranks computed a wrong gradient, and how. Pure.

Every rank has computed its own samples twice, then those of the data rank after it, and of the one after that. On sound
hardware all results for the same samples are the same, whatever the samples are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

TOLERANCE = 0.05  # of a gradient's norm, where kernels sum in any order
ALIKE = 0.01  # of its norm, another gradient that is this one times a number: bf16 rounds by 0.001


class Digest(NamedTuple):
    """Of a gradient: checksums, which are linear in it, and squared norms, of each slice; bits: that tell any change.
    maker: the kind of device that computed it; another kind rounds differently."""

    checks: tuple[float, ...]
    squares: tuple[float, ...]
    bits: tuple[int, ...] = ()
    maker: int = 0


class GradientFault(NamedTuple):
    """Ranks whose gradient was wrong. proven: else it is one of them, and not known which; lasting: the first time and
    when repeated, so not by chance; what: of the first of them, beside the right gradient: "negated"."""

    ranks: tuple[int, ...]
    proven: bool
    lasting: bool
    what: str


def alike(a: Digest, b: Digest, exact: bool) -> bool:
    """Whether both are of one gradient. exact: a repeated step gives the same bits, on the same kind of device."""
    if exact and a.maker == b.maker:
        return a.bits == b.bits if a.bits else a == b
    size = max(sum(a.squares), sum(b.squares))
    if not math.isfinite(size):
        return not (math.isfinite(sum(a.squares)) or math.isfinite(sum(b.squares)))
    apart = sum((x - y) ** 2 for x, y in zip(a.checks, b.checks, strict=True))
    longer = math.sqrt(sum(a.squares)) - math.sqrt(sum(b.squares))
    return max(apart, longer**2) <= TOLERANCE**2 * size


def difference(wrong: Digest, right: Digest) -> str:
    """How `wrong` differs from `right`, as a phrase."""
    size, reference = sum(wrong.squares), sum(right.squares)
    if not size:
        return "zero"
    if reference and math.isfinite(size):
        times = math.copysign(
            math.sqrt(size / reference), sum(a * b for a, b in zip(wrong.checks, right.checks, strict=True))
        )
        left = sum((a - times * b) ** 2 for a, b in zip(wrong.checks, right.checks, strict=True))
        if left <= ALIKE**2 * size:
            return "negated" if round(times, 3) == -1 else f"scaled by {times:.3g}"
    return "another gradient"


def prove(
    told: Mapping[int, Sequence[Digest]], groups: Sequence[Sequence[int]], shift: int, exact: bool
) -> GradientFault | None:
    """What the digests of all ranks show; None if all are as they should be.

    told: by rank, of its own samples, of these once more, and then of the samples of the data rank `shift` further, of
    the one 2 * `shift` further, and so on. groups: the ranks of each data group, in order.
    """
    changed = [rank for rank, (first, again, *_) in told.items() if not alike(first, again, exact)]
    if changed:
        first, again, *_ = told[changed[0]]
        return GradientFault(tuple(changed), True, False, difference(first, again))
    odd: dict[int, str] = {}
    doubtful: set[int] = set()
    for ranks in groups:
        for place, owner in enumerate(ranks):
            held = {owner: told[owner][0]}
            for turn, _ in enumerate(told[owner][2:], 1):
                by = ranks[(place - turn * shift) % len(ranks)]
                held[by] = told[by][1 + turn]
            most = max((_agree(d, held, exact) for d in held.values()), key=len)
            others = held.keys() - most
            if not others:
                continue
            if 2 * len(most) > len(held):
                right = held[min(most)]
                odd |= {rank: difference(held[rank], right) for rank in others if rank not in odd}
            else:
                doubtful |= held.keys()
    if odd:
        ranks_ = sorted(odd)
        return GradientFault(tuple(ranks_), True, True, odd[ranks_[0]])
    return GradientFault(tuple(sorted(doubtful)), False, True, "") if doubtful else None


def causes(
    changed: Sequence[int], pipelines: Sequence[Sequence[int]], moved: Sequence[AbstractSet[int]], tied: bool
) -> tuple[int, ...]:
    """The ranks that may have computed wrong, of those of whose gradients the repetition gives another one.

    A wrong result of one stage changes the gradients of others. What each has received is what was sent, so the first
    stage that sent something else on has computed it; if none has, the last one that sent something else back, and
    those after it whose gradient alone is another.

    pipelines: ranks, in the order of their stages. moved: by rank, the stages to which it sent something else. tied:
    whether the first and the last stage add up gradients.
    """
    found: set[int] = set()
    for ranks in pipelines:
        on = [s for s, rank in enumerate(ranks) if any(to > s for to in moved[rank])]
        back = [s for s, rank in enumerate(ranks) if any(to < s for to in moved[rank])]
        own = {s for s, rank in enumerate(ranks) if rank in changed}
        if back and tied and 0 in own:
            own.discard(len(ranks) - 1)  # its gradient has in it what that of the first stage is
        if on:
            stages = {min(on)}
        elif back:
            stages = {max(back)} | {s for s in own if s > max(back)}
        else:
            stages = own
        found |= {ranks[s] for s in stages}
    return tuple(sorted(found)) or tuple(changed)


def _agree(digest: Digest, held: Mapping[int, Digest], exact: bool) -> set[int]:
    return {rank for rank, other in held.items() if alike(digest, other, exact)}
