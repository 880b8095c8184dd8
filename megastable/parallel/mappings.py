"""Communication of tensor, sequence, context and expert parallelism, as autograd functions.

Source: Shoeybi et al., Megatron-LM, arXiv:1909.08053 section 3 (f and g); Korthikanti et al.,
arXiv:2205.05198 section 4.2.2 (g and g-bar over the sequence); Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509
section 3.1 (all-to-all around attention); Lepikhin et al., GShard, arXiv:2006.16668 (all-to-all around experts).
Sequences lie along dimension 0 ([s, b, ...]).
With a group of one, every function returns its input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import lcm
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megastable.base.collectives import gather_objects
from megastable.parallel.layout import find_own_tokens
from megastable.parallel.topology import ContextParallel, ExpertParallel, TensorParallel

# torch 2.13 renamed both; older versions only have the second names.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _all_reduce(x: Tensor, tp: TensorParallel) -> Tensor:
    x = x.contiguous()
    dist.all_reduce(x, group=tp.group)
    return x


def gather_sequence(x: Tensor, tp: TensorParallel) -> Tensor:
    """The whole of x [s / tensor, ...], of which every rank of the group has a part; without gradients."""
    whole_tensor = x.new_empty((x.shape[0] * tp.size, *x.shape[1:]))
    _gather(whole_tensor, x.contiguous(), group=tp.group)
    return whole_tensor


def scatter_sequence(x: Tensor, tp: TensorParallel) -> Tensor:
    """This rank's part of the sum of all ranks' x [s, ...]; without gradients."""
    own_part = x.new_empty((x.shape[0] // tp.size, *x.shape[1:]))
    _scatter(own_part, x.contiguous(), group=tp.group)
    return own_part


class Begun(NamedTuple):
    """A message under way; its result may be read after `wait`."""

    result: Tensor
    work: dist.Work

    def wait(self) -> Tensor:
        self.work.wait()
        return self.result


def begin_gather(x: Tensor, tp: TensorParallel) -> Begun:
    """`gather_sequence`, while something else is computed."""
    whole_tensor = x.new_empty((x.shape[0] * tp.size, *x.shape[1:]))
    return Begun(whole_tensor, _gather(whole_tensor, x.contiguous(), group=tp.group, async_op=True))


def begin_scatter(x: Tensor, tp: TensorParallel, own_part: Tensor | None = None) -> Begun:
    """`scatter_sequence`, into a contiguous `own_part` if given, while something else is computed."""
    if own_part is None:
        own_part = x.new_empty((x.shape[0] // tp.size, *x.shape[1:]))
    return Begun(own_part, _scatter(own_part, x.contiguous(), group=tp.group, async_op=True))


def begin_entering_sum(gradient: Tensor, tp: TensorParallel) -> Begun:
    """The backward pass of `enter_tensor_region`, while something else is computed. gradient [s, b, h]: contiguous, and
    nobody else's: without sequence parallelism the sum replaces it."""
    if tp.sequence:
        return begin_scatter(gradient, tp)
    return Begun(gradient, dist.all_reduce(gradient, group=tp.group, async_op=True))


