"""Comparing candidates over seeds: intervals, pairs, and the command."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megastable.commands.root import app
from megastable.config import recipe
from megastable_tools.study.compare_study import (
    Compared,
    CompareGrid,
    compare,
    in_words,
    interval,
    paired,
    quantile,
    within,
)
from megastable_tools.study.trial import TrialResult
from tests.tools.cli import Done, call

RECIPE = Path("launch/recipes/quickstart.yaml")


@pytest.mark.parametrize(
    ("freedom", "t"),
    [
        (1, 12.706),
        (2, 4.303),
        (3, 3.182),
        (4, 2.776),
        (7, 2.365),
        (10, 2.228),
        (30, 2.042),
        (120, 1.980),
        (999, 1.962),
    ],
)
def test_quantiles_are_those_of_the_table(freedom: int, t: float) -> None:
    assert quantile(freedom) == pytest.approx(t, abs=6e-4)
    assert within(quantile(freedom, 0.5), freedom) == pytest.approx(0.5)


def test_an_interval_of_the_mean() -> None:
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == 2 and found.half == pytest.approx(4.303 / math.sqrt(3), abs=1e-3)
    assert (
        not found.excludes_zero
        and interval([1.0, 1.1, 0.9]).excludes_zero
        and interval([-1.0, -1.1]).mean < 0
    )
    assert math.isinf(interval([1.0]).half) and not interval([1.0]).excludes_zero
    assert math.isnan(interval([1.0, math.inf]).mean) and not interval([1.0, math.nan]).excludes_zero


def test_what_a_pair_has_in_common_cancels() -> None:
    seeds = [5.0, 6.0, 7.0, 4.0]
    better = [x - 0.1 for x in seeds]
    assert paired(better, seeds).mean == pytest.approx(-0.1) and paired(better, seeds).half < 1e-6
    assert paired(better, seeds).excludes_zero and interval(better).half > 1


def result(final: float, validation: float) -> TrialResult:
    return TrialResult((7.0, final), 8.0, validation, 1.0, 10)


def compared(finals: list[list[float]]) -> list[Compared]:
    grid = CompareGrid(
        RECIPE, recipe.load(RECIPE), (), tuple(f"optimizer.lr={i + 1}" for i in range(len(finals))),
        tuple(range(1, len(finals[0]) + 1)),
    )  # fmt: skip
    results = {
        grid.trial(i, seed).name: result(loss, loss + 0.5)
        for i, losses in enumerate(finals) for seed, loss in zip(grid.seeds, losses, strict=True)
    }  # fmt: skip
    return compare(grid, results)


def test_candidates_are_compared_with_the_first() -> None:
    found = compared([[5.0, 6.0, 5.5], [4.9, 5.9, 5.41], [5.1, 5.9, 5.5], [6.0, math.inf, 6.5]])
    assert found[0].training_difference.mean == 0
    assert found[1].training.mean == pytest.approx(5.4033, abs=1e-3)
    assert found[1].training_difference.mean == pytest.approx(-0.0967, abs=1e-3)
    assert found[1].validation_difference.mean == pytest.approx(-0.0967, abs=1e-3)
    # At most the loss at initialization, 8.
    assert found[3].diverged == 1 and found[3].training_difference.mean == pytest.approx((1 + 2 + 1) / 3)
    assert math.isnan(found[3].validation_difference.mean)
    told = in_words(found)
    assert told[0].startswith("optimizer.lr=2: -0.097 nat (95%: ") and told[0].endswith("better")
    assert told[1].endswith("no difference is shown")
    assert in_words(compared([[5.0, 5.0], [5.1, 5.1001]]))[0].endswith("worse")
    assert "one seed shows nothing" in in_words(compared([[5.0], [4.0]]))[0]


def study(recipe_path: Path, *arguments: str, cwd: Path) -> Done:
    return call(app, "study", "compare", recipe_path, "--output", "out", "--jobs", "2", *arguments, cwd=cwd)


def test_a_comparison_trains_shows_and_grows(tiny_recipe: Path, tmp_path: Path) -> None:
    of = ("--of", "", "--of", "optimizer.lr=1e-6  model.z_loss=0")
    done = study(tiny_recipe, *of, "--seeds", "2", "train.steps=10", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "optimizer.lr=1e-6 model.z_loss=0: +" in done.stdout
    found = json.loads((tmp_path / "out/result.json").read_text())
    first, second = found["candidates"]
    assert first["overrides"] == "" and [t["seed"] for t in first["trials"]] == [1, 2]
    assert second["training_difference"]["mean"] > 0 and second["validation_difference"]["mean"] > 0
    # The same seed begins with the same weights and samples.
    assert [t["first"] for t in first["trials"]] == [t["first"] for t in second["trials"]]
    assert first["trials"][0]["losses"] != first["trials"][1]["losses"]
    assert (tmp_path / "out/picture.png").stat().st_size > 10_000
    more = study(tiny_recipe, *of, "--seeds", "3", "--json", "train.steps=10", cwd=tmp_path)
    grown = json.loads(more.stdout)["candidates"]
    assert more.stderr.count("loss") == 2  # the third seed of each
    assert [t["final"] for t in grown[0]["trials"][:2]] == [t["final"] for t in first["trials"]]
    other = study(tiny_recipe, *of, "--seeds", "3", "train.steps=11", cwd=tmp_path)
    assert other.returncode == 2 and "recipe.train.steps: 10 -> 11" in other.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "two different candidates"),
        (("--of", "a=1"), "two different candidates"),
        (("--of", "model.layers=1", "--of", " model.layers=1"), "two different candidates"),
        (("--of", "", "--of", "model.nonsense=1"), "nonsense"),
        (("--of", "", "--of", "word"), "key=value"),
        (("--of", "", "--of", "model.tied=true", "data.corpora.0.path=none"), "not a prepared corpus"),
    ],
)
def test_mistakes_show_before_any_training(
    arguments: tuple[str, ...], told: str, tiny_recipe: Path, tmp_path: Path
) -> None:
    done = study(tiny_recipe, *arguments, cwd=tmp_path)
    assert (
        (done.returncode, done.stdout) == (2, "") and told in done.stderr and "Traceback" not in done.stderr
    )
    assert not (tmp_path / "out").exists()
