"""The optimizer's state on this rank for any ZeRO wrapper: flat buffers, and the piece of each parameter in them.

DeepSpeed's wrappers all keep a few flat buffers of fp32 master weights and of the optimizer's state (fp32, or bf16 by
optim/adamw.py). A `Fragment` says where a parameter's piece lies in them, so that norms, whole tensors, snapshots and
checkpoints of another layout share one implementation for all wrappers. Imports no DeepSpeed: zero.py finds the
fragments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from megastable.base.collectives import gather_objects
from megastable.optim.pieces import MOMENTS, PieceOptimizer, UpdateSize, WholeParameter
from megastable.parallel.sharding import Fragment

# fp32 master weights; an average of gradients (Adam's first moment, a momentum); Adam's second moment. An optimizer
# has some of them.
KINDS = ("weight", *MOMENTS)
SHARED = "shared/"  # prefix of the shared state (optim/pieces.py) among the tensors of a snapshot
CHUNK = 1 << 22  # elements processed at a time: 16 MiB; a whole embedding would take gigabytes
CACHED = 1 << 18  # elements at a time on a CPU, whose fp32 sums of this many squares are exact to 1e-6


class Size(BaseModel):
    """L2 norm and largest magnitude of a tensor."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    norm: float
    largest: float


@dataclass(frozen=True)
class StateNorms:
    """Global L2 norms over the fp32 master weights and Adam's second moments."""

    parameters: float
    second_moment: float


