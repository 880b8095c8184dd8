"""The optimizer's shared state in a checkpoint: tensors that every rank holds alike, in one file that rank 0 writes.

It is indexed by whole parameters, so that it is the same in every layout. An optimizer without any has no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from megastable.checkpoint.files import FileRecord, TensorFile
from megastable.checkpoint.reader import Reader

FILE = "shared.safetensors"


def write(folder: Path, tensors: Mapping[str, Tensor]) -> tuple[dict[str, FileRecord], bool]:
    """Write the shared state, if there is any; and whether all numbers are finite. Raises OSError."""
    if not tensors:
        return {}, True
    entries = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in sorted(tensors.items())]
    with TensorFile(folder / FILE, entries) as file:
        for name, tensor in sorted(tensors.items()):
            file.write(name, tensor)
    return {FILE: file.record}, all(bool(tensor.isfinite().all()) for tensor in tensors.values())


def read(checkpoint: Path) -> dict[str, Tensor]:
    """The shared state by name, on the CPU; empty if the checkpoint has none. Raises CheckpointError."""
    if not (checkpoint / FILE).exists():
        return {}
    reader = Reader(checkpoint / FILE)
    return {name: reader.tensor(name) for name in reader.entries}
