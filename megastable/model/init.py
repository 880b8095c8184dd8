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
from megastable.parallel.sharding import Placement, cut_shard, placement_of, shape_of
from megastable.parallel.topology import TensorParallel

CHUNK = 1 << 18  # numbers drawn at a time: in fp32 they stay in a core's cache
BLOCK = 16  # torch draws this many together: chunks of a multiple give the same numbers


def std_of(name: str, rows: int, columns: int, config: ModelConfig) -> float:
    """Standard deviation of an initial matrix [rows, columns], outputs by inputs, before DeepNorm's factor.

    Under muP (arXiv:2203.03466, table 8) that of the blocks' matrices falls with the root of the width.

    The experts of a token begin together as strong as a dense MLP as wide as all of them: their weights, which add up
    to `scale`, would make them weaker by `scale` / top_k (docs/experts.md). Weights that are not normalized may grow
    far more, and change nothing.
    """
    if name == "embedding.weight":
        return config.init_std
    if name == "head.weight" and config.mup is not None and config.mup.zero_output:
        return 0.0
    strength = 1.0
    if ".mlp.experts." in name and name.endswith(".down.weight"):
        experts = config.experts
        assert experts is not None
        if experts.normalize:
            columns, strength = columns * experts.top_k, experts.top_k / experts.scale
    kinds = {
        "normal": config.init_std, "fan_in": columns**-0.5, "xavier": math.sqrt(2 / (rows + columns)),
        "small": math.sqrt(2 / (5 * config.hidden)),
    }  # fmt: skip
    std = strength * kinds[config.init] / math.sqrt(config.width_ratio if name.startswith("blocks.") else 1.0)
    if not name.endswith((".attention.out.weight", ".down.weight")) or config.residual_init == "same":
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
    row_sections = placement.sections if placement.dim == 0 else (rows,)
    section_gains = [1.0] * len(row_sections)
    if config.norms == "deep" and placement.name.startswith("blocks."):
        plain_sections = 2 if placement.name.endswith(".attention.qkv.weight") else 0
        section_gains[plain_sections:] = [(8 * config.layers) ** -0.25] * (len(row_sections) - plain_sections)
    sections = zip(row_sections, section_gains, strict=True)
    return [(n, gain * std_of(placement.name, n, columns, config)) for n, gain in sections]


