"""The verdict before an update: numbers in, decision out. Here only non-finite numbers are refused.

Pure: no torch.distributed, no engine. Every rank calls it with the same reduced numbers and so agrees.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """apply: let the optimizer run. reason: empty, or why not, for the journal."""

    apply: bool
    reason: str = ""


def judge(loss: float, grad_norm: float) -> Verdict:
    """Refuse an update whose loss or gradient norm is not finite."""
    if not math.isfinite(loss):
        return Verdict(False, "non-finite loss")
    if not math.isfinite(grad_norm):
        return Verdict(False, "non-finite gradients")
    return Verdict(True)
