"""One interface to DeepSpeed's three ZeRO optimizer wrappers, for the gate, snapshots and checkpoints.

Sources: arXiv:1910.02054; DeepSpeed 0.19.8's runtime/bf16_optimizer.py and runtime/zero/.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero import stage_1_and_2
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from megastable.base.fingerprint import STEP, mark_of
from megastable.config.optimizers import OptimizerConfig
from megastable.config.stability import HardwareConfig
from megastable.engine import patches
from megastable.engine.flatstate import FlatState
from megastable.engine.gradient_sums import GradientSums
from megastable.engine.local_gradients import LocalGradients, OwnGradients, Pairs
from megastable.engine.patches import Hop
from megastable.engine.weight_gathers import WeightGathers
from megastable.optim.adamw import OnePass
from megastable.optim.clipping import Clipping, by_norm
from megastable.optim.pieces import Piece
from megastable.parallel.layout import limit_bucket
from megastable.parallel.sharding import Fragment, placement_of, shape_of
from megastable.parallel.topology import Topology

HALF = (1 << 32) - 1  # of 64 bits, so that fp64 adds up a million of them without rounding


class StageMessages:
    """Of this rank, in the last step: fingerprints of all messages in their order, int64 [], by their hop: this stage
    and the other, or their chunks of the model. Several chunks of one pair of ranks send in different orders."""

    def __init__(self, device: torch.device, stage: int) -> None:
        self._device = device
        self.begin_step()
        patches.watch_messages(stage, self._add_sent, self._add_received)

    def begin_step(self) -> None:
        """A step begins."""
        self.sent: dict[Hop, Tensor] = defaultdict(self._none)
        self.received: dict[Hop, Tensor] = defaultdict(self._none)

    def _none(self) -> Tensor:
        return torch.zeros((), dtype=torch.int64, device=self._device)

    def _add_sent(self, message: Tensor, hop: Hop) -> None:
        self.sent[hop] = self.sent[hop] * STEP + mark_of(message).value

    def _add_received(self, message: Tensor, hop: Hop) -> None:
        self.received[hop] = self.received[hop] * STEP + mark_of(message).value

    @property
    def left(self) -> float:
        """Sent less received; over all ranks this is zero."""
        sent, received = (sum(map(_high, of.values()), self._none()) for of in (self.sent, self.received))
        return float(sent - received)

    def by_hop(self) -> tuple[dict[Hop, int], dict[Hop, int]]:
        """Sent and received."""
        sent, received = ({hop: int(_high(v)) for hop, v in of.items()} for of in (self.sent, self.received))
        return sent, received


def _high(fingerprint: Tensor) -> Tensor:
    """Its upper half: every bit of a message changes it, the lower half depends on the lower halves of words only."""
    return fingerprint >> 32 & HALF


def counted_once(parameter: nn.Parameter, topology: Topology) -> bool:
    """Whether this rank's tensor is the one of several equal ones, on stages and tensor ranks, that counts."""
    is_split: bool = parameter.tensor_model_parallel  # type: ignore[attr-defined]
    return not getattr(parameter, "ds_pipe_replicated", False) and (is_split or topology.tensor_rank == 0)


