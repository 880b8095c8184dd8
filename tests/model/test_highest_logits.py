"""The largest logit of every head against the scores written out."""

from __future__ import annotations

import math

import pytest
import torch

from megastable.model import attention
from megastable.model.attention import raise_highest
from megastable.model.attention_scores import AttentionScores
from megastable.model.cores import attention_mask


@pytest.mark.parametrize("window", [None, 1, 7, 30])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("at_a_time", [16, 20, 1000])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 0.004)])
def test_it_is_that_of_the_scores(
    apart: bool, at_a_time: int, dtype: torch.dtype, tolerance: float, window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    b, heads, kv, s, d = 2, 6, 3, 50, 8
    monkeypatch.setitem(attention.SCORES, "cpu", at_a_time * b * heads * s)
    drawn = torch.Generator().manual_seed(0)
    q = torch.randn(s, b, heads, d, generator=drawn).to(dtype).permute(1, 2, 0, 3)  # as attention lays it out
    k = torch.randn(s, b, kv, d, generator=drawn).to(dtype).permute(1, 2, 0, 3)
    segments = (torch.rand(b, s, generator=drawn) < 0.1).cumsum(1).int() if apart else None
    of = AttentionScores(scale=0.5, cap=1.0, window=window)  # of the logits before the cap
    scores = q.float() @ k.float().repeat_interleave(2, 1).transpose(2, 3) * 0.5
    seen = attention_mask(segments if segments is not None else torch.zeros(b, s), of, s, q.device)
    assert seen is not None
    wanted = scores.masked_fill(~seen, -math.inf).amax((0, 2, 3))
    assert (scores.amax((0, 2, 3)) > wanted).any()  # of tokens that come later, or of other documents
    highest = torch.full((heads,), -math.inf)
    highest[1], before = 99.0, highest
    raise_highest(highest, q.requires_grad_(), k, segments, of)
    assert highest is before and highest[1] == 99.0 and not highest.requires_grad
    rest = [0, 2, 3, 4, 5]
    assert torch.allclose(highest[rest], wanted[rest], rtol=tolerance)


def test_it_compiles_as_one_graph() -> None:
    q, highest = torch.randn(1, 2, 9, 4, requires_grad=True), torch.full((2,), -math.inf)

    def attend(q: torch.Tensor) -> torch.Tensor:
        raise_highest(highest, q, q, None)
        return q * 2

    y = torch.compile(attend, fullgraph=True, dynamic=False, backend="aot_eager")(q)
    y.sum().backward()  # type: ignore[no-untyped-call]
    wanted = torch.full((2,), -math.inf)
    raise_highest(wanted, q, q, None)
    assert torch.equal(highest, wanted)
