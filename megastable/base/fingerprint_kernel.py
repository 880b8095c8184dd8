"""The sum of fingerprint.py as a Triton kernel: reads a buffer once, in one launch, and waits for nothing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megastable.base import reproducible

PROGRAMS = 8  # per multiprocessor: enough loads under way to keep its share of the memory busy
WARPS = 8

GOLDEN = tl.constexpr(reproducible.GOLDEN)
FIRST_SHIFT, FIRST_FACTOR = (tl.constexpr(number) for number in reproducible.FACTORS[0])
SECOND_SHIFT, SECOND_FACTOR = (tl.constexpr(number) for number in reproducible.FACTORS[1])


@triton.jit
def odd_number(key, index):  # type: ignore[no-untyped-def]
    """As `fingerprint._odd_numbers`. key, index: uint64."""
    x = (index + 1) * GOLDEN + key
    x = (x ^ (x >> FIRST_SHIFT)) * FIRST_FACTOR
    x = (x ^ (x >> SECOND_SHIFT)) * SECOND_FACTOR
    return (x ^ (x >> 31)) | 1


# Compiled once, for tensors of any alignment: whole words are read in any case.
@triton.jit(
    do_not_specialize=["count", "left", "start", "scale"],
    do_not_specialize_on_alignment=["words", "rest", "total"],
)
def add_words_kernel(  # type: ignore[no-untyped-def]
    words,
    rest,
    total,
    count: tl.uint64,
    left: tl.uint64,
    start: tl.uint64,
    scale: tl.uint64,
    row_key: tl.constexpr,
    column_key: tl.constexpr,
    row: tl.constexpr,
):
    """words: int64 [count]; rest: uint8 [left], fewer than eight, the last word. total: int64 [], gets `start` plus
    their sum times `scale`."""
    columns = tl.arange(0, row).to(tl.uint64)
    # One factor for the whole row inside the loop, those of the columns behind it: a product per word, not two.
    held = tl.zeros([row], tl.uint64)
    count, left = count.to(tl.uint64), left.to(tl.uint64)  # the interpreter knows no annotations
    program = tl.program_id(0)
    number = program.to(tl.uint64)
    while number * row < count:
        at = number * row + columns
        word = tl.load(words + at, mask=at < count, other=0).to(tl.uint64, bitcast=True)
        held += word * odd_number(row_key, number)
        number += tl.num_programs(0).to(tl.uint64)
    summed = tl.sum(held * odd_number(column_key, columns))
    if program == 0:
        places = tl.arange(0, 8).to(tl.uint64)
        bytes_left = tl.load(rest + places, mask=places < left, other=0).to(tl.uint64)
        last = tl.sum(bytes_left << (8 * places))
        summed += last * odd_number(row_key, count // row) * odd_number(column_key, count % row)
        summed = summed * scale + start
    else:
        summed = summed * scale
    tl.atomic_add(total, summed.to(tl.int64, bitcast=True))


def add_words(
    total: Tensor, words: Tensor, rest: Tensor, start: int, scale: int, keys: tuple[int, int], row: int
) -> None:
    """Add to `total` in one launch.

    Args:
        total: int64 [], on the GPU.
        words: int64 [n], there.
        rest: uint8 [fewer than 8], there: the bytes after them.
        start: added as it is.
        scale: by which the sum is multiplied.
        keys: of the factors of rows, and of columns.
        row: words that have the same factor of a row; a power of two.
    """
    device = torch.cuda.get_device_properties(words.device)
    program_count = min(-(-words.numel() // row), PROGRAMS * device.multi_processor_count)
    with torch.cuda.device(words.device):
        add_words_kernel[(max(1, program_count),)](
            words, rest, total, words.numel(), rest.numel(), start, scale, *keys, row, num_warps=WARPS
        )
