"""Rotary embeddings: what makes them relative, and positions inside documents."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.model.rope import document_positions, rope_table, rotate
from tests import reference

WIDTH, LENGTH, THETA = 16, 512, 10_000.0
CPU = torch.device("cpu")


def at(x: torch.Tensor, position: int) -> torch.Tensor:
    """x [width] as it is at a position."""
    cos, sin = rope_table(LENGTH, WIDTH, THETA, CPU)
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
    cos, sin = rope_table(LENGTH, WIDTH, THETA, CPU)
    got = rotate(x, cos[:, None, None], sin[:, None, None])
    position = torch.arange(LENGTH).expand(2, LENGTH)
    wanted = reference.rope(x.permute(1, 2, 0, 3), position, THETA).permute(2, 0, 1, 3)
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
