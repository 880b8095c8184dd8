"""The base of optimizers that know which parameter each element of ZeRO's flat buffers belongs to.

    class Signed(PieceOptimizer):
        kinds = ("exp_avg",)
        def update(self, pieces, step): ...        # all pieces of this rank, once per call of step()

ZeRO hands an optimizer flat fp32 buffers, without shapes. `attach_buffers` tells it what lies in them, after
DeepSpeed has laid
them out. A rule that needs a whole tensor (a norm, a row, the matrix itself) sums over the ranks with
`sum_by_parameter`.

State has two forms. Flat state lies in buffers like the weights, by kind ("exp_avg", "exp_avg_sq"). Shared state is the
same on every rank and is indexed by whole parameters ("rows/blocks.0.mlp.up.weight"); it may be of any shape and is
small. Both are snapshotted, rewound, checkpointed and reshaped without further code.

An element's result must not depend on its position in a buffer: copies of a weight lie at different positions on two
pipeline stages. Compute elements with operations that round once (mul, add, div, sqrt, where); those with a scale
(`add(alpha=...)`, `lerp`, `addcmul`) are fused in vectors and not at a buffer's end on some CPUs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from megastable.optim.adamw import CHUNKS
from megastable.parallel.sharding import Fragment, Placement

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class WholeParameter:
    """A parameter of the whole model. shape: of the whole tensor; row: its index among all, sorted by name."""

    placement: Placement
    shape: tuple[int, ...]
    row: int

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


def sum_by_parameter(
    parts: Iterable[tuple[Fragment, Tensor]],
    width: int,
    parameters: Mapping[str, WholeParameter],
    device: torch.device,
) -> Tensor:
    """Sums over all fragments of all ranks by parameter: fp64 [parameters, width]. Collective over the world.

    parts: of each fragment its numbers, [width]; copies count once. All ranks get the same bits.
    """
    sum_table = torch.zeros(len(parameters), width, dtype=torch.float64, device=device)
    for fragment, numbers in parts:
        if fragment.counted:
            sum_table[parameters[fragment.name].row] += numbers.double()
    return sum_over_world(sum_table)


def sum_over_world(table: Tensor) -> Tensor:
    """`table`, summed in place over the world."""
    if dist.is_initialized():
        dist.all_reduce(table)
    return table


@dataclass(frozen=True)
class Surroundings:
    """Where a rank's buffers stand. parameters: of the whole model by name, the same on all ranks; tensor: this rank's
    (rank, size) in the tensor group; stage_group: ranks that hold parts of the same layers, None = all."""

    parameters: Mapping[str, WholeParameter]
    tensor: tuple[int, int] = (0, 1)
    stage_group: Any = None


@dataclass(frozen=True)
class Piece:
    """A fragment with its views, fp32 [n]: weight, gradient (as the optimizer gets it, clipped), flat state by kind.
    group: the settings of its parameter group, with "lr" and "weight_decay"."""

    fragment: Fragment
    weight: Tensor
    gradient: Tensor
    state: Mapping[str, Tensor]
    group: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.fragment.name


@dataclass(frozen=True)
class UpdateSize:
    """Size of a piece's last update. squares: sum of squares, fp64; highest: largest magnitude, fp32; both 0-d."""

    name: str
    squares: Tensor
    numel: int
    highest: Tensor

    @classmethod
    def of_change(cls, name: str, change: Tensor) -> UpdateSize:
        """The size of some weights' change."""
        lowest_value, highest_value = torch.aminmax(change)
        square_sum = torch.linalg.vector_norm(change, dtype=torch.float64).square()
        return cls(name, square_sum, change.numel(), torch.maximum(highest_value, -lowest_value).float())


