"""Counts the bytes that torch operations move between memory and a cache.

The cache holds `capacity` bytes in lines, the least recently used of which is dropped. A read costs a line that the
cache does not hold; a write costs one that is not in it as written. So an operation on what was just used is free, as
it nearly is on a CPU whose chunk fits its cache, and on a GPU within one kernel.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

LINE = 256  # bytes
# Operations that do not read what they overwrite.
OVERWRITING = {"copy_", "zero_", "fill_"}


def list_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from list_tensors(item)


class Traffic(TorchDispatchMode):
    """read, written: bytes so far, by the operation's name."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self._lines = capacity // LINE, OrderedDict[tuple[int, int], bool]()
        self.read: dict[str, int] = {}
        self.written: dict[str, int] = {}
        self._kept: list[
            Any
        ] = []  # storages whose addresses must not be given to others while they are counted

    @property
    def total(self) -> int:
        return sum(self.read.values()) + sum(self.written.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        # Messages are counted where they are planned (tools/megastable_tools/plan/volume.py).
        if func.is_view or "empty" in name or func.namespace == "c10d":
            return result
        given = set[int]()
        for index, argument in enumerate(func._schema.arguments):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            # The schema says that the kernel writes gradients: it does if it is given a scale.
            is_written &= not (
                name == "_fused_adamw_" and argument.name == "grads" and not kwargs.get("grad_scale")
            )
            is_read = not (is_written and (name in OVERWRITING or argument.is_out))
            for tensor in list_tensors(value):
                given.add(tensor.untyped_storage().data_ptr())
                if is_read:
                    self._touch(self.read, name, tensor, False)
                if is_written:
                    self._touch(self.written, name, tensor, True)
        for tensor in list_tensors(result):
            if tensor.untyped_storage().data_ptr() not in given:
                self._touch(self.written, name, tensor, True)
        return result

    def _touch(self, counted: dict[str, int], name: str, tensor: Tensor, is_written: bool) -> None:
        storage = tensor.untyped_storage()
        self._kept.append(storage)
        begin = tensor.storage_offset() * tensor.itemsize
        for line in range(begin // LINE, -(-(begin + tensor.numel() * tensor.itemsize) // LINE)):
            key = storage.data_ptr(), line
            was_written = self._lines.pop(key, None)
            if was_written is None or (is_written and not was_written):
                counted[name] = counted.get(name, 0) + LINE
            self._lines[key] = is_written or bool(was_written)
            if len(self._lines) > self.capacity:
                self._lines.popitem(last=False)
