"""The learning-rate study as a command: what it trains, keeps, shows and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megastable.commands.root import app
from megastable.config import recipe
from megastable_tools.study.lr_study import QUICK, common, schedule_of
from tests.tools.cli import Done, call

SHORT = ("train.steps=14", "train.global_batch=4", "train.micro_batch=4", "model.sequence_length=32")


def study(recipe_path: Path, *arguments: str, cwd: Path) -> Done:
    given = ("--output", "out", "--widths", "32,16", "--jobs", "2", "--interventions", "none,all")
    return call(app, "study", "lr-sensitivity", recipe_path, *given, *arguments, *SHORT, cwd=cwd)


@pytest.mark.slow
def test_a_study_trains_shows_and_goes_on(tiny_recipe: Path, tmp_path: Path) -> None:
    given = ("--rates", "1e-3,1e-2,1e3", "--edge-seeds", "1")
    done = study(tiny_recipe, *given, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "LR sensitivity" in done.stdout and "per doubling of the width" in done.stdout
    found = json.loads((tmp_path / "out/result.json").read_text())
    assert (tmp_path / "out/picture.png").stat().st_size > 10_000
    assert [(c["intervention"], c["width"]) for c in found["curves"]] == [
        ("none", 16), ("none", 32), ("all", 16), ("all", 32),
    ]  # fmt: skip
    for curve in found["curves"]:
        assert [one["rate"] for one in curve["losses"]] == [1e-3, 1e-2, 1e3]
        best, worst = curve["best_loss"], curve["losses"][2]["loss"]
        assert worst > best + 0.02  # a rate of 1000 learns nothing
        mean = sum(one["loss"] for one in curve["losses"]) / 3
        assert curve["lr_sensitivity"] == [pytest.approx(mean - best)]
        seeds = {t["seed"] for t in curve["trials"]}
        assert seeds == {1, 2} and 1 <= sum(t["seed"] == 2 for t in curve["trials"]) <= 3
        assert set(curve["highest_by_seed"]) == {"1", "2"}
    small, large = found["curves"][0]["parameters"], found["curves"][1]["parameters"]
    assert small < large < found["curves"][3]["parameters"]  # QK-norm has weights

    # One result is lost, as if the study had been killed: it alone runs again, and says the same.
    lost = tmp_path / "out/trials/none-w16-lr0.01-s1.json"
    before, times = lost.read_text(), {p: p.stat().st_mtime_ns for p in lost.parent.iterdir()}
    lost.unlink()
    again = study(tiny_recipe, *given, "--json", "--picture", "other.svg", cwd=tmp_path)
    assert json.loads(again.stdout)["curves"] != [] and (tmp_path / "other.svg").exists()
    assert json.loads(lost.read_text())["losses"] == json.loads(before)["losses"]
    assert {p for p in lost.parent.iterdir() if p.stat().st_mtime_ns != times[p]} == {lost}
    assert again.stderr.count("loss") == 1

    # Other rates: refused, unless they are more.
    refused = study(tiny_recipe, "--rates", "1e-3", cwd=tmp_path)
    assert refused.returncode == 2 and "grid.rates: 0.01, 1000.0 belong to it" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--widths", "20"), "multiples of 8"),
        (("--widths", "a"), "--widths a: give different whole numbers"),
        (("--widths", "32,32"), "--widths 32,32: give different"),
        (("--rates", "0,1"), "--rates 0,1: give learning rates above 0"),
        (("--rates", "x"), "--rates x: give learning rates"),
        (("--rates", "inf"), "--rates inf: give learning rates"),
        (("--interventions", "norm"), "there is no 'norm'"),
        (("--interventions", "x=model.nonsense=1"), "nonsense"),
        (("--interventions", "x=model.heads=3"), "heads=3"),
        (("--quick", "--full"), "exclude each other"),
        (("--picture", "a.gif"), "a name ending in .png"),
        (("model.nonsense=1",), "nonsense"),
        (("data.corpora.0.path=none",), "not a prepared corpus"),
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


def test_the_schedule_keeps_its_shares() -> None:
    path, quickstart = Path("launch/recipes/quickstart.yaml"), ("schedule.warmup_steps=22",)
    assert "schedule.warmup_steps=10" in schedule_of(recipe.load(path, quickstart), 100)
    wsd = ("schedule.kind=wsd", "schedule.decay_steps=55")
    assert "schedule.decay_steps=25" in schedule_of(recipe.load(path, wsd), 100)
    tokens = 220 * 16 * 256
    by_tokens = (f"schedule.warmup_tokens={tokens // 10}", "schedule.warmup_steps=null")
    found = recipe.load(path, [*by_tokens, *schedule_of(recipe.load(path, by_tokens), 50)])
    assert (found.schedule.warmup_steps, found.schedule.by_tokens) == (5, False)
    own = recipe.load(path, common(path, QUICK, ["train.steps=40", "schedule.floor=0.5"]))
    assert (own.train.steps, own.schedule.warmup_steps, own.schedule.floor) == (40, round(40 * 30 / 220), 0.5)
    assert recipe.load(path, common(path, QUICK, ["schedule.warmup_steps=1"])).schedule.warmup_steps == 1
