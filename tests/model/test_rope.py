"""Rotary embeddings: what makes them relative, and positions inside documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megastable.config.model import RopeScalingConfig
from megastable.model.rope import Rope, document_positions, frequencies, magnitude, rope_table, rotate
from tests import reference

WIDTH, LENGTH, THETA = 16, 512, 10_000.0
CPU = torch.device("cpu")
SHAPE = reference.Shape(layers=1, heads=3, kv_heads=3, width=WIDTH, vocabulary=9, theta=THETA)


def at(x: torch.Tensor, position: int) -> torch.Tensor:
    """x [width] as it is at a position."""
    cos, sin = rope_table(LENGTH, Rope(WIDTH, THETA), CPU)
    return rotate(x.view(1, 1, 1, WIDTH), cos[position], sin[position]).view(WIDTH)


def vectors(seed: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None)
@given(st.integers(0, 255), st.integers(0, 255), st.integers(0, 255), st.integers(0, 9))
def test_products_depend_on_the_distance_only(i: int, j: int, shift: int, seed: int) -> None:
    q, k = vectors(seed)
    here, there = at(q, i) @ at(k, j), at(q, i + shift) @ at(k, j + shift)
    torch.testing.assert_close(here, there, rtol=0, atol=1e-4 * float(q.norm() * k.norm()))


def test_products_do_depend_on_the_distance() -> None:
    q, k = vectors(0)
    products = torch.stack([at(q, 0) @ at(k, j) for j in range(8)])
    assert products.unique().numel() == 8


@settings(deadline=None)
@given(st.integers(0, LENGTH - 1), st.integers(0, 9))
def test_rotation_keeps_the_norm(position: int, seed: int) -> None:
    q = vectors(seed)[0]
    torch.testing.assert_close(at(q, position).norm(), q.norm(), rtol=1e-5, atol=0)


def test_position_zero_changes_nothing() -> None:
    q = vectors(0)[0]
    assert torch.equal(at(q, 0), q)


def test_halves_are_rotated_as_by_the_reference() -> None:
    x = torch.randn(LENGTH, 2, 3, WIDTH)  # [s, b, heads, d]
    cos, sin = rope_table(LENGTH, Rope(WIDTH, THETA), CPU)
    got = rotate(x, cos[:, None, None], sin[:, None, None])
    position = torch.arange(LENGTH).expand(2, LENGTH)
    wanted = reference.rope(x.permute(1, 2, 0, 3), position, reference.rates(SHAPE)).permute(2, 0, 1, 3)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_low_precision_inputs_are_rotated_in_fp32() -> None:
    """In bf16 the angle of position 509 would be off by a radian."""
    q = vectors(3)[0].to(torch.bfloat16)
    got = at(q, 509)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, at(q.float(), 509).to(torch.bfloat16))


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=12, max_size=12), min_size=1, max_size=3))
def test_positions_restart_with_every_document(rows: list[list[int]]) -> None:
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
    assert torch.equal(frequencies(rope, CPU), turned.inv_freq)
    assert magnitude(rope.scaling) == turned.attention_scaling
    cos, _ = turned(torch.zeros(1), torch.arange(64)[None])
    torch.testing.assert_close(rope_table(64, rope, CPU)[0], cos[0, :, : width // 2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"kind": "dynamic", "factor": 2.0}, "'linear', 'llama3' or 'yarn'"),
        ({"kind": "yarn", "factor": 2.0}, "needs original_length"),
        (YARN | {"beta_slow": 40.0}, "beta_slow=40 must be below beta_fast=32"),
        (YARN | {"low_freq_factor": 2.0}, "kind=yarn has no low_freq_factor"),
        ({"kind": "llama3", "factor": 8.0}, "needs original_length"),
        (LLAMA_31 | {"low_freq_factor": 4.0}, "low_freq_factor=4 must be below high_freq_factor=4"),
        (LLAMA_31 | {"factor": 0.5}, "greater than or equal to 1"),
        (LLAMA_31 | {"kind": "linear"}, "kind=linear has no original_length, only factor"),
        ({"kind": "linear"}, "factor"),
    ],
)
def test_a_scaling_that_cannot_be_is_refused(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        RopeScalingConfig.model_validate(given)
