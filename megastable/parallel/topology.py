"""Coordinates of a rank and its process groups.

Ranks are numbered as in DeepSpeed's `PipeModelDataParallelTopology`: pipeline outermost, then data, tensor innermost,
so that a tensor group sits on neighbouring GPUs of one host. Context parallelism is not an axis of its own: consecutive
data-parallel ranks share their samples, each with a part of the tokens. The loss of a rank is the mean over its tokens,
so averaging gradients over all data-parallel ranks averages over all tokens, and ZeRO, norms and checkpoints need no
special case. Nor are replicas an axis: those of neighbouring data-parallel ranks share out the state, and the ranks of
every replica that hold the same shard sum their gradients. Nor is expert parallelism: neighbouring data-parallel ranks
have an equal part of every block's experts each, and those with the same experts sum their gradients.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from megastable.base.collectives import gather_objects
from megastable.parallel.layout import Layout, find_own_tokens

CHANNEL = "messages between stages"  # what torch calls groups in which ranks only send and receive


class Channels(NamedTuple):
    """Groups of a pipeline's ranks, for activations to the next stage and gradients to the previous one, and for both
    between the last stage and the first (`around`).

    In each a rank has one to send to and one to receive from: messages arrive in their order, and none waits behind one
    in the other direction, as NCCL would let it do, which orders all messages of two ranks.
    """

    activations: Any
    gradients: Any
    activations_around: Any
    gradients_around: Any


class Sharing(NamedTuple):
    """The data ranks over which ZeRO shares out a kind of parameters: their group and number, and this rank's place."""

    group: Any
    size: int
    rank: int


class Topology:
    """This rank's coordinates in a `Layout`, with its process groups. Collective: all ranks build it alike.

    hosts: the name of every rank's host, by rank.
    """

    def __init__(self, layout: Layout, rank: int, timeout: float) -> None:
        self.layout = layout
        self.rank = rank
        self.hosts: list[str] = gather_objects(socket.gethostname())
        self.stage, self.data_rank, self.tensor_rank = layout.coordinates_of(rank)
        self.sample_rank, self.context_rank = divmod(self.data_rank, layout.context)
        # A new group does not inherit the world's timeout.
        self._timeout = timedelta(seconds=timeout)
        self.tensor_group = self._make_own_group("tensor")
        self.data_group = self._make_own_group("data")
        self.context_group = self._make_own_group("context") if layout.context > 1 else None
        self.replica, self.shard_rank = divmod(self.data_rank, layout.shards)
        self.shard_group, self.copies_group = self.data_group, self.tensor_group
        self.replica_group = self.owner_group = None
        if layout.replicas > 1:
            self.shard_group, self.replica_group, self.copies_group = map(
                self._make_own_group, ("shard", "replica", "copies")
            )
            # The ranks of the shard group once more: what they send here keeps no order with what they send there.
            self.owner_group = self._make_own_group("shard")
        self.experts = ALONE
        self._sharing = [Sharing(self.shard_group, layout.shards, self.shard_rank)] * 2
        if layout.expert > 1:
            group_number, expert_rank = divmod(self.data_rank, layout.expert)
            self.experts = ExpertParallel(self._make_own_group("expert"), layout.expert, expert_rank)
            peer_group = self._make_own_group("expert data")
            self._sharing[True] = Sharing(peer_group, layout.data // layout.expert, group_number)

    def find_sharing(self, is_split: bool) -> Sharing:
        """The data ranks that share out the state of parameters. is_split: those of `sharding.split_over_experts`."""
        return self._sharing[is_split]

    def _make_own_group(self, axis: str, description: str | None = None) -> Any:
        """The new group along `axis` that this rank is in; None if it is in none. Collective.

        Every rank names every group of the axis, in the same order: torch names a group by how many there were before,
        and members that count otherwise wait for each other until the timeout. A group of others costs 6 us and no
        message (since torch 2.1; 12,000 of them 0.07 s). With `use_local_synchronization`, by which members alone make
        a group, the count would be of a rank's own groups, of which some stages have more than others.
        """
        own_group = None
        for ranks in self.layout.list_groups(axis):
            new_group = dist.new_group(ranks, timeout=self._timeout, group_desc=description)
            if self.rank in ranks:
                own_group = new_group
        return own_group

    def stage_group(self) -> Any:
        """A new group of all ranks that hold parts of this rank's layers. Collective."""
        return self._make_own_group("stage")

    def tied_group(self) -> Any:
        """A new group of the data ranks of this replica on the first and the last stage with this tensor rank; None on
        other stages. Needs two stages. Collective."""
        return self._make_own_group("tied")

    def make_channels(self) -> Channels:
        """New groups for the messages of model chunks. Before groups that only some stages have; needs two stages."""
        return Channels(*(self._make_own_group("pipeline", CHANNEL) for _ in range(4)))

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.layout.pipeline - 1


@dataclass(frozen=True)
class TensorParallel:
    """A layer's view of its tensor group. `TensorParallel()` is a single process.

    `sequence`: activations between the parallel regions are split along the sequence (arXiv:2205.05198).
    `gathers_again`: a column-parallel layer then keeps its own part of the sequence, and gathers the rest again in
    the backward pass. `chunks`: in which the layers send what they gather and scatter along the sequence, each beside
    a product.
    """

    group: Any = None
    rank: int = 0
    size: int = 1
    sequence: bool = False
    gathers_again: bool = False
    chunks: int = 1


@dataclass(frozen=True)
class ExpertParallel:
    """A layer's view of the data ranks that share out experts, in equal parts. `ExpertParallel()`: all are here."""

    group: Any = None
    size: int = 1
    rank: int = 0


ALONE = ExpertParallel()


@dataclass(frozen=True)
class ContextParallel:
    """A layer's view of other data ranks: attention's of those that share a sample. `ContextParallel()`: this rank has
    whole samples, and all experts.

    ring: keys and values go round the ranks; else they exchange tokens for heads. experts: see `ExpertParallel`.
    """

    group: Any = None
    size: int = 1
    rank: int = 0
    ring: bool = False
    experts: ExpertParallel = ALONE

    def find_own_tokens(self, length: int) -> tuple[range, ...]:
        """See `layout.find_own_tokens`."""
        return find_own_tokens(length, self.size, self.rank, self.ring)


WHOLE = ContextParallel()
