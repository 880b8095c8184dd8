"""Fingerprints of tensors: 64 bits that tell whether two copies are equal bit for bit, computed on the device.

    fingerprint([a, b])    # int64 []: the same on every rank and device that holds the same bytes

A sum of 64-bit words, each times an odd number of its own, modulo 2^64: of integers, so the order of a parallel sum
does not matter. An odd factor can be undone, so any change within one word changes the sum; of changes of several
words, about one in 2^60 escapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

import torch
from torch import Tensor

from megastable.base import splitmix

WORDS = 1 << 20  # processed at once; the table of their factors, 8 MiB, stays in a GPU's cache
STEP = 0x1E3779B97F4A7C15  # odd

Marks = Mapping[str, Tensor]
"""By the names of tensors: their fingerprints, int64 [], where the tensors are."""


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


def marks_of(tensors: Mapping[str, Tensor]) -> Marks:
    """Without a wait for the device."""
    return {name: fingerprint([tensor]) for name, tensor in tensors.items()}


def unlike(marks: Marks, others: Marks) -> list[str]:
    """The names whose fingerprints differ, or that only one of them has. Waits for the devices."""
    both = [name for name in marks if name in others]
    values = [(marks[name].cpu(), others[name].cpu()) for name in both]
    return [
        *(n for n, (a, b) in zip(both, values, strict=True) if a != b),
        *sorted(marks.keys() ^ others.keys()),
    ]


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
