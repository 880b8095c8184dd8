"""RMSNorm: fp32 inside, whatever goes in."""

from __future__ import annotations

import pytest
import torch

from megastable.model.norm import RMSNorm, SplitRMSNorm
from megastable.parallel.topology import TensorParallel
from tests.distributed import run_ranks

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


def parts_of_a_width() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x and the upstream gradient, [5, 3, 24], and a weight."""
    x, upstream = torch.randn(2, 5, 3, 24, generator=torch.Generator().manual_seed(3))
    return 4 * x, upstream, torch.linspace(0.5, 1.5, 24)


def split_norm(size: int) -> list[torch.Tensor]:
    """This rank's columns of the output, and of the gradients of x and weight."""
    import torch.distributed as dist

    tp = TensorParallel(dist.group.WORLD, dist.get_rank(), size) if size > 1 else TensorParallel()
    x, upstream, weight = (t.chunk(size, -1)[tp.rank] for t in parts_of_a_width())
    x = x.clone().requires_grad_()
    module = SplitRMSNorm(24, EPS, tp, "norm")
    with torch.no_grad():
        module.weight.copy_(weight)
    y = module(x)
    return [y.detach(), *torch.autograd.grad(y, (x, module.weight), upstream)]


@pytest.mark.parametrize("size", [1, 2])
def test_a_width_shared_out_over_the_group_is_normed_whole(size: int) -> None:
    """Forward and backward: what one rank puts out depends on what the other one holds."""
    ranks = run_ranks(size, split_norm, size) if size > 1 else [split_norm(size)]
    x, upstream, weight = (t.double() for t in parts_of_a_width())
    x, weight = x.requires_grad_(), weight.requires_grad_()
    y = exact(x, weight)
    wanted = [y.detach(), *torch.autograd.grad(y, (x, weight), upstream)]
    for parts, b in zip(zip(*ranks, strict=True), wanted, strict=True):
        torch.testing.assert_close(torch.cat(parts, -1).double(), b, rtol=1e-5, atol=1e-5)
