"""Factors of heads and rows on tables of numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megastable.optim.qk_clip import clip_factors, row_factors, scale_rows
from megastable.parallel.fragments import Fragment


@given(
    highest=st.lists(st.floats(-50, 5000, width=32), min_size=12, max_size=12),
    kv=st.sampled_from([1, 2, 3, 12]),
)
def test_every_head_is_scaled_by_its_own_factor(highest: list[float], kv: int) -> None:
    queries, keys = clip_factors(torch.tensor(highest), kv, 100.0)
    for head, logit in enumerate(highest):
        product = float(queries[head] * keys[head // (12 // kv)])
        assert product == pytest.approx(100 / logit if logit > 100 else 1.0, rel=1e-5)
    assert float(keys.max()) <= 1
    if max(highest) <= 100:
        assert (queries == 1).all() and (keys == 1).all()  # nothing is rounded


def test_queries_and_keys_share_the_change() -> None:
    queries, keys = clip_factors(torch.tensor([400.0, 1.0]), 2, 100.0)
    assert queries.tolist() == keys.tolist() == [0.5, 1.0]
    # A shared key head takes as much as the query head that is clipped most; the other is to keep its logits.
    queries, keys = clip_factors(torch.tensor([400.0, 1.0]), 1, 100.0)
    assert queries.tolist() == [0.5, 2.0] and keys.tolist() == [0.5]


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_left_alone(number: float) -> None:
    queries, keys = clip_factors(torch.tensor([number, 1.0]), 1, 100.0)
    assert queries.tolist() == [1.0, 1.0] and keys.tolist() == [1.0]


def test_rows_of_a_tensor_rank() -> None:
    queries, keys = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([5.0, 6.0])
    assert row_factors(queries, keys, 2, 2, 1).tolist() == [3, 3, 4, 4, 6, 6, 1, 1]


@given(width=st.integers(1, 4), cut=st.tuples(st.integers(0, 20), st.integers(0, 20)))
def test_pieces_that_cut_rows(width: int, cut: tuple[int, int]) -> None:
    factors = torch.tensor([2.0, 3.0, 5.0, 7.0, 11.0])
    wanted = factors.repeat_interleave(width)
    begin, end = sorted(min(n, len(wanted)) for n in cut)
    if begin == end:
        return
    fragment = Fragment(
        name="qkv", dim=0, sections=(5,), shape=(5, width) if width > 1 else (5,), group=0, offset=0, start=begin,
        numel=end - begin, counted=True,
    )  # fmt: skip
    piece = torch.ones(end - begin)
    scale_rows(piece, fragment, factors)
    assert torch.equal(piece, wanted[begin:end])
