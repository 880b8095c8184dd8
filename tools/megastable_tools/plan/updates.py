"""Memory and traffic of an optimizer's update, by its name. Pure; without torch.

Counted from the operations in optim/: each reads its inputs and writes its result, in fp32. AdamW with bf16 moments is
one compiled kernel on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from megastable.config.model import ModelConfig
from megastable.config.optimizers import OptimizerConfig
from megastable.optim.ownership import Matrix, Round, plan_rounds, split_in_matrices


@dataclass(frozen=True)
class UpdateCost:
    """matrices, vectors: tensors of state per tensor of that kind. bytes: of memory traffic per parameter, gradient,
    weight and state included. scratch: fp32 elements of intermediate results per element of a chunk."""

    matrices: int
    vectors: int
    bytes: int
    scratch: int


_COSTS = {
    "adamw": UpdateCost(2, 2, 28, 0),
    "stable_adamw": UpdateCost(2, 2, 28 + 44, 2),  # before the kernel: its lag
    "spam": UpdateCost(2, 2, 28 + 74, 4),  # the clipped gradient
    "stable_spam": UpdateCost(2, 2, 28 + 84, 3),  # largest element, norm, the scaled gradient
    "lamb": UpdateCost(2, 2, 28 + 60, 3),  # the step, for its norm
    "adafactor": UpdateCost(0, 1, 84, 2),
    "sgd": UpdateCost(1, 1, 60, 2),
    "muon": UpdateCost(2, 2, 28 + 40, 2),  # with a matrix's two tensors of state; it has one
}


def update_cost_of(o: OptimizerConfig) -> UpdateCost:
    """The cost of an update under these settings. Not counted: shared state, a few rows and columns."""
    found = _COSTS[o.name]
    if o.name == "adamw" and o.moments == "bf16":
        return UpdateCost(2, 2, 20, 0)
    if (o.name == "spam" and o.spam.density < 1) or (o.name == "stable_spam" and o.stable_spam.density < 1):
        # The hash of each element, 8 bytes, and what it chooses.
        return UpdateCost(found.matrices, found.vectors, found.bytes + 240, found.scratch + 8)
    if o.name == "adafactor" and o.adafactor.momentum:
        return UpdateCost(1, 2, found.bytes + 28, found.scratch)
    return found


# The matrices of a pipeline stage that Muon orthogonalizes, and their exchange. Names, shapes and the order of the
# fused weights are those of model/; the pieces are cut as DeepSpeed 0.19.8 cuts them.


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
    weights = _weights(model, blocks)
    return tuple(m for placed, shape in weights for m in split_in_matrices(placed, shape))


def busiest_flops(model: ModelConfig, blocks: int, ranks: int) -> float:
    """Floating-point operations of the rank of a stage with the most to orthogonalize: about a fair share, or the
    largest matrix if that is more."""
    matrix_flops = [muon_matrix.flops for muon_matrix in stage_matrices(model, blocks)]
    return max(sum(matrix_flops) / ranks, *matrix_flops)


@lru_cache(maxsize=16)
def stage_rounds(model: ModelConfig, blocks: int, tensor: int, data: int, zero: int) -> list[Round]:
    """The exchange of a stage, in one round. Under ZeRO 3 the cost grows with the number of ranks times matrices."""
    stage_weights = list(_weights(model, blocks))
    weight_sizes = [rows * column_count // tensor for _, (rows, column_count) in stage_weights]
    # ZeRO 1 and 2 cut all together, padded to 4 bytes of bf16 on every rank.
    own = -(-sum(weight_sizes) // (2 * data)) * 2
    held: list[list[PlannedPiece]] = [[] for _ in range(data * tensor)]
    first = 0
    for (placed, (rows, column_count)), weight_size in zip(stage_weights, weight_sizes, strict=True):
        whole_shape = (rows // tensor, column_count) if placed.dim == 0 else (rows, column_count // tensor)
        part = -(-weight_size // data)
        for d in range(data):
            begin, end = (d * part, (d + 1) * part) if zero == 3 else (d * own - first, (d + 1) * own - first)
            begin, end = max(begin, 0), min(end, weight_size)
            for tensor_rank in range(tensor if begin < end else 0):
                held[d * tensor + tensor_rank].append(PlannedPiece(placed, whole_shape, begin, end - begin))
        first += weight_size
    return plan_rounds(held, tensor, limit=sum(weight_sizes) * tensor)


def _weights(model: ModelConfig, blocks: int) -> Iterator[tuple[PlannedPlacement, tuple[int, int]]]:
    """The fused weights of some blocks in order, with their whole shapes."""
    hidden_size, f = model.hidden, model.ffn_width
    query_width, key_width = model.heads * model.head_width, model.key_value_heads * model.head_width
    for block_number in range(blocks):
        for weight_name, dim, sections in (
            ("attention.qkv", 0, (query_width, key_width, key_width)), ("attention.out", 1, (query_width,)),
            ("mlp.gate_up", 0, (f, f)), ("mlp.down", 1, (f,)),
        ):  # fmt: skip
            whole_shape = (sum(sections), hidden_size) if dim == 0 else (hidden_size, sum(sections))
            yield PlannedPlacement(f"blocks.{block_number}.{weight_name}.weight", dim, sections), whole_shape
