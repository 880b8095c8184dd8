"""Sums gradients over the data ranks in buckets, while the backward pass of the last micro-batch goes on.

DeepSpeed 0.19.8 sums those of BF16_Optimizer after the backward pass, and its overlap_comm is for the other wrappers
alone: it is forced off under a pipeline, divides before it sums, and waits for the whole device. So these are hooks of
our own, for any pipeline. A bucket is sent as soon as every parameter in it has had a gradient of every micro-batch,
and always in the same order, which ranks of a group must agree on: the messages, and so the bits of the sums, are the
same whether they begin early or not.

Every element goes to the rank that updates it (ZeRO 1, arXiv:1910.02054 section 5.1); the flat buffers are cut into
these parts, so the pieces of a bucket differ in size, and most are empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor, nn
from torch.distributed import Work

from megastable.base import activity
from megastable.engine.local_gradients import LocalGradients
from megastable.engine.micro_batch_sums import MicroBatchSums, Place
from megastable.parallel.layout import cut_into_buckets, limit_bucket
from megastable.parallel.mappings import begin_sum
from megastable.parallel.sharding import Fragment
from megastable.parallel.topology import Topology


class Bucket(NamedTuple):
    """Gradients of neighbouring parameters of a group on this rank. whole: fp32 [n]. pieces: of it, by the data rank
    that updates them. numbers: of the parameters. fragments: of this rank's piece, by their places in its part."""

    whole: Tensor
    pieces: list[Tensor]
    group: int
    numbers: range
    fragments: list[Place]


class GradientSums:
    """The sums of a step over the data ranks, each written to this rank's part of the gradient buffers of `o`.

    engine: DeepSpeed's. fragments: of this rank's part. watching: what measures the gradients before and after a sum,
    if anything does. overlap: whether sums begin before the backward pass is over; not if a gradient is looked at in
    between. own: this rank's sums over its micro-batches.
    """

    def __init__(
        self, o: BF16_Optimizer, engine: Any, topology: Topology, fragments: Sequence[Fragment],
        watching: Callable[[], LocalGradients | None],
    ) -> None:  # fmt: skip
        self.overlap = True
        self.own = MicroBatchSums(o, engine.gradient_accumulation_steps, fragments, topology.layout.data)
        self._places = [(f.group, f.offset) for f in fragments]
        self._engine, self._watching = engine, watching
        self._group, self._rank = topology.data_group, topology.data_rank
        self._parts, self._ranks = o.fp32_groups_gradient_flat_partition, topology.layout.data
        self.buckets = self._make_buckets(o) if self._ranks > 1 else []
        self._bucket_of = {(b.group, n): number for number, b in enumerate(self.buckets) for n in b.numbers}
        self.begin_step()

    def _make_buckets(self, o: BF16_Optimizer) -> list[Bucket]:
        """In the order in which the backward pass completes them: the one with the first parameter is the last."""
        bucket_limit = limit_bucket(int(self._engine.zero_reduce_bucket_size()), self._ranks)
        module_orders = {id(p): order for order, p in enumerate(self._engine.module.parameters())}
        ordered_buckets = []
        for group, whole_buffer in enumerate(o.fp32_groups_gradients_flat):
            parameter_sizes = [parameter.numel() for parameter in o.bf16_groups[group]]
            parameter_ends, part_size = [0, *accumulate(parameter_sizes)], len(self._parts[group])
            parameter_ends[-1] = len(whole_buffer)  # padding belongs to the last one
            for bucket_numbers in cut_into_buckets(parameter_sizes, bucket_limit):
                bucket_start, bucket_end = (
                    parameter_ends[bucket_numbers.start],
                    parameter_ends[bucket_numbers.stop],
                )
                owner_cuts = [
                    min(max(rank * part_size, bucket_start), bucket_end) - bucket_start
                    for rank in range(1, self._ranks)
                ]
                bucket_buffer = whole_buffer[bucket_start:bucket_end]
                owner_pieces = list(bucket_buffer.tensor_split(owner_cuts))
                first_order = min(
                    module_orders[id(o.bf16_groups[group][number])] for number in bucket_numbers
                )
                own_start, own_stop = (end - self._rank * part_size for end in (bucket_start, bucket_end))
                own_places = [(g, at) for g, at in self._places if g == group and own_start <= at < own_stop]
                new_bucket = Bucket(bucket_buffer, owner_pieces, group, bucket_numbers, own_places)
                ordered_buckets.append((first_order, new_bucket))
        return [bucket for _, bucket in sorted(ordered_buckets, key=lambda pair: -pair[0])]

    def begin_step(self) -> None:
        """A step begins, of as many micro-batches as DeepSpeed has been told."""
        micro_batches = self._engine.gradient_accumulation_steps()
        self._missing = [len(bucket.numbers) * micro_batches for bucket in self.buckets]
        self._works: list[Work] = []

    def add_gradient(self, parameter: nn.Parameter, group: int, number: int, **_: Any) -> None:
        """A gradient of a micro-batch is there, of parameter `number` of `group`. In place of DeepSpeed's
        `_update_hp_grad`."""
        if parameter.grad is None:
            return
        self.own.add_gradient(parameter, group, number)
        if self.buckets:
            self._note_gradient(group, number)

    def _note_gradient(self, group: int, number: int) -> None:
        bucket_number = self._bucket_of[group, number]
        if bucket_number < len(self._works):
            raise RuntimeError(
                f"a gradient of parameter {number} of group {group} came after its sum over the data ranks had begun: "
                "it has more gradients in a step than micro-batches"
            )
        self._missing[bucket_number] -= 1
        while self.overlap and len(self._works) < len(self.buckets) and self._missing[len(self._works)] <= 0:
            self._begin_next()

    def _begin_next(self) -> None:
        next_bucket = self.buckets[len(self._works)]
        self.own.fill_missing(next_bucket.group, next_bucket.numbers)
        if (gradient_watch := self._watching()) is not None:
            for receiver, piece in enumerate(next_bucket.pieces):
                if piece.numel():
                    gradient_watch.measure_bucket_before_sum(piece, receiver)
        self._works.append(begin_sum(next_bucket.whole, next_bucket.pieces, self._rank, self._group))

    def finish_sums(self, *_: Any, **__: Any) -> None:
        """Begin the sums that are left, wait for all, and divide them by the ranks. In place of DeepSpeed's
        `buffered_allreduce_fallback`. Collective over the data group."""
        activity.enter_activity(activity.REDUCE)  # until the gate, which is next
        if not self.buckets:
            self.own.fill_all()
        while len(self._works) < len(self.buckets):
            self._begin_next()
        gradient_watch = self._watching()
        for begun_bucket, begun_work in zip(self.buckets, self._works, strict=True):
            begun_work.wait()
            own_piece = begun_bucket.pieces[self._rank]
            if gradient_watch is not None and own_piece.numel():
                gradient_watch.measure_after_sum([own_piece])
            # Also while later sums are under way.
            self.own.average_piece(own_piece, begun_bucket.fragments)
        self._works = []
