"""Faults below all code of the training: in what torch's products and collectives give, whoever calls them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.distributed import ProcessGroup, Work
from torch.utils._python_dispatch import TorchDispatchMode

from drills.corruption_bits import AMONG, WHOLE, Change, flip
from drills.corruption_plan import LAYOUTS, POSITIONS, Planned
from megastable.engine.engine import Engine

PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
Tell = Callable[[Change], None]


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
