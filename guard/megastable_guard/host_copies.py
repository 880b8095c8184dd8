"""Copies of a training state in host memory, to rewind to: weights, buffers, optimizer, scheduler, random states.

Needs torch, and nothing of a framework: plain modules, DDP, FSDP 1 and 2 (each rank copies its own part). The
optimizers are of torch, or wrap one that they name `optimizer`, as Accelerate's does, or hold several.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megastable_guard.random_states import read_random_states, restore_random_states
from megastable_guard.step_judge import thin_snapshots


class Stateful(Protocol):
    """What else belongs to the state, such as a scheduler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


@dataclass(frozen=True)
class ForwardState:
    """What a forward pass changes: buffers by name, and the states of the generators."""

    buffers: dict[str, Tensor]
    random: dict[str, Any]


@dataclass(frozen=True)
class StateCopy:
    """The state after `step` updates were offered to the guard. weights: parameters by name. masters: parameters of the
    optimizers that are not the model's, such as fp32 copies of them. moments: of every parameter of the optimizers, in
    the order of their groups; groups: their settings. others: state dicts."""

    step: int
    forward: ForwardState
    weights: dict[str, Tensor]
    masters: list[Tensor]
    moments: list[dict[str, Any]]
    groups: list[dict[str, Any]]
    others: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class HeldState:
    """Where a run stands, while its copies are visited. present: as a copy; kept: the copies; moments: of every
    parameter of the optimizers, as they were; gradients: parameters, their gradients and copies of these."""

    present: StateCopy
    kept: list[StateCopy]
    moments: list[dict[str, Any]]
    gradients: list[tuple[Tensor, Tensor, Tensor]]


def find_inner_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer of torch inside of wrappers. Raises TypeError."""
    inner_optimizer, wrapped = None, optimizer
    while wrapped is not None:
        inner_optimizer = wrapped if isinstance(wrapped, torch.optim.Optimizer) else inner_optimizer
        wrapped = getattr(wrapped, "optimizer", None)
    if inner_optimizer is None:
        raise TypeError(
            f"{type(optimizer).__name__} is not an optimizer of torch and wraps none: the guard can refuse updates, "
            "but not rewind it: keep=0"
        )
    return inner_optimizer


def find_inner_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The optimizers of torch inside of a sequence, or of a container such as torchtitan's or Megatron's. Raises
    TypeError."""
    held_members = optimizer if isinstance(optimizer, list | tuple) else None
    for member_name in ("optimizers", "chained_optimizers"):
        named_members = getattr(optimizer, member_name, None)
        held_members = named_members if isinstance(named_members, list | tuple) else held_members
    if held_members is None:
        return [find_inner_optimizer(optimizer)]
    return [
        inner_optimizer
        for held_member in held_members
        for inner_optimizer in find_inner_optimizers(held_member)
    ]


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor or of a parameter under ZeRO 3; another tensor itself."""
    whole_or_part: Tensor = getattr(tensor, "ds_tensor", tensor)
    return whole_or_part.to_local() if hasattr(whole_or_part, "to_local") else whole_or_part


def shard_like(present: Any, kept: Any, copy_deeply: Callable[[Any], Any]) -> Any:
    """A copy of a kept state, with DTensors where the present state has them: of an average of sharded weights."""
    if isinstance(kept, dict) and isinstance(present, Mapping):
        return {
            kept_key: shard_like(present.get(kept_key), kept_value, copy_deeply)
            for kept_key, kept_value in kept.items()
        }
    if isinstance(kept, Tensor) and hasattr(present, "to_local"):
        own_part = kept.to(present.to_local().device, copy=True)
        shard_layout = {"shape": present.shape, "stride": present.stride(), "run_check": False}
        return type(present).from_local(own_part, present.device_mesh, present.placements, **shard_layout)
    return copy_deeply(kept)


def read_forward_state(model: torch.nn.Module) -> ForwardState:
    """The buffers where they are, and the generators."""
    buffers = {name: local_part(buffer).detach().clone() for name, buffer in model.named_buffers()}
    return ForwardState(buffers, read_random_states())


def restore_buffers(model: torch.nn.Module, forward: ForwardState) -> None:
    """What a forward pass has written into them is gone. Those registered since stay as they are."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in forward.buffers:
                local_part(buffer).copy_(forward.buffers[name])


