"""A flipped bit is one bit, of an element that matters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drills.corruption_faults import AMONG, BITS, WHOLE, flip


def bits(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(WHOLE[tensor.dtype]).long()


@pytest.mark.parametrize("dtype", list(WHOLE))
@pytest.mark.parametrize("what", list(BITS))
@pytest.mark.parametrize("position", [0, 1, 2])
def test_one_bit_of_the_largest_of_a_few(dtype: torch.dtype, what: str, position: int) -> None:
    tensor = torch.randn(40, 30, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = tensor.clone()
    change = flip(tensor, what, position, "weight of a")
    assert change.tensor == "weight of a" and change.element is not None
    changed = (bits(tensor) ^ bits(before)).nonzero().flatten().tolist()
    assert changed == [change.element]
    number = int((bits(tensor) ^ bits(before))[change.element]) & (2 ** (8 * tensor.element_size()) - 1)
    assert number == 1 << BITS[what][position] - (32 - 8 * tensor.element_size())
    first = int((1200 - AMONG) * (0.125, 0.5, 0.875)[position])
    around = before.flatten()[first : first + AMONG].float().abs()
    assert first + int(around.argmax()) == change.element
    assert change.before == float(before.flatten()[change.element])
    assert change.after == float(tensor.flatten()[change.element]) != change.before


def test_signs_exponents_and_mantissas() -> None:
    for what, after in (("sign", -1.5), ("exponent", 1.5 * 2.0**-16), ("mantissa", 1.0)):
        tensor = torch.tensor([0.5, 1.5, 0.25])
        assert flip(tensor, what, 0, "").after == after and float(tensor[1]) == after


def test_padding_is_not_struck() -> None:
    tensor = torch.zeros(1000)
    tensor[990] = 1e-3
    assert flip(tensor, "sign", 0, "").element == 990 and float(tensor[990]) == pytest.approx(-1e-3)


def test_a_view_with_strides_is_struck_itself() -> None:
    whole = torch.arange(12.0).view(3, 4)
    change = flip(whole.t(), "sign", 1, "")
    assert whole[2, 3] == -11 and change.element == 11  # of the transposed one, [4, 3]
