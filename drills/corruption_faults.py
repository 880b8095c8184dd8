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
from megastable.engine.patches import instead
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

    changes: list[Change] = []
    times: list[float] = []

    def tell(change: Change) -> None:
        changes.append(change)
        times.append(time.time())

    error = text = ""
    try:
        with planted(job.fault, tell):
            train.train(job.config, Path("recipe.yaml"))
    except Exception as raised:
        error, text = type(raised).__name__, str(raised)
    return RankEnd(error, text, Struck(changes, times[0] if times else None))


@contextmanager
def planted(fault: Planned | None, tell: Tell) -> Iterator[None]:
    """In this context `fault` strikes an engine's run. tell: of what it changed on this rank, at once."""
    with ExitStack() as stack:
        if fault is not None:
            before, during = _strike(fault, dist.get_rank() == fault.rank, tell, stack)
            step = _stepping(fault, Engine.train_step, before, during)
            stack.enter_context(instead(Engine, "train_step", step))
        yield


def _stepping(fault: Planned, real: Callable[..., Any], before: Around, during: Around) -> Callable[..., Any]:
    done = False

    def train_step(self: Engine, *args: Any, **options: Any) -> Any:
        nonlocal done
        around: Around | None = None
        # The engine's step, which it counts from where it resumed: it goes back with a rewind. A measurement is none.
        if not (done or self._probing):
            step = fault.begin + self.ds.global_steps + 1
            done = step >= fault.step
            around = during if done else before if step == fault.step - 1 else None
        with around(self) if around is not None else nullcontext():
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
            tell(column(fault, stack))
            yield

        return _nothing, lasting
    operations: Operations = Products(fault, tell) if where == "product" else Messages(fault, tell)
    return operations.counting, operations.striking


def _at(items: Sequence[Item], position: int) -> Item:
    """The first, the middle or the last one."""
    return items[(0, len(items) // 2, len(items) - 1)[position]]


# What lies in memory, before the step: returns what was changed.


def _weight(engine: Engine, fault: Planned) -> Change:
    name, held = _copy(engine, fault.position)
    return flip(held, fault.what, fault.position, f"weight of {name}")


def _replica(engine: Engine, fault: Planned) -> Change:
    """A weight as if read from a wrong place: all elements are one too late."""
    name, held = _copy(engine, fault.position)
    held.copy_(held.flatten().roll(1).view_as(held))
    return Change(tensor=f"weight of {name}")


def _copy(engine: Engine, position: int) -> tuple[str, Tensor]:
    """A matrix in compute precision; with ZeRO 3 this rank's part of it."""
    parameters: list[Any] = list(engine.ds.module.parameters())
    matrices = [p for p in parameters if len(getattr(p, "ds_shape", p.shape)) > 1]
    chosen = _at(matrices, position)
    held = chosen.ds_tensor if hasattr(chosen, "ds_tensor") else chosen
    return placement_of(chosen).name, held.data


def _state(kind: str, engine: Engine, fault: Planned) -> Change:
    flat = engine.flat_state()
    f = _at([f for f in flat.fragments if len(f.shape) > 1], fault.position)
    piece = flat.piece(f, kind)
    assert piece is not None, "there are no moments before the first update"
    return flip(piece, fault.what, fault.position, f"{kind} of {f.name}")


def _norm(engine: Engine, fault: Planned) -> Change:
    """The master; the computing copy follows from it, and is refreshed."""
    flat = engine.flat_state()
    f = _at([f for f in flat.fragments if "norm" in f.name], fault.position)
    piece = flat.piece(f, "weight")
    assert piece is not None
    piece.mul_(1.5)
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
        acts: dict[str, Callable[[str, Tensor], Tensor]] = {
            "negated": lambda name, gradient: -gradient,
            "scaled-3": lambda name, gradient: gradient * 3.0,
            "zero": lambda name, gradient: torch.zeros_like(gradient),
            "stale": lambda name, gradient: self._old[name].pop(0),
        }
        self.tell(Change(tensor="all gradients"))
        with self._hooked(engine, acts[self.fault.what]):
            yield

    @contextmanager
    def _hooked(self, engine: Engine, act: Callable[[str, Tensor], Tensor | None]) -> Iterator[None]:
        with ExitStack() as stack:
            for parameter in engine.ds.module.parameters():
                name = placement_of(parameter).name
                stack.callback(parameter.register_hook(partial(act, name)).remove)
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
        wrong = output.clone()
        tell(flip(wrong, fault.what, fault.position, f"output of {name}"))
        return wrong

    handle = chosen.register_forward_hook(strike)
    try:
        yield
    finally:
        handle.remove()


# A bit


@torch.no_grad()
def flip(tensor: Tensor, what: str, position: int, name: str) -> Change:
    """In place. tensor: fp32 or bf16, of any strides. what: a key of BITS. position: 0, 1 or 2, of the bit, and of the
    element: in its first part, its middle or its last part. name: of the tensor, for people."""
    held = tensor.detach()
    index = _chosen(held.flatten(), position)
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), held.shape))
    bit = BITS[what][position] - (32 - 8 * held.element_size())
    element = held[at].reshape(1).clone()
    before = float(element)
    # int64, as the highest bit is no int32; it wraps to the negative number with these bits.
    element.view(WHOLE[held.dtype]).bitwise_xor_(torch.tensor(1 << bit).to(WHOLE[held.dtype]))
    held[at] = element[0]
    return Change(tensor=name, element=index, before=before, after=float(element))


def _chosen(flat: Tensor, position: int) -> int:
    """The largest of a few elements; of all if those are zero, as padding is."""
    first = int((flat.numel() - min(AMONG, flat.numel())) * NEAR[position])
    among = flat[first : first + AMONG].float().abs()
    if among.max() > 0:
        return first + int(among.argmax())
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
        name, result = func._schema.name, func(*args, **(kwargs or {}))
        if name.startswith("c10d::") and name != "c10d::send":
            # The caller waits for the message again: gloo would write a sum once more, or wait for another message.
            *others, work = result if isinstance(result, tuple) else (result,)
            Work.unbox(work).wait()
            result = (*others, _over()) if others else _over()
        self._act(name, args, result)
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
                    told = f"{name.partition('::')[2]} of {list(tensor.shape)}"
                    self.tell(flip(tensor, what, self.fault.position, told))
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
        received = [tensor for tensor in _flat(args[0]) if can_be_struck(tensor)]
        if name == "c10d::allreduce_" and LAYOUTS[self.fault.layout].tensor > 1:
            # Activations are bf16. In fp32 tensor ranks agree on the largest logit, which cancels out.
            received = [tensor for tensor in received if tensor.dtype is torch.bfloat16]
        return received


def _flat(tensors: Any) -> list[Any]:
    if isinstance(tensors, list | tuple):
        return [tensor for part in tensors for tensor in _flat(part)]
    return [tensors]


def _over() -> Any:
    """The work of a message that is there."""
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    future.set_result([])
    return _create_work_from_future(future).boxed()


def column(fault: Planned, stack: ExitStack) -> Change:
    """From now on every product of matrices on this rank has zeros in one column; which one depends on its width."""

    def act(name: str, args: Sequence[Any], result: Any) -> None:
        if name in PRODUCTS:
            width = result.shape[-1]
            result[..., (width - 1) * fault.position // (POSITIONS - 1)] = 0

    stack.enter_context(_Watching(act))
    return Change(tensor="a column of every product")
