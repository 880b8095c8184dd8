"""Fingerprints of tensors: 64 bits that tell whether two copies are equal bit for bit, computed on the device.

    fingerprint([a, b])    # int64 []: the same on every rank and device that holds the same bytes

A sum of 64-bit words, each times an odd number of its own, modulo 2^64: of integers, so the order of a parallel sum
does not matter. An odd factor can be undone, so any change within one word changes the sum; of changes of several
words, about one in 2^60 escapes. The factor of a word is the product of its row's and its column's, in rows of `ROW`
words, so that nothing but the words has to be read.

On a GPU a tensor is read once by one kernel (fingerprint_kernel.py); what follows here is the same in torch's
operations.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from megastable.base import reproducible

log = logging.getLogger(__name__)

ROW = 2048  # words
ROWS, COLUMNS = 1, 2  # the keys of their factors
# Words processed at once: by a CPU, in its cache; by a GPU without the kernel.
CACHED, LAUNCHED = 1 << 18, 1 << 24
STEP = 0x1E3779B97F4A7C15  # odd
MASK = (1 << 64) - 1


class Mark(NamedTuple):
    """64 bits of a tensor, as `device` (its type) makes them: int64 [], where the tensor was."""

    device: str
    value: Tensor


Marks = Mapping[str, Mark]
"""By the names of tensors."""


@torch.no_grad()
def fingerprint_tensors(tensors: Iterable[Tensor]) -> Tensor:
    """int64 [], on the device of the tensors (any dtype, all on one device): of their bytes, in this order."""
    flat_tensors = [_bytes(tensor) for tensor in tensors]
    total = torch.zeros((), dtype=torch.int64, device=flat_tensors[0].device if flat_tensors else None)
    for place, flat_tensor in enumerate(flat_tensors):
        scale = pow(STEP, 2 * (len(flat_tensors) - 1 - place), 1 << 64)
        _add(total, flat_tensor, scale)
    return total


def mark_of(tensor: Tensor, device: str | None = None) -> Mark:
    """Without a wait for the device. CPUs have a faster hash than the sum above, and what was marked on a GPU can be
    compared with a copy on the CPU: device: that made the other mark."""
    device = device or tensor.device.type
    if device != "cpu":
        return Mark(device, fingerprint_tensors([tensor]))
    hashed = xxhash.xxh3_64_intdigest(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return Mark(device, torch.tensor(hashed - (1 << 63)))


def marks_of(tensors: Mapping[str, Tensor], like: Marks | None = None) -> Marks:
    """like: marks that these will be compared with."""
    device_by_name = {name: mark.device for name, mark in (like or {}).items()}
    return {
        tensor_name: mark_of(tensor, device_by_name.get(tensor_name))
        for tensor_name, tensor in tensors.items()
    }


def compare_marks(marks: Marks, others: Marks) -> list[str]:
    """The names whose marks differ, or that only one of them has. Waits for the devices, once for each."""
    both = [mark_name for mark_name in marks if mark_name in others]
    pairs = zip(both, _values(marks, both), _values(others, both), strict=True)
    return [*(name for name, a, b in pairs if a != b), *sorted(marks.keys() ^ others.keys())]


def _values(marks: Marks, names: Sequence[str]) -> list[int]:
    """Fetched together: a wait for each would leave a GPU without work as often. Of a state on a GPU a few tensors are
    on the CPU, as the optimizer's count of steps may be."""
    names_by_device = defaultdict[torch.device, list[str]](list)
    for name in names:
        names_by_device[marks[name].value.device].append(name)
    value_by_name: dict[str, int] = {}
    for group in names_by_device.values():
        value_by_name |= zip(group, torch.stack([marks[name].value for name in group]).tolist(), strict=True)
    return [value_by_name[name] for name in names]


def _bytes(tensor: Tensor) -> Tensor:
    """uint8 [bytes]; a copy only where it has to be."""
    flat_bytes = tensor.detach().contiguous().view(-1).view(torch.uint8)
    is_aligned = flat_bytes.data_ptr() % 8 == 0 and flat_bytes.storage_offset() % 8 == 0
    return flat_bytes if is_aligned else flat_bytes.clone()


def _add(total: Tensor, flat: Tensor, scale: int) -> None:
    """Add what the bytes give, times `scale`, to `total`, in place."""
    whole_bytes = flat.numel() // 8 * 8
    words, rest = flat[:whole_bytes].view(torch.int64), flat[whole_bytes:]
    # With the length, or zeros could move from one tensor to the next.
    length_term = flat.numel() * STEP * scale & MASK
    if flat.device.type == "cuda" and _can_compile(flat.device):
        from megastable.base.fingerprint_kernel import add_words

        add_words(total, words, rest, length_term, scale, (ROWS, COLUMNS), ROW)
        return
    if rest.numel():
        words = torch.cat((words, torch.cat((rest, rest.new_zeros(8 - rest.numel()))).view(torch.int64)))
    total += _sum(words) * reproducible.to_signed(scale) + reproducible.to_signed(length_term)


def _sum(words: Tensor) -> Tensor:
    """int64 []: of all words, each times its factors."""
    # In powers of two, so that few tables are ever made.
    row_count = max(ROW, 1 << (words.numel() // ROW).bit_length())
    row_factors = _odd_numbers(ROWS, row_count, words.device)
    columns = _odd_numbers(COLUMNS, ROW, words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    chunk_words = CACHED if words.device.type == "cpu" else LAUNCHED
    for chunk_number, chunk in enumerate(words.split(chunk_words)):
        first_row = chunk_number * chunk_words // ROW
        whole_rows = chunk.numel() // ROW
        table, last_words = chunk[: whole_rows * ROW].view(whole_rows, ROW), chunk[whole_rows * ROW :]
        total += ((table * columns).sum(1) * row_factors[first_row : first_row + whole_rows]).sum()
        if last_words.numel():
            total += (last_words * columns[: last_words.numel()]).sum() * row_factors[first_row + whole_rows]
    return total


@cache
def _odd_numbers(key: int, count: int, device: torch.device) -> Tensor:
    """Factors: int64 [count]."""
    return reproducible.random_sequence(key, 0, count, device) | 1


@cache
def _can_compile(device: torch.device) -> bool:
    """Whether Triton makes the kernel here, tried once. It needs a C compiler, Python's headers and a folder that it
    may write to, and a machine may lack any of them."""
    if find_spec("triton") is None:
        return False
    from megastable.base.fingerprint_kernel import add_words

    trial_total = torch.zeros((), dtype=torch.int64, device=device)
    trial_word = torch.ones(1, dtype=torch.int64, device=device)
    try:
        add_words(trial_total, trial_word, trial_word.view(torch.uint8)[:0], 0, 1, (ROWS, COLUMNS), ROW)
    except Exception as error:  # whatever a compiler says
        error_lines = str(error).strip().splitlines() or [type(error).__name__]
        log.warning(
            "fingerprints of the state are taken by torch's operations, in many launches, as Triton cannot "
            "compile here: %s",
            error_lines[-1],
        )
        return False
    return True