class PieceOptimizer(torch.optim.Optimizer):
    """kinds: the flat state of every parameter.

    shared: state that is the same on every rank, by name "KIND/PARAMETER". recording: whether the coming update is
    measured, in `sizes`.
    """

    kinds: ClassVar[tuple[str, ...]] = MOMENTS

    def __init__(self, params: Iterable[Any], **defaults: Any) -> None:
        super().__init__(params, defaults)
        self.shared: dict[str, Tensor] = {}
        self.recording = False
        self.sizes: list[UpdateSize] = []
        self._fragments: dict[Tensor, list[Fragment]] = {}
        self.at = Surroundings({})

    def kinds_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The flat state of a parameter group."""
        return self.kinds

    def attach_buffers(
        self, masters: Sequence[Tensor], fragments: Sequence[Fragment], at: Surroundings
    ) -> None:
        """Learn what lies in the flat buffers. masters: of this rank; fragments: index them by `group`."""
        self.at = at
        self._fragments = {master: [] for master in masters}
        for fragment in fragments:
            self._fragments[masters[fragment.group]].append(fragment)

    @abstractmethod
    def update(self, pieces: Sequence[Piece], step: int) -> None:
        """Update weights and state of all pieces in place; step: the number of this update, from 1.

        Every rank calls it equally often, also without pieces: it may be collective. `sum_by_parameter` sums over the
        world.
        """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """ZeRO 1 and 2 call it once for all groups, ZeRO 3 once per group."""
        assert closure is None, "DeepSpeed passes none"
        assert self._fragments, "attach() comes first"
        rank_pieces, update_count = [], 0
        for param_group in self.param_groups:
            for p in param_group["params"]:
                if p.grad is not None:
                    update_count = self._count(p, param_group)
                    rank_pieces += [self._piece(f, p, param_group) for f in self._fragments[p]]
        self.update(rank_pieces, update_count)

    def _count(self, p: Tensor, group: Mapping[str, Any]) -> int:
        """The number of this update; makes the state before the first one."""
        parameter_state = self.state[p]
        if not parameter_state:
            parameter_state["step"] = torch.tensor(0.0)
            for kind in self.kinds_of(group):
                parameter_state[kind] = torch.zeros_like(p.detach())
        parameter_state["step"] += 1
        return int(parameter_state["step"])

    def _piece(self, f: Fragment, p: Tensor, group: Mapping[str, Any]) -> Piece:
        def view(buffer: Tensor) -> Tensor:
            return buffer.narrow(0, f.offset, f.numel)

        assert p.grad is not None
        flat_state = {kind: view(self.state[p][kind]) for kind in self.kinds_of(group)}
        return Piece(f, view(p.detach()), view(p.grad), flat_state, group)

    def move_weights(self, piece: Piece, change: Tensor, part: slice = slice(None)) -> None:
        """Add `change`, decay included, to (a part of) a piece's weights, and measure it if asked to."""
        piece.weight[part].add_(change)
        if self.recording and piece.fragment.counted:
            self.sizes.append(UpdateSize.of_change(piece.name, change))

    def sum_by_parameter(self, parts: Iterable[tuple[Piece, Tensor]], width: int) -> Tensor:
        """Sums over all pieces of all ranks by parameter: fp64 [parameters, width]. Collective over the world.

        parts: of each piece its numbers, [width]; copies count once. All ranks get the same bits.
        """
        fragment_parts = ((piece.fragment, numbers) for piece, numbers in parts)
        return sum_by_parameter(fragment_parts, width, self.at.parameters, self._device)

    def find_maxima(self, parts: Iterable[tuple[Piece, Tensor]]) -> Tensor:
        """Maxima by parameter of numbers, 0-d, that are not negative: fp64 [parameters]. Collective over the world."""
        table = torch.zeros(len(self.at.parameters), dtype=torch.float64, device=self._device)
        for piece, number in parts:
            row = self.at.parameters[piece.name].row
            table[row] = torch.maximum(table[row], number.double())
        if dist.is_initialized():
            dist.all_reduce(table, op=dist.ReduceOp.MAX)
        return table

    @property
    def _device(self) -> torch.device:
        return next(iter(self._fragments)).device


def split_in_chunks(piece: Piece) -> Iterator[slice]:
    """The elements of a piece in parts to process at a time."""
    chunk_length = chunk_size(piece.weight)
    for chunk_begin in range(0, piece.weight.numel(), chunk_length):
        yield slice(chunk_begin, min(chunk_begin + chunk_length, piece.weight.numel()))


def chunk_size(x: Tensor) -> int:
    """Elements to process at a time on x's device."""
    return CHUNKS.get(x.device.type, CHUNKS["cuda"])


class SGD(PieceOptimizer):
    """SGD with momentum (Polyak, 1964; Sutskever et al., ICML 2013) and decoupled weight decay.

    b = momentum b + g; w -= lr (b + decay w). "exp_avg" is the momentum buffer b. Elementwise: no communication.
    """

    kinds = ("exp_avg",)

    def __init__(self, params: Iterable[Any], *, lr: float, momentum: float = 0.9) -> None:
        super().__init__(params, lr=lr, momentum=momentum)

    def update(self, pieces: Sequence[Piece], step: int) -> None:
        for piece in pieces:
            group = piece.group
            for at in split_in_chunks(piece):
                buffer = piece.state["exp_avg"][at].mul_(group["momentum"]).add_(piece.gradient[at])
                change = (piece.weight[at] * group["weight_decay"]).add_(buffer).mul_(-group["lr"])
                self.move_weights(piece, change, at)
