"""The generator's published numbers, in parts and whole."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from megastable.base.splitmix import GOLDEN, mixed, sequence, signed


def test_published_numbers() -> None:
    """Of splitmix64 with the seeds 0 and 1234567 (Vigna's C program, and Rosetta Code)."""
    assert [int(n) % 2**64 for n in sequence(0, 0, 2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    assert int(sequence(1234567, 0, 1)[0]) % 2**64 == 6457827717110365317


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(0, 9))
def test_any_part_of_it_is_the_same(key: int, start: int, at: int) -> None:
    whole = sequence(key, start, 10)
    assert torch.equal(sequence(key, start + at, 10 - at), whole[at:])
    assert signed(mixed(key + (start + at + 1) * GOLDEN)) == int(whole[at])
