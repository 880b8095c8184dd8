"""Studies as commands: what they train, keep, show and refuse; a real model's activations; trials in processes."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megastable.base.errors import DataError
from megastable.commands.root import app
from megastable.config import recipe
from megastable_tools.study.coordinate_study import OPEN, record_activations
from megastable_tools.study.trial import QUIET, Trial, TrialResult, run_trials
from tests.distributed import run_ranks
from tests.patience import PATIENCE
from tests.tools.cli import Done, call

SHORT = ("train.global_batch=4", "train.micro_batch=4", "model.sequence_length=32")
FEW = (*QUIET, "train.steps=4")
OF = ("--of", "", "--of", "optimizer.lr=1e-6  model.z_loss=0")


def study(kind: str, recipe_path: Path, *arguments: str, cwd: Path) -> Done:
    return call(app, "study", kind, recipe_path, "--output", "out", "--jobs", "2", *arguments, cwd=cwd)


def test_compare_trains_shows_and_grows(tiny_recipe: Path, tmp_path: Path) -> None:
    done = study("compare", tiny_recipe, *OF, "--seeds", "2", "train.steps=10", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "optimizer.lr=1e-6 model.z_loss=0: +" in done.stdout
    first, second = json.loads((tmp_path / "out/result.json").read_text())["candidates"]
    assert first["overrides"] == "" and [t["seed"] for t in first["trials"]] == [1, 2]
    assert second["training_difference"]["mean"] > 0 and second["validation_difference"]["mean"] > 0
    # The same seed begins with the same weights and samples.
    assert [t["first"] for t in first["trials"]] == [t["first"] for t in second["trials"]]
    assert first["trials"][0]["losses"] != first["trials"][1]["losses"]
    assert (tmp_path / "out/picture.png").stat().st_size > 10_000
    more = study("compare", tiny_recipe, *OF, "--seeds", "3", "--json", "train.steps=10", cwd=tmp_path)
    grown = json.loads(more.stdout)["candidates"]
    assert more.stderr.count("loss") == 2  # the third seed of each
    assert [t["final"] for t in grown[0]["trials"][:2]] == [t["final"] for t in first["trials"]]
    other = study("compare", tiny_recipe, *OF, "--seeds", "3", "train.steps=11", cwd=tmp_path)
    assert other.returncode == 2 and "recipe.train.steps: 10 -> 11" in other.stderr


@pytest.mark.slow
def test_lr_sensitivity_trains_shows_and_goes_on(tiny_recipe: Path, tmp_path: Path) -> None:
    rates = "--rates", "1e-3,1e-2,1e3"
    given = (
        "--widths",
        "32,16",
        "--interventions",
        "none,all",
        *rates,
        "--edge-seeds",
        "1",
        "train.steps=14",
        *SHORT,
    )
    done = study("lr-sensitivity", tiny_recipe, *given, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "LR sensitivity" in done.stdout and "per doubling of the width" in done.stdout
    curves = json.loads((tmp_path / "out/result.json").read_text())["curves"]
    wanted = [("none", 16), ("none", 32), ("all", 16), ("all", 32)]
    assert [(c["intervention"], c["width"]) for c in curves] == wanted
    for curve in curves:
        losses = [one["loss"] for one in curve["losses"]]
        assert [one["rate"] for one in curve["losses"]] == [1e-3, 1e-2, 1e3]
        assert losses[2] > curve["best_loss"] + 0.02  # a rate of 1000 learns nothing
        assert curve["lr_sensitivity"] == [pytest.approx(sum(losses) / 3 - curve["best_loss"])]
        seeds = [t["seed"] for t in curve["trials"]]
        assert (
            set(seeds) == {1, 2} and 1 <= seeds.count(2) <= 3 and set(curve["highest_by_seed"]) == {"1", "2"}
        )
    assert curves[0]["parameters"] < curves[1]["parameters"] < curves[3]["parameters"]  # QK-norm has weights
    # One result is lost, as if the study had been killed: it alone runs again, and says the same.
    lost = tmp_path / "out/trials/none-w16-lr0.01-s1.json"
    before, times = lost.read_text(), {p: p.stat().st_mtime_ns for p in lost.parent.iterdir()}
    lost.unlink()
    again = study("lr-sensitivity", tiny_recipe, *given, "--json", "--picture", "other.svg", cwd=tmp_path)
    assert json.loads(again.stdout)["curves"] != [] and (tmp_path / "other.svg").exists()
    assert json.loads(lost.read_text())["losses"] == json.loads(before)["losses"]
    assert {p for p in lost.parent.iterdir() if p.stat().st_mtime_ns != times[p]} == {lost}
    # Other rates: refused, unless they are more.
    refused = study("lr-sensitivity", tiny_recipe, *given, "--rates", "1e-3", cwd=tmp_path)
    assert refused.returncode == 2 and "grid.rates: 0.01, 1000.0 belong to it" in refused.stderr


@pytest.mark.slow
def test_coordinate_check_measures_shows_and_goes_on(tiny_recipe: Path, tmp_path: Path) -> None:
    given = ("--seeds", "1", "--steps", "2", "--widths", "128,32,64", *SHORT)
    done = study("coordinate-check", tiny_recipe, *given, cwd=tmp_path)
    assert done.returncode == 1, done.stderr  # a standard parametrization is not flat
    assert "standard: not flat at" in done.stdout
    found = json.loads((tmp_path / "out/result.json").read_text())
    slopes = {place["place"]: place for place in found["places"]}
    parts = [f"{n}.{part}" for n in (1, 2) for part in ("attention", "mlp", "stream")]
    assert list(slopes) == ["embedding", *parts, "logits"]
    # Weights of standard deviation 0.02: embeddings alike, sums of hidden terms with the root of the width.
    assert slopes["embedding"]["first"] == pytest.approx(0, abs=0.05)
    assert slopes["logits"]["first"] == pytest.approx(0.5, abs=0.1)
    # Adam's update of each weight is as large as the rate: products of aligned terms grow with the width itself.
    assert slopes["logits"]["change"] > 0.6 and (tmp_path / "out/picture.png").stat().st_size > 10_000
    for one in found["models"]:
        assert all(len(values) == 3 and values[0] == 0 for values in one["change"].values())
        assert len(one["losses"]) == 2 and one["losses"][0] == pytest.approx(math.log(250), abs=0.1)
    (tmp_path / "out/trials/standard-width64-s1.json").unlink()
    again = study("coordinate-check", tiny_recipe, *given, "--json", cwd=tmp_path)
    assert json.loads(again.stdout)["models"] == found["models"]
    assert again.stderr.split() == ["standard-width64-s1"]


@pytest.mark.parametrize(
    ("kind", "arguments", "told"),
    [
        ("compare", (), "two different candidates"),
        ("compare", ("--of", "model.layers=1", "--of", " model.layers=1"), "two different candidates"),
        ("compare", ("--of", "", "--of", "model.nonsense=1"), "nonsense"),
        (
            "compare",
            ("--of", "", "--of", "model.tied=true", "data.corpora.0.path=none"),
            "not a prepared corpus",
        ),
        ("lr-sensitivity", ("--widths", "20"), "multiples of 8"),
        ("lr-sensitivity", ("--widths", "32,32"), "--widths 32,32: give different"),
        ("lr-sensitivity", ("--rates", "0,1"), "--rates 0,1: give learning rates above 0"),
        ("lr-sensitivity", ("--rates", "x"), "--rates x: give learning rates"),
        ("lr-sensitivity", ("--interventions", "norm"), "there is no 'norm'"),
        ("lr-sensitivity", ("--widths", "32", "--interventions", "x=model.heads=3"), "heads=3"),
        ("lr-sensitivity", ("--quick", "--full"), "exclude each other"),
        ("coordinate-check", ("--widths", "32,36"), "multiples of 8"),
        ("coordinate-check", ("--widths", "32"), "two widths or depths at least"),
        ("coordinate-check", ("--depths", "0,1"), "--depths 0,1: give different whole numbers"),
        ("coordinate-check", ("--depths", "1,2", "--widths", "32,64"), "exclude each other"),
    ],
)
def test_studies_refuse_mistakes_before_any_training(
    kind: str, arguments: tuple[str, ...], told: str, tiny_recipe: Path, tmp_path: Path
) -> None:
    done = study(kind, tiny_recipe, *arguments, *SHORT, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "") and told in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "out").exists()


def _recorded(path: str, overrides: tuple[str, ...]) -> dict[str, bool]:
    """Compares the activations of an engine with the model's own computation, part by part."""
    from megastable.config import deepspeed_json
    from megastable.data.loader import MicroBatch
    from megastable.engine.engine import Engine
    from megastable.parallel.layout import Layout
    from megastable.parallel.topology import Topology

    config = recipe.load_recipe(
        path, (*QUIET, *OPEN, "precision.kind=fp32", "model.vocab_size=250", *overrides)
    )
    engine = Engine(config, deepspeed_json.build_deepspeed_json(config, 1), Topology(Layout(), 0, 60))
    tokens = torch.randint(0, 250, (4, 33), generator=torch.Generator().manual_seed(0))
    halves = [(tokens[i : i + 2], torch.arange(i, i + 2)) for i in (0, 2)]
    probe = [MicroBatch(some[:, :-1], some[:, 1:], numbers, None) for some, numbers in halves]
    before = {name: x.clone() for name, x in engine.optimizer_state().items()}
    found = record_activations(engine, config, probe)
    after = engine.optimizer_state()
    assert all(torch.equal(x, after[name]) for name, x in before.items())
    assert record_activations(engine, config, probe).keys() == found.keys()  # and no hook is left
    model, own = engine.ds.module, dict[str, list[torch.Tensor]]()
    with torch.no_grad():
        for batch in probe:
            x = model[0](batch.tokens)
            own.setdefault("embedding", []).append(x)
            for n, block in enumerate(list(model.children())[1 : 1 + config.model.layers], start=1):

                def attend(
                    y: torch.Tensor, block: torch.nn.Module = block, x: torch.Tensor = x
                ) -> torch.Tensor:
                    return block.attention(y, block._places(x, None))

                middle, y = block._attended(x, attend, None), block(x)
                for part, values in (("attention", middle - x), ("mlp", y - middle), ("stream", y)):
                    own.setdefault(f"{n}.{part}", []).append(values)
                x = y
            own.setdefault("logits", []).append(model(batch.tokens)[..., :250])
    assert list(found) == list(own)
    flat = {place: torch.cat([p.flatten() for p in parts]) for place, parts in own.items()}
    return {place: torch.allclose(found[place], values, atol=1e-6) for place, values in flat.items()}


