"""The fused AdamW rounds alike wherever an element lies, and is otherwise torch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megastable.optim.fused import LANES, FusedAdamW

N, STEPS = 501, 8  # 5 elements behind the last whole vector


def trained(before: int, behind: int, fused: type[torch.optim.Optimizer] = FusedAdamW) -> list[Tensor]:
    """The same N elements after some steps, with other elements before and behind them in the buffer."""
    g = torch.Generator().manual_seed(0)
    own = slice(before, before + N)
    p = torch.ones(before + N + behind)
    p[own] = torch.randn(N, generator=g)
    settings = {"fused": True} if fused is torch.optim.AdamW else {}
    optimizer = fused([p.requires_grad_()], lr=3e-3, betas=(0.9, 0.95), eps=1e-8, **settings)  # type: ignore[call-arg]
    for _ in range(STEPS):
        p.grad = torch.ones_like(p)
        p.grad[own] = torch.randn(N, generator=g) * 1e-2
        optimizer.step()
    state = optimizer.state[p]
    assert state["step"] == STEPS
    return [x.detach()[own].clone() for x in (p, state["exp_avg"], state["exp_avg_sq"])]


def test_an_element_is_updated_alike_at_every_place() -> None:
    wanted = trained(0, -N % LANES)
    for before in range(LANES):
        for behind in (0, 1, LANES):
            for x, y in zip(trained(before, behind), wanted, strict=True):
                assert torch.equal(x, y), (before, behind)


@pytest.mark.parametrize("behind", [0, -N % LANES])
def test_it_is_torchs(behind: int) -> None:
    for x, y in zip(trained(0, behind), trained(0, behind, torch.optim.AdamW), strict=True):
        whole = N - N % LANES if behind == 0 else N
        assert torch.equal(x[:whole], y[:whole])
        torch.testing.assert_close(x, y, rtol=1e-6, atol=0)


def test_a_closure_is_asked_for_the_gradients() -> None:
    p = torch.ones(3, requires_grad=True)
    optimizer = FusedAdamW([p], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)

    def closure() -> Tensor:
        p.grad = torch.tensor([1.0, -1.0, 0.0])
        return p.sum()

    assert optimizer.step(closure) == 3.0
    torch.testing.assert_close(p.detach(), torch.tensor([0.9, 1.1, 1.0]))


def test_a_parameter_that_is_not_contiguous_is_refused() -> None:
    strided = torch.ones(3, 5).t().requires_grad_()
    with pytest.raises(ValueError, match=r"\(5, 3\).*not contiguous"):
        FusedAdamW([torch.ones(2, requires_grad=True), strided], lr=0.1, betas=(0.9, 0.95), eps=1e-8)
