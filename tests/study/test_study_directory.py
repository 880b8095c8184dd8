"""What a study's directory keeps, and whom it keeps out."""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megastable.base.errors import ConfigError
from megastable.config import recipe
from megastable_tools.study.study_directory import StudyDirectory, identity_of, list_differences
from megastable_tools.study.trial import LEARNT, WINDOW, TrialResult, smooth_losses
from tests.conftest import write_corpus

GRID = {"widths": [32, 64], "interventions": {"none": ["model.z_loss=0"]}, "seeds": [1]}
IDENTITY = {
    "kind": "lr",
    "recipe": {"model": {"layers": 2}, "train": {"steps": 5}},
    "corpora": ["x"],
    "grid": GRID,
}
RESULT = TrialResult((5.0, 4.0), 6.0, math.inf, 1.0, 10)


def other(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    found = copy.deepcopy(IDENTITY)
    change(found)
    return found


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda i: i.update(kind="compare"), "kind: lr -> compare"),
        (lambda i: i["recipe"]["model"].update(layers=3), "recipe.model.layers: 2 -> 3"),
        (lambda i: i.update(corpora=["y"]), "corpora: .*x.* -> .*y"),
        (lambda i: i["grid"].update(widths=[64, 128]), "grid.widths: 32 belong to it, and not to this one"),
        (lambda i: i["grid"].update(seeds=[2]), "grid.seeds: 1 belong"),
        (lambda i: i["grid"].update(interventions={"all": []}), "grid.interventions.none: .* -> None"),
        (
            lambda i: i["grid"].update(interventions={"none": ["a"]}),
            r"grid.interventions.none: .* -> \['a'\]",
        ),
    ],
)
def test_study_directory_refuses_another_study(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], told: str
) -> None:
    with StudyDirectory.open_locked(tmp_path / "a", IDENTITY, TrialResult):
        pass
    with (
        pytest.raises(ConfigError, match=f"holds another study: {told}"),
        StudyDirectory.open_locked(tmp_path / "a", other(change), TrialResult),
    ):
        pass
    with StudyDirectory.open_locked(tmp_path / "a", IDENTITY, TrialResult):
        pass  # and has changed nothing


def test_study_directory_may_grow(tmp_path: Path) -> None:
    def change(i: dict[str, Any]) -> None:
        i["grid"] = {
            "widths": [16, 32, 64],
            "interventions": {**GRID["interventions"], "all": []},
            "seeds": [1, 2],
        }  # type: ignore[dict-item]

    with (
        StudyDirectory.open_locked(tmp_path / "a", IDENTITY, TrialResult),
        pytest.raises(ConfigError, match="another process works on this study"),
        StudyDirectory.open_locked(tmp_path / "a", IDENTITY, TrialResult),
    ):
        pass
    with StudyDirectory.open_locked(tmp_path / "a", other(change), TrialResult):
        pass
    assert list_differences(IDENTITY, other(change)) == []
    with (
        pytest.raises(ConfigError, match="widths: 16"),
        StudyDirectory.open_locked(tmp_path / "a", IDENTITY, TrialResult),
    ):
        pass  # its results belong to the larger one


def test_study_directory_leaves_other_folders_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("x")
    with (
        pytest.raises(ConfigError, match="not the directory of a study"),
        StudyDirectory.open_locked(tmp_path / "mine", IDENTITY, TrialResult),
    ):
        pass
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(ConfigError, match="cannot be used"),
        StudyDirectory.open_locked(tmp_path / "file", IDENTITY, TrialResult),
    ):
        pass


def test_identity_of_follows_recipe_and_corpus(tiny_recipe: Path, corpus: Path, tmp_path: Path) -> None:
    def identity(*overrides: str) -> dict[str, Any]:
        return identity_of("lr", recipe.load_recipe(tiny_recipe, overrides), GRID)

    first = identity()
    assert (
        list_differences(first, identity("run.seed=77", "run.dir=elsewhere")) == []
    )  # the trials have their own
    assert list_differences(first, identity("optimizer.betas=[0.9, 0.999]"))
    assert list_differences(first, identity("run.deterministic=true"))
    mine = tmp_path / "corpus"
    shutil.copytree(corpus, mine)
    same = identity(f"data.corpora.0.path={mine}")
    assert [text for text in list_differences(first, same) if text.startswith("corpora")] == []
    shutil.rmtree(mine)
    write_corpus(mine, seed=5)
    changed = identity(f"data.corpora.0.path={mine}")
    assert [text for text in list_differences(same, changed) if text.startswith("corpora")]


def result(*losses: float, first: float = 8.0) -> TrialResult:
    return TrialResult(losses, first, math.nan, 1.5, 1000)


def test_trial_result_is_whole_in_its_file_and_capped(tmp_path: Path) -> None:
    for index, given in enumerate((result(7.0, 5.25), result(7.0, math.inf))):
        path = tmp_path / f"{index}.json"
        given.save_file(path)
        found = TrialResult.load_file(path)
        assert math.isnan(found.validation) and repr(found) == repr(given)
    means = smooth_losses([float(i) for i in range(20)])
    assert means[0] == 0 and means[1] == 0.5 and means[19] == sum(range(10, 20)) / WINDOW
    assert smooth_losses([1.0, math.nan, 1.0]) == (1.0, math.inf, math.inf)
    assert result(7.0, 5.0).capped == 5.0 and not result(7.0, 5.0).diverged
    assert result(7.0, math.inf).capped == 8.0 and result(7.0, math.inf).diverged
    assert result(8.0 - LEARNT / 2).diverged  # the uniform distribution is nothing learnt