def gather_slices(shard: Tensor, tp: TensorParallel) -> Iterator[Tensor]:
    """Of every rank's shard [s / tensor, ...] slice after slice, of `tp.chunks`: [tensor, s / tensor / chunks, ...].
    While one is used, the next one is gathered; there are never more than these two."""
    own_slices = shard.split(shard.shape[0] // tp.chunks)
    begun = begin_gather(own_slices[0], tp)
    for next_slice in own_slices[1:]:
        following = begin_gather(next_slice, tp)
        yield begun.wait().unflatten(0, (tp.size, -1))
        begun = following
    yield begun.wait().unflatten(0, (tp.size, -1))


def sum_and_scatter(whole: Tensor, part: Tensor, group: Any) -> None:
    """Reduce-scatter: write to `part` the sum of this rank's slice of the flat `whole` of all ranks.

    Where `part` is a view of `whole`, the rest of `whole` stays as it was: engine/zero.py needs that.
    """
    _scatter(part, whole, group=group)


def begin_sum(whole: Tensor, pieces: Sequence[Tensor], rank: int, group: Any) -> dist.Work:
    """Reduce-scatter the flat `whole` into pieces of any sizes, one for each rank of `group`: the sum of this `rank`'s
    replaces it when the returned work has been waited for; the others stay as they were."""
    if len({piece.numel() for piece in pieces}) == 1:
        return _scatter(pieces[rank], whole, group=group, async_op=True)
    return dist.reduce_scatter(pieces[rank], list(pieces), group=group, async_op=True)


class Shares(NamedTuple):
    """Of a flat tensor, which all ranks are to have: `piece`, which this rank has, and `even`, this rank's of the equal
    slices of all. given, taken: how many elements of its piece each rank's slice needs, and of its slice each rank's
    piece gives; None if slices are pieces."""

    whole: Tensor
    piece: Tensor
    even: Tensor
    given: list[int] | None
    taken: list[int] | None


def share_out(buffer: Tensor, whole: range, owned: Sequence[range], rank: int) -> Shares:
    """The shares of elements `whole` of a flat buffer. owned: those that each rank has."""
    size = len(whole) // len(owned)
    slices = [range(start, start + size) for start in range(whole.start, whole.stop, size)]
    parts = whole, owned[rank], slices[rank]
    whole_view, own_piece, even_slice = (buffer[part.start : part.stop] for part in parts)
    if list(owned) == slices:
        return Shares(whole_view, own_piece, even_slice, None, None)
    given, taken = count_overlaps(owned[rank], slices), count_overlaps(slices[rank], owned)
    return Shares(whole_view, own_piece, even_slice, given, taken)


def exchange_shares(shared: Sequence[Shares], group: Any) -> None:
    """Give every rank of `group` its equal slices of flat tensors of one dtype, out of the pieces that ranks have.

    One message for all tensors: those that one rank has pieces of leave it while others send theirs. A GPU is told to
    wait for it. It takes memory for what this rank gives and for what it gets.
    """
    uneven = [shares for shares in shared if shares.given is not None and shares.taken is not None]
    if not uneven:
        return
    ranks = range(dist.get_world_size(group))
    # By the other rank, and then by tensor.
    given_pieces = [shares.piece.split(shares.given or []) for shares in uneven]
    taken_slices = [shares.even.split(shares.taken or []) for shares in uneven]
    given_counts, taken_counts = (
        [sum(len(parts[rank]) for parts in all_parts) for rank in ranks]
        for all_parts in (given_pieces, taken_slices)
    )
    sent = torch.cat([parts[rank] for rank in ranks for parts in given_pieces])
    received = sent.new_empty(sum(taken_counts))
    dist.all_to_all_single(received, sent, taken_counts, given_counts, group=group)
    arrived_parts = [parts[rank] for rank in ranks for parts in taken_slices]
    torch._foreach_copy_(arrived_parts, received.split([len(part) for part in arrived_parts]))


def begin_gather_slices(shares: Shares, group: Any) -> dist.Work:
    """All-gather a flat tensor of which every rank of `group` has its equal slice, in place."""
    return _gather(shares.whole, shares.even, group=group, async_op=True)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # A clone: autograd may hand the same gradient to another branch.
        return _all_reduce(grad.clone(), ctx.tp), None


class _Share(_Copy):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # In fp32: summing partial gradients must not lose what a single process would have kept.
        return _all_reduce(grad.to(torch.float32, copy=True), ctx.tp).to(grad.dtype), None


class _ShareAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tp: TensorParallel, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.tp = tp
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flat_sum = _all_reduce(torch.cat([grad.flatten().float() for grad in grads]), ctx.tp)
        grad_sums = flat_sum.split([grad.numel() for grad in grads])
        return None, *(part.view_as(grad).to(grad.dtype) for part, grad in zip(grad_sums, grads, strict=True))


# A forward with a collective returns a view of its result. Dynamo (torch 2.11) also returns every intermediate of a
# forward: an output that is itself an intermediate, like the result of an in-place collective, would get the
# intermediate's gradient, which is zero. tests/parallel/test_mappings.py compiles all of them.


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        y = _all_reduce(x.clone(), tp)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Total(_Copy):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        y = _all_reduce(x.clone(), tp)
        return y.view_as(y)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        y = gather_sequence(x, tp)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return scatter_sequence(grad, ctx.tp), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        y = scatter_sequence(x, tp)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gather_sequence(grad, ctx.tp), None


def enter_tensor_region(x: Tensor, tp: TensorParallel) -> Tensor:
    """Enter a tensor-parallel region: x [s, b, h], whole on every rank; the backward pass sums the gradients."""
    if tp.size == 1:
        return x
    return _Gather.apply(x, tp) if tp.sequence else _Copy.apply(x, tp)


def leave_tensor_region(x: Tensor, tp: TensorParallel) -> Tensor:
    """Leave a tensor-parallel region: sum partial results [s, b, h] (with sequence parallelism: and split them)."""
    if tp.size == 1:
        return x
    return _ReduceScatter.apply(x, tp) if tp.sequence else _Reduce.apply(x, tp)


def share_weight(weight: Tensor, tp: TensorParallel) -> Tensor:
    """A replicated weight that each rank applies to its own part of the data: the backward sums its gradient."""
    return weight if tp.size == 1 else _Share.apply(weight, tp)


def share_weights(weights: Sequence[Tensor], tp: TensorParallel) -> tuple[Tensor, ...]:
    """`share_weight` of several: the backward sums all their gradients in one message, when it has the last one. A
    weight that was not used counts as one with a gradient of zeros."""
    return tuple(weights) if tp.size == 1 else _ShareAll.apply(tp, *weights)


def sum_over_group(x: Tensor, tp: TensorParallel) -> Tensor:
    """The sum of `x`, of any shape, over the group, for ranks that use it differently afterwards: their gradients are
    partial and are summed as well."""
    return x if tp.size == 1 else _Total.apply(x, tp)


def _all_to_all(parts: tuple[Tensor, ...], cp: ContextParallel) -> tuple[Tensor, ...]:
    x = torch.cat(parts, -2).contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=cp.group)
    ends = list(accumulate(part.shape[-2] for part in parts))
    # Slices: torch 2.13 cannot compile a split here if the code after it is recomputed.
    return tuple(received[..., end - part.shape[-2] : end, :] for part, end in zip(parts, ends, strict=True))


