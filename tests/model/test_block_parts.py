"""RMSNorm in fp32, whatever goes in; a clamp of SwiGLU; dropout as a hash of position, token, channel and place."""

from __future__ import annotations

import pytest
import torch

from megastable.engine.adjustments import CLAMPED, SWIGLU_CLAMP
from megastable.model.block_parts import RMSNorm, drop_elements, keys_at_places, keys_of_samples
from megastable.parallel.layout import find_own_tokens
from megastable.parallel.topology import TensorParallel
from tests.shapes import kept

NORM_EPS = 1e-5


def norm(width: int, dtype: torch.dtype) -> RMSNorm:
    module = RMSNorm(width, NORM_EPS, TensorParallel(), "norm", partial=False)
    with torch.no_grad():
        module.weight.copy_(torch.linspace(0.5, 1.5, width))
    return module.to(dtype)


def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """In fp64, as the paper writes it."""
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + NORM_EPS).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 3e3])
def test_norm_rounds_only_its_result(scale: float, dtype: torch.dtype) -> None:
    """3000 squared overflows fp16, and a sum of 4096 squares in bf16 stands still at 256: both must not matter."""
    module = norm(4096, dtype)
    x = (torch.randn(3, 2, 4096, generator=torch.Generator().manual_seed(0)) * scale).to(dtype)
    y = module(x)
    assert y.dtype == dtype
    rounding = torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 1e-6
    torch.testing.assert_close(y.double(), exact(x, module.weight), rtol=1.01 * rounding, atol=1e-7)


def test_clamp_is_its_definition_forward_and_backward() -> None:
    gate, up = 8 * torch.randn(2, 500, 8, dtype=torch.float64)
    x, c = torch.cat((gate, up), -1).requires_grad_(), SWIGLU_CLAMP
    y = CLAMPED(x)
    held, share = torch.where(gate > c, c, gate), up.abs().clamp(max=c) * up.sign()
    sigmoid = 1 / (1 + (-held).exp())
    torch.testing.assert_close(y, held * sigmoid * share)
    (found,) = torch.autograd.grad(y.sum(), x)
    by_gate = share * sigmoid * (1 + held * (1 - sigmoid)) * (gate <= c)
    torch.testing.assert_close(found, torch.cat((by_gate, held * sigmoid * (up.abs() <= c)), -1))
    assert int((gate > c).sum()) > 100 and int((up.abs() > c).sum()) > 100


S, B, H, SHARE, SEED = 16, 3, 24, 0.25, 1234


def factors(positions: torch.Tensor, place: int = 3, seed: int = SEED, share: float = SHARE) -> torch.Tensor:
    return drop_elements(
        torch.ones(S, len(positions), H),
        keys_at_places(keys_of_samples(positions, seed), place)[0],
        share,
        [range(S)],
    )


@pytest.mark.parametrize("place", [0, 3, 7, 200, 10_001])
def test_dropout_is_its_definition(place: int) -> None:
    positions = torch.tensor([0, 7, 2**40 + 5])
    wanted = kept(positions, S, H, place, SHARE, SEED).transpose(0, 1)
    torch.testing.assert_close(factors(positions, place), wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("parts", [2, 4])
def test_dropout_of_a_shard_has_the_mask_of_its_tokens(parts: int, ring: bool) -> None:
    x = torch.randn(S, B, H)
    keys = keys_at_places(keys_of_samples(torch.arange(B), SEED), 3)[0]
    whole = drop_elements(x, keys, SHARE, [range(S)])
    for rank in range(parts):
        tokens = find_own_tokens(S, parts, rank, ring)
        numbers = [position for part in tokens for position in part]
        assert torch.equal(drop_elements(x[numbers], keys, SHARE, tokens), whole[numbers])


def test_dropout_has_its_share_everywhere_and_independent_masks() -> None:
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
