"""Digests of one rank's own gradient, parameter by parameter, by hooks on its backward pass: for any ZeRO wrapper, and
before anything is summed over data ranks.

    digest = gradient_digest(engine, micro_batches)   # a forward and a backward pass; no update

Equal bits show that two passes computed the same. Where kernels sum in any order, checks and squares tell how far two
gradients are apart: a check is their product with random signs, so the difference of two checks has the size of the
difference of the gradients (Alon, Matias and Szegedy, STOC 1996).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from megastable.base.fingerprint import STEP, fingerprint
from megastable.data.loader import MicroBatch
from megastable.engine.engine import Engine
from megastable.parallel.sharding import placement_of

CHUNK = 1 << 20  # elements


@dataclass(frozen=True)
class GradientDigest:
    """Of the parameters `names` on this rank: bits int64 [parameters], of all bytes; checks, squares fp64 [parameters];
    on the CPU."""

    names: Sequence[str]
    bits: Tensor
    checks: Tensor
    squares: Tensor


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
    return GradientDigest([placement_of(p).name for p in parameters], bits.cpu(), checks, squares)


@cache
def _signs(device: torch.device) -> Tensor:
    """Random signs, fp32 [CHUNK]; the same on every rank."""
    drawn = torch.randint(0, 2, (CHUNK,), generator=torch.Generator().manual_seed(CHUNK))
    return (drawn * 2.0 - 1.0).to(device)
