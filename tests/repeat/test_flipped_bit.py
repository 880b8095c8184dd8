"""Bits that are flipped, and bits that are found to differ."""

from __future__ import annotations

import pytest
import torch

from megastable.base.fingerprint import fingerprint
from megastable.repeat.flipped_bit import bit_difference, flip, planted_bit

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.int32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_bit_of_the_middle_one(dtype: torch.dtype) -> None:
    x = torch.arange(1, 25, dtype=torch.float64).to(dtype).view(2, 3, 4)
    for whole in (x.clone(), x.clone().transpose(0, 2)):
        before = whole.clone()
        flip(whole)
        found = bit_difference(before, whole)
        assert found is not None
        assert (found.differing, found.elements, found.bits) == (1, 24, {planted_bit(dtype): 1})
        assert found.first == 12 and found.one != found.other
        assert not torch.equal(fingerprint([before]), fingerprint([whole]))
        if dtype.is_floating_point:  # by half at most: no infinity, no nan
            assert 0.6 < found.other / found.one < 1.5 and torch.isfinite(whole).all()


def test_autograd_does_not_hear_of_it() -> None:
    """As it would if an output that it has saved were changed in the usual way."""
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    flip(y)
    y.sum().backward()
    assert x.grad is not None


def test_what_differs_in_many_bits() -> None:
    one = torch.zeros(5, dtype=torch.float32)
    other = torch.tensor([0.0, -0.0, 1.0, 0.0, float("nan")])
    found = bit_difference(one, other)
    assert found is not None and (found.differing, found.first) == (3, 1)
    assert found.bits[31] == 1 and found.bits[23] == 2
    assert str(found).startswith("3 of 5 elements, bits 22 to 31; the first is number 1, -0 instead of 0")
    assert bit_difference(one, one.clone()) is None
    assert bit_difference(other, other.clone()) is None  # nan included
    assert bit_difference(one, one[:3]) is None and bit_difference(one, one.double()) is None
