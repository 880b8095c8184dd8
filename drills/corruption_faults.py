"""Plant a silent fault into this process, from outside: the training code has no hooks for it.

Every rank plants the same fault; only one of them acts. It acts once in the life of a run, also where the run goes back
and repeats the step, except for what lasts.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.distributed import ProcessGroup, Work
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.ranks import RankEnd
from drills.corruption_plan import LAYOUTS, POSITIONS, Change, Planned
from megastable.config.tree import RunConfig
from megastable.engine.engine import Engine
from megastable.engine.patches import replace_attribute
from megastable.model.gpt import Head
from megastable.parallel.sharding import placement_of

AMONG = 64  # elements of which the largest is struck
# By position, how far into the tensor they are. At its very beginning is a sample's first token, which attends only to
# itself, whatever its query is; at its very end the padding of the vocabulary.
NEAR = (1 / 8, 1 / 2, 7 / 8)
# Numbers of bits in fp32, by position. bf16 is the upper half of fp32. An exponent changes by 16, 8 or 4, so that the
# number is far off without being infinite.
BITS = {"sign": (31, 31, 31), "exponent": (27, 26, 25), "mantissa": (22, 21, 20)}
WHOLE = {torch.float32: torch.int32, torch.bfloat16: torch.int16}  # floats that can be struck, and their bits
PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
MOMENT = "exp_avg"
Item = TypeVar("Item")
Tell = Callable[[Change], None]
Around = Callable[[Engine], AbstractContextManager[None]]


class FaultJob(NamedTuple):
    """A run, and its fault."""

    config: RunConfig
    fault: Planned | None


class Struck(NamedTuple):
    """What the fault changed on a rank, and when it struck, in unix time."""

    changes: Sequence[Change] = ()
    time: float | None = None


def train_with_fault(job: FaultJob) -> RankEnd:
    """A rank of the run: how it ended, with what the fault did there."""
    from megastable import train

    all_changes: list[Change] = []
    change_times: list[float] = []

    def tell(change: Change) -> None:
        all_changes.append(change)
        change_times.append(time.time())

    error_name = error_text = ""
    try:
        with plant_fault(job.fault, tell):
            train.train(job.config, Path("recipe.yaml"))
    except Exception as raised_error:
        error_name, error_text = type(raised_error).__name__, str(raised_error)
    return RankEnd(error_name, error_text, Struck(all_changes, change_times[0] if change_times else None))


@contextmanager
def plant_fault(fault: Planned | None, tell: Tell) -> Iterator[None]:
    """In this context `fault` strikes an engine's run. tell: of what it changed on this rank, at once."""
    with ExitStack() as exit_stack:
        if fault is not None:
            around_before, around_during = _strike(fault, dist.get_rank() == fault.rank, tell, exit_stack)
            patched_step = _stepping(fault, Engine.train_step, around_before, around_during)
            exit_stack.enter_context(replace_attribute(Engine, "train_step", patched_step))
        yield


def _stepping(fault: Planned, real: Callable[..., Any], before: Around, during: Around) -> Callable[..., Any]:
    done = False

    def train_step(self: Engine, *args: Any, **options: Any) -> Any:
        nonlocal done
        around_step: Around | None = None
        # The engine's step, which it counts from where it resumed: it goes back with a rewind. A measurement is none.
        if not (done or self._probing):
            step_number = fault.begin + self.ds.global_steps + 1
            done = step_number >= fault.step
            around_step = during if done else before if step_number == fault.step - 1 else None
        with around_step(self) if around_step is not None else nullcontext():
            return real(self, *args, **options)

    return train_step


def _nothing(engine: Engine) -> AbstractContextManager[None]:
    return nullcontext()


def _strike(fault: Planned, here: bool, tell: Tell, stack: ExitStack) -> tuple[Around, Around]:
    """What is put around the step before the fault, and around the fault's. stack: of what lasts until the run ends."""
    where = fault.where
    if where in AT_REST:
        act = AT_REST[where]

        @contextmanager
        def at_rest(engine: Engine) -> Iterator[None]:
            if here:
                tell(act(engine, fault))
            if where == "norm":
                engine.refresh_weights()  # collective
            yield

        return _nothing, at_rest
    if not here:
        return _nothing, _nothing
    if where == "gradients":
        gradients = _Gradients(fault, tell)
        return gradients.recording, gradients.striking
    if where == "activation":
        return _nothing, partial(_activation, fault, tell)
    if where == "column":

        @contextmanager
        def lasting(engine: Engine) -> Iterator[None]:
            # Not only in steps: whatever this rank multiplies, a self test too, is wrong from now on.
            tell(zero_column(fault, stack))
            yield

        return _nothing, lasting
    operations: Operations = Products(fault, tell) if where == "product" else Messages(fault, tell)
    return operations.counting, operations.striking


