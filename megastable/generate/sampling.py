"""Which token comes next: temperature, top-k and top-p (nucleus sampling: Holtzman et al., arXiv:1904.09751). Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from megastable.base.errors import DataError


@dataclass(frozen=True)
class Sampling:
    """temperature: 0 takes the most likely token always; 1 is what the model says. top_k: only of so many most likely
    ones; 0 = of all. top_p: only of the fewest most likely ones that have at least this share of the probability.

    Raises DataError for what cannot be.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 0.95

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise DataError(f"temperature {self.temperature}: give 0 (the most likely token always) or more")
        if self.top_k < 0:
            raise DataError(f"top-k {self.top_k}: give how many tokens to choose from, or 0 for all")
        if not 0 < self.top_p <= 1:
            raise DataError(f"top-p {self.top_p}: give a share above 0, at most 1")


def pick(logits: Tensor, sampling: Sampling, uniforms: Tensor) -> Tensor:
    """The next token of each row, int64 [n]: logits [n, v], uniforms fp64 [n] in [0, 1).

    First the temperature, then top-k, then top-p of what is left. One uniform number decides by the inverse of the
    distribution function, so that rounding in the logits hardly ever changes a choice.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    scores, ids = logits.double(), None
    if 0 < sampling.top_k < logits.shape[-1]:
        scores, ids = scores.topk(sampling.top_k)
    elif sampling.top_p < 1:
        scores, ids = scores.sort(descending=True)
    # The largest first taken away: a small temperature must not overflow.
    share = ((scores - scores.amax(-1, keepdim=True)) / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        share = share.masked_fill(share.cumsum(-1) - share >= sampling.top_p, 0.0)
    below = share.cumsum(-1)
    chosen = (below <= uniforms[:, None] * below[:, -1:]).sum(-1, keepdim=True)
    return (chosen if ids is None else ids.gather(-1, chosen)).squeeze(-1)
