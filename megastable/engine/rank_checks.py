"""Whether a rank computes or holds other numbers than it should: copies, gradients, products with known answers.

Copies: what several ranks hold and must hold alike, bit for bit: named tensors by axis of the layout, their
fingerprints; and whether these are equal, found out in one sum over all ranks. Every group of ranks has its own columns
in the sum: of the four quarters x of a fingerprint, the sums of x and of x^2. By the inequality of Cauchy and Schwarz
n * sum(x^2) = sum(x)^2 only if all x are equal; the sums are integers below 2^53, so fp64 holds them exactly for up to
2^21 ranks.

Gradients: digests of one rank's own gradient, parameter by parameter, by hooks on its backward pass: for any ZeRO
wrapper, and before anything is summed over data ranks. Equal bits show that two passes computed the same. Where kernels
sum in any order, checks and squares tell how far two gradients are apart: a check is their product with random signs,
so the difference of two checks has the size of the difference of the gradients (Alon, Matias and Szegedy, STOC 1996).

Products in the shapes of the model: a chip that always computes one column wrong shows at once, and nobody else's
result is needed to know whose fault it is. The numbers are integers so small that every sum is exact in the dtype, in
any order of summation; the answers are computed in fp64, by numpy. A longer test: `preflight --burn-in`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from megastable.base import products
from megastable.base.fingerprint import STEP, Marks, fingerprint_tensors
from megastable.base.hardware import kind_of
from megastable.config.model import ModelConfig
from megastable.data.loader import MicroBatch
from megastable.engine.engine import Engine
from megastable.engine.flatstate import KINDS
from megastable.parallel.layout import Layout
from megastable.parallel.sharding import is_split, placement_of

CHUNK = 1 << 20  # elements
SLOTS = 8  # sums of checks, of the whole gradient
TOLERANCE = 0.05  # of a gradient's norm, where kernels sum in any order
ALIKE = 0.01  # of its norm, another gradient that is this one times a number: bf16 rounds by 0.001


class Digest(NamedTuple):
    """Of a gradient: checksums, which are linear in it, and squared norms, of each slice; bits: that tell any change.
    maker: the kind of device that computed it; another kind rounds differently."""

    checks: tuple[float, ...]
    squares: tuple[float, ...]
    bits: tuple[int, ...] = ()
    maker: int = 0

    def is_like(self, other: Digest, exact: bool) -> bool:
        """Whether both are of one gradient. exact: a repeated step gives the same bits, on the same kind of device."""
        if exact and self.maker == other.maker:
            return self.bits == other.bits if self.bits else self == other
        own_square, other_square = sum(self.squares), sum(other.squares)
        larger_square = max(own_square, other_square)
        if not math.isfinite(larger_square):
            return not (math.isfinite(own_square) or math.isfinite(other_square))
        check_distance = sum((x - y) ** 2 for x, y in zip(self.checks, other.checks, strict=True))
        norm_difference = math.sqrt(own_square) - math.sqrt(other_square)
        return max(check_distance, norm_difference**2) <= TOLERANCE**2 * larger_square

    def describe_difference(self, right: Digest) -> str:
        """How this one, which is wrong, differs from `right`, as a phrase."""
        wrong_square, right_square = sum(self.squares), sum(right.squares)
        if not wrong_square:
            return "zero"
        if right_square and math.isfinite(wrong_square):
            check_pairs = list(zip(self.checks, right.checks, strict=True))
            sign = sum(a * b for a, b in check_pairs)
            norm_ratio = math.copysign(math.sqrt(wrong_square / right_square), sign)
            rest_square = sum((a - norm_ratio * b) ** 2 for a, b in check_pairs)
            if rest_square <= ALIKE**2 * wrong_square:
                return "negated" if round(norm_ratio, 3) == -1 else f"scaled by {norm_ratio:.3g}"
        return "another gradient"


@dataclass(frozen=True)
class GradientDigest:
    """Of the parameters `names` on this rank: bits int64 [parameters], of all bytes; checks, squares fp64 [parameters];
    on the CPU. maker: as of `Digest`."""

    names: Sequence[str]
    bits: Tensor
    checks: Tensor
    squares: Tensor
    maker: int

    @property
    def total(self) -> Digest:
        """Of all parameters together."""
        check_slots = torch.zeros(SLOTS, dtype=torch.float64)
        check_slots.index_add_(0, torch.arange(len(self.checks)) % SLOTS, self.checks)
        joined_bits = int(fingerprint_tensors([self.bits]))
        return Digest(tuple(check_slots.tolist()), (float(self.squares.sum()),), (joined_bits,), self.maker)


def digest_gradient(engine: Engine, micro_batches: Sequence[MicroBatch]) -> GradientDigest:
    """Of the gradient for these micro-batches on the current state, which does not change. Collective."""
    parameters = [p for p in engine.ds.module.parameters() if p.requires_grad]
    bits = torch.zeros(len(parameters), dtype=torch.int64, device=engine.device)
    sums = torch.zeros(2, len(parameters), dtype=torch.float64, device=engine.device)

    def note(number: int, gradient: Tensor | None) -> None:
        if gradient is None:  # left for later (engine/zero_bubble.py)
            return
        bits[number] = bits[number] * STEP + fingerprint_tensors([gradient])
        for gradient_chunk in gradient.detach().flatten().split(CHUNK):
            wide_chunk = gradient_chunk.float()
            sums[0, number] += torch.dot(wide_chunk, _signs(wide_chunk.device)[: wide_chunk.numel()])
            sums[1, number] += torch.dot(wide_chunk, wide_chunk)

    hooks = [p.register_hook(partial(note, number)) for number, p in enumerate(parameters)]
    try:
        engine.measure_step(micro_batches)
    finally:
        for hook in hooks:
            hook.remove()
    checks, squares = sums.cpu()
    names = [placement_of(p).name for p in parameters]
    return GradientDigest(names, bits.cpu(), checks, squares, kind_of(engine.device))


@cache
def _signs(device: torch.device) -> Tensor:
    """Random signs, fp32 [CHUNK]; the same on every rank."""
    drawn_bits = torch.randint(0, 2, (CHUNK,), generator=torch.Generator().manual_seed(CHUNK))
    return (drawn_bits * 2.0 - 1.0).to(device)


# Of +-1, whose sum the dtype holds.
TERMS = {torch.bfloat16: 256, torch.float16: 1024, torch.float32: 1 << 20}
ROWS = 64
ROUNDS = 2


@torch.no_grad()
def find_wrong_product(model: ModelConfig, tensor: int, dtype: torch.dtype, device: torch.device) -> str:
    """Which product of this device is wrong, and where: a phrase; "" if none is. tensor: ranks that share a matrix."""
    for input_width, output_width in _shapes(model, tensor):
        x, weight, known_answer = _case(input_width, output_width, dtype)
        placed_factors = x.to(device, dtype), weight.to(device, dtype)
        for _ in range(ROUNDS):
            for product_name, product_result in _products(*placed_factors):
                columns = (product_result.cpu() != known_answer).any(0).nonzero().flatten().tolist()
                if columns:
                    wrong_place = f"column {columns[0]}" if len(columns) == 1 else f"{len(columns)} columns"
                    dtype_name = str(dtype).removeprefix("torch.")
                    shape_text = f"[{ROWS}, {input_width}] x [{input_width}, {output_width}]"
                    return (
                        f"a product with a known answer, {dtype_name} {product_name} {shape_text}, is wrong in "
                        f"{wrong_place}"
                    )
    return ""


def _products(x: Tensor, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield "linear", F.linear(x, weight)
    yield "matmul", products.mm(x, weight.t())


def _shapes(model: ModelConfig, tensor: int) -> list[tuple[int, int]]:
    """(input width, output width) of a block's products on one rank."""
    heads = model.heads * model.head_width // tensor
    ffn = (model.ffn_width if model.experts is None else model.expert_width) // tensor
    return [(model.hidden, heads), (heads, model.hidden), (model.hidden, ffn), (ffn, model.hidden)]


