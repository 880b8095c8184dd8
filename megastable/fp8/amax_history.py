"""Delayed scaling: the history of largest magnitudes of all quantized tensors, and the scales derived from it.

Micikevicius et al., arXiv:2209.05433 section 3; Transformer Engine's DelayedScaling. Deliberate differences: the
history moves once per step, not per micro-batch; magnitudes of a refused update and non-finite ones never enter it;
and without a history the scale is the tensor's own instead of 1, which would turn the first gradients into zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megastable.fp8.formats import FP8Format
from megastable.fp8.scale_factors import LARGEST

SLOTS = ("input", "weight", "gradient")


class Meters:
    """The history of the layers `names`, on this rank. formats: of the slots.

    scales: fp32 [layers, slots], 0 if unknown. history: fp32 [layers, slots, length], the newest first, 0
    if unknown. seen: the largest magnitudes of this step so far.
    """

    def __init__(
        self,
        names: Sequence[str],
        formats: Sequence[FP8Format],
        length: int,
        margin: int,
        device: torch.device,
    ) -> None:
        self.names = list(names)
        most = torch.tensor([f.max for f in formats], device=device)
        self._most = most / 2.0**margin
        shape = (len(self.names), len(SLOTS))
        self.history = torch.zeros(*shape, length, device=device)
        self.scales = torch.zeros(shape, device=device)
        self.seen = torch.zeros(shape, device=device)

    def see(self, layer: int, slot: int, largest: Tensor) -> None:
        """Record a magnitude of this step; fp32, one number."""
        cell = self.seen[layer, slot]
        torch.maximum(cell, largest, out=cell)

    def settle(self, applied: bool, group: Any = None) -> None:
        """After a step: move the recorded magnitudes into the history if the step's update was applied. Collective over
        `group` (None: the world; without a process group: this rank only), with the same `applied` on all ranks."""
        if applied:
            if dist.is_initialized() and dist.get_world_size(group) > 1:
                dist.all_reduce(self.seen, dist.ReduceOp.MAX, group=group)
            usable = torch.isfinite(self.seen) & (self.seen > 0)
            moved = torch.cat((self.seen.unsqueeze(-1), self.history[..., :-1]), -1)
            self.history.copy_(torch.where(usable.unsqueeze(-1), moved, self.history))
            self._rescale()
        self.seen.zero_()

    def _rescale(self) -> None:
        largest = self.history.amax(-1)
        scales = (self._most / largest).clamp_(max=LARGEST)
        self.scales.copy_(torch.where(largest > 0, scales, 0.0))

    def forget(self) -> None:
        """Clear the history."""
        for tensor in (self.history, self.scales, self.seen):
            tensor.zero_()

    def state(self) -> Tensor:
        """A copy of the history, from which everything follows."""
        return self.history.clone()

    def restore(self, saved: Tensor) -> None:
        """Restore what `state` returned."""
        self.history.copy_(saved)
        self._rescale()
        self.seen.zero_()

    def told(self) -> dict[str, list[list[float]]]:
        """The history by layer, for a checkpoint: exact, since Python's floats hold every fp32 number."""
        return dict(zip(self.names, self.history.tolist(), strict=True))

    def read(self, told: Mapping[str, Sequence[Sequence[float]]]) -> None:
        """Load what `told` returned, for the layers on this rank; cut or padded to this history's length."""
        saved = torch.zeros_like(self.history)
        for number, name in enumerate(self.names):
            for slot, values in enumerate(told.get(name, ())):
                kept = list(values)[: saved.shape[-1]]
                saved[number, slot, : len(kept)] = torch.tensor(kept)
        self.restore(saved)
