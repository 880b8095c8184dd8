"""Updates of pieces, without ranks: an element's result at every place, rectangles of a matrix, clipped spikes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megastable.config.model import ModelConfig
from megastable.config.optimizers import OptimizerConfig
from megastable.optim import build
from megastable.optim.adafactor import split_in_bands
from megastable.optim.adam_pieces import clip_spikes, draw_elements
from megastable.optim.adamw import LANES
from megastable.optim.pieces import Piece, PieceOptimizer, Surroundings, WholeParameter
from megastable.parallel.sharding import Fragment, Placement, cut_shard, set_placement
from tests.optim import rules

ROWS, WIDTH = 13, 7
N = ROWS * WIDTH
NAMES = ["sgd", "stable_adamw", "spam", "stable_spam", "lamb", "adafactor"]


def trained(name: str, before: int) -> list[Tensor]:
    """Weight and flat state of a matrix after some updates, `before` elements from the beginning of its buffer."""
    g = torch.Generator().manual_seed(0)
    module = torch.nn.Linear(WIDTH, ROWS, bias=False)
    settings = OptimizerConfig.model_validate({"name": name, "lr": 3e-3, "spam": {"threshold": 10.0}})
    set_placement(module.weight, Placement("blocks.0.mlp.down.weight"), 1)
    optimizer = build.build_optimizer(module, settings, ModelConfig(), compiled=False)
    assert isinstance(optimizer, PieceOptimizer)
    flat = torch.zeros(before + N + 3)
    flat[before : before + N] = torch.randn(N, generator=g)
    optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]
    optimizer.param_groups[0]["params"] = [flat]
    piece = Fragment(
        name="w", dim=None, sections=(), shape=(ROWS, WIDTH), group=0, offset=before, start=0, numel=N, counted=True
    )  # fmt: skip
    optimizer.attach_buffers(
        [flat], [piece], Surroundings({"w": WholeParameter(Placement("w"), (ROWS, WIDTH), 0)})
    )
    for _ in range(6):
        flat.grad = torch.zeros_like(flat)
        flat.grad[before : before + N] = torch.randn(N, generator=g) * 1e-2
        optimizer.step()
    state = [flat, *(t for t in optimizer.state[flat].values() if t.dim())]
    return [t[before : before + N].clone() for t in state]


@pytest.mark.parametrize("name", NAMES)
def test_an_element_is_updated_alike_at_every_place(name: str) -> None:
    wanted = trained(name, 0)
    for before in range(1, LANES + 1):
        for x, y in zip(trained(name, before), wanted, strict=True):
            assert torch.equal(x, y), before


@pytest.mark.parametrize("size", [1, WIDTH, 3 * WIDTH + 1, N])
def test_rectangles_cover_a_piece_once(size: int) -> None:
    matrix = torch.arange(float(N)).view(ROWS, WIDTH)
    for start in range(N):
        for numel in (1, 5, 2 * WIDTH + 3, N - start):
            if start + numel > N:
                continue
            piece = Fragment(
                name="w", dim=None, sections=(), shape=(ROWS, WIDTH), group=0, offset=0, start=start, numel=numel,
                counted=True,
            )  # fmt: skip
            flat, seen = matrix.flatten()[start : start + numel], torch.zeros(numel)
            for band in split_in_bands(piece, size):
                assert torch.equal(band.view_of(flat), matrix[band.rows, band.columns])
                assert seen[band.part].numel() <= max(size, WIDTH)
                seen[band.part] += 1
            assert (seen == 1).all()


def test_spikes_are_clipped_to_the_threshold() -> None:
    gradient = torch.tensor([1.0, -1.0, 0.1, -0.1, 5.0, 0.0])
    v = torch.tensor([0.01, 0.01, 0.01, 0.01, 0.0, 0.0])
    bound = math.sqrt(0.04)
    wanted = torch.tensor([bound, -bound, 0.1, -0.1, 5.0, 0.0])
    torch.testing.assert_close(clip_spikes(gradient, v, 4.0), wanted)
    assert torch.equal(clip_spikes(gradient[2:4], v[2:4], 4.0), gradient[2:4])


@pytest.mark.parametrize(("dim", "sections"), [(None, ()), (0, (24,)), (0, (12, 8, 4)), (1, (16,))])
@given(start=st.integers(0, 100), numel=st.integers(1, 90), density=st.floats(0.1, 0.9))
@settings(max_examples=20, deadline=None)
def test_every_shard_draws_as_the_whole_matrix(
    dim: int | None, sections: tuple[int, ...], start: int, numel: int, density: float
) -> None:
    whole = rules.sparse("w", torch.zeros(24, 16), 3, density)
    for rank in range(2):
        mine = cut_shard(whole, Placement("w", dim, sections), rank, 2)
        part = slice(start, min(start + numel, mine.numel()))
        f = Fragment(
            name="w", dim=dim, sections=sections, shape=tuple(mine.shape), group=0, offset=0, start=start,
            numel=part.stop - start, counted=True,
        )  # fmt: skip
        piece = Piece(f, torch.zeros(f.numel), torch.zeros(f.numel), {}, {})
        drawn = draw_elements(piece, 3, density, (rank, 2))(slice(0, f.numel))
        assert drawn is not None and torch.equal(drawn, mine.flatten()[part])