class Wrapper(ABC):
    """DeepSpeed's wrapper `o` of the optimizer, on this rank. engine: DeepSpeed's.

    known: DeepSpeed's own result for the gradient norm, in its own form, None where we compute it. sums_apart: whether
    the gradients of every micro-batch are summed over the data ranks by themselves.
    """

    norm: ClassVar[str]  # what computes the norm that the update clips by
    sums_apart = False

    def __init__(self, o: Any, engine: Any, topology: Topology, device: torch.device) -> None:
        self.o, self.engine, self.topology, self.device = o, engine, topology, device
        self.local: LocalGradients | None = None
        self.messages: StageMessages | None = None

    @property
    @abstractmethod
    def masters(self) -> list[Tensor]:
        """The flat fp32 master weights of this rank."""

    @property
    def flat_weights(self) -> list[Tensor]:
        """The weights in compute precision that this rank keeps between two steps, flat; with ZeRO 3 its part."""
        self.wait_for_weights()
        return list(self.o.bit16_groups_flat)

    def wait_for_weights(self) -> None:  # noqa: B027
        """Until the parameters hold what the last update wrote, on this stream of a GPU. Forward passes wait by
        themselves."""

    def replicated_parameters(self) -> list[nn.Parameter]:
        """The parameters whose weights in compute precision all data ranks keep."""
        self.wait_for_weights()
        return list(self.engine.module.parameters())

    @abstractmethod
    def place_parameter(self, parameter: nn.Parameter) -> tuple[int, int, int, int] | None:
        """(group, offset in its master, first element of the parameter, number of elements) that this rank updates;
        None if it updates nothing."""

    @abstractmethod
    def squared_norm(self) -> tuple[Tensor, Tensor, Any]:
        """(this rank's part of the squared gradient norm, whether it is a number, known): unscaled, before clipping,
        fp64; the parts of all ranks are summed."""

    @abstractmethod
    def refresh_weights(self) -> None:
        """Copy the master weights to the parameters in compute precision."""

    def watch_hardware(self, config: HardwareConfig) -> None:
        """Measure the gradients of every rank before they are summed over data ranks (`local`), and what stages send
        (`messages`), as far as that is wanted."""
        layout = self.topology.layout
        if config.messages and layout.pipeline > 1:
            self.messages = StageMessages(self.device, self.topology.stage)
        if not config.gradients:
            return
        if layout.data > 1 and getattr(self.o, "reduce_scatter", True):
            self.local = LocalGradients(self.topology, self.device)
            self._measure_sums(self.local)
        elif layout.data == 1 < layout.world and self.beside_moments() is not None:
            self.local = OwnGradients(self.topology, self.device, lambda: self.beside_moments() or [])

    @property
    def divided_by(self) -> int:
        """By what gradients are divided before they are summed over the data ranks, and so when `local` sees them."""
        return 1

    def beside_moments(self) -> Pairs | None:
        """This rank's flat gradients with their first moments; None where they do not lie so in memory."""
        return None

    def begin_step(self) -> None:
        """A step begins."""
        for gradient_watch in (self.local, self.messages):
            if gradient_watch is not None:
                gradient_watch.begin_step()

    def _measure_sums(self, watch: LocalGradients) -> None:  # noqa: B027
        """Have `watch` see what is summed, before and after, where sums do not ask for `local` themselves."""

    def average_gradients(self) -> None:  # noqa: B027
        """Divide sums over the data ranks, where DeepSpeed has not done so."""

    def forget_norms(self, fragments: Iterable[Fragment]) -> None:  # noqa: B027
        """Averaged gradients were changed: where norms are measured as gradients are written, measure these again."""

    def view_gradients(self, fragments: Sequence[Fragment]) -> dict[tuple[int, int], Tensor]:
        """The optimizer's input, times the loss scale, by the (group, offset) of its fragments."""
        gradient_by_place = {}
        for group, group_pieces in self.o.averaged_gradients.items():
            group_offset = 0
            for group_piece in group_pieces:
                gradient_by_place[group, group_offset] = group_piece
                group_offset += group_piece.numel()
        return gradient_by_place

    def discard_gradients(self) -> None:
        """Drop the gradients. Weights, moments and loss scale stay the same, bit for bit."""
        self.o.zero_grad()

    def clipping_by(self, known: Any, followed: bool) -> contextlib.AbstractContextManager[None]:
        """In this context an update clips by the known norm instead of computing it again. followed: whether weights
        are changed once more after the optimizer's step."""
        return patches.replace_attribute(self.o, self.norm, lambda *_, **__: known)

    def flat_state(self) -> FlatState:
        """Masters and moments of this rank by parameter; see flatstate.py. Views: writing to them changes the state."""
        fragments = list[Fragment]()
        for parameter in self.engine.module.parameters():
            placement = placement_of(parameter)
            group, offset, start, numel = self.place_parameter(parameter) or (0, 0, 0, 0)
            if numel > 0:
                # Equal shards take turns: each parameter's piece counts, and is written, in one replica.
                is_ours = len(fragments) % self.topology.layout.replicas == self.topology.replica
                fragments.append(
                    Fragment(
                        name=placement.name, dim=placement.dim, sections=placement.sections,
                        shape=shape_of(parameter), group=group, offset=offset, start=start, numel=numel,
                        counted=is_ours and counted_once(parameter, self.topology),
                    )
                )  # fmt: skip
        masters, groups = self.masters, self.o.optimizer.param_groups
        # ZeRO 3 splits the optimizer's groups into buffers of at most `sub_group_size` elements.
        owner = getattr(self.o, "sub_group_to_group_id", range(len(groups)))
        settings = [groups[owner[i]] for i in range(len(masters))]
        return FlatState(masters, self.o.optimizer, fragments, self.topology.shard_group, settings)

    def make_scalar(self, value: Any) -> Tensor:
        """A number of this rank on its device, fp64. Without waiting: a GPU still computes the gradients."""
        return torch.as_tensor(value, dtype=torch.float64).to(self.device, non_blocking=True)


