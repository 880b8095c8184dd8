"""Products of bf16 on CPUs with and without instructions for it, against products in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megastable.base import products


@pytest.fixture(params=[True, False], ids=["native", "cast"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param and not products.NATIVE:
        pytest.skip("this CPU has no instructions for bf16")
    monkeypatch.setattr(products, "NATIVE", request.param)
    return bool(request.param)


def near(product: Tensor, exact: Tensor) -> None:
    """Rounded once from sums in fp32: half a unit in the last of eight bits, and what fp32 loses."""
    assert product.dtype is torch.bfloat16 and product.shape == exact.shape
    assert torch.all((product.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-4)


@pytest.mark.parametrize("shape", [(5, 40), (7, 3, 40), (0, 40)])
def test_linear_is_rounded_once_forward_and_backward(native: bool, shape: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(1)
    x, w, up = (torch.randn(*s, generator=g).bfloat16() for s in (shape, (24, 40), (*shape[:-1], 24)))
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = products.linear(*leaves)
    y.backward(up)
    rows, ups = x.reshape(-1, 40).double(), up.reshape(-1, 24).double()
    near(y.detach(), (rows @ w.double().t()).view(y.shape))
    assert leaves[0].grad is not None and leaves[1].grad is not None
    near(leaves[0].grad, (ups @ w.double()).view(x.shape))
    near(leaves[1].grad, ups.t() @ rows)


def test_linear_saves_nothing_in_fp32(native: bool) -> None:
    kept = list[Tensor]()
    x, w = (torch.randn(*s).bfloat16().requires_grad_() for s in ((5, 40), (24, 40)))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        products.linear(x, w)
    assert len(kept) == 2 and all(t.dtype is torch.bfloat16 for t in kept)
