"""Silent faults: a flipped bit is one bit, of an element that matters; faults of products and messages."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from drills.corruption_faults import AMONG, BITS, WHOLE, Messages, Operations, Products, column, flip
from drills.corruption_plan import Change, Planned
from megastable.engine.engine import Engine
from tests.distributed import run_ranks

NO_ENGINE = cast(Engine, None)


def fault(kind: str, position: int) -> Planned:
    return Planned(layout="dp2", kind=kind, position=position, seed=1, step=24, rank=0)


def products() -> list[Tensor]:
    """Five of them, in a forward and a backward pass, and things that are none."""
    made = torch.Generator().manual_seed(1)
    x = torch.randn(16, 8, generator=made, requires_grad=True)
    w = torch.randn(8, 12, generator=made, requires_grad=True)
    y = torch.mm(x, w)
    z = torch.bmm(y.view(4, 4, 12), y.view(4, 4, 12).transpose(1, 2))
    small = torch.mm(x[:2], w[:, :2])  # 4 numbers
    z.sum().backward()
    assert x.grad is not None and w.grad is not None
    return [y.detach(), z.detach(), small.detach(), w.grad, x.grad]


def struck(operations: Operations, act: Any) -> Any:
    with operations.counting(NO_ENGINE):
        act()
    with operations.striking(NO_ENGINE):
        return act()


@pytest.mark.parametrize(("position", "name"), [(0, "mm of [16, 12]"), (1, "bmm of"), (2, "mm of")])
def test_one_bit_of_one_product(position: int, name: str) -> None:
    told: list[Change] = []
    clean, wrong = products(), struck(Products(fault("product/sign", position), told.append), products)
    (change,) = told
    assert change.tensor.startswith(name) and change.before == -cast(float, change.after)
    same = [torch.equal(a, b) for a, b in zip(clean, wrong, strict=True)]
    assert not all(same)
    if position == 0:
        assert int((clean[0] != wrong[0]).sum()) == 1  # and what follows from it
    else:
        assert same[0] and same[2]  # what comes before, and what does not depend on it
    assert all(torch.equal(a, b) for a, b in zip(clean, products(), strict=True))  # it is over


@pytest.mark.parametrize(("position", "zero"), [(0, 0), (1, 5), (2, 11)])
def test_a_column_of_every_product_until_the_end(position: int, zero: int) -> None:
    with ExitStack() as stack:
        assert column(fault("column/zero", position), stack).tensor == "a column of every product"
        for _ in range(2):
            y, z, *_ = products()
            assert not y[:, zero].any() and bool(y[:, [i for i in range(12) if i != zero]].all())
            assert not z[..., 3 * position // 2].any()
    assert products()[0].all()


def messages(position: int) -> list[Tensor]:
    """What this rank receives in a step, in which rank 0 is struck, and how often it was."""
    rank = dist.get_rank()
    told: list[Change] = []
    one = fault("message/sign", position)

    def act() -> list[Tensor]:
        part, whole = torch.zeros(128), torch.zeros(256, dtype=torch.bfloat16)
        dist.reduce_scatter_tensor(part, torch.arange(256.0) + 1)
        agreed = torch.ones(128, dtype=torch.float64)
        dist.all_reduce(agreed)  # what the gate sums
        dist.all_gather_into_tensor(whole, torch.full((128,), rank + 1.0, dtype=torch.bfloat16))
        stage = torch.arange(100.0) + 1
        dist.recv(stage, 1) if rank == 0 else dist.send(stage, 0)
        dist.all_gather_object([None, None], "a")
        return [part, agreed, whole, stage]

    if rank == 0:
        return [*struck(Messages(one, told.append), act), torch.tensor(len(told))]
    act()  # the step before
    return act()


@pytest.mark.quick("1")
@pytest.mark.parametrize("position", [0, 1, 2])
def test_one_bit_of_one_message_to_one_rank(position: int) -> None:
    wrong, other = run_ranks(2, messages, position)
    clean = [2 * (torch.arange(128.0) + 1), torch.full((128,), 2.0), wrong[2].abs(), torch.arange(100.0) + 1]
    hit = [0, 2, 3][position]  # not what the ranks agree on
    for i, (a, b) in enumerate(zip(wrong[:4], clean, strict=True)):
        assert int((a.float() != b.float()).sum()) == (1 if i == hit else 0)
        assert torch.equal(a.float().abs(), b.float())
    assert int(wrong[4]) == 1 and (other[2] > 0).all()


# A bit


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