class _Exchange(torch.autograd.Function):
    """All-to-all of several tensors x [context, ..., d] in one message: x[i] goes to rank i and is replaced by what
    rank i sent. It is its own inverse and its own gradient."""

    @staticmethod
    def forward(ctx: Any, cp: ContextParallel, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.cp = cp
        return _all_to_all(parts, cp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_all_to_all(grads, ctx.cp)


def to_heads(q: Tensor, k: Tensor, v: Tensor, cp: ContextParallel) -> tuple[Tensor, Tensor, Tensor]:
    """From a shard of the tokens to a shard of the heads: q [s / c, b, q, d] -> [s, b, q / c, d], c ranks in the group;
    k and v [s / c, b, k, d] alike. Where c does not divide k, key and value heads are repeated.

    Together with `to_tokens`, two all-to-alls per block and pass: in each direction a rank sends
    (c - 1) / c * s / c * b * (2 q + 2 k) * d numbers.
    """
    c, kv_heads = cp.size, k.shape[2]
    if c == 1:
        return q, k, v
    if (repeat_count := lcm(kv_heads, c) // kv_heads) > 1:
        k, v = k.repeat_interleave(repeat_count, 2), v.repeat_interleave(repeat_count, 2)
    # By receiving rank: [c, s / c, b, heads / c, d].
    parts_by_rank = [x.unflatten(2, (c, -1)).permute(2, 0, 1, 3, 4) for x in (q, k, v)]
    q, k, v = (x.flatten(0, 1) for x in _Exchange.apply(cp, *parts_by_rank))
    return q, k, v


def to_tokens(y: Tensor, cp: ContextParallel) -> Tensor:
    """Back from a shard of the heads to a shard of the tokens: y [s, b, q / c, d] -> [s / c, b, q, d]."""
    if cp.size == 1:
        return y
    (x,) = _Exchange.apply(cp, y.unflatten(0, (cp.size, -1)))
    return x.permute(1, 2, 0, 3, 4).flatten(2, 3)


def gather_tokens(x: Tensor, cp: ContextParallel) -> Tensor:
    """The whole of x [b, heads, s / ranks, d], of which every rank of a ring has its own tokens; without gradients."""
    count = x.shape[2]
    gathered = x.new_empty((cp.size, *x.shape))
    _gather(gathered.flatten(0, 1), x.contiguous(), group=cp.group)
    whole_tensor = x.new_empty((*x.shape[:2], count * cp.size, x.shape[3]))
    for rank, part in enumerate(gathered):
        own_tokens = find_own_tokens(count * cp.size, cp.size, rank, cp.ring)
        for tokens, chunk in zip(own_tokens, part.chunk(len(own_tokens), 2), strict=True):
            whole_tensor[:, :, tokens.start : tokens.stop] = chunk
    return whole_tensor


class RowExchange(NamedTuple):
    """Of rows that are sent to the ranks with their experts. sent, received: how many rows go to each rank, and come
    from it. order: int64 [received], the places of the received ones, in the order of this rank's experts and within
    one in that of ranks. counts: int64 [own experts], how many each has."""

    group: Any
    sent: list[int]
    received: list[int]
    order: Tensor
    counts: Tensor


def count_rows(counts: Tensor, ep: ExpertParallel) -> RowExchange:
    """Tell each rank how many rows come to each of its experts. counts: int64 [experts], of this rank's rows."""
    sent_counts = counts.view(ep.size, -1)
    received_counts = torch.empty_like(sent_counts)
    dist.all_to_all_single(received_counts, sent_counts, group=ep.group)
    rows_by_rank = torch.stack((sent_counts.sum(1), received_counts.sum(1)))
    row_experts = torch.arange(sent_counts.shape[1], device=counts.device).repeat(ep.size)
    sent, received = rows_by_rank.tolist()  # waits for the GPU: a message's sizes are known to its host
    row_experts = row_experts.repeat_interleave(received_counts.flatten(), output_size=sum(received))
    return RowExchange(ep.group, sent, received, row_experts.argsort(stable=True), received_counts.sum(0))


def _send_rows(rows: Tensor, exchange: RowExchange) -> Tensor:
    received_rows = rows.new_empty((len(exchange.order), rows.shape[1]))
    dist.all_to_all_single(
        received_rows, rows.contiguous(), exchange.received, exchange.sent, group=exchange.group
    )
    return received_rows.index_select(0, exchange.order)


def _return_rows(rows: Tensor, exchange: RowExchange) -> Tensor:
    rows_by_rank = torch.empty_like(rows, memory_format=torch.contiguous_format)
    rows_by_rank.index_copy_(0, exchange.order, rows)
    returned_rows = rows.new_empty((sum(exchange.sent), rows.shape[1]))
    dist.all_to_all_single(
        returned_rows, rows_by_rank, exchange.sent, exchange.received, group=exchange.group
    )
    return returned_rows


class _MoveRows(torch.autograd.Function):
    """One way in the forward pass, and the other in the backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: RowExchange, back: bool) -> Tensor:
        ctx.exchange, ctx.back = exchange, back
        return _return_rows(rows, exchange) if back else _send_rows(rows, exchange)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        move_other_way = _send_rows if ctx.back else _return_rows
        return move_other_way(grad, ctx.exchange), None, None


def send_rows(rows: Tensor, exchange: RowExchange) -> Tensor:
    """From a rank's rows [m, h], in the order of experts, to the rows of all ranks for this rank's experts, in their
    order: one all-to-all in each pass."""
    return _MoveRows.apply(rows, exchange, False)


def return_rows(rows: Tensor, exchange: RowExchange) -> Tensor:
    """Back from the results of this rank's experts to those of this rank's rows; the inverse of `send_rows`."""
    return _MoveRows.apply(rows, exchange, True)


def begin_shift(x: Tensor, group: Any) -> Callable[[], Tensor]:
    """Send `x`, contiguous, to the next rank of `group`, and begin to receive as much from the previous one. Returns a
    function that waits for both and returns what came. `x` must not be written to before."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    next_rank, previous_rank = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
    received = torch.empty_like(x)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, next_rank, group), dist.P2POp(dist.irecv, received, previous_rank, group)]
    )

    def wait() -> Tensor:
        for work in works:
            work.wait()
        return received

    return wait