def _at(items: Sequence[Item], position: int) -> Item:
    """The first, the middle or the last one."""
    return items[(0, len(items) // 2, len(items) - 1)[position]]


# What lies in memory, before the step: returns what was changed.


def _weight(engine: Engine, fault: Planned) -> Change:
    weight_name, held_weight = _copy(engine, fault.position)
    return flip_bit(held_weight, fault.what, fault.position, f"weight of {weight_name}")


def _replica(engine: Engine, fault: Planned) -> Change:
    """A weight as if read from a wrong place: all elements are one too late."""
    weight_name, held_weight = _copy(engine, fault.position)
    held_weight.copy_(held_weight.flatten().roll(1).view_as(held_weight))
    return Change(tensor=f"weight of {weight_name}")


def _copy(engine: Engine, position: int) -> tuple[str, Tensor]:
    """A matrix in compute precision; with ZeRO 3 this rank's part of it."""
    engine.zero.wait_for_weights()
    parameters: list[Any] = list(engine.ds.module.parameters())
    matrices = [p for p in parameters if len(getattr(p, "ds_shape", p.shape)) > 1]
    chosen_parameter = _at(matrices, position)
    held_part = chosen_parameter.ds_tensor if hasattr(chosen_parameter, "ds_tensor") else chosen_parameter
    return placement_of(chosen_parameter).name, held_part.data


def _state(kind: str, engine: Engine, fault: Planned) -> Change:
    flat_state = engine.flat_state()
    f = _at([f for f in flat_state.fragments if len(f.shape) > 1], fault.position)
    state_piece = flat_state.view_piece(f, kind)
    assert state_piece is not None, "there are no moments before the first update"
    return flip_bit(state_piece, fault.what, fault.position, f"{kind} of {f.name}")


def _norm(engine: Engine, fault: Planned) -> Change:
    """The master; the computing copy follows from it, and is refreshed."""
    flat_state = engine.flat_state()
    f = _at([f for f in flat_state.fragments if "norm" in f.name], fault.position)
    norm_piece = flat_state.view_piece(f, "weight")
    assert norm_piece is not None
    norm_piece.mul_(1.5)
    return Change(tensor=f"weight of {f.name}")


AT_REST: dict[str, Callable[[Engine, Planned], Change]] = {
    "weight": _weight,
    "replica": _replica,
    "master": partial(_state, "weight"),
    "moment": partial(_state, MOMENT),
    "norm": _norm,
}


# What is computed in the step


class _Gradients:
    """All gradients of a rank, in each of its backward passes, before anything sums them."""

    def __init__(self, fault: Planned, tell: Tell) -> None:
        self.fault, self.tell = fault, tell
        # Of the step before, by parameter, in the order of micro-batches.
        self._old: dict[str, list[Tensor]] = {}

    def recording(self, engine: Engine) -> AbstractContextManager[None]:
        def record(name: str, gradient: Tensor) -> None:
            self._old.setdefault(name, []).append(gradient.clone())

        return self._hooked(engine, record) if self.fault.what == "stale" else nullcontext()

    @contextmanager
    def striking(self, engine: Engine) -> Iterator[None]:
        act_by_kind: dict[str, Callable[[str, Tensor], Tensor]] = {
            "negated": lambda name, gradient: -gradient,
            "scaled-3": lambda name, gradient: gradient * 3.0,
            "zero": lambda name, gradient: torch.zeros_like(gradient),
            "stale": lambda name, gradient: self._old[name].pop(0),
        }
        self.tell(Change(tensor="all gradients"))
        with self._hooked(engine, act_by_kind[self.fault.what]):
            yield

    @contextmanager
    def _hooked(self, engine: Engine, act: Callable[[str, Tensor], Tensor | None]) -> Iterator[None]:
        with ExitStack() as exit_stack:
            for parameter in engine.ds.module.parameters():
                parameter_name = placement_of(parameter).name
                exit_stack.callback(parameter.register_hook(partial(act, parameter_name)).remove)
            yield


@contextmanager
def _activation(fault: Planned, tell: Tell, engine: Engine) -> Iterator[None]:
    """What a layer with weights gives for its first micro-batch. Not the head, whose result may be the loss itself: a
    number that is told, and not trained on."""
    done = False
    layers = [
        (placement_of(p).name.rpartition(".")[0], module)
        for module in engine.ds.module.modules()
        for p in list(module.parameters(recurse=False))[:1]
        if not isinstance(module, Head)
    ]
    name, chosen = _at(layers, fault.position)

    def strike(module: nn.Module, inputs: Any, output: Any) -> Any:
        nonlocal done
        if done:
            return None
        done = True
        wrong_output = output.clone()
        tell(flip_bit(wrong_output, fault.what, fault.position, f"output of {name}"))
        return wrong_output

    handle = chosen.register_forward_hook(strike)
    try:
        yield
    finally:
        handle.remove()


# A bit


@torch.no_grad()
def flip_bit(tensor: Tensor, what: str, position: int, name: str) -> Change:
    """In place. tensor: fp32 or bf16, of any strides. what: a key of BITS. position: 0, 1 or 2, of the bit, and of the
    element: in its first part, its middle or its last part. name: of the tensor, for people."""
    held = tensor.detach()
    flat_index = _chosen(held.flatten(), position)
    element_index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat_index), held.shape))
    bit = BITS[what][position] - (32 - 8 * held.element_size())
    one_element = held[element_index].reshape(1).clone()
    value_before = float(one_element)
    # int64, as the highest bit is no int32; it wraps to the negative number with these bits.
    one_element.view(WHOLE[held.dtype]).bitwise_xor_(torch.tensor(1 << bit).to(WHOLE[held.dtype]))
    held[element_index] = one_element[0]
    return Change(tensor=name, element=flat_index, before=value_before, after=float(one_element))


