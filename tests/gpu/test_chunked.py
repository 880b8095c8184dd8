"""Head and loss in chunks on a GPU, by the references of tests/model/test_chunked.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megastable.model.chunked import chunked_objective
from tests.model.test_chunked import ONE, VOCABULARY, by_chunks, error, exact, inputs, reference


def on(gpu: torch.device, case: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, labels = (t.detach().to(gpu) for t in case)
    return x.requires_grad_(), weight.requires_grad_(), labels


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("elements", [2**22, 2**14], ids=["one chunk", "chunks"])
def test_it_is_about_as_exact_as_the_reference(
    elements: int, dtype: torch.dtype, compiled: bool, gpu: torch.device
) -> None:
    case = on(gpu, inputs(96, 3, 64, 500, 512, dtype))
    got = by_chunks(*case, 500, 1e-2, elements=elements, compiled=compiled)
    plain, wanted = reference(*case, 500, 1e-2), exact(*case, 500, 1e-2)
    for name in vars(wanted):
        ours, theirs = (error(getattr(r, name), getattr(wanted, name)) for r in (got, plain))
        assert ours <= 1.5 * theirs + 1e-6, (name, ours, theirs)


def test_the_host_does_not_wait(gpu: torch.device) -> None:
    x, weight, labels = on(gpu, inputs(dtype=torch.bfloat16))
    by_chunks(x, weight, labels, VOCABULARY, 0.1, elements=500)
    upstream = torch.ones((), device=gpu)
    torch.cuda.set_sync_debug_mode("error")
    try:
        objective, _ = chunked_objective(x, weight, labels, VOCABULARY, 0.1, ONE, elements=500)
        torch.autograd.grad(objective, (x, weight), upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_it_is_ligers(gpu: torch.device) -> None:
    """No padding: Liger knows none."""
    ops = pytest.importorskip("liger_kernel.ops.fused_linear_cross_entropy")
    x, weight, labels = on(gpu, inputs(96, 3, 64, 512, 512, torch.bfloat16))
    theirs = ops.LigerFusedLinearCrossEntropyFunction.apply(
        x.flatten(0, 1), weight, labels.t().reshape(-1), None, None, -100, 1e-2
    )
    objective = theirs[0] if isinstance(theirs, tuple) else theirs
    dx, dw = torch.autograd.grad(objective, (x, weight))
    got = by_chunks(x, weight, labels, 512, 1e-2)
    torch.testing.assert_close(got.objective, objective.detach().float(), rtol=1e-4, atol=1e-4)
    assert error(got.dx, dx.double()) < 2**-6 and error(got.dw, dw.double()) < 2**-6