@pytest.mark.parametrize("overrides", [(), ("model.tied=true",)], ids=["", "tied"])
def test_activations_are_those_of_the_model(tiny_recipe: Path, overrides: tuple[str, ...]) -> None:
    [same] = run_ranks(1, _recorded, str(tiny_recipe), overrides)
    assert len(same) == 8 and all(same.values()), same


# Trials in processes of their own


def results_of(recipe: Path, folder: Path, trials: list[Trial], jobs: int = 2) -> dict[str, TrialResult]:
    found: dict[str, TrialResult] = {}
    run_trials(recipe, trials, folder, jobs, lambda trial, result: found.update({trial.name: result}))
    return found


@pytest.mark.slow
def test_run_trials_lets_none_disturb_the_next_and_takes_divergence_as_a_result(
    tiny_recipe: Path, tmp_path: Path
) -> None:
    """The same one alone, after another kind, and beside one, where something was left; weights beyond fp16's range."""
    same, other = ("optimizer.lr=0.01",), ("model.layers=1", "precision.kind=fp32", "optimizer.name=sgd")
    broken = ("train.steps=8", "precision.kind=fp16", "optimizer.lr=1e7", "schedule.warmup_steps=1")
    (tmp_path / "b/0/steps").mkdir(parents=True)
    (tmp_path / "b/0/recipe.yaml").write_text("{")
    trials = [Trial(str(i), (*FEW, *more)) for i, more in enumerate((same, other, same, broken))]
    alone = results_of(tiny_recipe, tmp_path / "a", trials[:1], 1)["0"]
    found = results_of(tiny_recipe, tmp_path / "b", trials, 2)
    assert found["0"].losses == found["2"].losses == alone.losses != found["1"].losses
    assert len(found["3"].losses) == 8 and math.isfinite(found["3"].losses[0])
    assert found["3"].final == math.inf and found["3"].diverged and found["3"].capped == found["3"].first


