"""Cross-entropy and z-loss against plain torch, forward and backward."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megastable.model.loss import cross_entropy

VOCABULARY, COLUMNS = 50, 64
# Gradients leave in the dtype of the logits: bf16 keeps 8 bits of mantissa.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8}
DTYPES = list(TOLERANCE)


def inputs(dtype: torch.dtype, scale: float = 4.0) -> tuple[Tensor, Tensor]:
    """Logits [s, b, columns] and labels [s, b]."""
    g = torch.Generator().manual_seed(0)
    logits = (torch.randn(7, 3, COLUMNS, generator=g) * scale).to(dtype).requires_grad_()
    return logits, torch.randint(0, VOCABULARY, (7, 3), generator=g)


def plain(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    real = logits[..., :VOCABULARY].double()
    loss = F.cross_entropy(real.flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)
    return loss, real.logsumexp(-1)


def gradient(output: Tensor, logits: Tensor) -> Tensor:
    return torch.autograd.grad(output, logits)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("output", ["loss", "logsumexp", "both"])
def test_cross_entropy_has_the_gradients_of_torch(output: str, dtype: torch.dtype) -> None:
    logits, labels = inputs(dtype)
    weight = torch.rand(labels.shape, generator=torch.Generator().manual_seed(1)).double()

    def objective(loss: Tensor, lse: Tensor) -> Tensor:
        parts = {"loss": loss, "logsumexp": lse**2, "both": loss + 0.3 * lse**2}
        return (parts[output].double() * weight).sum()

    got = gradient(objective(*cross_entropy(logits, labels, VOCABULARY)), logits)
    wanted = gradient(objective(*plain(logits, labels)), logits)
    assert got.dtype == dtype
    torch.testing.assert_close(got, wanted, rtol=TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize("padding", [0.0, 1e4, math.inf, math.nan])
def test_cross_entropy_leaves_out_the_padding(padding: float) -> None:
    """Whatever stands in the columns beyond the vocabulary; they get no gradient either."""
    logits, labels = inputs(torch.float32)
    with torch.no_grad():
        logits[..., VOCABULARY:] = padding
    loss, lse = cross_entropy(logits, labels, VOCABULARY)
    torch.testing.assert_close(loss.double(), plain(logits, labels)[0], rtol=1e-5, atol=1e-6)
    grad = gradient(loss.sum() + lse.square().sum(), logits)
    assert grad[..., VOCABULARY:].abs().max() == 0
    assert grad[..., :VOCABULARY].isfinite().all() and grad[..., :VOCABULARY].abs().max() > 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_cross_entropy_shows_a_broken_logit_in_its_token_only(bad: float) -> None:
    """The gate can only refuse what it sees."""
    logits, labels = inputs(torch.float32)
    with torch.no_grad():
        logits[2, 1, 5] = bad
    finite = cross_entropy(logits, labels, VOCABULARY)[0].isfinite()
    assert not finite[2, 1] and finite.sum() == finite.numel() - 1
