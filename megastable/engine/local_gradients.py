"""Measures every rank's own gradient before it is summed over the data ranks, and checks the sum.

The sum is linear, so a linear checksum of what goes in must be that of what comes out, but for rounding (Huang and
Abraham, IEEE Trans. Computers C-33, 1984). That of a slice is sum_ij w_i s_j g_ij: rows i of ROW elements, random
signs s, and random weights w, so that rows that were swapped show as well; the same on all data ranks. A product with s
in fp32, then fp64: the checksum's own rounding stays at that of one row.

The numbers, a `RankGradient` of every data rank, travel in the sum that every step makes for its gate, and
hardware/gradient_watch.py judges them. A step reads the gradient, and a rank's part of the sum, once more (GPUs:
twice). ZeRO 1 sums every bucket once in a step, ZeRO 2 and 3 in every micro-batch, and what is measured then is added
up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megastable.parallel.topology import Topology

ROW = 2048  # elements
CACHED = 128  # rows that a CPU's cache holds: they are read once for two purposes
BLOCK = 1024  # elements
BLOCKS = 64  # of a rank's part of a flat buffer, on which directions are compared
ROUNDING = 2.0**-24  # fp32's
SLACK = 64.0


class RankGradient(NamedTuple):
    """Of data rank d, 72 bytes, each number summed over all ranks.

    excess: what the checksums of slice d of every rank's gradient add up to, less that of the sum that rank d received.
    slices: squared norms of slice d of every rank's gradient. square: squared norm of rank d's gradient. dot, own,
    others: on a sample of slice d, dot product of rank d's gradient and the sum of the others', and both squared norms.
    stale: number of ranks of d whose gradient is that of the step before, bit for bit. zero: whose gradient is zero.
    summed: squared norm of the sum that rank d received; as of `square`, a tensor of which ranks hold copies counts for
    each of them.

    Without other data ranks it is of a rank (`OwnGradients`): dot, own and others compare its gradient with its first
    moments, and there is no sum.
    """

    excess: float
    slices: float
    square: float
    dot: float
    own: float
    others: float
    stale: float
    zero: float
    summed: float = 0.0


COLUMNS = len(RankGradient._fields)
Pairs = Sequence[tuple[Tensor, Tensor | None]]


def read_columns(columns: Sequence[float]) -> list[RankGradient]:
    """columns: summed over all ranks."""
    return [RankGradient(*columns[i : i + COLUMNS]) for i in range(0, len(columns), COLUMNS)]


def bound_rounding(squares: float, ranks: int) -> float:
    """The most that rounding adds to the excess of a slice. squares: of its norms on all `ranks` data ranks.

    A sum of n numbers rounds n - 1 times, each time by at most u of a partial sum, the norm of which is at most
    sqrt(n * squares). Random signs turn the n errors of an element, and those of all elements, into a random walk:
    u * n * sqrt(squares). SLACK is for its tail, and for the rounding of the checksum itself.
    """
    return SLACK * ROUNDING * ranks * math.sqrt(squares)


class LocalGradients:
    """Of this rank. digest: fp64 [2, data ranks], of its own gradient in the last step: checksum and squared norm of
    what every data rank receives. total: fp64 [], the checksum of the sum that it received."""

    def __init__(self, topology: Topology, device: torch.device) -> None:
        layout = topology.layout
        self._ranks, self._rank = layout.data, topology.data_rank
        self._shards, self._shard_rank = layout.shards, topology.shard_rank
        self._experts = layout.expert
        # Ranks of other layers have signs of their own, as their errors are summed.
        self._random = torch.Generator().manual_seed(topology.stage * layout.tensor + topology.tensor_rank)
        self._signs = (torch.randint(0, 2, (ROW,), generator=self._random) * 2.0 - 1.0).to(device)
        self._weights = torch.empty(0, dtype=torch.float64, device=device)
        self._own: list[Tensor] = []
        self._previous: Tensor | None = None
        self._device = device
        self.begin_step()

    def begin_step(self) -> None:
        self.digest = torch.zeros(2, self._ranks, dtype=torch.float64, device=self._device)
        self.total = torch.zeros((), dtype=torch.float64, device=self._device)
        self._size, self._compared = torch.zeros_like(self.total), self.total.new_zeros(3)
        self._summed, self._receivers = torch.zeros_like(self.total), 1  # of one sum
        self._own.clear()

    def measure_before_sum(self, gradients: Sequence[Tensor]) -> None:
        """gradients: flat fp32 buffers, whole, about to be summed; every rank receives its part."""
        slices = [g.view(self._ranks, -1) for g in gradients]
        found = torch.stack([self._at_once(s) if s.is_cuda else self._one_by_one(s) for s in slices]).sum(0)
        # In place: memory that is freed on DeepSpeed's stream while it is still read may be given away on another.
        self.digest.add_(found)
        self._size.add_(found[1].sum())
        self._own = [sample_blocks(s[self._rank]).clone() for s in slices]  # the sum overwrites it

    def measure_bucket_before_sum(
        self, gradient: Tensor, receiver: int | None, is_split: bool = False
    ) -> None:
        """gradient: flat, fp32, about to be summed; this rank of every replica receives the sum, None: all do.
        is_split: it is this one of the data ranks with this rank's experts."""
        own_check, own_square = self._measured(gradient)
        self._receivers = self._ranks if receiver is None else self._ranks // self._shards
        receiving_slices = slice(None) if receiver is None else slice(receiver, None, self._shards)
        if is_split and receiver is not None:
            receiver = receiver * self._experts + self._rank % self._experts
            receiving_slices = slice(receiver, receiver + 1)
        self.digest[:, receiving_slices] += torch.stack((own_check, own_square))[:, None]
        self._size.add_(own_square)
        if receiver in (None, self._shard_rank):  # other sums may begin before this one is over
            self._own.append(sample_blocks(gradient).clone())

    def measure_after_sum(self, parts: Sequence[Tensor]) -> None:
        """parts: what this rank has received, the sums over the data ranks, in the order in which they began."""
        sum_check, sum_square = torch.stack([self._measured(received_part) for received_part in parts]).sum(0)
        self.total.add_(sum_check)
        self._summed.add_(sum_square / self._receivers)
        own_samples, self._own = self._own[: len(parts)], self._own[len(parts) :]
        for own_sample, received_part in zip(own_samples, parts, strict=True):
            self._compared.add_(compute_products(own_sample, sample_blocks(received_part) - own_sample))

    def make_columns(self) -> Tensor:
        """What this rank adds to the sum: fp64 [data ranks x COLUMNS], on the device."""
        own_columns = torch.zeros(self._ranks, COLUMNS, dtype=torch.float64, device=self._device)
        own_columns[:, :2] = self.digest.T
        own_columns[self._rank, 0] -= self.total
        own_columns[self._rank, 8] = self._summed
        self._tell(own_columns[self._rank])
        return own_columns.flatten()

    def _tell(self, row: Tensor) -> None:
        """What its own gradient is like."""
        row[2], row[3:6] = self._size, self._compared
        if self._previous is not None:
            row[6] = (self.digest == self._previous).all()
        row[7] = self._size == 0

    def keep_digest(self) -> None:
        """The next step's gradient must not be this one's."""
        self._previous = self.digest

    def forget_digest(self) -> None:
        """The next step may be the last one again."""
        self._previous = None

    def _one_by_one(self, slices: Tensor) -> Tensor:
        """fp64 [2, data ranks]: checksums and squared norms. A CPU has each piece of memory in its cache for both."""
        return torch.stack([self._measured(one_slice) for one_slice in slices], 1)

    def _at_once(self, slices: Tensor) -> Tensor:
        """The same with a few kernels, however many data ranks there are."""
        data_ranks, slice_size = slices.shape
        row_count, row_rest = slice_size // ROW, slices[:, slice_size // ROW * ROW :]
        row_table = slices[:, : row_count * ROW].unflatten(1, (row_count, ROW))
        row_sums = torch.bmm(row_table, self._signs.expand(data_ranks, ROW).unsqueeze(2)).squeeze(2)
        slice_checks = row_sums.double() @ self._weights_of(row_count)
        slice_checks = slice_checks + row_rest @ self._signs[: row_rest.shape[1]]
        rest_norms = torch.linalg.vector_norm(row_rest, dim=1)[:, None]
        row_norms = torch.cat((torch.linalg.vector_norm(row_table, dim=2), rest_norms), 1)
        return torch.stack((slice_checks, row_norms.double().square().sum(1)))

    def _weights_of(self, rows: int) -> Tensor:
        if rows > self._weights.numel():
            more = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(ROW))
            self._weights = (more + 0.5).to(self._signs.device)
        return self._weights[:rows]

    def _measured(self, part: Tensor) -> Tensor:
        """fp64 [2]: checksum and squared norm."""
        row_count = part.numel() // ROW
        row_table = part[: row_count * ROW].view(row_count, ROW)
        row_rest = part[row_count * ROW :]
        chunk_sums, chunk_norms = [], [torch.linalg.vector_norm(row_rest)]
        for row_chunk in row_table.split(max(row_count, 1) if part.is_cuda else CACHED):
            chunk_sums.append(torch.mv(row_chunk, self._signs))
            chunk_norms.append(torch.linalg.vector_norm(row_chunk))
        weighted_sum = torch.dot(torch.cat(chunk_sums).double(), self._weights_of(row_count))
        part_check = weighted_sum + torch.dot(row_rest, self._signs[: row_rest.numel()])
        return torch.stack((part_check, torch.stack(chunk_norms).double().square().sum()))


