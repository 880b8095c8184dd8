"""Inject faults into a rank from outside: the training code has no hooks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from drills import court_faults, slow_faults
from drills.plan import Fault, Plan
from megastable.config.tree import ScheduleConfig
from megastable.engine.engine import Engine
from megastable.fp8 import emulated
from megastable.model.cores import CORES, Core
from megastable.model.loss import Features, LossFunction
from megastable.optim import schedule as optim_schedule
from megastable.optim.schedule import rate
from megastable.parallel.fragments import Fragment

GARBAGE = 4096  # overwritten first moments: 16 KiB, four pages
TILE = 16  # wrong columns of a broken kernel's product
EXPONENT = 1 << 30  # the highest bit of an fp32 (and bf16) exponent: a weight of 0.02 becomes one of 10^36


def install(plan: Plan) -> None:
    """Install the fault of `plan` in this process."""
    fault = plan.fault
    if fault is None:
        return
    if fault.kind in LASTING:
        LASTING[fault.kind](fault)
        return
    real, marker = Engine.train_step, plan.run / f".drilled-{fault.kind}"

    def train_step(self: Engine, *args: Any, **options: Any) -> Any:
        rank = self.topology.rank
        mine = marker.with_name(f"{marker.name}-{rank}")
        # The engine's step: it goes back with a rewind. A measurement is not a step.
        if self._probing or self.ds.global_steps + 1 != fault.step or mine.exists():
            return real(self, *args, **options)
        mine.touch()
        with HAPPENS[fault.kind](self, rank == fault.rank, plan.seed):
            return real(self, *args, **options)

    Engine.train_step = train_step  # type: ignore[method-assign]


def _mistake(fault: Fault) -> None:
    def mistaken(schedule: ScheduleConfig, peak: float, total: int, done: int, next: int = 1) -> float:
        wrong = fault.step - 1 <= done // next < fault.step - 1 + fault.steps
        return rate(schedule, peak, total, done, next) * (fault.factor if wrong else 1.0)

    optim_schedule.rate = mistaken


def _broken_product(fault: Fault) -> None:
    """A fault of the emulation, such as the scale of another tile."""
    product, is_broken = emulated.multiply, _lasting(fault)

    def multiply(*args: Any, **options: Any) -> Tensor:
        result = product(*args, **options)
        if is_broken():
            result[..., :TILE] *= fault.factor
        return result

    emulated.multiply = multiply


def _broken_attention(fault: Fault) -> None:
    """A fault of the fused kernels' backward pass, for the first sample of a micro-batch."""
    is_broken = _lasting(fault)

    def broken(core: Core) -> Core:
        def run(*args: Any, **options: Any) -> Tensor:
            y = core.run(*args, **options)
            if is_broken() and y.requires_grad:
                y.register_hook(spoilt)
            return y

        return replace(core, run=run)

    def spoilt(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[0] *= fault.factor
        return gradient

    for name in CORES.keys() - {"reference", "plain"}:
        CORES[name] = broken(CORES[name])


def _lasting(fault: Fault) -> Callable[[], bool]:
    """Whether the present step is one of those with the fault, every time that they are computed."""
    step, broken = Engine.train_step, False

    def train_step(self: Engine, *args: Any, **options: Any) -> Any:
        nonlocal broken
        # A measurement repeats the step that was refused last.
        number = self.ds.global_steps + (not self._probing)
        broken = fault.step <= number < fault.step + fault.steps
        try:
            return step(self, *args, **options)
        finally:
            broken = False

    Engine.train_step = train_step  # type: ignore[method-assign]
    return lambda: broken


LASTING: dict[str, Callable[[Fault], None]] = {
    "high_rate": _mistake,
    "fp8": _broken_product,
    "attention": _broken_attention,
    "growing_gains": slow_faults.growing_gains,
    "growing_logits": slow_faults.growing_logits,
    "growing_outputs": slow_faults.growing_outputs,
    "dying_block": slow_faults.dying_block,
    "rare_tokens": slow_faults.rare_tokens,
    "grown_gradient": court_faults.grow_gradient,
    "shifted_labels": court_faults.shift_labels,
}


# Context managers around one step: (engine, whether it happens on this rank, seed)


@contextmanager
def nan_gradient(engine: Engine, here: bool, seed: int) -> Iterator[None]:
    def spoil(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[0] = torch.nan
        return gradient

    parameter = _matrix(engine)
    handle = parameter.register_hook(spoil) if here else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


@contextmanager
def inf_loss(engine: Engine, here: bool, seed: int) -> Iterator[None]:
    real = LossFunction.__call__

    def infinite(self: LossFunction, given: Tensor | Features, labels: Tensor) -> Tensor:
        loss = real(self, given, labels)
        if len(self.samples) == 1:
            self.samples[0] = self.samples[0] * torch.inf
            loss = loss * torch.inf
        return loss

    if here:
        LossFunction.__call__ = infinite  # type: ignore[method-assign]
    try:
        yield
    finally:
        LossFunction.__call__ = real  # type: ignore[method-assign]


@contextmanager
def moments(engine: Engine, here: bool, seed: int) -> Iterator[None]:
    if here:
        held = _held(engine, "exp_avg")[:GARBAGE]
        held.copy_(torch.randn(held.shape, generator=torch.Generator().manual_seed(seed)))
    yield


@contextmanager
def bit_flip(engine: Engine, here: bool, seed: int) -> Iterator[None]:
    if here:
        held = _held(engine, "weight")
        index = int(torch.randint(held.numel(), (1,), generator=torch.Generator().manual_seed(seed)))
        held[index : index + 1].view(torch.int32).bitwise_xor_(EXPONENT)
    engine.refresh_weights()  # collective: updates the computing copy
    yield


Around = Callable[[Engine, bool, int], Any]
HAPPENS: dict[str, Around] = {
    "nan_gradient": nan_gradient,
    "inf_loss": inf_loss,
    "moments": moments,
    "bit_flip": bit_flip,
    **{kind: court_faults.spoil_update(kind) for kind in court_faults.EDITS},
}


def _matrix(engine: Engine) -> torch.nn.Parameter:
    """A weight matrix in the middle of the model."""
    matrices = [p for p in engine.ds.module.parameters() if p.dim() > 1]
    return matrices[len(matrices) // 2]


def _held(engine: Engine, kind: str) -> Tensor:
    """This rank's part of a block's weight matrix, fp32: the largest."""

    def size(fragment: Fragment) -> int:
        return fragment.numel if len(fragment.shape) > 1 and fragment.name.startswith("blocks.") else 0

    flat = engine.flat_state()
    piece = flat.piece(max(flat.fragments, key=size), kind)
    assert piece is not None, "there are no moments before the first update"
    return piece
