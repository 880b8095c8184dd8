"""How the attention logits of a block are made and which keys a query sees, for every attention core."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megastable.config.model import ModelConfig


class AttentionScores(NamedTuple):
    """scale: factor of q k; None: 1 / sqrt(d). cap: logits z become cap tanh(z / cap) (Gemma 2, arXiv:2408.00118,
    section 2); None: as they are. window: a query sees this many keys, its own included; None: all up to its own."""

    scale: float | None = None
    cap: float | None = None
    window: int | None = None

    @classmethod
    def of(cls, config: ModelConfig, block: int) -> AttentionScores:
        return cls(config.score_scale, config.attention_softcap, config.window_of(block))

    def within(self, length: int) -> AttentionScores:
        """The same for samples of `length` tokens: without a window that none of them reaches."""
        return self if self.window is None or self.window < length else self._replace(window=None)

    def factor(self, width: int) -> float:
        """The factor of q k. width: of a head."""
        return 1 / math.sqrt(width) if self.scale is None else self.scale

    def mask(self, queries: Tensor, keys: Tensor) -> Tensor:
        """bool [queries, keys]: which keys a query sees. Both int64, positions in the sample."""
        behind = queries[:, None] - keys
        seen = behind >= 0
        return seen if self.window is None else seen & (behind < self.window)


FULL = AttentionScores()


def softcap(z: Tensor, cap: float | None) -> Tensor:
    """cap tanh(z / cap), in the dtype of z."""
    return z if cap is None else torch.tanh(z / cap) * cap
