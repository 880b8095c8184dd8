"""Clips every worker's own gradient before the average (Lin et al., arXiv:1712.01887, section 3.2; no factor N^-1/2).

A worker is all ranks that compute the gradient of the same samples: tensor, pipeline and context ranks together. The
gate judges the average of unclipped gradients. Only if a worker's norm is above the threshold are local gradients
clipped and averaged once more. That needs each rank's own gradient after the first average, which BF16_Optimizer keeps
(ZeRO 1 in bf16), but for the part that the average overwrites: this keeps a copy of it, of 4 / ranks bytes a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megastable.config.optimizers import OptimizerConfig
from megastable.engine.zero import Bf16
from megastable.optim.clipping import Clipping, by_norm
from megastable.optim.pieces import Piece
from megastable.parallel.topology import Topology


class Worker(Clipping):
    """The norm of each worker's gradient is clipped to optimizer.clip. It has no state."""

    def __init__(
        self, config: OptimizerConfig, zero: Bf16, engine: Any, topology: Topology, device: torch.device
    ):
        super().__init__(config, {}, (topology.tensor_rank, topology.layout.tensor), device)
        self.zero, self.topology = zero, topology
        self._own: list[Tensor] = []
        self._square = torch.zeros((), dtype=torch.float64, device=device)
        self._average = engine.buffered_allreduce_fallback
        engine.buffered_allreduce_fallback = self._measured

    def _measured(self, *_: Any, **__: Any) -> None:
        """Measure this rank's gradient, then average it over the data ranks. Collective over the data group."""
        o, context = self.zero.o, self.topology.layout.context
        if context > 1:  # ranks that share samples are one worker
            for whole in o.fp32_groups_gradients_flat:
                dist.all_reduce(whole, group=self.topology.context_group)
                whole.div_(context)
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in self._counted()]
        self._square = torch.stack(norms).square().sum()
        self._own = [part.clone() for part in o.fp32_groups_gradient_flat_partition]
        self._average()

    def _counted(self) -> list[Tensor]:
        """This rank's local gradients, of parameters that no other rank of its worker counts."""
        first = self.topology.tensor_rank == 0
        o = self.zero.o
        return [
            gradient
            for parameters, gradients in zip(o.bf16_groups, o.fp32_groups_gradients, strict=True)
            for parameter, gradient in zip(parameters, gradients, strict=True)
            if parameter.tensor_model_parallel or first
        ]

    def clip(self, pieces: Sequence[Piece], norm: float, scale: float) -> float:
        t, o = self.topology, self.zero.o
        squares = torch.zeros(t.layout.samples, dtype=torch.float64, device=self.device)
        if t.context_rank == 0:
            squares[t.sample_rank] = self._square
        dist.all_reduce(squares)
        factors = [by_norm(n, self.config.clip) for n in squares.sqrt().tolist()]
        own, self._own = self._own, []
        if min(factors) == 1:
            return 1.0
        for part, before in zip(o.fp32_groups_gradient_flat_partition, own, strict=True):
            part.copy_(before)
        torch._foreach_mul_(o.fp32_groups_gradients_flat, factors[t.sample_rank])
        self._average()
        after = self.zero.squared_norm()[0]
        dist.all_reduce(after)
        return math.sqrt(float(after)) / norm if norm else 1.0