class HostCopies:
    """The newest copies, thinned out with age. Every rank takes, drops and restores the same steps.

    Args:
        model, optimizer: of this rank; several optimizers as a sequence.
        others: what else belongs to the state, by name.
        interval, capacity: steps from one to the next, and how many are kept. Each needs the memory of the weights and
            the optimizer's state.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        others: Mapping[str, Stateful],
        interval: int,
        capacity: int,
    ) -> None:
        self.model, self.optimizers, self.others = model, find_inner_optimizers(optimizer), others
        self.interval, self.capacity = interval, capacity
        self._kept: list[StateCopy] = []

    @property
    def newest(self) -> Sequence[StateCopy]:
        """The newest first."""
        return self._kept[::-1]

    @property
    def steps(self) -> list[int]:
        """Ascending."""
        return [kept_copy.step for kept_copy in self._kept]

    def is_due(self, step: int) -> bool:
        return self.capacity > 0 and (not self._kept or step >= self._kept[-1].step + self.interval)

    def forget_copies(self) -> None:
        """Of a timeline that is left: a checkpoint was loaded."""
        self._kept.clear()

    def take_copy(self, step: int, forward: ForwardState) -> None:
        """Copy the present state, of after `step`. forward: of before the forward pass that came since."""
        kept_steps = thin_snapshots([*self.steps, step], self.capacity, self.interval)
        self._kept = [kept_copy for kept_copy in self._kept if kept_copy.step in kept_steps]
        self._kept.append(self._copy_state(step, forward))

    def _copy_state(self, step: int, forward: ForwardState) -> StateCopy:
        forward = ForwardState({name: self._copy(t) for name, t in forward.buffers.items()}, forward.random)
        with torch.no_grad():
            weights = {name: self._copy(tensor) for name, tensor in self.model.named_parameters()}
            master_weights = [self._copy(tensor) for tensor in self._masters()]
            moments = [self._copy(inner.state.get(p, {})) for inner, p in self._parameters()]
            groups = [
                {key: self._copy(value) for key, value in param_group.items() if key != "params"}
                for param_group in self._groups()
            ]
            others = {other_name: self._copy(other.state_dict()) for other_name, other in self.others.items()}
        return StateCopy(step, forward, weights, master_weights, moments, groups, others)

    def hold_present(self, step: int) -> HeldState:
        """Keep where the run stands, between the backward pass of a step and its update, for `put_back`: copies may be
        restored meanwhile. The gradients stay, and are the parameters' no more."""
        present_copy = self._copy_state(step, read_forward_state(self.model))
        gradients = list[tuple[Tensor, Tensor, Tensor]]()
        for parameter in [*self.model.parameters(), *self._masters()]:
            if parameter.grad is not None:
                # DDP may write those of the next backward pass into the same memory.
                gradients.append((parameter, parameter.grad, self._copy(parameter.grad)))
                parameter.grad = None
        moments = [dict(inner.state.get(parameter, {})) for inner, parameter in self._parameters()]
        return HeldState(present_copy, [*self._kept], moments, gradients)

    def put_back(self, held: HeldState) -> None:
        """Restore what `hold_present` has kept, bit for bit."""
        self._kept = [*held.kept]
        for (inner_optimizer, parameter), moments in zip(self._parameters(), held.moments, strict=True):
            if moments:  # a copy from before the first update has none
                inner_optimizer.state[parameter] = dict(moments)
        self.restore_copy(held.present)
        with torch.no_grad():
            for parameter, gradient, gradient_copy in held.gradients:
                local_part(gradient).copy_(gradient_copy)
                parameter.grad = gradient

    def restore_before(self, onset: int) -> StateCopy:
        """Restore the newest copy that no step from `onset` on has touched, and drop later ones."""
        self._kept = [kept_copy for kept_copy in self._kept if kept_copy.step < onset]
        if not self._kept:
            raise LookupError(f"there is no copy from before step {onset}")
        self.restore_copy(self._kept[-1])
        return self._kept[-1]

    def restore_copy(self, kept_copy: StateCopy) -> None:
        """Restore one of the copies."""
        if len(kept_copy.moments) != len(self._parameters()):
            raise RuntimeError(
                "the optimizer has other parameters than when its state was copied: after add_param_group begin with a "
                "new Guard"
            )
        self.restore_weights(kept_copy)
        with torch.no_grad():
            for master_weight, kept_master in zip(self._masters(), kept_copy.masters, strict=True):
                local_part(master_weight).copy_(kept_master)
            for (inner_optimizer, parameter), moments in zip(
                self._parameters(), kept_copy.moments, strict=True
            ):
                self._restore_moments(inner_optimizer, parameter, moments)
        for group, settings in zip(self._groups(), kept_copy.groups, strict=True):
            for setting_key, setting_value in settings.items():
                if isinstance(group.get(setting_key), Tensor):  # a learning rate that a captured update reads
                    group[setting_key].copy_(setting_value)
                else:
                    group[setting_key] = copy.deepcopy(setting_value)
        for name, other in self.others.items():
            other.load_state_dict(shard_like(other.state_dict(), kept_copy.others[name], self._copy_deeply))
        restore_random_states(kept_copy.forward.random)
        self.clear_gradients()

    def clear_gradients(self) -> None:
        """Those of the model and of the optimizers, which may hold others than the model's parameters."""
        for parameter in [*self.model.parameters(), *self._masters()]:
            parameter.grad = None

    def restore_weights(self, kept_copy: StateCopy) -> None:
        """Weights and buffers alone: to measure by."""
        with torch.no_grad():
            for name, tensor in self.model.named_parameters():
                local_part(tensor).copy_(kept_copy.weights[name])
        restore_buffers(self.model, kept_copy.forward)

    def _restore_moments(
        self, optimizer: torch.optim.Optimizer, parameter: Tensor, moments: Mapping[str, Any]
    ) -> None:
        """In place where there are tensors already: a compiled or captured update refers to them."""
        if not moments:
            optimizer.state.pop(parameter, None)
            return
        state = optimizer.state[parameter]
        for key in [key for key in state if key not in moments]:
            del state[key]
        for key, moment_value in moments.items():
            present = state.get(key)
            if isinstance(moment_value, Tensor) and isinstance(present, Tensor):
                local_part(present).copy_(moment_value)
            elif isinstance(moment_value, Tensor):
                raise LookupError(f"the optimizer's state has no {key!r} any more")
            else:
                state[key] = copy.deepcopy(moment_value)

    def _groups(self) -> Sequence[dict[str, Any]]:
        return [group for inner_optimizer in self.optimizers for group in inner_optimizer.param_groups]

    def _parameters(self) -> Sequence[tuple[torch.optim.Optimizer, Tensor]]:
        return [
            (inner, p) for inner in self.optimizers for group in inner.param_groups for p in group["params"]
        ]

    def _masters(self) -> Sequence[Tensor]:
        own_parameters = {id(parameter) for parameter in self.model.parameters()}
        return [parameter for _, parameter in self._parameters() if id(parameter) not in own_parameters]

    def _copy_deeply(self, value: Any) -> Any:
        """But for the model: a schedule may refer to it."""
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        shared_parts = [self.model, *self.optimizers, *self.model.modules(), *self.model.parameters()]
        return copy.deepcopy(value, {id(shared_part): shared_part for shared_part in shared_parts})

    def _copy(self, value: Any) -> Any:
        """A copy on the CPU, of whatever a state is made of."""
        if isinstance(value, Tensor):
            return local_part(value).detach().to("cpu", copy=True)
        if isinstance(value, dict):  # also a module's, which is ordered
            return {key: self._copy(inner_value) for key, inner_value in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._copy(inner_value) for inner_value in value)
        return self._copy_deeply(value)
