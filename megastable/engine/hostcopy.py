"""Copy tensors to host memory in the background of a step; snapshots and checkpoints start with such a copy.

Only an update overwrites the copied tensors. So the copy may continue during the next forward and backward pass, and
the update waits for what is left of it. In a thread: it goes through the state in slices, which a GPU sends on a stream
of its own into two small pinned buffers in turn; while it fills one, the thread empties the other. The copies
themselves are ordinary memory: to pin gigabytes takes seconds, during which the driver lets nobody launch kernels, and
torch would round them up to a power of two. A step is delayed by

    bytes / the slower of (the link to the host, a thread's writes to memory) - time of forward and backward pass

if that is positive. Without a GPU the copies are made at once, unless a thread is given.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch
from torch import Tensor

PAGE = 1 << 12  # bytes, of the system's memory: the first write to each is slow
SLICE = 1 << 26  # bytes that a GPU sends at once: other messages to the host wait for no more than one


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
    """tensors: on the CPU, complete only after `wait_until_complete`. done: None if they are complete."""

    tensors: dict[str, Tensor]
    done: Filled | None = None

    def wait_until_complete(self) -> None:
        """Wait until all copies are complete; from any thread. Raises the error of a failed copy."""
        if self.done is not None:
            self.done.result()

    @property
    def waited(self) -> float:
        """Seconds that an update waited, on the host."""
        return self.done.waited if self.done is not None else 0.0


def receive_slices(
    pieces: Iterable[tuple[Tensor, Tensor]],
    buffers: Sequence[Tensor],
    send: Callable[[Tensor, Tensor], Callable[[], None]],
) -> None:
    """Copy each pair's second tensor into its first, one behind another.

    Args:
        pieces: bytes, uint8 [n], at most as many as a buffer holds.
        buffers: uint8, used in turn: one is emptied while another is filled.
        send: begins to copy its second tensor into its first, a part of a buffer; returns what waits for that.
    """
    sent = deque[tuple[Tensor, Tensor, Callable[[], None]]]()

    def empty_oldest() -> None:
        target, filled, wait_until_sent = sent.popleft()
        wait_until_sent()
        target.copy_(filled)

    for piece_number, (target, source) in enumerate(pieces):
        if len(sent) == len(buffers):
            empty_oldest()
        part = buffers[piece_number % len(buffers)][: source.numel()]
        sent.append((target, part, send(part, source)))
    while sent:
        empty_oldest()


def slice_bytes(tensor: Tensor) -> Sequence[Tensor]:
    """Views of a contiguous tensor's bytes, uint8, at most `SLICE` each."""
    return tensor.view(-1).view(torch.uint8).split(SLICE)


class HostCopy:
    """Copies tensors. hold: called with what an update must wait for before it overwrites the originals; thread: where
    to copy, None = one of its own for a GPU, and else at once."""

    def __init__(self, hold: Callable[[Filled], None], thread: Executor | None = None) -> None:
        self._hold, self._thread = hold, thread
        self._stream = torch.cuda.Stream() if torch.cuda.is_initialized() else None
        self._buffers: list[Tensor] = []
        if self._stream is not None and thread is None:
            self._thread = ThreadPoolExecutor(1, "host-copy")

    def copy_tensors(self, source: dict[str, Tensor], spare: dict[str, Tensor]) -> CopiedTensors:
        """spare: tensors of an older, unneeded copy; their memory is reused where it fits."""

        def place(name: str, tensor: Tensor) -> Tensor:
            old = spare.get(name)
            if old is not None and old.shape == tensor.shape and old.dtype == tensor.dtype:
                return old
            return torch.empty_like(tensor, device="cpu")

        originals = {name: tensor.detach() for name, tensor in source.items()}
        copies = {original_name: place(original_name, tensor) for original_name, tensor in originals.items()}

        def fill() -> None:
            if self._stream is not None:
                self._receive(
                    [(copies[name], original) for name, original in originals.items()], self._stream
                )
                return
            for original_name, original_tensor in originals.items():
                copies[original_name].copy_(original_tensor)

        if self._thread is None:
            fill()
            return CopiedTensors(copies)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        done = Filled(self._thread.submit(fill))
        self._hold(done)
        return CopiedTensors(copies, done)

    def _receive(self, pairs: Sequence[tuple[Tensor, Tensor]], stream: torch.cuda.Stream) -> None:
        """Copy from the GPU. pairs: a copy, and its original."""
        self._buffers = self._buffers or [
            torch.empty(SLICE, dtype=torch.uint8, pin_memory=True) for _ in range(2)
        ]

        def send(part: Tensor, original_bytes: Tensor) -> Callable[[], None]:
            with torch.cuda.stream(stream):
                part.copy_(original_bytes, non_blocking=True)
                return stream.record_event().synchronize

        pieces = (
            piece
            for copy, original in pairs
            for piece in zip(slice_bytes(copy), slice_bytes(original), strict=True)
        )
        receive_slices(pieces, self._buffers, send)

    def reserve_like(self, tensors: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """Memory for another copy (`spare`): the thread touches its pages before it copies into it. None without a
        thread, as the one that waits would have to."""
        if self._thread is None:
            return None
        reserved = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}

        def touch() -> None:
            for tensor in reserved.values():
                tensor.view(-1).view(torch.uint8)[::PAGE].zero_()

        self._thread.submit(touch)
        return reserved

    def allocate_touched(self, shapes: dict[str, torch.Size], dtype: torch.dtype) -> dict[str, Tensor]:
        """Memory to copy into (`spare`), touched: the system provides pages on the first write, which is slow."""
        return {
            shape_name: torch.empty(tensor_shape, dtype=dtype).zero_()
            for shape_name, tensor_shape in shapes.items()
        }
