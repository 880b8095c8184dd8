"""Every attention backend against the reference, and the reference against a loop."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megastable.model.attention import BACKENDS, document_mask, reference_attention

S, B, D = 11, 2, 8
FAST = sorted(set(BACKENDS) - {"reference"})
SEGMENTS = torch.tensor([[0] * 5 + [1] + [2] * 5, [0] * S])


def qkv(heads: int, kv_heads: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [
        torch.randn(B, h, S, D, generator=g).to(dtype).requires_grad_() for h in (heads, kv_heads, kv_heads)
    ]


def run(core: Callable[..., Tensor], tensors: list[Tensor], mask: Tensor | None) -> list[Tensor]:
    """The output and the three gradients."""
    out = core(*tensors, mask)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out, *torch.autograd.grad(out, tensors, upstream)]


@pytest.mark.parametrize("apart", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_the_reference_is_softmax_over_what_may_be_seen(kv_heads: int, apart: bool) -> None:
    q, k, v = qkv(4, kv_heads)
    got = reference_attention(q, k, v, document_mask(SEGMENTS) if apart else None)
    for b in range(B):
        for h in range(4):
            for i in range(S):
                seen = [j for j in range(i + 1) if not apart or SEGMENTS[b, j] == SEGMENTS[b, i]]
                group = h // (4 // kv_heads)
                scores = torch.stack([q[b, h, i] @ k[b, group, j] for j in seen]) / math.sqrt(D)
                wanted = scores.softmax(0) @ v[b, group, seen]
                torch.testing.assert_close(got[b, h, i], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("apart", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fast_backends_equal_the_reference(
    backend: str, kv_heads: int, apart: bool, dtype: torch.dtype
) -> None:
    mask = document_mask(SEGMENTS) if apart else None
    tensors = qkv(4, kv_heads, dtype)
    # bf16: the reference rounds only its results; a fused kernel rounds probabilities and sums of groups, too.
    tolerance = 1e-5 if dtype == torch.float32 else 4 * 2**-8
    for got, wanted in zip(
        run(BACKENDS[backend], tensors, mask), run(reference_attention, tensors, mask), strict=True
    ):
        assert got.dtype == dtype and got.shape == wanted.shape
        error = (got.double() - wanted.double()).norm() / wanted.double().norm()
        assert error < tolerance


def test_the_document_mask_is_causal_and_inside_one_document() -> None:
    mask = document_mask(SEGMENTS)
    assert mask.shape == (B, 1, S, S) and mask.dtype == torch.bool
    for b in range(B):
        for i in range(S):
            for j in range(S):
                assert mask[b, 0, i, j] == (j <= i and SEGMENTS[b, i] == SEGMENTS[b, j])


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_the_future_is_not_seen(backend: str) -> None:
    q, k, v = (t.detach() for t in qkv(4, 2))
    before = BACKENDS[backend](q, k, v, None)
    k, v = k.clone(), v.clone()
    k[:, :, 7:], v[:, :, 7:] = 1e3, -1e3
    assert torch.equal(BACKENDS[backend](q, k, v, None)[:, :, :7], before[:, :, :7])
