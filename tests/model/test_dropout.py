"""Dropout as a hash: its definition, its statistics, and that only position, token, channel and place matter."""

from __future__ import annotations

import pytest
import torch

from megastable.model.dropout import at_places, dropped, keys_of
from tests.shapes import kept

S, B, H, SHARE, SEED = 16, 3, 24, 0.25, 1234


def factors(positions: torch.Tensor, place: int = 3, seed: int = SEED, share: float = SHARE) -> torch.Tensor:
    return dropped(torch.ones(S, len(positions), H), at_places(keys_of(positions, seed), place)[0], share, 0)


@pytest.mark.parametrize("place", [0, 3, 7, 200, 10_001])
def test_it_is_its_definition(place: int) -> None:
    positions = torch.tensor([0, 7, 2**40 + 5])
    wanted = kept(positions, S, H, place, SHARE, SEED).transpose(0, 1)
    torch.testing.assert_close(factors(positions, place), wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("parts", [2, 4])
def test_a_shard_of_the_sequence_has_the_mask_of_its_tokens(parts: int) -> None:
    x = torch.randn(S, B, H)
    keys = at_places(keys_of(torch.arange(B), SEED), 3)[0]
    whole = dropped(x, keys, SHARE, 0)
    shards = [dropped(part, keys, SHARE, i * len(part)) for i, part in enumerate(x.chunk(parts))]
    assert torch.equal(torch.cat(shards), whole)


def test_the_share_is_right_everywhere_and_masks_are_independent() -> None:
    """Along every axis, and between samples, places, seeds and epochs: 10 million numbers, five standard errors."""
    many = torch.arange(200)
    masks = {
        "one": factors(many), "place": factors(many, place=4), "seed": factors(many, seed=SEED + 1),
        "epoch": factors(many + 10**6), "next": factors(many + 1),
    }  # fmt: skip
    for name, mask in masks.items():
        drop = (mask == 0).double()
        for axes in ((0, 1, 2), (0, 1), (0, 2), (1, 2)):
            n = drop.numel() / drop.mean(axes).numel()
            error = (SHARE * (1 - SHARE) / n) ** 0.5
            assert ((drop.mean(axes) - SHARE).abs() < 5 * error).all(), (name, axes)
        if name != "one":
            together = float((drop * (masks["one"] == 0)).mean())
            assert abs(together - SHARE**2) < 5 * (SHARE**2 / drop.numel()) ** 0.5, name
    assert float(masks["one"].mean()) == pytest.approx(1.0, abs=0.01)


def test_gradients_pass_where_values_do() -> None:
    x = torch.randn(S, B, H, requires_grad=True)
    y = dropped(x, keys_of(torch.arange(B), SEED), SHARE, 0)
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad == 0, y == 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_has_the_same_mask(dtype: torch.dtype) -> None:
    positions = torch.arange(B)
    x = torch.ones(S, B, H, dtype=dtype)
    y = dropped(x, at_places(keys_of(positions, SEED), 3)[0], SHARE, 0)
    assert y.dtype == dtype and torch.equal(y == 0, factors(positions) == 0)