def _chosen(flat: Tensor, position: int) -> int:
    """The largest of a few elements; of all if those are zero, as padding is."""
    first_index = int((flat.numel() - min(AMONG, flat.numel())) * NEAR[position])
    some_elements = flat[first_index : first_index + AMONG].float().abs()
    if some_elements.max() > 0:
        return first_index + int(some_elements.argmax())
    return int(flat.float().abs().argmax())


# Below all code of the training: in what torch's products and collectives give, whoever calls them


def can_be_struck(tensor: object) -> bool:
    """Whether it is numbers of the training: what ranks agree on is smaller, or in another dtype."""
    return isinstance(tensor, Tensor) and tensor.dtype in WHOLE and tensor.numel() >= AMONG


class _Watching(TorchDispatchMode):
    """Shows every operation to `act`, when it is done: its name, arguments and result. Messages are waited for."""

    def __init__(self, act: Callable[[str, Sequence[Any], Any], None]) -> None:
        super().__init__()
        self._act = act

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        operation_name, result = func._schema.name, func(*args, **(kwargs or {}))
        if operation_name.startswith("c10d::") and operation_name != "c10d::send":
            # The caller waits for the message again: gloo would write a sum once more, or wait for another message.
            *other_results, message_work = result if isinstance(result, tuple) else (result,)
            Work.unbox(message_work).wait()
            result = (*other_results, _over()) if other_results else _over()
        self._act(operation_name, args, result)
        return result


class Operations(ABC):
    """Of a rank: one bit of what one operation of the step gives. Those of the step before are counted, so that it is
    the first, the middle or the last one."""

    def __init__(self, fault: Planned, tell: Tell) -> None:
        self.fault, self.tell = fault, tell
        self.number = 0

    @contextmanager
    def counting(self, engine: Engine) -> Iterator[None]:
        def count(name: str, args: Sequence[Any], result: Any) -> None:
            self.number += bool(self.given(name, args, result))

        with _Watching(count):
            yield

    @contextmanager
    def striking(self, engine: Engine) -> Iterator[None]:
        left, what = (self.number - 1) * self.fault.position // (POSITIONS - 1), self.fault.what
        assert self.number, "there was nothing to strike in the step before"

        def act(name: str, args: Sequence[Any], result: Any) -> None:
            nonlocal left
            for tensor in self.given(name, args, result)[:1]:
                if left == 0:
                    told_name = f"{name.partition('::')[2]} of {list(tensor.shape)}"
                    self.tell(flip_bit(tensor, what, self.fault.position, told_name))
                left -= 1

        with _Watching(act):
            yield

    @abstractmethod
    def given(self, name: str, args: Sequence[Any], result: Any) -> list[Tensor]:
        """The tensors that an operation gives, if it is of this kind and its numbers are trained with."""


class Products(Operations):
    """Of matrices, in the forward and the backward pass."""

    def given(self, name: str, args: Sequence[Any], result: Any) -> list[Tensor]:
        return [result] if name in PRODUCTS and can_be_struck(result) else []


class Messages(Operations):
    """Of collectives and of exchanges between stages, as this rank receives them."""

    def given(self, name: str, args: Sequence[Any], result: Any) -> list[Tensor]:
        if not name.startswith("c10d::") or name == "c10d::send":
            return []
        if name == "c10d::reduce_" and ProcessGroup.unbox(args[1]).rank() != args[3]:
            return []  # only the root receives something
        tensors_received = [tensor for tensor in _flat(args[0]) if can_be_struck(tensor)]
        if name == "c10d::allreduce_" and LAYOUTS[self.fault.layout].tensor > 1:
            # Activations are bf16. In fp32 tensor ranks agree on the largest logit, which cancels out.
            tensors_received = [tensor for tensor in tensors_received if tensor.dtype is torch.bfloat16]
        return tensors_received


def _flat(tensors: Any) -> list[Any]:
    if isinstance(tensors, list | tuple):
        return [tensor for tensor_list in tensors for tensor in _flat(tensor_list)]
    return [tensors]


def _over() -> Any:
    """The work of a message that is there."""
    done_future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    done_future.set_result([])
    return _create_work_from_future(done_future).boxed()


def zero_column(fault: Planned, stack: ExitStack) -> Change:
    """From now on every product of matrices on this rank has zeros in one column; which one depends on its width."""

    def act(name: str, args: Sequence[Any], result: Any) -> None:
        if name in PRODUCTS:
            width = result.shape[-1]
            result[..., (width - 1) * fault.position // (POSITIONS - 1)] = 0

    stack.enter_context(_Watching(act))
    return Change(tensor="a column of every product")
