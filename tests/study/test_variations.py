"""Interventions, and models of other widths, as overrides of a recipe."""

from __future__ import annotations

import pytest

from megastable.base.errors import ConfigError
from megastable.config import recipe
from megastable.config.tree import ModelConfig
from megastable_tools.study.variations import at_width, interventions

RECIPE = "launch/recipes/quickstart.yaml"


def models(given: list[str], *overrides: str) -> dict[str, ModelConfig]:
    base = recipe.load(RECIPE, overrides).model
    found = interventions(given, base)
    return {name: recipe.load(RECIPE, [*overrides, *more]).model for name, more in found.items()}


def test_the_baseline_has_none_of_them() -> None:
    found = models(["none,qk_norm,z_loss", "all"])
    assert list(found) == ["none", "qk_norm", "z_loss", "all"]
    assert {name: (m.qk_norm, m.z_loss) for name, m in found.items()} == {
        "none": (False, 0), "qk_norm": (True, 0), "z_loss": (False, 1e-4), "all": (True, 1e-4),
    }  # fmt: skip


def test_they_are_the_recipes_own() -> None:
    found = models(["qk_norm+z_loss,none"], "model.qk_norm=full", "model.z_loss=0.01")
    assert (found["qk_norm+z_loss"].qk_norm, found["qk_norm+z_loss"].z_loss) == ("full", 0.01)
    assert (found["none"].qk_norm, found["none"].z_loss) == (False, 0)
    without = models(["all"], "model.qk_norm=false", "model.z_loss=0")["all"]
    assert (without.qk_norm, without.z_loss) == (True, 1e-4)


def test_the_users_own() -> None:
    found = models(["none,after+qk_norm,all", "after=model.norms=after model.init_std=0.01"])
    assert list(found) == ["none", "after+qk_norm", "all", "after"]
    assert [m.norms for m in found.values()] == ["before", "after", "after", "after"]
    assert [m.init_std for m in found.values()] == [0.02, 0.01, 0.01, 0.01]
    assert [bool(m.qk_norm) for m in found.values()] == [False, True, True, False]
    assert found["all"].z_loss == 1e-4


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["none,qknorm"], "there is no 'qknorm'"),
        (["none,,all"], "there is no ''"),
        (["all+qk_norm"], "stand alone"),
        (["all=model.norms=after"], "cannot be the name"),
        (["z_loss=model.z_loss=1"], "cannot be the name"),
        (["a/b=model.z_loss=1"], "cannot be the name"),
        (["a="], "after the name come overrides"),
        (["a=model.norms after"], "after the name come overrides"),
    ],
)
def test_what_is_refused(given: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        interventions(given, ModelConfig())


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
