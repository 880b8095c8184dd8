"""Sizes of the parallel axes, coordinates and groups of ranks, and the partition of the layers into pipeline stages.

Pure; without torch, for the planner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import lcm


@dataclass(frozen=True)
class Layout:
    """Sizes of the three axes; `world` ranks in all. context: number of data ranks that share their samples. replicas:
    number of groups of neighbouring data ranks, over each of which ZeRO shares out the whole state. expert: number of
    neighbouring data ranks that share out every block's experts."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    replicas: int = 1
    expert: int = 1

    @property
    def team(self) -> int:
        """Number of neighbouring data ranks that compute together: they share samples, or send tokens to experts."""
        return lcm(self.context, self.expert)

    @property
    def shards(self) -> int:
        """Number of data ranks over which ZeRO shares out the state."""
        return self.data // self.replicas

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def samples(self) -> int:
        """Number of groups of data ranks with samples of their own."""
        return self.data // self.context

    def coordinates_of(self, rank: int) -> tuple[int, int, int]:
        """(stage, data rank, tensor rank) of a global rank."""
        return rank // (self.data * self.tensor), rank // self.tensor % self.data, rank % self.tensor

    def rank_at(self, stage: int, data: int, tensor: int) -> int:
        """Global rank of a coordinate; the inverse of `coordinates_of`."""
        return (stage * self.data + data) * self.tensor + tensor

    def find_replicas(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """All ranks that work on the samples of these: of every stage and tensor rank, and of a team."""
        teams = {self.coordinates_of(rank)[1] // self.team for rank in ranks}
        team_of = [self.coordinates_of(rank)[1] // self.team for rank in range(self.world)]
        return tuple(rank for rank, team in enumerate(team_of) if team in teams)

    def list_groups(self, axis: str) -> list[list[int]]:
        """The ranks of every group along `axis`: "tensor", "data", "stage" (both of these), "context", "shard" (the
        data ranks of a replica), "replica" (the data ranks with the same shard), "copies" (these and their tensor
        groups), "expert" (the data ranks that share out experts), "expert data" (those with the same experts),
        "pipeline", or "tied" (the data ranks of a replica on the first and the last stage)."""
        s, d, t = range(self.pipeline), range(self.data), range(self.tensor)
        of_shard = [range(first, first + self.shards) for first in d[:: self.shards]]
        of_replica = [d[place :: self.shards] for place in range(self.shards)]
        of_data = {
            "shard": of_shard, "replica": of_replica,
            "expert": [range(first, first + self.expert) for first in d[:: self.expert]],
            "expert data": [d[place :: self.expert] for place in range(self.expert)],
        }  # fmt: skip
        match axis:
            case "tensor":
                return [[self.rank_at(i, j, k) for k in t] for i in s for j in d]
            case "data":
                return [[self.rank_at(i, j, k) for j in d] for i in s for k in t]
            case "stage":
                return [[self.rank_at(i, j, k) for j in d for k in t] for i in s]
            case "context":
                c = range(self.context)
                return [
                    [self.rank_at(i, g * self.context + j, k) for j in c]
                    for i in s for g in range(self.samples) for k in t
                ]  # fmt: skip
            case "shard" | "replica" | "expert" | "expert data":
                return [
                    [self.rank_at(i, j, k) for j in members]
                    for i in s for members in of_data[axis] for k in t
                ]  # fmt: skip
            case "copies":
                return [
                    [self.rank_at(i, j, k) for j in members for k in t] for i in s for members in of_replica
                ]
            case "tied":
                ends = (0, self.pipeline - 1)
                return [
                    [self.rank_at(i, j, k) for i in ends for j in members] for members in of_shard for k in t
                ]
            case "pipeline":
                return [[self.rank_at(i, j, k) for i in s] for j in d for k in t]
        raise ValueError(f"no axis {axis!r}")


def find_own_tokens(length: int, ranks: int, rank: int, ring: bool) -> tuple[range, ...]:
    """The tokens of a sample of `length` that `rank` has, of `ranks` that share it; ascending.

    One range. Two in a ring, of 2 x `ranks` chunks one from each end: under a causal mask late queries see many keys
    and early ones few, and so all ranks have the same work in every round (Llama 3, arXiv:2407.21783 section 3.3.2).
    """
    chunk_size = length // (2 * ranks if ring else ranks)
    chunks = (rank, 2 * ranks - 1 - rank) if ring else (rank,)
    return tuple(range(chunk * chunk_size, (chunk + 1) * chunk_size) for chunk in chunks)


def cut_ranges(ranges: Iterable[range], begin: int, end: int) -> tuple[range, ...]:
    """Numbers [begin, end) of those in `ranges`, one range after the other."""
    cut_parts, first = [], 0
    for whole_range in ranges:
        cut_parts.append(whole_range[max(begin - first, 0) : max(end - first, 0)])
        first += len(whole_range)
    return tuple(cut_part for cut_part in cut_parts if cut_part)


def cut_into_stages(costs: Sequence[float], stages: int, required: Sequence[bool]) -> list[int]:
    """Bounds [0, ..., len(costs)] of `stages` contiguous ranges that minimise the cost of the costliest stage.

    costs: of every layer, any unit, positive. required: layers of which every stage must hold at least one: a
    stage with only tied or replicated parameters has no gradient norm in DeepSpeed, and hangs or dies.
    Among equally good partitions the one that fills later stages wins (the first stages hold more activations in
    1F1B). Dynamic programming, O(stages x layers^2).

    Raises ValueError when there are fewer required layers than stages.
    """
    layer_count = len(costs)
    if sum(required) < stages:
        raise ValueError(f"{sum(required)} blocks are too few for {stages} stages")
    cost_before, required_before = [0.0], [0]
    for cost, is_required in zip(costs, required, strict=True):
        cost_before.append(cost_before[-1] + cost)
        required_before.append(required_before[-1] + is_required)
    # best[k][i]: the lowest maximum cost of layers [0, i) in k stages, and where the last stage begins.
    best_by_stages: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for _ in range(stages):
        stage_row: dict[int, tuple[float, int]] = {}
        for range_end in range(1, layer_count + 1):
            best_choice = None
            for range_begin in range(range_end - 1, -1, -1):
                last_cost = cost_before[range_end] - cost_before[range_begin]
                if best_choice is not None and last_cost > best_choice[0]:
                    break  # a longer last range costs even more
                has_required = required_before[range_end] > required_before[range_begin]
                if has_required and range_begin in best_by_stages[-1]:
                    new_choice = max(best_by_stages[-1][range_begin][0], last_cost), range_begin
                    best_choice = new_choice if best_choice is None else min(best_choice, new_choice)
            if best_choice is not None:
                stage_row[range_end] = best_choice
        best_by_stages.append(stage_row)
    stage_bounds = [layer_count]
    for stage_count in range(stages, 0, -1):
        stage_bounds.append(best_by_stages[stage_count][stage_bounds[-1]][1])
    return stage_bounds[::-1]


def list_chunks(bounds: Sequence[int], stages: int, stage: int) -> list[range]:
    """The layers of each model chunk of a stage, of a model that `bounds` cut into stages x chunks ranges: they go
    round the stages, one chunk each, then the next one."""
    all_ranges = [range(*pair) for pair in pairwise(bounds)]
    return all_ranges[stage::stages]


BUCKET, BUCKET_OF_RANK = 40_000_000, 1_000_000  # elements: a ring's latency grows with its ranks
ALIGNED = 8  # elements: 16 bytes of bf16


def limit_bucket(given: int, ranks: int) -> int:
    """The most elements of a bucket that `ranks` data ranks sum or gather. given: DeepSpeed's reduce_bucket_size."""
    return min(given, max(BUCKET, BUCKET_OF_RANK * ranks))


def cut_into_buckets(sizes: Sequence[int], limit: int) -> list[range]:
    """Cut a flat buffer of parameters of these sizes into buckets of neighbours: the numbers of the parameters of each.

    From the end, where a backward pass begins. A bucket has at most `limit` elements, or one parameter.
    """
    buckets, bucket_stop, bucket_elements = [], len(sizes), 0
    for number in reversed(range(len(sizes))):
        if bucket_elements and bucket_elements + sizes[number] > limit:
            buckets.append(range(number + 1, bucket_stop))
            bucket_stop, bucket_elements = number + 1, 0
        bucket_elements += sizes[number]
    return [*buckets, range(bucket_stop)] if bucket_stop else buckets


def cut_evenly(sizes: Sequence[int], length: int, ranks: int, limit: int) -> list[range]:
    """The buckets of `cut_into_buckets` as elements of the flat buffer, from its beginning. Each begins a little later,
    so that `ranks` divide it. length: of the buffer, with padding; a multiple of `ranks`."""
    parameter_starts, step = [0, *accumulate(sizes)], ALIGNED * ranks
    bucket_starts = [parameter_starts[numbers.start] for numbers in cut_into_buckets(sizes, limit)]
    even_starts = sorted({0, *(-(-start // step) * step for start in bucket_starts)})
    return [range(*pair) for pair in pairwise([*(start for start in even_starts if start < length), length])]


def find_owned(whole: range, length: int, ranks: int, rank: int) -> range:
    """The elements in `whole` that one of `ranks` ranks updates of a flat buffer of `length`: ZeRO gives each an equal
    part."""
    part = length // ranks
    start = max(rank * part, whole.start)
    return range(start, max(start, min(rank * part + part, whole.stop)))
