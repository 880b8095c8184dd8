"""The backend `blocked`: its results against plain ones in fp64, its errors against those of torch's kernel."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megastable.model import blocked
from megastable.model.blocked import blocked_attention, document_starts, is_supported, kept_size, split_blocks
from megastable.model.kernels import FULL, AttentionScores
from tests.tiers import examples

CPU = torch.device("cpu")
BF16 = pytest.mark.skipif(
    not is_supported(CPU, torch.bfloat16), reason="no exact bf16 products on this machine"
)


class Case(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dy: Tensor
    segments: Tensor | None
    scores: AttentionScores = FULL


def case(
    b: int,
    k: int,
    groups: int,
    s: int,
    d: int,
    dtype: torch.dtype,
    documents: bool = False,
    size: float = 1.0,
) -> Case:
    """Random inputs, laid out as the layer has them: permuted from [s, b, heads, d], values a part of a row."""
    g = torch.Generator().manual_seed(s)
    q, keys, dy = (torch.randn(s, b, h, d, generator=g) * size for h in (k * groups, k, k * groups))
    v = torch.randn(s, b, 3 * k, d, generator=g)[:, :, -k:]
    segments = (torch.rand(b, s, generator=g) < 0.04).cumsum(1).int() if documents else None
    tensors = (t.to(dtype).permute(1, 2, 0, 3) for t in (q, keys, v, dy))
    return Case(*tensors, segments)


def allowed(case: Case) -> Tensor:
    s = case.q.shape[2]
    causal = torch.ones(s, s, dtype=torch.bool).tril()
    if case.scores.window is not None:
        causal = causal.triu(1 - case.scores.window)
    if case.segments is None:
        return causal
    return (causal & (case.segments[:, :, None] == case.segments[:, None, :]))[:, None]


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, of: AttentionScores = FULL) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if of.scale is None else of.scale)
    if of.cap is not None:
        scores = of.cap * (scores / of.cap).tanh()
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ v


def results(case: Case, how: str) -> list[Tensor]:
    """The output and the gradients of q, k, v."""
    wide = torch.float64 if how == "exact" else case.q.dtype
    q, k, v = (t.detach().to(wide).requires_grad_() for t in case[:3])
    if how == "blocked":
        y = blocked_attention(q, k, v, case.segments, case.scores)
    else:
        y = plain(q, k, v, allowed(case), case.scores)
    return [y.detach(), *torch.autograd.grad(y, (q, k, v), case.dy.to(wide))]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks in a small tensor."""
    for name, value in {"ROWS": 8, "DOCUMENT_ROWS": 6, "ELEMENTS": 2048, "ALIGN": 4}.items():
        monkeypatch.setattr(blocked, name, value)


shapes = {
    "b": st.integers(1, 3),
    "k": st.integers(1, 3),
    "groups": st.integers(1, 4),
    "s": st.integers(1, 70),
    "d": st.sampled_from([8, 24, 32]),
    "documents": st.booleans(),
    "scores": st.builds(
        AttentionScores,
        st.sampled_from([None, 0.3]),
        st.sampled_from([None, 1.0, 30.0]),
        st.sampled_from([None, 1, 5, 13, 200]),
    ),
}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kept", [0, 100], ids=["computed again", "kept"])
@settings(max_examples=examples(25))
@given(**shapes)
def test_blocked_attention_in_fp32_is_the_plain_softmax(
    kept: int, b: int, k: int, groups: int, s: int, d: int, documents: bool, scores: AttentionScores
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocked, "KEPT", kept)
        inputs = case(b, k, groups, s, d, torch.float32, documents)._replace(scores=scores)
        exact = results(inputs, "exact")
        for got, wanted in zip(results(inputs, "blocked"), exact, strict=True):
            assert got.dtype == torch.float32
            torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-5)


@BF16
@pytest.mark.usefixtures("small_blocks")
@settings(max_examples=examples(25))
@given(**shapes)
def test_blocked_attention_in_bf16_is_the_plain_softmax_but_for_rounding(
    b: int, k: int, groups: int, s: int, d: int, documents: bool, scores: AttentionScores
) -> None:
    inputs = case(b, k, groups, s, d, torch.bfloat16, documents)._replace(scores=scores)
    for got, wanted in zip(results(inputs, "blocked"), results(inputs, "exact"), strict=True):
        assert got.dtype == torch.bfloat16
        assert (got.double() - wanted).abs().max() <= 2**-5 * wanted.abs().max().clamp_min(1)