@cache
def _case(width: int, height: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x [ROWS, width], weight [height, width], int8, and their product as `dtype`."""
    random_generator = torch.Generator().manual_seed(width * 31 + height)
    sizes = (ROWS, width), (height, width)
    x, weight = (torch.randint(0, 2, size, generator=random_generator) * 2 - 1 for size in sizes)
    x[:, torch.randperm(width, generator=random_generator)[TERMS[dtype] :]] = 0
    # By other kernels than those that are tested; all sums are exact in fp64.
    exact_product = torch.from_numpy(x.double().numpy() @ weight.double().numpy().T)
    return x.to(torch.int8), weight.to(torch.int8), exact_product.to(dtype)


Named = dict[str, Tensor]
Of = TypeVar("Of")
COPIES, EXPERTS, SHARDS = "copies", "copies of experts", "shards"
# Kinds of weights in compute precision, and the axis of those who hold them alike.
WEIGHTS = {COPIES: "data", EXPERTS: "expert data"}
QUARTERS = 4
COLUMNS = 2 * QUARTERS  # of a group
MOST = 1 << 21  # ranks of a group


def split_fingerprint(fingerprint: int) -> list[float]:
    """What a rank adds to the columns of its group. fingerprint: 64 bits, signed or not."""
    fingerprint_quarters = [(fingerprint >> 16 * i) & 0xFFFF for i in range(QUARTERS)]
    return [float(column_value) for q in fingerprint_quarters for column_value in (q, q * q)]


def are_equal(sums: Sequence[float], ranks: int) -> bool:
    """Whether all `ranks` fingerprints of a group are equal. sums: its columns, summed."""
    sum_pairs = zip(sums[::2], sums[1::2], strict=True)
    # As integers: the products are beyond fp64.
    return all(ranks * int(square_sum) == int(quarter_sum) ** 2 for quarter_sum, square_sum in sum_pairs)


class Replicas:
    """Of this rank. kinds: what is held alike, by kind, with the groups of ranks that hold it; the same on every
    rank. The weights in compute precision are COPIES, and EXPERTS where these are on some data ranks only: the next
    update overwrites them, with what is wrong in them. Masters and moments that another replica holds as well are
    SHARDS."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        layout, p = engine.topology.layout, engine.config.parallel
        self._held: dict[str, Callable[[], Named]] = {}
        self.kinds: dict[str, list[list[int]]] = {}
        if p.zero < 3 or engine.zero.replicated_parameters():  # ZeRO 3 leaves small ones whole
            self._add(COPIES, WEIGHTS[COPIES], layout, partial(self._list_weights, False))
        if layout.expert > 1:
            self._add(EXPERTS, WEIGHTS[EXPERTS], layout, partial(self._list_weights, True))
        if layout.replicas > 1:
            self._add(SHARDS, "replica", layout, lambda: self._list_pieces(whole_only=False))
        self._add("replicas", "tensor", layout, self._replicated)
        if engine.config.model.tied and layout.pipeline > 1:
            self._add("tied", "tied", layout, self._tied)
        self._add("shared state", "world", layout, lambda: dict(engine.shared_state))

    def _add(self, kind: str, axis: str, layout: Layout, held: Callable[[], Named]) -> None:
        rank_groups = [list(range(layout.world))] if axis == "world" else layout.list_groups(axis)
        if len(rank_groups[0]) > 1:
            self.kinds[kind], self._held[kind] = rank_groups, held

    def _list_weights(self, of_experts: bool) -> Named:
        parameters = self.engine.zero.replicated_parameters()
        return {placement_of(p).name: p.data for p in parameters if is_split(p) == of_experts}

    def _list_pieces(self, whole_only: bool) -> Named:
        """Masters and moments of this rank; whole_only: of parameters that tensor parallelism does not split."""
        flat = self.engine.flat_state()
        return {
            f"{kind} of {f.name}": piece
            for f in flat.fragments
            for kind in (KINDS if f.dim is None or not whole_only else ())
            if (piece := flat.view_piece(f, kind)) is not None
        }

    def _replicated(self) -> Named:
        self.engine.zero.wait_for_weights()
        found: Named = {}
        if self.engine.config.parallel.zero < 3:
            parameters: list[Any] = list(self.engine.ds.module.parameters())
            found = {placement_of(p).name: p.data for p in parameters if not p.tensor_model_parallel}
        return found | self._list_pieces(whole_only=True)

    def _tied(self) -> Named:
        self.engine.zero.wait_for_weights()
        module = self.engine.ds.module
        return {placement_of(p).name: p.data for p in module.tied_modules.parameters()}

    def find_group(self, kind: str) -> int | None:
        """The number of this rank's group; None if it holds nothing of the kind."""
        rank = self.engine.topology.rank
        return next((i for i, ranks in enumerate(self.kinds[kind]) if rank in ranks), None)

    def fingerprint_kind(self, kind: str, known: Mapping[str, Marks] = MappingProxyType({})) -> Tensor:
        """int64 []: of all that this rank holds of the kind. known: marks of flat weights
        (COPIES, EXPERTS), of masters and moments (SHARDS), if there are any."""
        # Hundreds of small tensors take longer than a few large ones.
        is_flat = kind in WEIGHTS and self.engine.config.parallel.zero < 3
        if kind in known and (is_flat or kind == SHARDS):
            known_marks = [known_mark.value for known_mark in known[kind].values()]
            held = [torch.stack(known_marks)] if known_marks else []
        elif is_flat:
            held = self.choose_flat(kind, self.engine.zero.flat_weights)
        else:
            held = list(self._held[kind]().values())
        if not held:  # a stage without experts
            return torch.zeros((), dtype=torch.int64, device=self.engine.device)
        return fingerprint_tensors(held)

    def choose_flat(self, kind: str, flat: Sequence[Of]) -> list[Of]:
        """Of what there is for each of the flat weights, that for those of a kind of `WEIGHTS`."""
        if self.engine.topology.layout.expert == 1:
            return list(flat) if kind == COPIES else []
        pairs = zip(flat, self.engine.optimizer.param_groups, strict=True)
        return [one for one, of in pairs if of.get("split", False) == (kind == EXPERTS)]

    def fingerprint_by_name(self, kind: str) -> dict[str, int]:
        """The fingerprint of every tensor of the kind that this rank holds."""
        if self.find_group(kind) is None:
            return {}
        return {name: int(fingerprint_tensors([held])) for name, held in self._held[kind]().items()}

    def make_columns(
        self, kinds: Iterable[str], known: Mapping[str, Marks] = MappingProxyType({})
    ) -> list[float]:  # fmt: skip
        """What this rank adds to the sum that compares these kinds. known: as of `fingerprint_kind`."""
        groups = {kind: self.find_group(kind) for kind in kinds}
        held = [
            self.fingerprint_kind(group_kind, known)
            for group_kind, group in groups.items()
            if group is not None
        ]
        values = iter(torch.stack(held).tolist() if held else [])
        columns: list[float] = []
        for group_kind, own in groups.items():
            for group in range(len(self.kinds[group_kind])):
                columns += split_fingerprint(next(values)) if group == own else [0.0] * COLUMNS
        return columns

    def find_unequal(self, kinds: Iterable[str], sums: Sequence[float]) -> list[tuple[str, list[int]]]:
        """The kinds and groups of ranks that do not all hold the same. sums: of the `make_columns` of all ranks."""
        groups = [(kind, ranks) for kind in kinds for ranks in self.kinds[kind]]
        parts = (sums[i : i + COLUMNS] for i in range(0, len(sums), COLUMNS))
        return [of for of, part in zip(groups, parts, strict=True) if not are_equal(part, len(of[1]))]