# Sum the gradient of a tied embedding over its two copies, on the first and the last pipeline stage.
#
# Each stage has already reduced its own gradient over the data ranks, and each rank holds the partition that it
# updates (ZeRO, arXiv:1910.02054 section 5.1). The stages hold different layers, so the embedding is partitioned at
# different elements. Each rank exchanges its elements with the ranks of the other stage that hold the same ones. Both
# sides add the same two numbers, so the copies stay bit-identical in whatever order a collective sums. Summing over
# the copies first would not achieve that: the data-parallel sums round differently on the two stages.


def count_overlaps(own: range, others: Sequence[range]) -> list[int]:
    """Number of elements that `own` shares with each of `others`. Ranges of step 1."""
    return [len(range(max(own.start, r.start), min(own.stop, r.stop))) for r in others]


class TiedGradient:
    """This rank's partition of a tied weight's gradient. Collective: all ranks of the group build it and call
    `add_other_stage`."""

    def __init__(self, elements: range, stage: int, group: Any) -> None:
        """elements: the elements of the flattened weight that this rank updates, maybe none. stage: of this rank.
        group: all ranks of both stages, ordered by stage and data rank, like the partitions."""
        self.group = group
        held = gather_objects((stage, elements), group)
        other_ranges = [range(0) if of_stage == stage else others for of_stage, others in held]
        self._counts = count_overlaps(elements, other_ranges)
        assert sum(self._counts) == len(elements), (
            f"the other stage does not hold all of {elements}: {other_ranges}"
        )

    @torch.no_grad()
    def add_other_stage(self, piece: Tensor) -> None:
        """Add the other stage's gradient of the same elements to `piece` ([len(elements)], contiguous), in place.

        Sends and receives len(elements) numbers, and allocates memory for as many.
        """
        other_gradient = torch.empty_like(piece)
        dist.all_to_all_single(other_gradient, piece, self._counts, self._counts, group=self.group)
        piece.add_(other_gradient)
