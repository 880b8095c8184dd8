"""Measures every rank's gradient where no other data rank has one to compare it with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megastable.engine.local_gradients import COLUMNS, LocalGradients, products, sample
from megastable.parallel.topology import Topology

Pairs = Sequence[tuple[Tensor, Tensor | None]]


class OwnGradients(LocalGradients):
    """Of this rank. It is compared with its first moments in place of the others' sum.

    held: flat fp32 gradients, about to be used, each with its first moments, None if there are none yet.
    """

    def __init__(self, topology: Topology, device: torch.device, held: Callable[[], Pairs]) -> None:
        super().__init__(topology, device)
        self._held, self._place, self._world = held, topology.rank, topology.layout.world

    def columns(self) -> Tensor:
        """What this rank adds to the sum: fp64 [ranks x COLUMNS], on the device."""
        for gradient, moment in self._held():
            found = self._measured(gradient)
            self.digest.add_(found[:, None])
            self._size.add_(found[1])
            if moment is not None:
                self._compared.add_(products(sample(gradient), sample(moment.view(-1)).float()))
        table = torch.zeros(self._world, COLUMNS, dtype=torch.float64, device=self._device)
        table[self._place, 1] = self._size
        self._tell(table[self._place])
        return table.flatten()
