"""Measure the largest attention logit of every head in a step, and apply QK-clip after the update.

Each rank watches the heads that it computes: tensor and context parallelism share them out, pipeline stages have their
blocks. One MAX all-reduce of [layers, heads] per update. Recomputed blocks are measured twice, which changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megastable.config.model import ModelConfig
from megastable.engine.flatstate import FlatState
from megastable.model.gpt import Block
from megastable.optim.qk_clip import clip_factors, over, row_factors, scale_rows
from megastable.parallel.topology import Topology


class LogitClipping:
    """QK-clip of a model on this rank. threshold: of the logits, q k / sqrt(d); None: none, and no measurement."""

    def __init__(
        self,
        module: nn.Module,
        model: ModelConfig,
        topology: Topology,
        threshold: float | None,
        device: torch.device,
    ) -> None:
        self.model, self.topology = model, topology
        layout = topology.layout
        heads = model.heads // (layout.tensor * layout.context)
        first = (topology.tensor_rank * layout.context + topology.context_rank) * heads
        self._mine = slice(first, first + heads)
        # By layer. Tensors of their own: compiled blocks share one graph, which takes them as inputs.
        self._attentions = {
            int(block.name.rpartition(".")[2]): block.attention
            for block in module.modules()
            if isinstance(block, Block)
        }
        self._highest = {layer: torch.empty(heads, device=device) for layer in self._attentions}
        self._table = torch.empty(model.layers, model.heads, device=device)
        self.threshold: float | None = None
        self.switch(threshold)

    def switch(self, threshold: float | None) -> None:
        """Clip at another threshold from the next step on."""
        if threshold == self.threshold:  # as before nearly every step
            return
        self.threshold = threshold
        self.begin()
        for layer, attention in self._attentions.items():
            attention.highest = None if threshold is None else self._highest[layer]

    def begin(self) -> None:
        """Before a step."""
        if self.threshold is None:
            return
        for highest in self._highest.values():
            highest.fill_(-math.inf)

    def measured(self) -> Tensor:
        """The largest logits of the step, fp32 [layers, heads] on the CPU. Collective over the world."""
        self._table.fill_(-math.inf)
        for layer, highest in self._highest.items():
            self._table[layer, self._mine] = highest
        # Libraries differ in the maximum of a NaN and a number.
        self._table.nan_to_num_(math.inf, math.inf, -math.inf)
        dist.all_reduce(self._table, op=dist.ReduceOp.MAX)
        return self._table.to("cpu", copy=True)

    def after_update(
        self, highest: Tensor, inner: torch.optim.Optimizer, flat: FlatState
    ) -> Callable[..., Any]:
        """The optimizer's `step`, and then QK-clip of the buffers that it updates. highest: from `measured`."""
        step, threshold = inner.step, self.threshold
        if threshold is None or not over(highest, threshold).any():
            return step

        def stepped(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            # DeepSpeed's ZeRO 3 hands the optimizer one buffer at a time.
            self._clip(
                threshold, highest, flat, {id(p) for group in inner.param_groups for p in group["params"]}
            )
            return result

        return stepped

    def _clip(self, threshold: float, highest: Tensor, flat: FlatState, buffers: set[int]) -> None:
        """Scale the master weights in these buffers (by `id`)."""
        layout = self.topology.layout
        queries, keys = clip_factors(highest, self.model.key_value_heads, threshold)
        for f in flat.fragments:
            block, _, parameter = f.name.partition(".attention.qkv.")
            if parameter and id(flat.masters[f.group]) in buffers:
                layer = int(block.rpartition(".")[2])
                factors = row_factors(
                    queries[layer],
                    keys[layer],
                    self.model.head_width,
                    layout.tensor,
                    self.topology.tensor_rank,
                )
                piece = flat.piece(f, "weight")
                assert piece is not None
                scale_rows(piece, f, factors)
