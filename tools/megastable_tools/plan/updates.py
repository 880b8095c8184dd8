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
    dim: int | None
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


@dataclass(frozen=True)
class BlockWeight:
    """A fused weight of a block, whole. name: inside of the block. dim: the dimension that tensor parallelism splits;
    None: every rank has all of it."""

    name: str
    dim: int | None
    sections: tuple[int, ...]
    shape: tuple[int, int]

    @property
    def is_router(self) -> bool:
        return self.dim is None

    @property
    def is_expert(self) -> bool:
        """Whether it is of a routed expert."""
        return self.name.startswith("mlp.experts.")

    def count_elements(self, tensor: int) -> int:
        """On a tensor rank."""
        return self.shape[0] * self.shape[1] // (1 if self.dim is None else tensor)


@lru_cache(maxsize=256)
def list_block_weights(model: ModelConfig, routed: bool, expert_ranks: int = 1) -> tuple[BlockWeight, ...]:
    """The matrices of a block in order. routed: of one with routed experts, of which a rank has 1 / `expert_ranks`."""
    h, query_width = model.hidden, model.heads * model.head_width
    key_width = model.key_value_heads * model.head_width

    def make_weight(name: str, dim: int | None, *sections: int) -> BlockWeight:
        shape = (h, sum(sections)) if dim == 1 else (sum(sections), h)
        return BlockWeight(name, dim, sections, shape)

    mlp_widths = {"mlp": model.ffn_width}
    weights = [
        make_weight("attention.qkv", 0, query_width, key_width, key_width),
        make_weight("attention.out", 1, query_width),
    ]
    if routed:
        experts = model.experts
        assert experts is not None
        weights.append(make_weight("mlp.router", None, experts.count))
        own_experts = range(experts.count // expert_ranks)
        mlp_widths = {f"mlp.experts.{number}": model.expert_width for number in own_experts}
        if experts.shared:
            mlp_widths["mlp.shared"] = model.expert_width * experts.shared
    for mlp_name, width in mlp_widths.items():
        weights.append(make_weight(f"{mlp_name}.gate_up", 0, width, width))
        weights.append(make_weight(f"{mlp_name}.down", 1, width))
    return tuple(weights)


@lru_cache(maxsize=64)
def stage_matrices(model: ModelConfig, blocks: int, routed: int) -> tuple[Matrix, ...]:
    """The matrices of a stage of some blocks, whole. routed: of these the last ones, with routed experts."""
    weights = _weights(model, blocks, routed)
    return tuple(m for placed, shape in weights for m in split_in_matrices(placed, shape))


def busiest_flops(model: ModelConfig, blocks: int, routed: int, ranks: int) -> float:
    """Floating-point operations of the rank of a stage with the most to orthogonalize: about a fair share, or the
    largest matrix if that is more."""
    matrix_flops = [muon_matrix.flops for muon_matrix in stage_matrices(model, blocks, routed)]
    return max(sum(matrix_flops) / ranks, *matrix_flops)


@lru_cache(maxsize=16)
def stage_rounds(
    model: ModelConfig, blocks: int, routed: int, tensor: int, data: int, zero: int
) -> list[Round]:  # fmt: skip
    """The exchange of a stage, in one round for each of its flat buffers: that of the routers, if there are any, and
    that of the other matrices. Under ZeRO 3 the cost grows with the number of ranks times matrices."""
    stage_weights = list(_weights(model, blocks, routed))
    routers = [weight for weight in stage_weights if weight[0].dim is None]
    split_weights = [weight for weight in stage_weights if weight[0].dim is not None]
    both_buffers = [buffer for buffer in (routers, split_weights) if buffer]
    return [of for buffer in both_buffers for of in _plan_buffer(buffer, tensor, data, zero)]


def _plan_buffer(
    stage_weights: list[tuple[PlannedPlacement, tuple[int, int]]], tensor: int, data: int, zero: int
) -> list[Round]:  # fmt: skip
    """The exchange of some weights of a stage, with their whole shapes, that lie in one flat buffer."""
    weight_sizes = [
        rows * column_count // (1 if placed.dim is None else tensor)
        for placed, (rows, column_count) in stage_weights
    ]
    # ZeRO 1 and 2 cut all together, padded to 4 bytes of bf16 on every rank.
    own = -(-sum(weight_sizes) // (2 * data)) * 2
    held: list[list[PlannedPiece]] = [[] for _ in range(data * tensor)]
    first = 0
    for (placed, (rows, column_count)), weight_size in zip(stage_weights, weight_sizes, strict=True):
        rows //= tensor if placed.dim == 0 else 1
        column_count //= tensor if placed.dim == 1 else 1
        part = -(-weight_size // data)
        for d in range(data):
            begin, end = (d * part, (d + 1) * part) if zero == 3 else (d * own - first, (d + 1) * own - first)
            begin, end = max(begin, 0), min(end, weight_size)
            for tensor_rank in range(tensor if begin < end else 0):
                is_counted = placed.dim is not None or tensor_rank == 0
                piece = PlannedPiece(placed, (rows, column_count), begin, end - begin, counted=is_counted)
                held[d * tensor + tensor_rank].append(piece)
        first += weight_size
    return plan_rounds(held, tensor, limit=sum(weight_sizes) * tensor)


def _weights(
    model: ModelConfig, blocks: int, routed: int
) -> Iterator[tuple[PlannedPlacement, tuple[int, int]]]:  # fmt: skip
    """The fused weights of some blocks in order, with their whole shapes."""
    for block_number in range(blocks):
        for weight in list_block_weights(model, block_number >= blocks - routed):
            weight_name = f"blocks.{block_number}.{weight.name}.weight"
            yield PlannedPlacement(weight_name, weight.dim, weight.sections), weight.shape
