"""Sums gradients over the data ranks in buckets, while the backward pass of the last micro-batch goes on.

DeepSpeed 0.19.8 sums those of BF16_Optimizer after the backward pass, and its overlap_comm is for the other wrappers
alone: it is forced off under a pipeline, divides before it sums, and waits for the whole device. So these are hooks of
our own, for any pipeline. A bucket is sent as soon as every parameter in it has had a gradient of every micro-batch,
and always in the same order, which ranks of a group must agree on: the messages, and so the bits of the sums, are the
same whether they begin early or not.

Every element goes to the rank that updates it (ZeRO 1, arXiv:1910.02054 section 5.1); the flat buffers are cut into
these parts, so the pieces of a bucket differ in size, and most are empty. With replicas (FSDP's hybrid sharding,
arXiv:2304.11277 section 3.2.2) a bucket is summed in even slices, inside each replica first, then each slice over the
ranks that have the same one, so that all links between hosts are in use; and what belongs to another rank goes to it,
inside the replica. Gradients of experts that only some data ranks have are in buckets of their own, which these ranks
sum, and are divided like all others: they are of the tokens of all ranks. Every message has a group of its own: it
waits for the one before it of the same bucket, and holds up no other bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor, nn
from torch.distributed import Work

from megastable.base import activity
from megastable.engine.local_gradients import LocalGradients
from megastable.engine.micro_batch_sums import MicroBatchSums, Place
from megastable.parallel.layout import cut_into_buckets, limit_bucket
from megastable.parallel.mappings import begin_sum, count_overlaps
from megastable.parallel.sharding import Fragment, is_split
from megastable.parallel.topology import Topology


class Bucket(NamedTuple):
    """Gradients of neighbouring parameters of a group on this rank. whole: fp32 [n]. pieces: of it, by the rank of a
    replica that updates them. slices: of it, by the rank that sums them; without replicas these are the pieces.
    numbers: of the parameters. fragments: of this rank's piece, by their places in its part. is_split: only some
    data ranks have these parameters, and sum it."""

    whole: Tensor
    pieces: list[Tensor]
    slices: list[Tensor]
    group: int
    numbers: range
    fragments: list[Place]
    is_split: bool


def list_ranges(parts: Sequence[Tensor]) -> list[range]:
    """The elements of each of the parts that a flat tensor is cut into."""
    part_ends = [0, *accumulate(part.numel() for part in parts)]
    return [range(begin, end) for begin, end in pairwise(part_ends)]


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
        self._find_sharing = topology.find_sharing
        self._replicas, self._owners = topology.replica_group, topology.owner_group
        is_cuda = o.fp32_groups_gradient_flat_partition[0].is_cuda
        # On which a GPU waits for a bucket's message before the next one, and not where it computes.
        self._between = torch.cuda.Stream() if is_cuda and self._replicas is not None else None
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
            is_of_experts = is_split(o.bf16_groups[group][0])
            sharing = self._find_sharing(is_of_experts)
            parameter_ends, part_size = [0, *accumulate(parameter_sizes)], len(self._parts[group])
            parameter_ends[-1] = len(whole_buffer)  # padding belongs to the last one
            for bucket_numbers in cut_into_buckets(parameter_sizes, bucket_limit):
                bucket_start, bucket_end = (
                    parameter_ends[bucket_numbers.start],
                    parameter_ends[bucket_numbers.stop],
                )
                owner_cuts = [
                    min(max(rank * part_size, bucket_start), bucket_end) - bucket_start
                    for rank in range(1, sharing.size)
                ]
                bucket_buffer = whole_buffer[bucket_start:bucket_end]
                owner_pieces = list(bucket_buffer.tensor_split(owner_cuts))
                first_order = min(
                    module_orders[id(o.bf16_groups[group][number])] for number in bucket_numbers
                )
                own_start, own_stop = (end - sharing.rank * part_size for end in (bucket_start, bucket_end))
                own_places = [(g, at) for g, at in self._places if g == group and own_start <= at < own_stop]
                even_slices = owner_pieces
                if self._replicas is not None:
                    even_slices = list(bucket_buffer.tensor_split(sharing.size))
                new_bucket = Bucket(
                    bucket_buffer, owner_pieces, even_slices, group, bucket_numbers, own_places, is_of_experts
                )
                ordered_buckets.append((first_order, new_bucket))
        return [bucket for _, bucket in sorted(ordered_buckets, key=lambda pair: -pair[0])]

    def _place(self, bucket: Bucket) -> int:
        """This rank's among those that sum it."""
        return self._find_sharing(bucket.is_split).rank

    def list_overwritten(self) -> list[Tensor]:
        """The gradients of this rank's own that its sums overwrite: views, which may overlap."""
        own_slices = [b.slices[self._place(b)] for b in self.buckets if self._replicas is not None]
        return [*self._parts, *own_slices]

    def begin_step(self) -> None:
        """A step begins, of as many micro-batches as DeepSpeed has been told."""
        micro_batches = self._engine.gradient_accumulation_steps()
        self._missing = [len(bucket.numbers) * micro_batches for bucket in self.buckets]
        self._works, self._across, self._moved = list[Work](), list[Work](), list[Work]()

    def add_gradient(self, parameter: nn.Parameter, group: int, number: int, **_: Any) -> None:
        """A gradient of a micro-batch is there, of parameter `number` of `group`. In place of DeepSpeed's
        `_update_hp_grad`."""
        if parameter.grad is None:
            return
        self.own.add_gradient(parameter, group, number)
        if self.buckets:
            self._note_gradient(group, number)
            self._pass_on()

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
                    gradient_watch.measure_bucket_before_sum(piece, receiver, next_bucket.is_split)
        sharing = self._find_sharing(next_bucket.is_split)
        self._works.append(begin_sum(next_bucket.whole, next_bucket.slices, sharing.rank, sharing.group))
        self._pass_on()

    def _pass_on(self, wait: bool = False) -> None:
        """With replicas, begin the next message of every bucket whose last one is over, in their order. A GPU is told
        at once to wait for it, elsewhere, so that all send in the same order. wait: for what is not over, too."""
        if self._replicas is None:
            return
        for earlier, later, begin in (
            (self._works, self._across, self._sum_across), (self._across, self._moved, self._move_slices),
        ):  # fmt: skip
            while len(later) < len(earlier):
                earlier_work = earlier[len(later)]
                if not wait and self._between is None and not earlier_work.is_completed():
                    break
                with torch.cuda.stream(self._between):
                    earlier_work.wait()
                    later.append(begin(self.buckets[len(later)]))

    def _sum_across(self, bucket: Bucket) -> Work:
        return dist.all_reduce(bucket.slices[self._place(bucket)], group=self._replicas, async_op=True)

    def _move_slices(self, bucket: Bucket) -> Work:
        """To their owners. In place: a rank receives nothing where it has something to send, but from itself."""
        slice_ranges, piece_ranges = (list_ranges(parts) for parts in (bucket.slices, bucket.pieces))
        rank = self._place(bucket)
        return dist.all_to_all_single(
            bucket.pieces[rank], bucket.slices[rank], count_overlaps(piece_ranges[rank], slice_ranges),
            count_overlaps(slice_ranges[rank], piece_ranges), group=self._owners, async_op=True,
        )  # fmt: skip

    def finish_sums(self, *_: Any, **__: Any) -> None:
        """Begin the sums that are left, wait for all, and divide them by the ranks. In place of DeepSpeed's
        `buffered_allreduce_fallback`. Collective over the data group, with replicas over its parts."""
        activity.enter_activity(activity.REDUCE)  # until the gate, which is next
        if not self.buckets:
            self.own.fill_all()
        while len(self._works) < len(self.buckets):
            self._begin_next()
        self._pass_on(wait=True)
        gradient_watch = self._watching()
        last_works = self._works if self._replicas is None else self._moved
        for begun_bucket, begun_work in zip(self.buckets, last_works, strict=True):
            begun_work.wait()
            own_piece = begun_bucket.pieces[self._place(begun_bucket)]
            if gradient_watch is not None and own_piece.numel():
                gradient_watch.measure_after_sum([own_piece])
            # Also while later sums are under way.
            self.own.average_piece(own_piece, begun_bucket.fragments)
        self._works, self._across, self._moved = [], [], []