def sample_blocks(part: Tensor) -> Tensor:
    """At most BLOCKS x BLOCK elements, spread evenly."""
    if part.numel() <= BLOCKS * BLOCK:
        return part
    block_distance = part.numel() // BLOCKS
    return part[: block_distance * BLOCKS].view(BLOCKS, block_distance)[:, :BLOCK].flatten()


def compute_products(own: Tensor, others: Tensor) -> Tensor:
    """fp64 [3]: their dot product, and both squared norms."""
    vector_pairs = ((own, others), (own, own), (others, others))
    return torch.stack([torch.dot(a, b) for a, b in vector_pairs]).double()


class OwnGradients(LocalGradients):
    """Of this rank, where no other data rank has one to compare it with: its first moments stand for the others' sum.

    held: flat fp32 gradients, about to be used, each with its first moments, None if there are none yet.
    """

    def __init__(self, topology: Topology, device: torch.device, held: Callable[[], Pairs]) -> None:
        super().__init__(topology, device)
        self._held, self._place, self._world = held, topology.rank, topology.layout.world

    def make_columns(self) -> Tensor:
        """What this rank adds to the sum: fp64 [ranks x COLUMNS], on the device."""
        for flat_gradient, first_moment in self._held():
            gradient_digest = self._measured(flat_gradient)
            self.digest.add_(gradient_digest[:, None])
            self._size.add_(gradient_digest[1])
            if first_moment is not None:
                moment_sample = sample_blocks(first_moment.view(-1)).float()
                self._compared.add_(compute_products(sample_blocks(flat_gradient), moment_sample))
        rank_columns = torch.zeros(self._world, COLUMNS, dtype=torch.float64, device=self._device)
        rank_columns[self._place, 1] = self._size
        self._tell(rank_columns[self._place])
        return rank_columns.flatten()
