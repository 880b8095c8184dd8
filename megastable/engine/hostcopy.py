"""Copy tensors to host memory in the background of a step; snapshots and checkpoints start with such a copy.

Only an update overwrites the copied tensors. So the copy may continue during the next forward and backward pass, and
the update waits for it: on a GPU the copies run on a separate stream into pinned memory, and the update waits on the
GPU, not on the host; without a GPU they run in a thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Filled:
    """Completion of copies by a thread. waited: total seconds spent in `synchronize`."""

    def __init__(self, future: Future[None]) -> None:
        self._future, self.waited = future, 0.0

    def synchronize(self) -> None:
        """Wait until the copies are filled or have failed; readers get the error from
        `CopiedTensors.wait_until_complete`."""
        wait_begin = time.perf_counter()
        wait((self._future,))
        self.waited += time.perf_counter() - wait_begin

    def result(self) -> None:
        self._future.result()


@dataclass(frozen=True)
class CopiedTensors:
    """tensors: on the CPU, complete only after `wait_until_complete`. done: a `Filled`, a CUDA event, or None if
    complete."""

    tensors: dict[str, Tensor]
    done: Any = None

    def wait_until_complete(self) -> None:
        """Wait until all copies are complete; from any thread. Raises the error of a failed copy."""
        if isinstance(self.done, Filled):
            self.done.result()
        elif self.done is not None:
            self.done.synchronize()

    @property
    def waited(self) -> float:
        """Seconds that an update waited, on the host."""
        return self.done.waited if isinstance(self.done, Filled) else 0.0


class HostCopy:
    """Copies tensors. hold: called with what an update must wait for before it overwrites the originals; thread: where
    to copy without a GPU, None = at once."""

    def __init__(self, hold: Callable[[Any], None], thread: Executor | None = None) -> None:
        self._hold, self._thread = hold, thread
        self._stream = torch.cuda.Stream() if torch.cuda.is_initialized() else None

    def copy_tensors(self, source: dict[str, Tensor], spare: dict[str, Tensor]) -> CopiedTensors:
        """spare: tensors of an older, unneeded copy; their memory is reused where it fits."""

        def place(name: str, tensor: Tensor) -> Tensor:
            old = spare.get(name)
            if old is not None and old.shape == tensor.shape and old.dtype == tensor.dtype:
                return old
            return torch.empty_like(tensor, device="cpu", pin_memory=self._stream is not None)

        originals = {name: tensor.detach() for name, tensor in source.items()}
        copies = {original_name: place(original_name, tensor) for original_name, tensor in originals.items()}

        def fill() -> None:
            for original_name, original_tensor in originals.items():
                copies[original_name].copy_(original_tensor, non_blocking=True)

        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                fill()
            done: Any = self._stream.record_event()
        elif self._thread is not None:
            done = Filled(self._thread.submit(fill))
        else:
            fill()
            return CopiedTensors(copies)
        self._hold(done)
        return CopiedTensors(copies, done)

    def allocate_touched(self, shapes: dict[str, torch.Size], dtype: torch.dtype) -> dict[str, Tensor]:
        """Memory to copy into (`spare`), touched: the system provides pages on the first write, which is slow."""
        is_pinned = self._stream is not None
        return {
            shape_name: torch.empty(tensor_shape, dtype=dtype, pin_memory=is_pinned).zero_()
            for shape_name, tensor_shape in shapes.items()
        }

    def synchronize(self) -> None:
        """Wait until all copies to pinned memory are complete."""
        if self._stream is not None:
            self._stream.synchronize()
