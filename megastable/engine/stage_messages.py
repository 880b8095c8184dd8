"""Fingerprints what pipeline stages send each other, and what arrives."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from megastable.base.fingerprint import mark_of
from megastable.engine import patches

HALF = (1 << 32) - 1  # of a mark's 64 bits, so that fp64 adds up a million of them without rounding


class StageMessages:
    """Of this rank, in the last step: sums of fingerprints, int64 [], by the other stage."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.begin()
        patches.watched_messages(self._add_sent, self._add_received)

    def begin(self) -> None:
        """A step begins."""
        self.sent: dict[int, Tensor] = defaultdict(self._none)
        self.received: dict[int, Tensor] = defaultdict(self._none)

    def _none(self) -> Tensor:
        return torch.zeros((), dtype=torch.int64, device=self._device)

    def _add_sent(self, message: Tensor, stage: int) -> None:
        self.sent[stage] += mark_of(message).value & HALF

    def _add_received(self, message: Tensor, stage: int) -> None:
        self.received[stage] += mark_of(message).value & HALF

    @property
    def left(self) -> float:
        """Sent less received; over all ranks this is zero."""
        return float(sum(self.sent.values(), self._none()) - sum(self.received.values(), self._none()))

    def by_stage(self) -> tuple[dict[int, int], dict[int, int]]:
        """Sent and received."""
        sent, received = ({s: int(v) for s, v in of.items()} for of in (self.sent, self.received))
        return sent, received
