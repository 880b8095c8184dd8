"""Plant a silent fault into this process, from outside: the training code has no hooks for it.

Every rank plants the same fault; only one of them acts. It acts once in the life of a run, also where the run goes back
and repeats the step, except for what lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drills.corruption_bits import Change, flip
from drills.corruption_modes import Messages, Operations, Products, column
from drills.corruption_plan import Planned
from megastable.engine.engine import Engine
from megastable.engine.patches import instead
from megastable.model.gpt import Head
from megastable.parallel.sharding import placement_of

MOMENT = "exp_avg"
Item = TypeVar("Item")
Tell = Callable[[Change], None]
Around = Callable[[Engine], AbstractContextManager[None]]


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
        self._old: dict[
            str, list[Tensor]
        ] = {}  # of the step before, by parameter, in the order of micro-batches

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
