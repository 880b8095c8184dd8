"""The recipe's model at other widths."""

from __future__ import annotations

import pytest

from megastable.base.errors import ConfigError
from megastable.config import recipe
from megastable.config.tree import ModelConfig
from megastable.study.model_shapes import at_width

RECIPE = "launch/recipes/quickstart.yaml"


def model(width: int, *overrides: str) -> ModelConfig:
    base = recipe.load(RECIPE, overrides).model
    return recipe.load(RECIPE, [*overrides, *at_width(base, width)]).model


def test_heads_stay_as_wide_and_the_rest_is_in_proportion() -> None:
    base = recipe.load(RECIPE).model
    assert (base.hidden, base.heads, base.kv_heads, base.ffn) == (256, 4, 2, 768)
    twice = model(512)
    assert (twice.hidden, twice.heads, twice.kv_heads, twice.ffn, twice.head_width) == (512, 8, 4, 1536, 64)
    assert model(256) == base
    narrow = model(64)
    assert (narrow.heads, narrow.kv_heads, narrow.ffn, narrow.head_width) == (1, 1, 192, 64)


def test_a_head_may_be_wider_than_its_share() -> None:
    wide = model(512, "model.head_dim=128")
    assert (wide.heads, wide.head_width) == (8, 128)


def test_key_value_heads_divide_the_heads() -> None:
    wide = model(5 * 64, "model.heads=4", "model.kv_heads=4")
    assert (wide.heads, wide.kv_heads) == (5, 5)
    odd = model(7 * 32, "model.heads=8", "model.kv_heads=4")  # 3.5 are none
    assert (odd.heads, odd.kv_heads) == (7, 1)


def test_an_inner_width_of_its_own() -> None:
    assert model(128, "model.ffn=null").ffn == 384  # of 768, which 8/3 of 256 is rounded to


@pytest.mark.parametrize("width", [32, 100, 0])
def test_a_width_between_heads_is_refused(width: int) -> None:
    with pytest.raises(ConfigError, match=rf"--widths {width}: .*multiples of 64"):
        model(width)