@pytest.mark.parametrize(
    ("overrides", "told"),
    [(("precision.kind=fp16", "model.init_std=1e30"), "first batch"),
     (("data.corpora.0.path=none",), r"(?s)run bad ended with code 2:.*no.* a prepared corpus.*bad/output\.log")],
)  # fmt: skip
def test_run_trials_names_a_run_that_fails(
    overrides: tuple[str, ...], told: str, tiny_recipe: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=told):
        results_of(tiny_recipe, tmp_path / "a", [Trial("bad", (*FEW, *overrides))])
    assert (tmp_path / "a/bad/output.log").exists()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_runs_end_with_their_study(how: signal.Signals, tiny_recipe: Path, tmp_path: Path) -> None:
    """Ctrl-C on a terminal goes to the whole process group; a kill to the study alone. Both leave what goes on."""
    words = ["study", "compare", str(tiny_recipe), *OF, "--seeds", "1", "--jobs", "2", "train.steps=1000000"]
    command = [sys.executable, "-m", "megastable.cli", *words, "--output", str(tmp_path / "a")]
    process = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        runs = tmp_path / "a/runs"
        progress = [runs / f"{i}-s1/progress.json" for i in range(2)]
        _wait(lambda: all(path.exists() and '"phase": "step"' in path.read_text() for path in progress))
        (os.killpg if how is signal.SIGINT else os.kill)(process.pid, how)
        said = process.communicate(timeout=PATIENCE)[1]
        assert process.returncode == (130 if how is signal.SIGINT else -how)
        assert said == ("interrupted\n" if how is signal.SIGINT else "")
        _wait(lambda: not _is_written_to(runs))
        assert json.loads((tmp_path / "a/study.json").read_text())["kind"] == "compare"
    finally:
        process.kill()


def _is_written_to(folder: Path) -> bool:
    """Whether a process has its output there."""
    for fd in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            if str(fd.readlink()).startswith(str(folder)):
                return True
        except OSError:
            continue
    return False


def _wait(until: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not until():
        assert time.monotonic() < end
        time.sleep(0.05)
