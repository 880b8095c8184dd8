"""Fingerprints of tensors: 64 bits that tell whether two copies are equal bit for bit, computed on the device.

    fingerprint([a, b])    # int64 []: the same on every rank and device that holds the same bytes

A sum of 64-bit words, each times an odd number of its own, modulo 2^64: of integers, so the order of a parallel sum
does not matter. An odd factor can be undone, so any change within one word changes the sum; of changes of several
words, about one in 2^60 escapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from megastable.base import splitmix

WORDS = 1 << 20  # processed at once; the table of their factors, 8 MiB, stays in a GPU's cache
STEP = 0x1E3779B97F4A7C15  # odd


class Mark(NamedTuple):
    """64 bits of a tensor, as `device` (its type) makes them: int64 [], where the tensor was."""

    device: str
    value: Tensor


Marks = Mapping[str, Mark]
"""By the names of tensors."""


@torch.no_grad()
def fingerprint(tensors: Iterable[Tensor]) -> Tensor:
    """int64 [], on the device of the tensors (any dtype, all on one device): of their bytes, in this order."""
    total: Tensor | None = None
    for tensor in tensors:
        flat = tensor.detach().contiguous().flatten()
        if total is None:
            total = torch.zeros((), dtype=torch.int64, device=flat.device)
        # With their lengths, or zeros could move from one tensor to the next.
        total = total * STEP + flat.numel() * flat.element_size()
        for chunk in flat.split(WORDS * 8 // flat.element_size()):
            words = _words(chunk)
            total = total * STEP + (words * _factors(flat.device)[: words.numel()]).sum()
    return torch.zeros((), dtype=torch.int64) if total is None else total


def mark_of(tensor: Tensor, device: str | None = None) -> Mark:
    """Without a wait for the device. CPUs have a faster hash than the sum above, and what was marked on a GPU can be
    compared with a copy on the CPU: device: that made the other mark."""
    device = device or tensor.device.type
    if device != "cpu":
        return Mark(device, fingerprint([tensor]))
    hashed = xxhash.xxh3_64_intdigest(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return Mark(device, torch.tensor(hashed - (1 << 63)))


def marks_of(tensors: Mapping[str, Tensor], like: Marks | None = None) -> Marks:
    """like: marks that these will be compared with."""
    made = {name: mark.device for name, mark in (like or {}).items()}
    return {name: mark_of(tensor, made.get(name)) for name, tensor in tensors.items()}


def unlike(marks: Marks, others: Marks) -> list[str]:
    """The names whose marks differ, or that only one of them has. Waits for the devices."""
    both = [name for name in marks if name in others]
    odd = [name for name in both if int(marks[name].value) != int(others[name].value)]
    return [*odd, *sorted(marks.keys() ^ others.keys())]


def _words(chunk: Tensor) -> Tensor:
    """The bytes of a chunk as int64, the last ones filled up with zeros. A copy only where it has to be."""
    missing = -chunk.numel() * chunk.element_size() % 8
    if missing:
        chunk = torch.cat((chunk, chunk.new_zeros(missing // chunk.element_size())))
    elif chunk.data_ptr() % 8 or chunk.storage_offset() * chunk.element_size() % 8:
        chunk = chunk.clone()
    return chunk.view(torch.int64)


@cache
def _factors(device: torch.device) -> Tensor:
    """Odd numbers, int64 [WORDS]."""
    return (splitmix.sequence(0, 0, WORDS) | 1).to(device)
