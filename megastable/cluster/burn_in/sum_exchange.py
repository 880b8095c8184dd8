"""All-reduces of integers with known sums, between the devices of a host.

    for state in exchanges(device, seed, seconds): ...     # on every rank of the process group

Each rank looks at what it has received. A second group, over loopback, carries whether one of them has found something:
then all repeat that all-reduce at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from megastable.cluster.burn_in import draws
from megastable.cluster.burn_in.bits import mismatch
from megastable.cluster.burn_in.device_rounds import after
from megastable.cluster.burn_in.exact_cases import EXACT, name
from megastable.cluster.burn_in.faults import AGAIN, DeviceBurnIn
from megastable.cluster.burn_in.trials import CaseTrial, on_cpu

DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.int32)
ELEMENTS = {"cuda": (1 << 20, 1 << 26), "cpu": (1 << 10, 1 << 18)}


def exchanges(device: torch.device, seed: int, seconds: float) -> Iterator[DeviceBurnIn]:
    """The state of this rank before and after every all-reduce. At least one of each dtype. Raises RuntimeError if one
    fails."""
    flags = dist.new_group(backend="gloo")
    until, state, round_, go_on = time.monotonic() + seconds, DeviceBurnIn(device=str(device)), 0, True
    while go_on:
        yield state.model_copy(update={"now": f"all_reduce, round {round_}"})
        state = after(state, "all_reduce", round_, 0, trial(device, seed, round_, flags))
        round_ += 1
        go_on = _any(round_ < len(DTYPES) or time.monotonic() < until, flags)
        yield state


def trial(device: torch.device, seed: int, round_: int, flags: dist.ProcessGroup) -> CaseTrial:
    """One all-reduce; if a rank has a wrong sum, `AGAIN` more. A rank whose own sums were right reports nothing."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dtype, count, parts = contributions(device.type, seed, round_, ranks)
    mine = draws.tiled(parts[rank].to(dtype), (count,)).to(device)
    answer = draws.tiled(parts.sum(0).to(dtype), (count,))
    what = f"{name(dtype)} [{count}] over {ranks} ranks"
    found = mismatch(answer, *on_cpu([all_reduced(mine)]))
    if not _any(found is not None, flags):
        return CaseTrial(what, 1)
    again = sum(mismatch(answer, *on_cpu([all_reduced(mine)])) is not None for _ in range(AGAIN))
    return CaseTrial(what, 1, found, again)


def contributions(kind: str, seed: int, round_: int, ranks: int) -> tuple[torch.dtype, int, Tensor]:
    """Pure: the dtype, the number of elements, and of each rank the numbers that its message repeats: int64 [ranks, n]
    on the CPU. All their sums are exact in the dtype."""
    key = draws.key("all_reduce", seed, round_)
    dtype = DTYPES[round_ % len(DTYPES)]
    most = EXACT.get(dtype, (1 << 31) - 1) // ranks
    parts = draws.nonzero(draws.key(key, "parts"), (ranks, draws.PRIME), most)
    return dtype, draws.between(*ELEMENTS[kind], key, "count"), parts


def all_reduced(mine: Tensor) -> Tensor:
    total = mine.clone()
    dist.all_reduce(total)
    return total


def _any(flag: bool, group: dist.ProcessGroup) -> bool:
    """Whether any rank says so."""
    told = torch.tensor([int(flag)])
    dist.all_reduce(told, op=dist.ReduceOp.MAX, group=group)
    return bool(told.item())