class _Linked(Wrapper):
    """ZeRO 1 and 2: every parameter has a link to its part.

    The norm is one sum over the world, in the gate. DeepSpeed's own takes a sum for every parameter group, and stages
    of a pipeline have different groups: embedding and head may have one that no stage between them has.

    gathers: of the updated weights.
    """

    gathers: WeightGathers

    def _gather_weights(
        self, groups: Sequence[Sequence[nn.Parameter]], buffers: Sequence[Tensor]
    ) -> WeightGathers:
        limit = limit_bucket(int(self.engine.zero_reduce_bucket_size()), self.topology.layout.data)
        return WeightGathers(self.engine.module, groups, buffers, self.o.real_dp_process_group, limit)

    def wait_for_weights(self) -> None:
        self.gathers.wait_for_all()

    def refresh_weights(self) -> None:
        self.wait_for_weights()
        self.o.update_lp_params()

    def place_parameter(self, parameter: nn.Parameter) -> tuple[int, int, int, int] | None:
        held: Any = getattr(parameter, "_hp_mapping", None)
        if held is None:
            return None
        low = held.lp_fragment_address
        return held.param_group_index, held.hp_fragment_address.start, low.start, low.numel

    def squared_norm(self) -> tuple[Tensor, Tensor, Any]:
        own_squares = self._squares()
        return own_squares, torch.isfinite(own_squares), None

    @abstractmethod
    def _squares(self) -> Tensor:
        """This rank's part of the squared norm, fp64 []: of parameters that no other rank counts."""


class Bf16(_Linked):
    """BF16_Optimizer: ZeRO 1 in bf16, with fp32 sums of gradients."""

    norm = "get_global_norm_of_tensors"

    def __init__(self, o: Any, engine: Any, topology: Topology, device: torch.device) -> None:
        super().__init__(o, engine, topology, device)
        self._buffers = o.fp32_groups_gradient_flat_partition
        self.sums = GradientSums(o, engine, topology, self.flat_state().fragments, lambda: self.local)
        patches.sum_in_parts(o, engine, self.sums)
        self.gathers = self._gather_weights(o.bf16_groups, o.bf16_groups_flat)

    def begin_step(self) -> None:
        super().begin_step()
        self.sums.begin_step()

    @property
    def masters(self) -> list[Tensor]:
        return list(self.o.fp32_groups_flat_partition)

    @property
    def flat_weights(self) -> list[Tensor]:
        self.wait_for_weights()
        return list(self.o.bf16_groups_flat)

    def _squares(self) -> Tensor:
        return self.sums.own.sum_squares()

    def forget_norms(self, fragments: Iterable[Fragment]) -> None:
        self.sums.own.forget_norms(fragments)

    def beside_moments(self) -> Pairs:
        held = [self.o.optimizer.state.get(master, {}).get("exp_avg") for master in self.masters]
        pairs = zip(self._buffers, held, strict=True)
        return [(g, m if m is not None and m.numel() == g.numel() else None) for g, m in pairs]

    @contextlib.contextmanager
    def clipping_by(self, known: Any, followed: bool) -> Iterator[None]:
        inner, begin_gathers = self.o.optimizer, self.gathers.begin_gathers
        replaced: list[tuple[Any, str, Any]] = [
            (bf16_optimizer, self.norm, lambda *_, **__: known),
            (bf16_optimizer, "all_gather_dp_groups", begin_gathers),
        ]
        if isinstance(inner, OnePass):
            replaced += [
                (self.o, "clip_grad", 0.0), (inner, "gradient_factor", by_norm(known, self.o.clip_grad)),
            ]  # fmt: skip
            if not followed:
                low_weights = dict(zip(self.masters, self.own_low_weights(), strict=True))
                replaced += [
                    (inner, "low_weights", low_weights), (self.o, "update_lp_params", begin_gathers),
                ]  # fmt: skip
        with contextlib.ExitStack() as stack:
            for replacement in replaced:
                stack.enter_context(patches.replace_attribute(*replacement))
            yield

    def own_low_weights(self) -> list[Tensor]:
        """This rank's part of the bf16 weights, as `masters`."""
        groups = zip(self.o.bf16_partitioned_groups, self.o.real_dp_process_group, strict=True)
        return [parts[dist.get_rank(group)] for parts, group in groups]

    def view_gradients(self, fragments: Sequence[Fragment]) -> dict[tuple[int, int], Tensor]:
        return {(f.group, f.offset): self._buffers[f.group][f.offset :] for f in fragments}