def _generator(placement: Placement, seed: int) -> torch.Generator:
    name_digest = hashlib.blake2b(f"{seed}/{placement.name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(name_digest, "little") >> 1)


def _of_vector(placement: Placement, config: ModelConfig) -> float:
    return 0.0 if placement.name.endswith(".bias") or config.zero_centered_norms else 1.0


def _scaled(chunk: Tensor, first: int, parts: list[tuple[int, float]]) -> Tensor:
    """Rows of a whole matrix, from `first` on, drawn with the deviation of its first part, with that of their own; in
    place."""
    part_begin = 0
    for part_rows, part_std in parts:
        part_end = part_begin + part_rows
        if part_std != parts[0][1]:
            chunk[max(part_begin - first, 0) : max(part_end - first, 0)] *= part_std / parts[0][1]
        part_begin = part_end
    return chunk


def whole_weight(placement: Placement, shape: tuple[int, ...], config: ModelConfig, seed: int) -> Tensor:
    """The initial value, fp32, of the whole tensor: the plain reference of `fill_parts`."""
    if len(shape) == 1:
        return torch.full(shape, _of_vector(placement, config))
    parts = section_stds(placement, shape[0], shape[1], config)
    drawn_numbers = torch.empty(shape).normal_(0.0, parts[0][1], generator=_generator(placement, seed))
    return _scaled(drawn_numbers, 0, parts)


@dataclass(frozen=True)
class ParameterPart:
    """A flat range of a parameter to fill: `into`, of any dtype and device, gets the elements of its tensor-parallel
    shard (of `shape`) from `start` on, and zeros beyond the shard's end."""

    placement: Placement
    shape: tuple[int, ...]
    into: Tensor
    start: int = 0


def initialise_weights(
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
    # Cores of this rank: its share of the host's, or fewer if it is bound to some.
    cores = min(len(os.sched_getaffinity(0)), (os.cpu_count() or 1) // ranks_of_host())
    fill_parts(parts, config, tp, seed, max(1, cores))


def fill_parts(
    parts: Iterable[ParameterPart], config: ModelConfig, tp: TensorParallel, seed: int, threads: int
) -> None:
    """Fill `parts` on this many threads. Each thread holds one chunk of numbers, in fp32 and in the target dtype."""
    # The longest first, so that no thread works alone at the end.
    ordered_parts = sorted(parts, key=lambda part: -math.prod(part.shape))
    draw_part = partial(_fill, config=config, tp=tp, seed=seed)
    threads_before = torch.get_num_threads()
    try:
        # One torch thread each: else every worker would start as many again for its copies.
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as thread_pool:
            list(thread_pool.map(draw_part, ordered_parts))
    finally:
        torch.set_num_threads(threads_before)  # a pool thread sets it for all later threads


@torch.no_grad()
def _fill(part: ParameterPart, config: ModelConfig, tp: TensorParallel, seed: int) -> None:
    placement, into = part.placement, part.into
    shard_size = max(math.prod(part.shape) - part.start, 0)  # elements of the shard left to fill
    into[shard_size:] = 0
    if len(part.shape) == 1:
        into[:shard_size] = _of_vector(placement, config)
        return
    whole_shape = list(part.shape)
    if placement.dim is not None:
        whole_shape[placement.dim] = sum(placement.sections)
    whole_rows, whole_columns = whole_shape
    section_parts = section_stds(placement, whole_rows, whole_columns, config)
    for first, chunk in _chunks(whole_rows, whole_columns, section_parts[0][1], _generator(placement, seed)):
        _scaled(chunk, first, section_parts)
        for shard_row, own_rows in _of_shard(chunk, first, placement, tp):
            into_begin = shard_row * part.shape[1] - part.start  # of these rows in `into`
            first_element, last_element = max(-into_begin, 0), min(own_rows.numel(), len(into) - into_begin)
            if first_element < last_element:
                own_elements = own_rows.reshape(-1)[first_element:last_element]
                into[into_begin + first_element : into_begin + last_element] = own_elements


def _chunks(rows: int, columns: int, std: float, generator: torch.Generator) -> Iterator[tuple[int, Tensor]]:
    """The first row and the numbers, fp32 [some rows, columns], of a matrix of normal numbers, from the top; each
    chunk is valid until the next one."""
    row_unit = BLOCK // math.gcd(columns, BLOCK)
    chunk_rows = max(CHUNK // columns // row_unit, 1) * row_unit
    # Torch draws less than a block differently: the remainder goes with the last chunk.
    chunk_starts = [
        start for start in range(0, rows, chunk_rows) if start == 0 or (rows - start) * columns >= BLOCK
    ]
    chunk_ends = [*chunk_starts[1:], rows]
    chunk_size = (
        max(range_end - range_start for range_start, range_end in zip(chunk_starts, chunk_ends, strict=True))
        * columns
    )
    chunk_memory = torch.empty(chunk_size, dtype=torch.float32, device="cpu")
    for range_start, range_end in zip(chunk_starts, chunk_ends, strict=True):
        drawn_numbers = chunk_memory[: (range_end - range_start) * columns].normal_(
            0.0, std, generator=generator
        )
        yield range_start, drawn_numbers.view(-1, columns)


def _of_shard(
    chunk: Tensor, first: int, placement: Placement, tp: TensorParallel
) -> Iterator[tuple[int, Tensor]]:
    """The rows of a chunk (starting at row `first` of the whole tensor) that belong to this tensor rank's shard, cut to
    its columns; and their first row in the shard."""
    if placement.dim != 0 or tp.size == 1:
        yield first, cut_shard(chunk, placement, tp.rank, tp.size)
        return
    passed_rows = 0
    for section_rows in placement.sections:
        shard_rows = section_rows // tp.size
        shard_begin, local_row = passed_rows + tp.rank * shard_rows, passed_rows // tp.size
        chunk_low, chunk_high = max(shard_begin, first), min(shard_begin + shard_rows, first + len(chunk))
        if chunk_low < chunk_high:
            yield local_row + chunk_low - shard_begin, chunk[chunk_low - first : chunk_high - first]
        passed_rows += section_rows
