"""Fingerprints what pipeline stages send each other, and what arrives."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from megastable.base.fingerprint import STEP, mark_of
from megastable.engine import patches

HALF = (1 << 32) - 1  # of 64 bits, so that fp64 adds up a million of them without rounding


class StageMessages:
    """Of this rank, in the last step: fingerprints of all messages in their order, int64 [], by the other stage."""

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
        self.sent[stage] = self.sent[stage] * STEP + mark_of(message).value

    def _add_received(self, message: Tensor, stage: int) -> None:
        self.received[stage] = self.received[stage] * STEP + mark_of(message).value

    @property
    def left(self) -> float:
        """Sent less received; over all ranks this is zero."""
        sent, received = (sum(map(_high, of.values()), self._none()) for of in (self.sent, self.received))
        return float(sent - received)

    def by_stage(self) -> tuple[dict[int, int], dict[int, int]]:
        """Sent and received."""
        sent, received = ({s: int(_high(v)) for s, v in of.items()} for of in (self.sent, self.received))
        return sent, received


def _high(fingerprint: Tensor) -> Tensor:
    """Its upper half: every bit of a message changes it, the lower half depends on the lower halves of words only."""
    return fingerprint >> 32 & HALF
