"""The numbers of studies: curves over learning rates, paired intervals, slopes of scales; and what a study varies."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megastable.base.errors import ConfigError
from megastable.config import recipe
from megastable.config.tree import ModelConfig
from megastable_tools.study.compare_study import (
    Compared,
    CompareGrid,
    compare_candidates,
    confidence_interval,
    describe_differences,
    paired_interval,
    student_quantile,
    student_share_within,
)  # fmt: skip
from megastable_tools.study.coordinate_study import (
    PLAIN,
    CoordinateGrid,
    Coordinates,
    common_overrides,
    find_scales,
    fit_exponent,
    geometric_mean,
    name_depths,
)  # fmt: skip
from megastable_tools.study.lr_study import (
    LrCurve,
    find_edge_rates,
    find_optimum,
    find_trends,
    find_usable_rates,
    fit_slope,
    lr_sensitivity,
)  # fmt: skip
from megastable_tools.study.trial import TrialResult
from megastable_tools.study.variations import at_width, parse_interventions

RECIPE = Path("launch/recipes/quickstart.yaml")
CURVE = {1e-4: 5.0, 1e-3: 4.0, 1e-2: 3.9, 1e-1: 4.4, 1.0: 8.0}


def result(final: float, first: float = 9.0, validation: float = math.nan, size: int = 1) -> TrialResult:
    return TrialResult((7.0, final), first, validation, 1.0, size)


# Curves over learning rates


def parabola(*rates: float, at: float) -> dict[float, float]:
    return {rate: 3.0 + 0.3 * math.log(rate / at) ** 2 for rate in rates}


def test_lr_sensitivity_is_the_mean_excess_over_the_best() -> None:
    assert lr_sensitivity(CURVE) == pytest.approx((1.1 + 0.1 + 0.0 + 0.5 + 4.1) / 5)
    assert fit_slope([0, 1, 2], [1, 3, 5]) == 2 and fit_slope([0, 1, 2], [0, 3, 0]) == 0
    assert math.isnan(fit_slope([1, 1], [2, 3])) and math.isnan(fit_slope([1], [2]))


@pytest.mark.parametrize("rates", [(1e-3, 2e-3, 4e-3), (1e-4, 1e-3, 3e-3, 2e-2)])
def test_optimum_lies_between_the_rates_tried_or_at_their_end(rates: tuple[float, ...]) -> None:
    found = find_optimum(parabola(*rates, at=2.3e-3))
    assert found.rate == pytest.approx(2.3e-3) and found.inside
    ends = [find_optimum(parabola(*rates, at=at)) for at in (1e-6, 1.0)]
    assert [(end.rate, end.inside) for end in ends] == [(rates[0], False), (rates[-1], False)]
    assert find_optimum(dict.fromkeys(rates, 1.0)).rate == rates[0]


def test_usable_rates_end_where_the_loss_leaves_the_margin() -> None:
    found = find_usable_rates(CURVE, 0.25)
    # 0.15 of the way from 4.0 to 5.0, and half of that from 3.9 to 4.4, in the logarithm of the rate.
    assert found.lowest == pytest.approx(10**-3.15) and found.highest == pytest.approx(10**-1.5)
    assert (found.open_below, found.open_above) == (False, False) and found.factor == pytest.approx(10**1.65)
    found = find_usable_rates({1e-3: 4.0, 1e-2: 3.9, 1e-1: 3.95}, 0.2)
    assert (found.lowest, found.highest, found.open_below, found.open_above) == (1e-3, 1e-1, True, True)
    assert (
        find_usable_rates({1e-3: 4.0, 1e-2: 6.0, 1e-1: 4.05}, 0.1).highest < 1e-2
    )  # an island does not count


@pytest.mark.parametrize(
    ("losses", "margin", "found"),
    [(CURVE, 0.25, (1e-2, 1e-1)), (CURVE, 0.6, (1e-2, 1e-1, 1.0)), ({1e-3: 4.0, 1e-2: 3.0}, 0.1, (1e-2,)),
     ({1e-3: 4.0, 1e-2: 6.0, 1e-1: 4.05}, 0.1, (1e-3, 1e-2))],
)  # fmt: skip
def test_edges_are_the_best_the_last_usable_and_the_next(
    losses: dict[float, float], margin: float, found: tuple[float, ...]
) -> None:
    assert find_edge_rates(losses, margin) == found


def curve(width: int, *seeds: dict[float, float]) -> LrCurve:
    runs = {
        n: {rate: result(loss, size=width**2) for rate, loss in of.items()} for n, of in enumerate(seeds, 1)
    }
    return LrCurve("none", width, runs, (1,))


def test_trends_over_widths() -> None:
    rates = (1e-4, 1e-3, 1e-2, 1e-1)
    halved = [curve(width, parabola(*rates, at=0.4 / width)) for width in (64, 128, 256)]
    [found] = find_trends(halved)
    assert found.best_rate == pytest.approx(-1)
    assert found.sensitivity == pytest.approx(fit_slope([6, 7, 8], [c.sensitivities[0] for c in halved])) != 0
    [ends] = find_trends([curve(width, dict.fromkeys(rates, 1.0)) for width in (64, 128)])
    assert math.isnan(ends.best_rate)


def test_curve_counts_a_diverged_run_as_its_initialization_and_other_seeds_at_the_edges() -> None:
    found = curve(64, {1e-3: 4.0, 1e-2: math.inf, 1e-1: 12.0})
    assert found.mean == {1e-3: 4.0, 1e-2: 9.0, 1e-1: 9.0} and found.diverged == [1e-2, 1e-1]
    assert found.sensitivities == [pytest.approx(10 / 3)]
    more = curve(64, {1e-3: 4.2, 1e-2: 4.0, 1e-1: 5.0}, {1e-2: 4.0, 1e-1: 4.5}, {1e-2: 3.9, 1e-1: 8.9})
    assert more.highest_rates(0.5) == pytest.approx([10**-1.5, 1e-1, 1e-2 * 10**0.1])
    assert list(more.mean) == [1e-3, 1e-2, 1e-1]  # of the whole seed alone


# Paired seeds


@pytest.mark.parametrize(
    ("freedom", "t"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (7, 2.365), (30, 2.042), (120, 1.980), (999, 1.962)],
)
def test_quantile_is_that_of_the_table(freedom: int, t: float) -> None:
    assert student_quantile(freedom) == pytest.approx(t, abs=6e-4)
    assert student_share_within(student_quantile(freedom, 0.5), freedom) == pytest.approx(0.5)


def test_interval_of_the_mean_and_of_pairs() -> None:
    found = confidence_interval([1.0, 2.0, 3.0])
    assert found.mean == 2 and found.half == pytest.approx(4.303 / math.sqrt(3), abs=1e-3)
    assert not found.excludes_zero and confidence_interval([1.0, 1.1, 0.9]).excludes_zero
    assert math.isinf(confidence_interval([1.0]).half) and not confidence_interval([1.0]).excludes_zero
    assert (
        math.isnan(confidence_interval([1.0, math.inf]).mean)
        and not confidence_interval([1.0, math.nan]).excludes_zero
    )
    seeds = [5.0, 6.0, 7.0, 4.0]  # what a pair has in common cancels
    better = [x - 0.1 for x in seeds]
    assert (
        paired_interval(better, seeds).mean == pytest.approx(-0.1)
        and paired_interval(better, seeds).excludes_zero
    )
    assert paired_interval(better, seeds).half < 1e-6 < 1 < confidence_interval(better).half


def compared(finals: list[list[float]]) -> list[Compared]:
    candidates, seeds = [f"optimizer.lr={i + 1}" for i in range(len(finals))], range(1, len(finals[0]) + 1)
    grid = CompareGrid(RECIPE, recipe.load_recipe(RECIPE), (), tuple(candidates), tuple(seeds))
    results = {
        grid.make_trial(i, seed).name: result(loss, 8.0, loss + 0.5)
        for i, losses in enumerate(finals) for seed, loss in zip(grid.seeds, losses, strict=True)
    }  # fmt: skip
    return compare_candidates(grid, results)


def test_compare_takes_differences_to_the_first() -> None:
    found = compared([[5.0, 6.0, 5.5], [4.9, 5.9, 5.41], [5.1, 5.9, 5.5], [6.0, math.inf, 6.5]])
    assert found[0].training_difference.mean == 0
    assert found[1].training.mean == pytest.approx(5.4033, abs=1e-3)
    for difference in (found[1].training_difference, found[1].validation_difference):
        assert difference.mean == pytest.approx(-0.0967, abs=1e-3)
    # At most the loss at initialization, 8.
    assert found[3].diverged == 1 and found[3].training_difference.mean == pytest.approx((1 + 2 + 1) / 3)
    assert math.isnan(found[3].validation_difference.mean)
    told = describe_differences(found)
    assert told[0].startswith("optimizer.lr=2: -0.097 nat (95%: ") and told[0].endswith("better")
    assert told[1].endswith("no difference is shown")
    assert describe_differences(compared([[5.0, 5.0], [5.1, 5.1001]]))[0].endswith("worse")
    assert "one seed shows nothing" in describe_differences(compared([[5.0], [4.0]]))[0]


# Scales of activations


def grid_of(*sizes: int, deep: bool = False, seeds: tuple[int, ...] = (1,)) -> CoordinateGrid:
    overrides = common_overrides(["data.corpora.0.path=data/stdlib"])
    return CoordinateGrid(
        RECIPE, recipe.load_recipe(RECIPE, overrides), overrides, sizes, deep, (PLAIN,), 2, seeds
    )


def model_of(scale: float, change: float, blocks: int = 1) -> Coordinates:
    places = ["embedding", *(f"{n}.mlp" for n in range(1, blocks + 1)), "logits"]
    rms = {place: [1.0, 2.0, scale * (1 + n)] for n, place in enumerate(places)}
    return Coordinates(rms, {place: [0.0, 0.5, change] for place in places}, [5.0, 4.0])


def test_scales_have_the_slopes_that_are_known() -> None:
    grid = grid_of(64, 128, 256, seeds=(1, 2))
    results = {
        grid.model_name(PLAIN, size, seed): model_of(3 * size**0.5 * factor, 7.0)
        for size in grid.sizes for seed, factor in ((1, 2.0), (2, 0.5))
    }  # fmt: skip
    found = {one.place: one for one in find_scales(grid, results)}
    assert list(found) == ["embedding", "1.mlp", "logits"]
    for one in found.values():
        assert (one.first, one.change) == (pytest.approx(0), pytest.approx(0))
        assert one.last == pytest.approx(0.5) and not one.flat
    assert found["embedding"].rms == pytest.approx({64: 24, 128: 3 * 128**0.5, 256: 48})


@pytest.mark.parametrize(
    ("last", "change", "flat"),
    [(0.05, 0.2, True), (0, -0.26, False), (0.11, 0, False), (0, math.nan, False), (0, math.inf, False)],
)
def test_flat_is_flat_at_the_end_and_in_the_change(last: float, change: float, flat: bool) -> None:
    grid = grid_of(64, 128, 256)
    results = {grid.model_name(PLAIN, n, 1): model_of(n**last, n**change) for n in grid.sizes}
    assert {one.flat for one in find_scales(grid, results)} == {flat}
    assert math.isnan(geometric_mean([1.0, 0.0])) and geometric_mean([2.0, 8.0]) == pytest.approx(4)
    assert fit_exponent({2: 3.0, 4: 12.0}) == pytest.approx(2)


def test_named_compares_depths_at_the_same_share_of_the_depth() -> None:
    found, one = (name_depths(model_of(1.0, 1.0, blocks), deep=True) for blocks in (4, 1))
    assert list(found.rms) == ["embedding", "middle.mlp", "last.mlp", "logits"]
    assert found.rms["middle.mlp"][2] == 3 and found.rms["last.mlp"][2] == 5  # the second and the fourth
    assert one.rms["middle.mlp"] == one.rms["last.mlp"]
    grid = grid_of(2, 8, deep=True)
    results = {grid.model_name(PLAIN, n, 1): model_of(float(n), 1.0, n) for n in (2, 8)}
    by_place = {one.place: one.rms for one in find_scales(grid, results)}
    assert by_place["middle.mlp"] == pytest.approx({2: 2 * 2, 8: 8 * 5})
    assert by_place["last.mlp"] == pytest.approx({2: 2 * 3, 8: 8 * 9})
    assert recipe.load_recipe(RECIPE, grid.overrides_of(PLAIN, 8, 1)).model.layers == 8


# What a study varies


@pytest.mark.parametrize(
    ("given", "overrides", "wanted"),
    [
        (["none,qk_norm,z_loss", "all"], (),
         {"none": (False, 0), "qk_norm": (True, 0), "z_loss": (False, 1e-4), "all": (True, 1e-4)}),
        (["qk_norm+z_loss,none"], ("model.qk_norm=full", "model.z_loss=0.01"),
         {"qk_norm+z_loss": ("full", 0.01), "none": (False, 0)}),
        (["all"], ("model.qk_norm=false", "model.z_loss=0"), {"all": (True, 1e-4)}),
        (["none,after+qk_norm,all", "after=model.norms=after model.init_std=0.01"], (),
         {"none": (False, 0), "after+qk_norm": (True, 0), "all": (True, 1e-4), "after": (False, 0)}),
    ],
)  # fmt: skip
def test_interventions(given: list[str], overrides: tuple[str, ...], wanted: dict[str, object]) -> None:
    found = parse_interventions(given, recipe.load_recipe(RECIPE, overrides).model)
    models = {name: recipe.load_recipe(RECIPE, [*overrides, *more]).model for name, more in found.items()}
    assert {name: (m.qk_norm, m.z_loss) for name, m in models.items()} == wanted
    for name, model in models.items():
        after = "after" in name or (name == "all" and "after" in models)
        assert (model.norms, model.init_std) == (("after", 0.01) if after else ("before", 0.02))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["none,qknorm"], "there is no 'qknorm'"), (["none,,all"], "there is no ''"), (["all+qk_norm"], "stand alone"),
        (["all=model.norms=after"], "cannot be the name"), (["z_loss=model.z_loss=1"], "cannot be the name"),
        (["a/b=model.z_loss=1"], "cannot be the name"), (["a="], "after the name come overrides"),
        (["a=model.norms after"], "after the name come overrides"),
    ],
)  # fmt: skip
def test_interventions_refused(given: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_interventions(given, ModelConfig())


@pytest.mark.parametrize(
    ("width", "overrides", "shape"),
    [
        (512, (), (8, 4, 1536, 64)), (256, (), (4, 2, 768, 64)), (64, (), (1, 1, 192, 64)),
        (512, ("model.head_dim=128",), (8, 4, 1536, 128)), (128, ("model.ffn=null",), (2, 1, 384, 64)),
        (5 * 64, ("model.heads=4", "model.kv_heads=4"), (5, 5, 960, 64)),
        (7 * 32, ("model.heads=8", "model.kv_heads=4"), (7, 1, 672, 32)),  # 3.5 are none
    ],
)  # fmt: skip
def test_at_width_keeps_heads_as_wide_and_the_rest_in_proportion(
    width: int, overrides: tuple[str, ...], shape: tuple[int, ...]
) -> None:
    base = recipe.load_recipe(RECIPE, overrides).model
    found = recipe.load_recipe(RECIPE, [*overrides, *at_width(base, width)]).model
    assert (found.heads, found.kv_heads, found.ffn_width, found.head_width) == shape
    for wrong in (32, 100, 0):
        with pytest.raises(ConfigError, match=rf"--widths {wrong}: .*multiples of"):
            at_width(recipe.load_recipe(RECIPE).model, wrong)
