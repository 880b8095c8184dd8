"""Digests of one rank's own gradient, parameter by parameter, by hooks on its backward pass: for any ZeRO wrapper, and
before anything is summed over data ranks.

    digest = gradient_digest(engine, micro_batches)   # a forward and a backward pass; no update

Equal bits show that two passes computed the same. Where kernels sum in any order, checks and squares tell how far two
gradients are apart: a check is their product with random signs, so the difference of two checks has the size of the
difference of the gradients (Alon, Matias and Szegedy, STOC 1996).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from megastable.base.fingerprint import STEP, fingerprint
from megastable.base.hardware import kind_of
from megastable.data.loader import MicroBatch
from megastable.engine.engine import Engine
from megastable.parallel.sharding import placement_of

CHUNK = 1 << 20  # elements
SLOTS = 8  # sums of checks, of the whole gradient
TOLERANCE = 0.05  # of a gradient's norm, where kernels sum in any order
ALIKE = 0.01  # of its norm, another gradient that is this one times a number: bf16 rounds by 0.001


class Digest(NamedTuple):
    """Of a gradient: checksums, which are linear in it, and squared norms, of each slice; bits: that tell any change.
    maker: the kind of device that computed it; another kind rounds differently."""

    checks: tuple[float, ...]
    squares: tuple[float, ...]
    bits: tuple[int, ...] = ()
    maker: int = 0

    def is_like(self, other: Digest, exact: bool) -> bool:
        """Whether both are of one gradient. exact: a repeated step gives the same bits, on the same kind of device."""
        if exact and self.maker == other.maker:
            return self.bits == other.bits if self.bits else self == other
        mine, others = sum(self.squares), sum(other.squares)
        size = max(mine, others)
        if not math.isfinite(size):
            return not (math.isfinite(mine) or math.isfinite(others))
        apart = sum((x - y) ** 2 for x, y in zip(self.checks, other.checks, strict=True))
        longer = math.sqrt(mine) - math.sqrt(others)
        return max(apart, longer**2) <= TOLERANCE**2 * size

    def describe_difference(self, right: Digest) -> str:
        """How this one, which is wrong, differs from `right`, as a phrase."""
        size, reference = sum(self.squares), sum(right.squares)
        if not size:
            return "zero"
        if reference and math.isfinite(size):
            pairs = list(zip(self.checks, right.checks, strict=True))
            times = math.copysign(math.sqrt(size / reference), sum(a * b for a, b in pairs))
            left = sum((a - times * b) ** 2 for a, b in pairs)
            if left <= ALIKE**2 * size:
                return "negated" if round(times, 3) == -1 else f"scaled by {times:.3g}"
        return "another gradient"


@dataclass(frozen=True)
class GradientDigest:
    """Of the parameters `names` on this rank: bits int64 [parameters], of all bytes; checks, squares fp64 [parameters];
    on the CPU. maker: as of `Digest`."""

    names: Sequence[str]
    bits: Tensor
    checks: Tensor
    squares: Tensor
    maker: int

    @property
    def total(self) -> Digest:
        """Of all parameters together."""
        slots = torch.zeros(SLOTS, dtype=torch.float64)
        slots.index_add_(0, torch.arange(len(self.checks)) % SLOTS, self.checks)
        bits = int(fingerprint([self.bits]))
        return Digest(tuple(slots.tolist()), (float(self.squares.sum()),), (bits,), self.maker)


def gradient_digest(engine: Engine, micro_batches: Sequence[MicroBatch]) -> GradientDigest:
    """Of the gradient for these micro-batches on the current state, which does not change. Collective."""
    parameters = [p for p in engine.ds.module.parameters() if p.requires_grad]
    bits = torch.zeros(len(parameters), dtype=torch.int64, device=engine.device)
    sums = torch.zeros(2, len(parameters), dtype=torch.float64, device=engine.device)

    def note(number: int, gradient: Tensor) -> None:
        bits[number] = bits[number] * STEP + fingerprint([gradient])
        for chunk in gradient.detach().flatten().split(CHUNK):
            whole = chunk.float()
            sums[0, number] += torch.dot(whole, _signs(whole.device)[: whole.numel()])
            sums[1, number] += torch.dot(whole, whole)

    hooks = [p.register_hook(partial(note, number)) for number, p in enumerate(parameters)]
    try:
        engine.measure(micro_batches)
    finally:
        for hook in hooks:
            hook.remove()
    checks, squares = sums.cpu()
    return GradientDigest(
        [placement_of(p).name for p in parameters], bits.cpu(), checks, squares, kind_of(engine.device)
    )


@cache
def _signs(device: torch.device) -> Tensor:
    """Random signs, fp32 [CHUNK]; the same on every rank."""
    drawn = torch.randint(0, 2, (CHUNK,), generator=torch.Generator().manual_seed(CHUNK))
    return (drawn * 2.0 - 1.0).to(device)