class Zero12(_Linked):
    """DeepSpeedZeroOptimizer: ZeRO 2, and ZeRO 1 in fp16 and fp32."""

    norm = "scaled_global_norm"

    def __init__(self, o: Any, engine: Any, topology: Topology, device: torch.device) -> None:
        super().__init__(o, engine, topology, device)
        # ZeRO 2 divides 16-bit gradients before it sums them in fp32: division by 3 rounds each once more.
        o.gradient_average = False
        self.sums_apart = o.partition_gradients
        patches.update_at_once(o)
        patches.scatter_buckets(o, topology, lambda: self.local)
        self.gathers = self._gather_weights(o.round_robin_bit16_groups, o.bit16_groups_flat)

    @property
    def masters(self) -> list[Tensor]:
        return list(self.o.single_partition_of_fp32_groups)

    def average_gradients(self) -> None:
        torch._foreach_div_(list(self.view_gradients([]).values()), self.topology.layout.data)

    def _squares(self) -> Tensor:
        counted = self._counted_gradients()
        # DeepSpeed's norms are fp32 as well; those of fp16 gradients would overflow in fp16.
        norms = torch._foreach_norm(counted, dtype=torch.float32) if counted else [self.make_scalar(0.0)]
        scale = float(getattr(self.o, "loss_scale", 1.0))
        return torch.stack(norms).double().square().sum() / scale**2

    def _counted_gradients(self) -> list[Tensor]:
        # Not by fragments: with round_robin_gradients DeepSpeed links parameters to each other's pieces. A partition
        # may end with zeros that belong to no parameter.
        return [
            gradient
            for group, gradients in self.o.averaged_gradients.items()
            for gradient, parameter in zip(
                (g for g in gradients if not getattr(g, "_zero_padding", False)),
                self.o.params_in_partition[group],
                strict=False,
            )
            if counted_once(parameter, self.topology)
        ]

    @contextlib.contextmanager
    def clipping_by(self, known: Any, followed: bool) -> Iterator[None]:
        scaled_norm = self.make_scalar(known).float() * self.o.loss_scale
        replaced = stage_1_and_2, "all_gather_dp_groups", self.gathers.begin_gathers
        with super().clipping_by(scaled_norm, followed), patches.replace_attribute(*replaced):
            yield

    def discard_gradients(self) -> None:
        super().discard_gradients()
        self.o.micro_step_id = -1
        self.o._release_preflattened_grad_buffers()
        for averaged_gradient in self.o.averaged_gradients:
            self.o.averaged_gradients[averaged_gradient] = None
            self.o.all_grad_tensors[averaged_gradient] = None

    def refresh_weights(self) -> None:
        super().refresh_weights()
        for group in range(len(self.o.bit16_groups)):
            self.o._update_model_bit16_weights(group)


class Zero3(Wrapper):
    """DeepSpeedZeroOptimizer_Stage3: the parameters are partitioned as well."""

    norm = "_get_norm_groups"
    sums_apart = True

    @property
    def divided_by(self) -> int:
        return self.topology.layout.data

    def _measure_sums(self, watch: LocalGradients) -> None:
        patches.measure_scattering(self.o, watch, self.topology.layout.data)

    @property
    def masters(self) -> list[Tensor]:
        return list(self.o.fp32_partitioned_groups_flat)

    @property
    def flat_weights(self) -> list[Tensor]:
        return list(self.o.fp16_partitioned_groups_flat)

    def replicated_parameters(self) -> list[nn.Parameter]:
        return list(self.o.persistent_parameters)

    def place_parameter(self, parameter: nn.Parameter) -> tuple[int, int, int, int] | None:
        group, group_offset, part_size = self.o.grad_position[self.o.get_param_id(parameter)]
        part_start = self.topology.data_rank * part_size
        return group, group_offset, part_start, min(part_size, parameter.ds_numel - part_start)  # type: ignore[attr-defined]

    def squared_norm(self) -> tuple[Tensor, Tensor, Any]:
        known_norms = self.o._get_norm_groups()
        scale = float(getattr(self.o, "loss_scale", 1.0))
        unscaled_norms = torch.stack([self.make_scalar(known_norm) for known_norm in known_norms]) / scale
        # DeepSpeed says -1 of one that is not a number.
        is_valid = torch.isfinite(unscaled_norms).all() & (unscaled_norms.min() >= 0)
        # All ranks have the global norm: only one contributes it, so that a differing last bit cannot split them.
        counted_share = 1.0 if self.topology.rank == 0 else 0.0
        return counted_share * unscaled_norms.square().sum(), is_valid, known_norms

    def discard_gradients(self) -> None:
        super().discard_gradients()
        self.o.averaged_gradients = {}  # zero_grad has already reset its micro_step_id to 0

    def refresh_weights(self) -> None:
        o = self.o
        # An evaluation leaves gathered parameters behind, which would be used stale.
        o._partition_all_parameters()
        for master, low in zip(o.fp32_partitioned_groups_flat, o.fp16_partitioned_groups_flat, strict=True):
            low.data.copy_(master.data)
        for group in range(len(o.fp16_partitioned_groups_flat)):
            o._unflatten_partitioned_parameters(group)
        if o.persistent_parameters:
            o.persistent_parameters[0].all_gather(o.persistent_parameters)


