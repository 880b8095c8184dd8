"""The matrices of a pipeline stage that Muon orthogonalizes, and their exchange. Pure; without torch or an engine.

Names, shapes and the order of the fused weights are those of model/; the pieces are cut as DeepSpeed 0.19.8 cuts them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from megastable.config.model import ModelConfig
from megastable.optim.matrices import Matrix, matrices
from megastable.optim.ownership import Round, plan


@dataclass(frozen=True)
class PlannedPlacement:
    """See `parallel.sharding.Placement`, which needs torch."""

    name: str
    dim: int
    sections: tuple[int, ...]


@dataclass(frozen=True)
class PlannedPiece:
    """A piece of a parameter on a rank; see `parallel.fragments.Fragment`. Where it lies in the buffer is not known."""

    placement: PlannedPlacement
    shape: tuple[int, int]
    start: int
    numel: int
    offset: int = 0
    counted: bool = True


@lru_cache(maxsize=64)
def stage_matrices(model: ModelConfig, blocks: int) -> tuple[Matrix, ...]:
    """The matrices of a stage of some blocks, whole."""
    return tuple(m for placed, shape in _weights(model, blocks) for m in matrices(placed, shape))


def busiest_flops(model: ModelConfig, blocks: int, ranks: int) -> float:
    """Floating-point operations of the rank of a stage with the most to orthogonalize: about a fair share, or the
    largest matrix if that is more."""
    flops = [matrix.flops for matrix in stage_matrices(model, blocks)]
    return max(sum(flops) / ranks, *flops)


@lru_cache(maxsize=16)
def stage_rounds(model: ModelConfig, blocks: int, tensor: int, data: int, zero: int) -> list[Round]:
    """The exchange of a stage, in one round. Under ZeRO 3 the cost grows with the number of ranks times matrices."""
    weights = list(_weights(model, blocks))
    sizes = [rows * columns // tensor for _, (rows, columns) in weights]
    # ZeRO 1 and 2 cut all together, padded to 4 bytes of bf16 on every rank.
    own = -(-sum(sizes) // (2 * data)) * 2
    held: list[list[PlannedPiece]] = [[] for _ in range(data * tensor)]
    first = 0
    for (placed, (rows, columns)), size in zip(weights, sizes, strict=True):
        shape = (rows // tensor, columns) if placed.dim == 0 else (rows, columns // tensor)
        part = -(-size // data)
        for d in range(data):
            begin, end = (d * part, (d + 1) * part) if zero == 3 else (d * own - first, (d + 1) * own - first)
            begin, end = max(begin, 0), min(end, size)
            for t in range(tensor if begin < end else 0):
                held[d * tensor + t].append(PlannedPiece(placed, shape, begin, end - begin))
        first += size
    return plan(held, tensor, limit=sum(sizes) * tensor)


def _weights(model: ModelConfig, blocks: int) -> Iterator[tuple[PlannedPlacement, tuple[int, int]]]:
    """The fused weights of some blocks in order, with their whole shapes."""
    h, f = model.hidden, model.ffn_width
    q, k = model.heads * model.head_width, model.key_value_heads * model.head_width
    for index in range(blocks):
        for name, dim, sections in (
            ("attention.qkv", 0, (q, k, k)), ("attention.out", 1, (q,)),
            ("mlp.gate_up", 0, (f, f)), ("mlp.down", 1, (f,)),
        ):  # fmt: skip
            shape = (sum(sections), h) if dim == 0 else (h, sum(sections))
            yield PlannedPlacement(f"blocks.{index}.{name}.weight", dim, sections), shape
