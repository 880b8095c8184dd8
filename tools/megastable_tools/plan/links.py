"""Links that a group of ranks crosses, and the cost of a message there. Pure; without torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from megastable.parallel.layout import Layout
from megastable_tools.plan.cluster import ClusterConfig


@dataclass(frozen=True)
class Crossing:
    """The link between the members of a group.

    rate: bytes a second that leave a rank in a ring; own: on the slowest link crossed; inside: on the host's.
    near, far: latency in seconds inside a host and between two. hosts: number that the group spans;
    together: its members in one host.
    """

    name: str
    rate: float
    own: float
    inside: float
    near: float
    far: float
    hosts: int
    together: int

    @property
    def told(self) -> str:
        return f"over the {self.name} at {self.rate / 1e9:.3g} GB/s"

    def count_seconds(self, collective: str, sent: float, ranks: int) -> float:
        """Seconds for `sent` bytes that leave each of `ranks` ranks. An all-to-all is not a ring: data for other hosts
        goes over the network, each rank with its own card, and the rest inside the host at the same time. What a rank
        sends to one other goes over its own card, too."""
        if collective == "send":
            return sent / min(self.own, self.inside)
        if collective == "all-to-all" and self.hosts > 1:
            far_bytes = sent * (ranks - self.together) / (ranks - 1)
            return max(far_bytes / self.own, (sent - far_bytes) / self.inside)
        return sent / self.rate


@lru_cache(maxsize=1024)
def find_crossing(group: str, layout: Layout, cluster: ClusterConfig) -> Crossing:
    """The link that the groups of a kind cross, by the numbers of their ranks: pipeline outermost, tensor innermost,
    and hosts filled one after another. Of several groups the slowest counts: all wait for it.

    A ring passes through every host once, and what enters a host is divided over the network cards of all of the
    group's members there: a data-parallel group without tensor parallelism has eight, one with tensor 8 has one.
    """
    e, per = cluster.efficiency, cluster.gpus_per_host
    inside, near = cluster.host.gb_per_second * 1e9 * e.host, cluster.host.latency_us * 1e-6
    own_rate, far = cluster.network.gb_per_second * 1e9 * e.network, cluster.network.latency_us * 1e-6
    rank_stride, group_size, first_ranks = _stride(group, layout)
    found = []
    for base in sorted({first_rank % per for first_rank in first_ranks}):
        hosts = Counter(rank // per for rank in range(base, base + group_size * rank_stride, rank_stride))
        together = min(hosts.values())
        if len(hosts) == 1:
            found.append(Crossing("host", inside, inside, inside, near, near, 1, together))
        else:
            ring_rate = min(inside, own_rate * together)
            found.append(Crossing("network", ring_rate, own_rate, inside, near, far, len(hosts), together))
    return min(found, key=lambda c: (c.rate, c.name == "host"))


def _stride(group: str, lay: Layout) -> tuple[int, int, Iterable[int]]:
    """(distance of neighbours, members, first ranks) of the groups of a kind. For a pipeline these are two neighbouring
    stages, which communicate, and for tied stages one rank of each."""
    t, d, p = lay.tensor, lay.data, lay.pipeline
    group_starts = [stage * t * d + k for stage in range(p) for k in range(t)]  # of data-parallel groups

    def list_neighbours(size: int) -> tuple[int, int, Iterable[int]]:
        return t, size, (start + first * t for start in group_starts for first in range(0, d, size))

    def list_alike(size: int) -> tuple[int, int, Iterable[int]]:
        """The data ranks in the same place of all groups of so many neighbours."""
        return size * t, d // size, (start + place * t for start in group_starts for place in range(size))

    match group:
        case "tensor":
            return 1, t, range(0, lay.world, t)
        case "context" | "data" | "shard" | "expert":
            return list_neighbours(
                {"context": lay.context, "data": d, "shard": lay.shards, "expert": lay.expert}[group]
            )
        case "replica" | "expert data":
            return list_alike(lay.shards if group == "replica" else lay.expert)
        case "stage":
            return 1, t * d, range(0, lay.world, t * d)
        case "pipeline":
            return t * d, min(p, 2), range(max(p - 1, 1) * t * d)
        case "tied":
            return (p - 1) * t * d or 1, min(p, 2), range(t * d)
    # The whole world, or a tensor group of every stage: the same number of hosts.
    return (1, lay.world, (0,)) if group == "world" else (t * d, p, (0,))


def estimate_latency(collective: str, ranks: int, link: Crossing) -> float:
    """Seconds of an empty message: a ring's rounds, or a tree's if that is faster (NCCL has no tree for all-gather and
    reduce-scatter)."""
    if collective in ("send", "all-to-all"):
        return link.far
    ring = (ranks - link.hosts) * link.near + link.hosts * link.far
    if collective == "all-reduce":
        return min(2 * ring, 2 * math.ceil(math.log2(ranks)) * link.far)
    if collective in ("broadcast", "reduce"):
        return min(ring, math.ceil(math.log2(ranks)) * link.far)
    return ring
