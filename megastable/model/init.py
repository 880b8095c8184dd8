"""Initial weights: a pure function of seed and parameter name, whatever the layout.

Normal with `init_std`; projections back into the residual stream are scaled by 1 / sqrt(2 layers) (GPT-2, section
2.3); norms start at one, biases at zero. A rank draws the numbers of whole tensors, in chunks, and keeps those that it
holds: the same bytes under every tensor, pipeline and ZeRO layout, on any number of threads.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megastable.base.hardware import ranks_of_host
from megastable.config.tree import ModelConfig
from megastable.parallel.sharding import Placement, placement_of, shape_of, shard
from megastable.parallel.topology import TensorParallel

CHUNK = 1 << 18  # numbers drawn at a time: in fp32 they stay in a core's cache
BLOCK = 16  # numbers that torch draws together: cut in multiples of it, a tensor has the same numbers


def threads_to_draw() -> int:
    """The cores of this rank: its share of the host's, or fewer, where it is bound to some."""
    share = (os.cpu_count() or 1) // ranks_of_host()
    return max(1, min(len(os.sched_getaffinity(0)), share))


def _std_and_generator(placement: Placement, config: ModelConfig, seed: int) -> tuple[float, torch.Generator]:
    """Standard deviation and generator of a matrix."""
    into_residual = placement.name.endswith((".attention.out.weight", ".mlp.down.weight"))
    std = config.init_std / math.sqrt(2 * config.layers) if into_residual else config.init_std
    digest = hashlib.blake2b(f"{seed}/{placement.name}".encode(), digest_size=8).digest()
    return std, torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def _of_vector(placement: Placement) -> float:
    return 0.0 if placement.name.endswith(".bias") else 1.0


def whole_weight(placement: Placement, shape: tuple[int, ...], config: ModelConfig, seed: int) -> Tensor:
    """The initial value, fp32, of the whole tensor: the plain reference of `fill`."""
    if len(shape) == 1:
        return torch.full(shape, _of_vector(placement))
    std, generator = _std_and_generator(placement, config, seed)
    return torch.empty(shape).normal_(0.0, std, generator=generator)


@dataclass(frozen=True)
class ParameterPart:
    """Elements of a parameter to be filled: `into`, flat, of any dtype and device, gets those of its tensor-parallel
    shard (of `shape`) from `start` on, and zeros beyond the shard's end."""

    placement: Placement
    shape: tuple[int, ...]
    into: Tensor
    start: int = 0


def initialise(
    module: nn.Module, config: ModelConfig, tp: TensorParallel, seed: int, data_rank: int = 0
) -> None:
    """Fill every parameter of `module` in place, on all cores of this rank; those on the meta device stay empty.

    data_rank: whose part of a parameter it is, where ZeRO 3 has taken the parameters apart.
    """
    parts = []
    for p in module.parameters():
        piece: Tensor | None = getattr(p, "ds_tensor", None)
        if piece is not None:
            parts.append(ParameterPart(placement_of(p), shape_of(p), piece, data_rank * len(piece)))
        elif not p.is_meta:
            parts.append(ParameterPart(placement_of(p), shape_of(p), p.detach().view(-1)))
    fill(parts, config, tp, seed, threads_to_draw())


def fill(
    parts: Iterable[ParameterPart], config: ModelConfig, tp: TensorParallel, seed: int, threads: int
) -> None:
    """Fill `parts` on so many threads. Of numbers that are on their way each thread holds a chunk, in fp32 and as they
    are to be."""
    # The longest first: none is left at the end for which one thread would be waited.
    ordered = sorted(parts, key=lambda part: -math.prod(part.shape))
    draw = partial(_fill, config=config, tp=tp, seed=seed)
    before = torch.get_num_threads()
    try:
        # One of torch's own for each: else each would start as many for its copies.
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            list(pool.map(draw, ordered))
    finally:
        torch.set_num_threads(before)  # a thread of the pool sets it for all threads to come


@torch.no_grad()
def _fill(part: ParameterPart, config: ModelConfig, tp: TensorParallel, seed: int) -> None:
    placement, into = part.placement, part.into
    size = max(math.prod(part.shape) - part.start, 0)  # of what is there of the shard
    into[size:] = 0
    if len(part.shape) == 1:
        into[:size] = _of_vector(placement)
        return
    rows, columns = part.shape
    if placement.dim is not None:
        whole = sum(placement.sections)
        rows, columns = (whole, columns) if placement.dim == 0 else (rows, whole)
    std, generator = _std_and_generator(placement, config, seed)
    for first, chunk in _chunks(rows, columns, std, generator):
        for at, mine in _of_shard(chunk, first, placement, tp):
            begin = at * part.shape[1] - part.start  # of these rows in `into`
            low, high = max(-begin, 0), min(mine.numel(), len(into) - begin)
            if low < high:
                into[begin + low : begin + high] = mine.reshape(-1)[low:high]


def _chunks(rows: int, columns: int, std: float, generator: torch.Generator) -> Iterator[tuple[int, Tensor]]:
    """The first row and the numbers, fp32 [some rows, columns], of a matrix of normal numbers from its top on; valid
    until the next one."""
    unit = BLOCK // math.gcd(columns, BLOCK)
    step = max(CHUNK // columns // unit, 1) * unit
    # Of less than a block torch draws other numbers: what is left goes with the last chunk.
    starts = [start for start in range(0, rows, step) if start == 0 or (rows - start) * columns >= BLOCK]
    ends = [*starts[1:], rows]
    most = max(end - start for start, end in zip(starts, ends, strict=True)) * columns
    memory = torch.empty(most, dtype=torch.float32, device="cpu")
    for start, end in zip(starts, ends, strict=True):
        drawn = memory[: (end - start) * columns].normal_(0.0, std, generator=generator)
        yield start, drawn.view(-1, columns)


def _of_shard(
    chunk: Tensor, first: int, placement: Placement, tp: TensorParallel
) -> Iterator[tuple[int, Tensor]]:
    """Rows of a chunk, which begins with row `first` of the whole tensor, that are of this tensor rank's shard, cut to
    its columns; and where they begin there."""
    if placement.dim != 0 or tp.size == 1:
        yield first, shard(chunk, placement, tp.rank, tp.size)
        return
    passed = 0
    for section in placement.sections:
        size = section // tp.size
        begin, local = passed + tp.rank * size, passed // tp.size
        low, high = max(begin, first), min(begin + size, first + len(chunk))
        if low < high:
            yield local + low - begin, chunk[low - first : high - first]
        passed += section
