"""Copies of tensors in host memory, without holding up the step more than it must.

On a GPU the copies run on a stream of their own into pinned memory, and the next update waits for them there, not the
host. Snapshots and checkpoints both begin with one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Copied:
    """tensors: on the CPU; on a GPU they are complete only after `wait`."""

    tensors: dict[str, Tensor]
    done: Any = None

    def wait(self) -> None:
        """Until all is there; from any thread."""
        if self.done is not None:
            self.done.synchronize()


class HostCopy:
    """Copies what it is given. hold: told (on a GPU) the event that whoever overwrites the originals must wait for."""

    def __init__(self, hold: Callable[[Any], None]) -> None:
        self._hold = hold
        self._stream = torch.cuda.Stream() if torch.cuda.is_initialized() else None

    def copy(self, source: dict[str, Tensor], spare: dict[str, Tensor]) -> Copied:
        """spare: tensors of an older copy that nobody needs; their memory is used again where it fits."""

        def place(name: str, tensor: Tensor) -> Tensor:
            old = spare.get(name)
            if old is not None and old.shape == tensor.shape and old.dtype == tensor.dtype:
                return old
            return torch.empty_like(tensor, device="cpu", pin_memory=self._stream is not None)

        copies = {name: place(name, tensor.detach()) for name, tensor in source.items()}
        if self._stream is None:
            for name, tensor in source.items():
                copies[name].copy_(tensor.detach())
            return Copied(copies)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for name, tensor in source.items():
                copies[name].copy_(tensor.detach(), non_blocking=True)
        done = self._stream.record_event()
        self._hold(done)
        return Copied(copies, done)

    def fetch(self, shapes: dict[str, torch.Size], dtype: torch.dtype) -> dict[str, Tensor]:
        """Memory to copy into (`spare`). A system gives it page by page at the first write, which is slow."""
        pinned = self._stream is not None
        return {
            name: torch.empty(shape, dtype=dtype, pin_memory=pinned).zero_() for name, shape in shapes.items()
        }

    def synchronize(self) -> None:
        """Until all copies are complete."""
        if self._stream is not None:
            self._stream.synchronize()
