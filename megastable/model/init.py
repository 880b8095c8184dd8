"""Initial weights as a pure function of seed and parameter name, independent of the layout.

Normal, by default with `init_std`; projections back into the residual stream are scaled by 1 / sqrt(2 layers) (GPT-2,
section 2.3); norms start at one, biases at zero. A rank draws the numbers of whole tensors in chunks and keeps its own:
the same bytes under every tensor, pipeline and ZeRO layout, on any number of threads.
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
from megastable.config.model import ModelConfig
from megastable.parallel.sharding import Placement, placement_of, shape_of, shard
from megastable.parallel.topology import TensorParallel

CHUNK = 1 << 18  # numbers drawn at a time: in fp32 they stay in a core's cache
BLOCK = 16  # torch draws this many together: chunks of a multiple give the same numbers


def threads_to_draw() -> int:
    """Cores of this rank: its share of the host's, or fewer if it is bound to some."""
    share = (os.cpu_count() or 1) // ranks_of_host()
    return max(1, min(len(os.sched_getaffinity(0)), share))


def std_of(name: str, rows: int, columns: int, config: ModelConfig) -> float:
    """Standard deviation of an initial matrix [rows, columns], outputs by inputs, before DeepNorm's factor.

    Under muP (arXiv:2203.03466, table 8) that of the blocks' matrices falls with the root of the width.
    """
    if name == "embedding.weight":
        return config.init_std
    if name == "head.weight" and config.mup is not None and config.mup.zero_output:
        return 0.0
    kinds = {
        "normal": config.init_std, "fan_in": columns**-0.5, "xavier": math.sqrt(2 / (rows + columns)),
        "small": math.sqrt(2 / (5 * config.hidden)),
    }  # fmt: skip
    std = kinds[config.init] / math.sqrt(config.width_ratio if name.startswith("blocks.") else 1.0)
    if not name.endswith((".attention.out.weight", ".mlp.down.weight")) or config.residual_init == "same":
        return std
    if config.residual_init == "zero":
        return 0.0
    if config.norms == "deep":
        return std
    # A transfer over depths scales the branches themselves: the base's depth counts here.
    return std / math.sqrt(2 * (config.layers / config.depth_ratio))


def section_stds(
    placement: Placement, rows: int, columns: int, config: ModelConfig
) -> list[tuple[int, float]]:
    """(rows, standard deviation) of the parts of a whole matrix, from the top: fused matrices are several.

    DeepNorm scales values, attention output and MLP by (8 layers)^(-1/4), not queries and keys (arXiv:2203.00555,
    figure 2).
    """
    sections = placement.sections if placement.dim == 0 else (rows,)
    gains = [1.0] * len(sections)
    if config.norms == "deep" and placement.name.startswith("blocks."):
        plain = 2 if placement.name.endswith(".attention.qkv.weight") else 0
        gains[plain:] = [(8 * config.layers) ** -0.25] * (len(sections) - plain)
    return [
        (n, gain * std_of(placement.name, n, columns, config))
        for n, gain in zip(sections, gains, strict=True)
    ]


def _generator(placement: Placement, seed: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{placement.name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def _of_vector(placement: Placement, config: ModelConfig) -> float:
    return 0.0 if placement.name.endswith(".bias") or config.zero_centered_norms else 1.0


def _scaled(chunk: Tensor, first: int, parts: list[tuple[int, float]]) -> Tensor:
    """Rows of a whole matrix, from `first` on, drawn with the deviation of its first part, with that of their own; in
    place."""
    begin = 0
    for rows, std in parts:
        end = begin + rows
        if std != parts[0][1]:
            chunk[max(begin - first, 0) : max(end - first, 0)] *= std / parts[0][1]
        begin = end
    return chunk


def whole_weight(placement: Placement, shape: tuple[int, ...], config: ModelConfig, seed: int) -> Tensor:
    """The initial value, fp32, of the whole tensor: the plain reference of `fill`."""
    if len(shape) == 1:
        return torch.full(shape, _of_vector(placement, config))
    parts = section_stds(placement, shape[0], shape[1], config)
    return _scaled(
        torch.empty(shape).normal_(0.0, parts[0][1], generator=_generator(placement, seed)), 0, parts
    )


@dataclass(frozen=True)
class ParameterPart:
    """A flat range of a parameter to fill: `into`, of any dtype and device, gets the elements of its tensor-parallel
    shard (of `shape`) from `start` on, and zeros beyond the shard's end."""

    placement: Placement
    shape: tuple[int, ...]
    into: Tensor
    start: int = 0


def initialise(
    module: nn.Module, config: ModelConfig, tp: TensorParallel, seed: int, data_rank: int = 0
) -> None:
    """Fill every parameter of `module` in place, on all cores of this rank; those on the meta device stay empty.

    data_rank: the data rank whose partition to fill, where ZeRO 3 has partitioned the parameters.
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
    """Fill `parts` on this many threads. Each thread holds one chunk of numbers, in fp32 and in the target dtype."""
    # The longest first, so that no thread works alone at the end.
    ordered = sorted(parts, key=lambda part: -math.prod(part.shape))
    draw = partial(_fill, config=config, tp=tp, seed=seed)
    before = torch.get_num_threads()
    try:
        # One torch thread each: else every worker would start as many again for its copies.
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            list(pool.map(draw, ordered))
    finally:
        torch.set_num_threads(before)  # a pool thread sets it for all later threads


@torch.no_grad()
def _fill(part: ParameterPart, config: ModelConfig, tp: TensorParallel, seed: int) -> None:
    placement, into = part.placement, part.into
    size = max(math.prod(part.shape) - part.start, 0)  # elements of the shard left to fill
    into[size:] = 0
    if len(part.shape) == 1:
        into[:size] = _of_vector(placement, config)
        return
    rows, columns = part.shape
    if placement.dim is not None:
        whole = sum(placement.sections)
        rows, columns = (whole, columns) if placement.dim == 0 else (rows, whole)
    parts = section_stds(placement, rows, columns, config)
    for first, chunk in _chunks(rows, columns, parts[0][1], _generator(placement, seed)):
        _scaled(chunk, first, parts)
        for at, mine in _of_shard(chunk, first, placement, tp):
            begin = at * part.shape[1] - part.start  # of these rows in `into`
            low, high = max(-begin, 0), min(mine.numel(), len(into) - begin)
            if low < high:
                into[begin + low : begin + high] = mine.reshape(-1)[low:high]


def _chunks(rows: int, columns: int, std: float, generator: torch.Generator) -> Iterator[tuple[int, Tensor]]:
    """The first row and the numbers, fp32 [some rows, columns], of a matrix of normal numbers, from the top; each
    chunk is valid until the next one."""
    unit = BLOCK // math.gcd(columns, BLOCK)
    step = max(CHUNK // columns // unit, 1) * unit
    # Torch draws less than a block differently: the remainder goes with the last chunk.
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
    """The rows of a chunk (starting at row `first` of the whole tensor) that belong to this tensor rank's shard, cut to
    its columns; and their first row in the shard."""
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
