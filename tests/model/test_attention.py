"""The largest logit of every head against the scores written out; rotary embeddings."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.config.model import RopeScalingConfig
from megastable.model import attention
from megastable.model.attention import (
    Rope,
    document_positions,
    raise_highest,
    rope_frequencies,
    rope_table,
    rotate_pairs,
    yarn_magnitude,
)
from megastable.model.cores import attention_mask
from megastable.model.kernels import AttentionScores
from tests import reference


@pytest.mark.parametrize("window", [None, 1, 7, 30])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("at_a_time", [16, 20, 1000])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 0.004)])
def test_raise_highest_is_the_largest_score(
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


def test_raise_highest_compiles_as_one_graph() -> None:
    q, highest = torch.randn(1, 2, 9, 4, requires_grad=True), torch.full((2,), -math.inf)

    def attend(q: torch.Tensor) -> torch.Tensor:
        raise_highest(highest, q, q, None)
        return q * 2

    y = torch.compile(attend, fullgraph=True, dynamic=False, backend="aot_eager")(q)
    y.sum().backward()  # type: ignore[no-untyped-call]
    wanted = torch.full((2,), -math.inf)
    raise_highest(wanted, q, q, None)
    assert torch.equal(highest, wanted)


WIDTH, LENGTH, THETA = 16, 512, 10_000.0
CPU = torch.device("cpu")
SHAPE = reference.Shape(layers=1, heads=3, kv_heads=3, width=WIDTH, vocabulary=9, theta=THETA)


def at(x: torch.Tensor, position: int) -> torch.Tensor:
    """x [width] as it is at a position."""
    cos, sin = rope_table(LENGTH, Rope(WIDTH, THETA), CPU)
    return rotate_pairs(x.view(1, 1, 1, WIDTH), cos[position], sin[position]).view(WIDTH)


def vectors(seed: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))


def test_rotate_halves_as_the_reference() -> None:
    x = torch.randn(LENGTH, 2, 3, WIDTH)  # [s, b, heads, d]
    cos, sin = rope_table(LENGTH, Rope(WIDTH, THETA), CPU)
    got = rotate_pairs(x, cos[:, None, None], sin[:, None, None])
    position = torch.arange(LENGTH).expand(2, LENGTH)
    wanted = reference.rope(x.permute(1, 2, 0, 3), position, reference.rates(SHAPE)).permute(2, 0, 1, 3)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=12, max_size=12), min_size=1, max_size=3))
def test_document_positions_restart_with_every_document(rows: list[list[int]]) -> None:
    wanted = []
    for row in rows:
        positions: list[int] = []
        for i, segment in enumerate(row):
            positions.append(positions[-1] + 1 if i and row[i - 1] == segment else 0)
        wanted.append(positions)
    assert document_positions(torch.tensor(rows, dtype=torch.int32)).tolist() == wanted


LLAMA_31 = {"kind": "llama3", "factor": 8.0, "original_length": 8192}
YARN = {"kind": "yarn", "factor": 4.0, "original_length": 4096}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scaling", "theirs"),
    [
        (LLAMA_31, {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192}),
        (LLAMA_31 | {"factor": 32.0, "low_freq_factor": 0.5, "high_freq_factor": 9.0, "original_length": 100},
         {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 0.5, "high_freq_factor": 9.0,
          "original_max_position_embeddings": 100}),
        ({"kind": "linear", "factor": 3.0}, {"rope_type": "linear", "factor": 3.0}),
        (YARN, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}),
        (YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.3, "original_length": 100},
         {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100, "beta_fast": 8.0,
          "beta_slow": 2.0, "attention_factor": 1.3}),
        (None, {"rope_type": "default"}),
    ],
    ids=["llama-3.1", "llama3", "linear", "yarn", "yarn-2", "none"],
)  # fmt: skip
@pytest.mark.parametrize(("width", "theta"), [(128, 500_000.0), (64, 10_000.0), (16, 300.0)])
def test_frequencies_are_those_of_transformers(
    scaling: dict[str, Any] | None, theirs: dict[str, Any], width: int, theta: float
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    of = transformers.LlamaConfig(
        hidden_size=width, num_attention_heads=1, max_position_embeddings=131072, rope_theta=theta,
        rope_scaling=dict(theirs), rope_parameters=theirs | {"rope_theta": theta},
    )  # fmt: skip
    rope = Rope(width, theta, scaling and RopeScalingConfig(**scaling))
    turned = LlamaRotaryEmbedding(of)
    assert torch.equal(rope_frequencies(rope, CPU), turned.inv_freq)
    assert yarn_magnitude(rope.scaling) == turned.attention_scaling
    cos, _ = turned(torch.zeros(1), torch.arange(64)[None])
    torch.testing.assert_close(rope_table(64, rope, CPU)[0], cos[0, :, : width // 2], rtol=1e-5, atol=1e-6)