@BF16
@pytest.mark.parametrize("documents", [False, True], ids=["causal", "documents"])
def test_blocked_attention_in_bf16_is_as_exact_as_the_fused_kernel(documents: bool) -> None:
    """Where probabilities are peaked: errors relative to the norms."""
    inputs = case(1, 2, 3, 333, 96, torch.bfloat16, documents, 3.0)
    q, k, v = (t.detach().requires_grad_() for t in inputs[:3])
    heads = (t.repeat_interleave(3, 1) for t in (k, v))
    y = torch.nn.functional.scaled_dot_product_attention(q, *heads, attn_mask=allowed(inputs))
    fused = [y.detach(), *torch.autograd.grad(y, (q, k, v), inputs.dy)]
    for ours, theirs, exact in zip(results(inputs, "blocked"), fused, results(inputs, "exact"), strict=True):
        assert (ours - exact).norm() < 1.5 * (theirs - exact).norm()


@pytest.mark.usefixtures("small_blocks")
@settings(max_examples=examples(30))
@given(
    b=st.integers(1, 4),
    k=st.integers(1, 4),
    groups=st.integers(1, 3),
    s=st.integers(1, 80),
    seed=st.integers(0, 9),
)
def test_blocks_cover_every_document_once(b: int, k: int, groups: int, s: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    segments = (torch.rand(b, s, generator=g) < 0.1).cumsum(1).int()
    wanted = torch.ones(s, s, dtype=torch.bool).tril() & (segments[:, :, None] == segments[:, None, :])
    for c, starts in ((8, None), (6, document_starts(segments, 6))):
        seen = torch.zeros(b, k, s, s, dtype=torch.int)
        scores = 0
        for at in split_blocks(b, k, groups, s, c, starts):
            seen[at.b0 : at.b1, at.k0 : at.k1, at.first : at.end, at.key : at.end] += 1
            n, r, keys = at.shape(groups)
            assert n == 1 or n * r * keys <= blocked.ELEMENTS
            scores += n * r * keys
        assert seen.max() == 1 and bool((seen > 0)[wanted[:, None].expand(seen.shape)].all())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(blocked, "KEPT", 1000)
            room = kept_size(b, k * groups, s, 8)
        assert scores == room if starts is None else scores <= room


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=BF16)])
@pytest.mark.parametrize("s", [200, 700], ids=["kept", "computed again"])
def test_blocked_attention_repeats_itself_bit_for_bit(s: int, dtype: torch.dtype) -> None:
    inputs = case(2, 2, 2, s, 32, dtype, documents=True)
    for one, two in zip(results(inputs, "blocked"), results(inputs, "blocked"), strict=True):
        assert torch.equal(one, two)


def test_blocked_attention_without_autograd_spoils_no_later_call() -> None:
    blocked._held.flat.clear()
    inputs = case(1, 2, 2, 40, 16, torch.float32)
    with torch.inference_mode():
        blocked_attention(*inputs[:3])
    q, k, v = (t.detach().requires_grad_() for t in inputs[:3])
    assert blocked_attention(q, k, v).sum().backward() is None and q.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=BF16)])
def test_blocked_attention_compiles_to_one_graph_once(dtype: torch.dtype) -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None) -> Tensor:
        y = blocked_attention(q * 2, k, v, segments)
        return y.permute(2, 0, 1, 3).flatten(2)

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for documents in (True, False):
        for step in range(3):
            inputs = case(2, 2, 2, 150, 16, dtype, documents)
            if documents:  # other documents in every step
                inputs = inputs._replace(
                    segments=torch.arange(150).div(9 + 7 * step).int().expand(2, -1).contiguous()
                )
            q, k, v = (t.detach().requires_grad_() for t in inputs[:3])
            with torch.compiler.set_stance("default" if step == 0 else "fail_on_recompile"):
                y = compiled(q, k, v, inputs.segments)
            wanted = layer(q, k, v, inputs.segments)
            assert y.stride() == wanted.stride()
            dy = inputs.dy.permute(2, 0, 1, 3).flatten(2)
            got = [y, *torch.autograd.grad(y, (q, k, v), dy)]
            for one, two in zip(got, [wanted, *torch.autograd.grad(wanted, (q, k, v), dy)], strict=True):
                assert torch.equal(one, two)