class FlatState:
    """Flat buffers, the torch optimizer that owns the moments, and the fragments of this rank."""

    def __init__(
        self,
        masters: list[Tensor],
        optimizer: torch.optim.Optimizer,
        fragments: list[Fragment],
        shard_group: Any,
        settings: Sequence[dict[str, Any]],
    ) -> None:
        """settings: the optimizer's settings of every buffer: "lr", "betas", "eps", "weight_decay"."""
        self.masters, self.optimizer, self.fragments = masters, optimizer, fragments
        self.shard_group, self.settings = shard_group, settings

    @property
    def moments(self) -> torch.dtype:
        """Dtype of the moments."""
        moments_dtype: torch.dtype = getattr(self.optimizer, "moments", torch.float32)
        return moments_dtype

    def kinds_of_group(self, group: int) -> tuple[str, ...]:
        """The kinds of tensors of a group after the first update: a subset of `KINDS`, in its order."""
        o = self.optimizer
        return (KINDS[0], *(o.kinds_of(self.settings[group]) if isinstance(o, PieceOptimizer) else MOMENTS))

    def count_bytes(self) -> Iterator[int]:
        """Of every buffer after the first update."""
        for group, master in enumerate(self.masters):
            for kind in self.kinds_of_group(group):
                yield master.numel() * (torch.float32 if kind == KINDS[0] else self.moments).itemsize

    def view_piece(self, fragment: Fragment, kind: str) -> Tensor | None:
        """A view of a fragment's elements; None for state before the first update, or of another kind."""
        master = self.masters[fragment.group]
        flat_buffer = master.data if kind == "weight" else self.optimizer.state.get(master, {}).get(kind)
        return None if flat_buffer is None else flat_buffer.narrow(0, fragment.offset, fragment.numel)

    def view_counted(self, kinds: Sequence[str]) -> Iterator[tuple[int, str, Tensor]]:
        """(index in `kinds`, parameter, view of the elements) of all state that this rank counts and has."""
        for f in self.fragments:
            for index, kind in enumerate(kinds if f.counted else ()):
                if (piece := self.view_piece(f, kind)) is not None:
                    yield index, f.name, piece

    @torch.no_grad()
    def measure_updates(self) -> Iterator[UpdateSize]:
        """Sizes of the last update of this rank's weights: of every piece, or of parts of it. Nothing before the first
        one, and if an optimizer without AdamW's formula was not asked to measure it."""
        if isinstance(self.optimizer, PieceOptimizer):
            yield from self.optimizer.sizes
            return
        for f in self.fragments:
            for weight_change in self.derive_changes(f) if f.counted else ():
                yield UpdateSize.of_change(f.name, weight_change)

    @torch.no_grad()
    def derive_changes(self, fragment: Fragment) -> Iterator[Tensor]:
        """The change of a fragment's weights by the last AdamW update, in chunks; nothing before the first one.

        It is derived from the state after it: w' = (1 - lr d) w - lr a with a = m_hat / (sqrt(v_hat) + eps) and decay d
        gives w - w' = lr (a + d w') / (1 - lr d). Moments rounded to bf16 after the update make an element wrong by up
        to 1.2 %, in either direction.
        """
        of, state = self.settings[fragment.group], self.optimizer.state.get(self.masters[fragment.group], {})
        held = [self.view_piece(fragment, kind) for kind in KINDS]
        if "step" not in state:
            return
        lr, decay, (beta1, beta2) = of["lr"], of["weight_decay"], of["betas"]
        if lr * decay == 1:  # nothing is left of w in w'
            return
        count = state["step"].double()
        unbias1, unbias2 = 1 - beta1**count, 1 - beta2**count
        for w, m, v in zip(*(piece.split(CHUNK) for piece in held if piece is not None), strict=True):
            a = (m.float() / unbias1).div_((v.float() / unbias2).sqrt_().add_(of["eps"]))
            yield a.add_(w, alpha=decay).mul_(lr / (1 - lr * decay))

    @torch.no_grad()
    def sum_norms(self) -> StateNorms:
        """Collective over the world; every parameter counts once."""
        squared_norms = torch.zeros(2, dtype=torch.float64, device=self.masters[0].device)
        for index, _, piece in self.view_counted(("weight", "exp_avg_sq")):
            squared_norms[index] += torch.linalg.vector_norm(piece, dtype=torch.float64).square()
        dist.all_reduce(squared_norms)
        weight_norm, moment_norm = squared_norms.sqrt().tolist()
        return StateNorms(weight_norm, moment_norm)

    @torch.no_grad()
    def tensor_norms(self, names: Sequence[str]) -> tuple[list[float], list[float | None]]:
        """L2 norms of the weights of every whole tensor, and of its second moments, None for one without; by `names`,
        as in `measure_sizes`. Collective over the world."""
        row = {name: i for i, name in enumerate(names)}
        squared_sums = torch.zeros(3, len(row), dtype=torch.float64, device=self.masters[0].device)
        for index, name, piece in self.view_counted(("weight", "exp_avg_sq")):
            for part in piece.split(CHUNK):
                squared_sums[index, row[name]] += torch.linalg.vector_norm(part.float()).double().square()
            squared_sums[2, row[name]] += index
        dist.all_reduce(squared_sums)
        weight_squares, moment_squares, moment_counts = squared_sums.tolist()
        moments = zip(moment_squares, moment_counts, strict=True)
        moment_norms = [math.sqrt(square) if count else None for square, count in moments]
        return [math.sqrt(weight_square) for weight_square in weight_squares], moment_norms

    @torch.no_grad()
    def measure_sizes(self, names: Sequence[str]) -> dict[str, dict[str, Size]]:
        """Norm and largest magnitude of every whole tensor, by kind and name; without moments before the first update.

        names: all that any rank may hold, the same on every rank. Collective over the world; every element counts once.
        """
        device = self.masters[0].device
        part_size = CHUNK if device.type == "cuda" else CACHED
        row = {name: i for i, name in enumerate(names)}
        # Counts show which tensors exist: the largest magnitude of one may be zero.
        sums = torch.zeros(2, len(KINDS), len(row), dtype=torch.float64, device=device)
        largest = torch.zeros(len(KINDS), len(row), dtype=torch.float64, device=device)
        for k, name, piece in self.view_counted(KINDS):
            i = row[name]
            for part in piece.split(part_size):
                peak = torch.linalg.vector_norm(part, ord=math.inf)
                sums[0, k, i] += torch.linalg.vector_norm(part.float()).double().square()
                sums[1, k, i] += part.numel()
                largest[k, i] = torch.maximum(largest[k, i], peak.double())
        dist.all_reduce(sums)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        norms, counts, peaks = sums[0].sqrt().tolist(), sums[1].tolist(), largest.tolist()
        return {
            kind: {
                name: Size(norm=norms[k][i], largest=peaks[k][i]) for name, i in row.items() if counts[k][i]
            }
            for k, kind in enumerate(KINDS)
        }

    @torch.no_grad()
    def gather_shards(self, kind: str) -> dict[str, Tensor]:
        """This tensor rank's and stage's parameters by name, whole over data parallelism, fp32 on the CPU.

        Collective over the data ranks of a replica, which sum the pieces.
        """
        shard_by_name: dict[str, Tensor] = {}
        own_names = sorted({(f.name, f.shape) for f in self.fragments})
        names_by_rank = gather_objects(own_names, self.shard_group)
        for name, parameter_shape in sorted(set(chain.from_iterable(names_by_rank))):
            flat_shard = torch.zeros(parameter_shape, device=self.masters[0].device).flatten()
            for fragment in self.fragments:
                piece = self.view_piece(fragment, kind) if fragment.name == name else None
                if piece is not None:
                    flat_shard[fragment.start : fragment.start + fragment.numel] = piece
            dist.all_reduce(flat_shard, group=self.shard_group)
            shard_by_name[name] = flat_shard.view(parameter_shape).cpu()
        return shard_by_name

    @torch.no_grad()
    def fill_from(self, read: Callable[[Fragment, str], Tensor], step: float) -> None:
        """Set masters and state: `read(fragment, kind)` returns its elements; `step` is the optimizer's count of
        updates, 0 without state. bf16 moments are rounded to nearest.

        The caller refreshes the parameters in compute precision afterwards.
        """
        for group, master in enumerate(self.masters if step else []):
            state = self.optimizer.state[master]
            # The fused kernel needs its step count on the weights' device, the plain one on the CPU.
            is_fused = self.optimizer.defaults.get("fused")
            state["step"] = torch.tensor(float(step), device=master.device if is_fused else "cpu")
            for kind in self.kinds_of_group(group)[1:]:
                state[kind] = torch.zeros_like(master.data, dtype=self.moments)
        for master in self.masters if not step else []:
            self.optimizer.state.get(master, {}).clear()  # moments of a checkpoint loaded before
        for f in self.fragments:
            for kind in self.kinds_of_group(f.group) if step else KINDS[:1]:
                piece = self.view_piece(f, kind)
                assert piece is not None
                piece.copy_(read(f, kind))

    def whole_parameters(self, tensor: int) -> dict[str, WholeParameter]:
        """Every parameter of the whole model by name; tensor: size of the tensor group. Collective."""
        held = {f.name: (f.placement, f.shape) for f in self.fragments}
        found = {name: of for each in gather_objects(held) for name, of in each.items()}
        parameters = {}
        for row, (name, (placement, shape)) in enumerate(sorted(found.items())):
            whole = tuple(n * tensor if dim == placement.dim else n for dim, n in enumerate(shape))
            parameters[name] = WholeParameter(placement, whole, row)
        return parameters
