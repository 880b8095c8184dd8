"""Gathers updated weights from the ranks that share out the state, while the next forward pass begins.

ZeRO 1 and 2 let a rank update a part of every flat buffer (arXiv:1910.02054 section 5.1); to compute, it needs all of
it. DeepSpeed 0.19.8 gathers each buffer as a whole after the update, and waits for it. Here a buffer is cut into
buckets of neighbours. All gathers begin after the update, in the order in which the forward pass reads the weights, and
every layer waits for its own when it is called. One or a few ranks have updated a bucket: first, in one message for all
buckets, they give each rank an equal slice of it, which is then gathered (NCCL would gather uneven pieces by a
broadcast of each, of which some wait for the one before to go round the whole ring). The bytes of the weights are the
same.

Whoever reads weights in another place than a forward pass calls `wait_for_all` before. A GPU waits on its stream alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Work

from megastable.parallel.layout import cut_evenly, find_owned
from megastable.parallel.mappings import Shares, begin_gather_slices, exchange_shares, share_out

BEFORE_ALL = -1  # weights that no layer alone reads are there before the first of them


class WeightBucket(NamedTuple):
    """Neighbouring weights. reader: number of the layer that reads some of them first. group: the ranks that have
    updated them."""

    reader: int
    shares: Shares
    group: Any


class WeightGathers:
    """The gathers behind an update.

    module: the model or a stage, with its layers as children, or in the order of its `forward_funcs`. groups: of
    parameters, each in the order of its flat buffer. buffers: the flat ones, in compute precision. shard_groups: the
    ranks over which each is partitioned, in equal parts. limit: elements of a bucket.
    """

    def __init__(
        self, module: nn.Module, groups: Sequence[Sequence[nn.Parameter]], buffers: Sequence[Tensor],
        shard_groups: Sequence[Any], limit: int,
    ) -> None:  # fmt: skip
        # In a tied pipeline the last one is a function of the embedding, which is not called.
        called = getattr(module, "forward_funcs", module.children())
        called_layers = [layer for layer in called if isinstance(layer, nn.Module)]
        # Norms are read at the beginning (`share_norm_weights`), or from the first block on: they share a bucket.
        reader_numbers = {
            id(p): n for n, layer in enumerate(called_layers) for p in layer.parameters() if p.dim() > 1
        }
        found_buckets = []
        for parameters, buffer, group in zip(groups, buffers, shard_groups, strict=True):
            ranks, rank, length = dist.get_world_size(group), dist.get_rank(group), len(buffer)
            parameter_sizes = [parameter.numel() for parameter in parameters]
            parameter_places = list(
                zip(parameters, pairwise(accumulate(parameter_sizes, initial=0)), strict=True)
            )
            for whole in cut_evenly(parameter_sizes, length, ranks, limit) if ranks > 1 else ():
                parameters_within = [
                    p for p, (start, stop) in parameter_places if start < whole.stop and stop > whole.start
                ]
                first_reader = min(
                    (reader_numbers.get(id(p), BEFORE_ALL) for p in parameters_within), default=BEFORE_ALL
                )
                owned_ranges = [find_owned(whole, length, ranks, owner) for owner in range(ranks)]
                bucket_shares = share_out(buffer.detach(), whole, owned_ranges, rank)
                found_buckets.append(WeightBucket(first_reader, bucket_shares, group))
        self.buckets = sorted(found_buckets, key=lambda bucket: bucket.reader)
        self._begun: deque[tuple[int, Work]] = deque()
        if self.buckets:
            module.register_forward_pre_hook(partial(self._wait_for_layer, BEFORE_ALL), prepend=True)
            for number, layer in enumerate(called_layers):
                layer.register_forward_pre_hook(partial(self._wait_for_layer, number))

    @torch.no_grad()
    def begin_gathers(self, *_: Any, **__: Any) -> None:
        """This rank has updated its parts: begin to gather the others. In place of DeepSpeed's `all_gather_dp_groups`.
        Collective over the groups."""
        for group in dict.fromkeys(bucket.group for bucket in self.buckets):
            exchange_shares([bucket.shares for bucket in self.buckets if bucket.group is group], group)
        self._begun = deque((b.reader, begin_gather_slices(b.shares, b.group)) for b in self.buckets)

    def _wait_for_layer(self, number: int, *_: Any) -> None:
        while self._begun and self._begun[0][0] <= number:
            self._begun.popleft()[1].wait()

    def wait_for_all(self) -> None:
        """Until all weights are there. On a GPU for what its present stream does next; layers still wait on theirs."""
        for _, begun_work in self._begun:
            begun_work.wait()
