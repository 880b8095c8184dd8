"""Every attention kernel that a CPU has against the reference, and the reference against a loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import flex_attention

from megastable.model import cores
from megastable.model.cores import CORES, make_block_mask, reference_attention
from megastable.model.kernels import FULL, AttentionScores

S, B, D = 11, 2, 8
ON_A_CPU = ["reference", "sdpa", "blocked"]
FAST = [*ON_A_CPU[1:], "plain"]
SEGMENTS = torch.tensor([[0] * 5 + [1] + [2] * 5, [0] * S])
CPU = torch.device("cpu")
SCORES = {
    "full": FULL, "scaled": AttentionScores(scale=0.7), "capped": AttentionScores(cap=0.8),
    "window": AttentionScores(window=3), "all": AttentionScores(0.7, 0.8, 3),
    "window of one": AttentionScores(window=1),
}  # fmt: skip


def qkv(heads: int, kv_heads: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [
        torch.randn(B, h, S, D, generator=g).to(dtype).requires_grad_() for h in (heads, kv_heads, kv_heads)
    ]


def run(
    core: Callable[..., Tensor], tensors: list[Tensor], documents: Any, scores: AttentionScores
) -> list[Tensor]:
    """The output and the three gradients."""
    out = core(*tensors, documents, scores)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out, *torch.autograd.grad(out, tensors, upstream)]


@pytest.mark.parametrize("apart", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("kind", SCORES)
def test_reference_attention_is_softmax_over_what_may_be_seen(kv_heads: int, apart: bool, kind: str) -> None:
    (q, k, v), how = qkv(4, kv_heads), SCORES[kind]
    got = reference_attention(q, k, v, SEGMENTS if apart else None, how)
    for b in range(B):
        for h in range(4):
            for i in range(S):
                first = max(i - how.window + 1, 0) if how.window else 0
                seen = [j for j in range(first, i + 1) if not apart or SEGMENTS[b, j] == SEGMENTS[b, i]]
                group = h // (4 // kv_heads)
                scores = torch.stack([q[b, h, i] @ k[b, group, j] for j in seen])
                scores = scores / math.sqrt(D) if how.scale is None else scores * how.scale
                if how.cap:
                    scores = how.cap * (scores / how.cap).tanh()
                wanted = scores.softmax(0) @ v[b, group, seen]
                torch.testing.assert_close(got[b, h, i], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("apart", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", SCORES)
def test_cores_equal_the_reference(
    backend: str, kv_heads: int, apart: bool, dtype: torch.dtype, kind: str
) -> None:
    core, scores = CORES[backend], SCORES[kind]
    if backend == "sdpa" and scores.cap:
        pytest.skip("refused: torch's kernels for CPUs do not cap logits")
    tensors = qkv(4, kv_heads, dtype)
    # bf16: the reference rounds only its results; a fused kernel rounds probabilities and sums of groups, too.
    tolerance = 1e-5 if dtype == torch.float32 else 4 * 2**-8
    segments = SEGMENTS if apart else None
    got = run(core.run, tensors, core.prepare(segments, scores, S, CPU), scores)
    close(got, run(reference_attention, tensors, segments, scores), tolerance)


def close(got: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    for mine, right in zip(got, wanted, strict=True):
        assert mine.dtype == right.dtype and mine.shape == right.shape
        # Of one key, the probability is 1 whatever its logit: the gradients of queries and keys are 0.
        scale = right.double().norm().clamp_min(0.3 * float(wanted[0].detach().double().norm()))
        assert (mine.double() - right.double()).norm() / scale < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_sdpa_asks_no_gpu_for_grouped_queries_in_fp32(
    kv_heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its fused kernels know them in 16 bits only. With tensors that claim to be on a GPU, and hold no numbers."""
    asked: list[tuple[Tensor, Tensor, dict[str, Any]]] = []

    def attention(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        assert k.shape == v.shape
        asked.append((q, k, how))
        return torch.empty_like(q)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    with FakeTensorMode():
        q, kv = (torch.empty(B, heads, S, D, dtype=dtype, device="cuda") for heads in (4, kv_heads))
        CORES["sdpa"].run(q, kv, kv, None)
    ((q, k, how),) = asked
    grouped = kv_heads < 4 and dtype != torch.float32
    assert how == {"is_causal": True, "enable_gqa": grouped, "scale": None}
    assert k.shape[1] == (kv_heads if grouped else 4) and (q.dtype, k.dtype) == (dtype, dtype)


@pytest.mark.quick("all-documents-4", "capped-documents-1")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("apart", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("kind", SCORES)
def test_flex_attention_of_a_gpu_equals_the_reference(
    kv_heads: int, apart: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlexAttention written out, with the mask that its kernel gets on a GPU; forward: a CPU has no more of it."""
    scores, segments = SCORES[kind], SEGMENTS if apart else None
    q, k, v = (t.detach() for t in qkv(4, kv_heads))
    documents = make_block_mask(segments, scores, S, CPU)
    assert (documents is None) == (not apart and scores.cap is None and scores.window is None)
    monkeypatch.setattr(cores, "_flex", lambda: flex_attention)
    got = CORES["sdpa"].run(q, k, v, documents, scores)
    close([got], [reference_attention(q, k, v, segments, scores)], 1e-5)
