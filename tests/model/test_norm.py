"""RMSNorm: fp32 inside, whatever goes in."""

from __future__ import annotations

import pytest
import torch

from megastable.model.norm import RMSNorm
from megastable.parallel.topology import TensorParallel

EPS = 1e-5


def norm(width: int, dtype: torch.dtype) -> RMSNorm:
    module = RMSNorm(width, EPS, TensorParallel(), "norm", partial=False)
    with torch.no_grad():
        module.weight.copy_(torch.linspace(0.5, 1.5, width))
    return module.to(dtype)


def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """In fp64, as the paper writes it."""
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 3e3])
def test_only_the_result_is_rounded(scale: float, dtype: torch.dtype) -> None:
    """3000 squared overflows fp16, and a sum of 4096 squares in bf16 stands still at 256: both must not matter."""
    module = norm(4096, dtype)
    x = (torch.randn(3, 2, 4096, generator=torch.Generator().manual_seed(0)) * scale).to(dtype)
    y = module(x)
    assert y.dtype == dtype
    rounding = torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 1e-6
    torch.testing.assert_close(y.double(), exact(x, module.weight), rtol=1.01 * rounding, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients(dtype: torch.dtype) -> None:
    module = norm(64, dtype)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(5, 64, generator=g).to(dtype).requires_grad_()
    upstream = torch.randn(5, 64, generator=g).to(dtype)
    got = torch.autograd.grad(module(x), (x, module.weight), upstream)
    wanted = torch.autograd.grad(exact(x, module.weight), (x, module.weight), upstream.double())
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a, b, rtol=2e-5 if dtype == torch.float32 else 2**-7, atol=1e-5)


def test_zeros_stay_zeros_and_have_a_gradient() -> None:
    module = norm(8, torch.float32)
    x = torch.zeros(2, 8, requires_grad=True)
    y = module(x)
    y.sum().backward()
    assert y.abs().max() == 0 and x.grad is not None and x.grad.isfinite().all()