WRAPPERS: dict[type, type[Wrapper]] = {
    BF16_Optimizer: Bf16, DeepSpeedZeroOptimizer_Stage3: Zero3, DeepSpeedZeroOptimizer: Zero12,
}  # fmt: skip


def wrap_optimizer(o: Any, engine: Any, topology: Topology, device: torch.device) -> Wrapper:
    """The interface to the wrapper that DeepSpeed chose."""
    for deepspeed_class, wrapper_class in WRAPPERS.items():
        if isinstance(o, deepspeed_class):
            return wrapper_class(o, engine, topology, device)
    raise TypeError(f"DeepSpeed chose {type(o).__name__}, which the gate does not support")


class Worker(Clipping):
    """Clips each worker's own gradient to optimizer.clip before the average (Lin et al., arXiv:1712.01887, section 3.2;
    no factor N^-1/2). It has no state.

    A worker is all ranks that compute the gradient of the same samples: tensor, pipeline and context ranks together.
    The gate judges the average of unclipped gradients. Only if a worker's norm is above the threshold are local
    gradients clipped and averaged once more. That needs each rank's own gradient after the first average, which
    BF16_Optimizer keeps (ZeRO 1 in bf16), but for what the average overwrites: this keeps a copy of it, of 4 / ranks
    bytes a parameter, with replicas 8 / shards: the slices that a rank sums are not what it updates.
    """

    def __init__(
        self, config: OptimizerConfig, zero: Bf16, engine: Any, topology: Topology, device: torch.device
    ):
        super().__init__(config, {}, (topology.tensor_rank, topology.layout.tensor), device)
        self.zero, self.topology = zero, topology
        self._own: list[Tensor] = []
        self._square = torch.zeros((), dtype=torch.float64, device=device)
        zero.sums.overlap = False
        self._average = engine.buffered_allreduce_fallback
        engine.buffered_allreduce_fallback = self._measured

    def _measured(self, *_: Any, **__: Any) -> None:
        """Measure this rank's gradient, then average it over the data ranks. Collective over the data group."""
        self.zero.sums.own.fill_all()
        o, context_ranks = self.zero.o, self.topology.layout.context
        if context_ranks > 1:  # ranks that share samples are one worker
            for whole_gradient in o.fp32_groups_gradients_flat:
                dist.all_reduce(whole_gradient, group=self.topology.context_group)
                whole_gradient.div_(context_ranks)
        gradient_norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in self._counted()]
        self._square = torch.stack(gradient_norms).square().sum()
        self._own = [own_part.clone() for own_part in self.zero.sums.list_overwritten()]
        self._average()

    def _counted(self) -> list[Tensor]:
        """This rank's local gradients, of parameters that no other rank of its worker counts."""
        o, is_first_rank = self.zero.o, self.topology.tensor_rank == 0
        parameters, gradients = chain(*o.bf16_groups), chain(*o.fp32_groups_gradients)
        pairs = zip(parameters, gradients, strict=True)
        return [g for p, g in pairs if p.tensor_model_parallel or is_first_rank]

    def clip_pieces(self, pieces: Sequence[Piece], norm: float, scale: float) -> float:
        t, o = self.topology, self.zero.o
        worker_squares = torch.zeros(t.layout.samples, dtype=torch.float64, device=self.device)
        if t.context_rank == 0:
            worker_squares[t.sample_rank] = self._square
        dist.all_reduce(worker_squares)
        worker_factors = [by_norm(norm, self.config.clip) for norm in worker_squares.sqrt().tolist()]
        own_parts, self._own = self._own, []
        if min(worker_factors) == 1:
            return 1.0
        for gradient_part, part_before in zip(self.zero.sums.list_overwritten(), own_parts, strict=True):
            gradient_part.copy_(part_before)
        torch._foreach_mul_(o.fp32_groups_gradients_flat, worker_factors[t.sample_rank])
        self._average()
        self.zero.forget_norms(piece.fragment for piece in pieces)
        square_after = self.zero.squared_norm()[0]
        dist.all_reduce(square_after)
        return math.sqrt(float(square_after)) / norm if norm else 1.0
