"""Coordinate checks: slopes of known scales, activations of a real model, and the command."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from megastable.base.errors import DataError
from megastable.commands.root import app
from megastable.config import recipe
from megastable_tools.study.coordinate_study import (
    MUP,
    PLAIN,
    CoordinateGrid,
    common,
    exponent,
    geometric,
    named,
    scales,
)
from megastable_tools.study.coordinates import OPEN, Coordinates, activations
from megastable_tools.study.trial import QUIET
from megastable_tools.study.variations import at_width
from tests.distributed import run_ranks
from tests.tools.cli import Done, call

RECIPE = Path("launch/recipes/quickstart.yaml")


def grid(
    sizes: tuple[int, ...] = (64, 128, 256), deep: bool = False, seeds: tuple[int, ...] = (1, 2)
) -> CoordinateGrid:
    overrides = common(["data.corpora.0.path=data/stdlib"])
    config = recipe.load(RECIPE, overrides)
    return CoordinateGrid(RECIPE, config, overrides, sizes, deep, (PLAIN,), 2, seeds)


def model(scale: float, change: float, blocks: int = 1) -> Coordinates:
    places = ["embedding", *(f"{n}.mlp" for n in range(1, blocks + 1)), "logits"]
    return Coordinates(
        {place: [1.0, 2.0, scale * (1 + n)] for n, place in enumerate(places)},
        {place: [0.0, 0.5, change] for place in places}, [5.0, 4.0],
    )  # fmt: skip


def test_slopes_of_scales_that_are_known() -> None:
    g = grid()
    results = {
        g.name(PLAIN, size, seed): model(3 * size**0.5 * factor, 7.0)
        for size in g.sizes for seed, factor in ((1, 2.0), (2, 0.5))
    }  # fmt: skip
    found = {one.place: one for one in scales(g, results)}
    assert list(found) == ["embedding", "1.mlp", "logits"]
    for one in found.values():
        assert one.first == pytest.approx(0) and one.change == pytest.approx(0)
        assert one.last == pytest.approx(0.5) and not one.flat
    assert found["embedding"].rms == pytest.approx({64: 24, 128: 3 * 128**0.5, 256: 48})


@pytest.mark.parametrize(("last", "change", "flat"), [(0.05, 0.2, True), (0, -0.26, False), (0.11, 0, False)])
def test_flat_is_flat_at_the_end_and_in_the_change(last: float, change: float, flat: bool) -> None:
    g = grid(seeds=(1,))
    results = {g.name(PLAIN, n, 1): model(n**last, n**change) for n in g.sizes}
    assert {one.flat for one in scales(g, results)} == {flat}


def test_a_scale_that_is_no_number_is_not_flat() -> None:
    g = grid(seeds=(1,))
    for broken in (math.nan, math.inf, 0.0):
        results = {g.name(PLAIN, n, 1): model(1.0, 1.0 if n < 256 else broken) for n in g.sizes}
        assert {one.flat for one in scales(g, results)} == {False}
    assert math.isnan(geometric([1.0, 0.0])) and geometric([2.0, 8.0]) == pytest.approx(4)
    assert exponent({2: 3.0, 4: 12.0}) == pytest.approx(2)


def test_depths_are_compared_at_the_same_share_of_the_depth() -> None:
    found = named(model(1.0, 1.0, blocks=4), deep=True)
    assert list(found.rms) == ["embedding", "middle.mlp", "last.mlp", "logits"]
    assert found.rms["middle.mlp"][2] == 3 and found.rms["last.mlp"][2] == 5  # the second and the fourth
    one = named(model(1.0, 1.0, blocks=1), deep=True)
    assert one.rms["middle.mlp"] == one.rms["last.mlp"]
    g = grid((2, 8), deep=True, seeds=(1,))
    results = {g.name(PLAIN, n, 1): model(float(n), 1.0, blocks=n) for n in (2, 8)}
    found_at = {one.place: one.rms for one in scales(g, results)}
    assert found_at["middle.mlp"] == pytest.approx({2: 2 * 2, 8: 8 * 5})
    assert found_at["last.mlp"] == pytest.approx({2: 2 * 3, 8: 8 * 9})
    assert recipe.load(RECIPE, g.overrides(PLAIN, 8, 1)).model.layers == 8


def test_mup_scales_from_the_smallest_model() -> None:
    wide, deep = grid((256, 64)), grid((8, 2), deep=True)
    assert "model.mup.base_width=64" in wide.overrides(MUP, 256, 1)
    assert {"model.mup.base_width=256", "model.mup.base_layers=2"} <= set(deep.overrides(MUP, 8, 1))
    assert wide.overrides(PLAIN, 256, 1)[-2] == "model.mup=null"
    # From another base the same width is another model.
    assert wide.name(MUP, 256, 1) != grid((256, 32)).name(MUP, 256, 1)
    assert wide.name(PLAIN, 256, 1) == grid((256, 32)).name(PLAIN, 256, 1)


def test_a_file_holds_the_whole_result(tmp_path: Path) -> None:
    given = model(math.inf, 1.0)
    given.save(tmp_path / "x.json")
    assert Coordinates.load(tmp_path / "x.json") == given
    for text in ("", "{}", '{"rms": 1, "change": {}, "losses": []}'):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(DataError, match=r"x\.json"):
            Coordinates.load(tmp_path / "x.json")


# A real model


def _recorded(path: str, overrides: tuple[str, ...]) -> dict[str, bool]:
    """Compares the activations of an engine with the model's own computation, part by part."""
    from megastable.config import deepspeed_json
    from megastable.data.loader import MicroBatch
    from megastable.engine.engine import Engine
    from megastable.parallel.layout import Layout
    from megastable.parallel.topology import Topology

    config = recipe.load(path, (*QUIET, *OPEN, "precision.kind=fp32", "model.vocab_size=250", *overrides))
    engine = Engine(config, deepspeed_json.build(config, 1), Topology(Layout(), 0, 60))
    tokens = torch.randint(0, 250, (4, 33), generator=torch.Generator().manual_seed(0))
    probe = [
        MicroBatch(tokens[i : i + 2, :-1], tokens[i : i + 2, 1:], torch.arange(i, i + 2), None)
        for i in (0, 2)
    ]
    before = {name: x.clone() for name, x in engine.optimizer_state().items()}
    found = activations(engine, config, probe)
    after = engine.optimizer_state()
    assert all(torch.equal(x, after[name]) for name, x in before.items())
    assert activations(engine, config, probe).keys() == found.keys()  # and no hook is left
    model, own = engine.ds.module, dict[str, list[torch.Tensor]]()
    with torch.no_grad():
        for batch in probe:
            x = model[0](batch.tokens)
            own.setdefault("embedding", []).append(x)
            for n, block in enumerate(list(model.children())[1 : 1 + config.model.layers], start=1):
                middle = block._attended(
                    x, lambda y, block=block, x=x: block.attention(y, block._places(x, None)), None
                )
                y = block(x)
                own.setdefault(f"{n}.attention", []).append(middle - x)
                own.setdefault(f"{n}.mlp", []).append(y - middle)
                own.setdefault(f"{n}.stream", []).append(y)
                x = y
            own.setdefault("logits", []).append(model(batch.tokens)[..., :250])
    assert list(found) == list(own)
    return {
        place: torch.allclose(found[place], torch.cat([p.flatten() for p in parts]), atol=1e-6)
        for place, parts in own.items()
    }


@pytest.mark.parametrize("overrides", [(), ("model.tied=true",)], ids=["", "tied"])
def test_activations_are_those_of_the_model(tiny_recipe: Path, overrides: tuple[str, ...]) -> None:
    [same] = run_ranks(1, _recorded, str(tiny_recipe), overrides)
    assert len(same) == 8 and all(same.values()), same


# The command


def check(recipe_path: Path, *arguments: str, cwd: Path) -> Done:
    given = ("--output", "out", "--seeds", "1", "--steps", "2", "--jobs", "2")
    return call(app, "study", "coordinate-check", recipe_path, *given, *arguments, cwd=cwd)


SHORT = ("model.sequence_length=32", "train.global_batch=4", "train.micro_batch=4")


@pytest.mark.slow
def test_a_check_measures_shows_and_goes_on(tiny_recipe: Path, tmp_path: Path) -> None:
    given = ("--widths", "128,32,64", *SHORT)
    done = check(tiny_recipe, *given, cwd=tmp_path)
    assert done.returncode == 1, done.stderr  # a standard parametrization is not flat
    assert "standard: not flat at" in done.stdout
    found = json.loads((tmp_path / "out/result.json").read_text())
    slopes = {place["place"]: place for place in found["places"]}
    assert list(slopes) == [
        "embedding",
        "1.attention",
        "1.mlp",
        "1.stream",
        "2.attention",
        "2.mlp",
        "2.stream",
        "logits",
    ]
    # Weights of standard deviation 0.02: embeddings alike, sums of hidden terms with the root of the width.
    assert slopes["embedding"]["first"] == pytest.approx(0, abs=0.05)
    assert slopes["logits"]["first"] == pytest.approx(0.5, abs=0.1)
    # Adam's update of each weight is as large as the rate: products of aligned terms grow with the width itself.
    assert slopes["logits"]["change"] > 0.6
    assert (tmp_path / "out/picture.png").stat().st_size > 10_000
    models = {m["size"]: m for m in found["models"]}
    for one in models.values():
        assert all(len(values) == 3 and values[0] == 0 for values in one["change"].values())
        assert len(one["losses"]) == 2 and one["losses"][0] == pytest.approx(math.log(250), abs=0.1)
    (tmp_path / "out/trials/standard-width64-s1.json").unlink()
    again = check(tiny_recipe, *given, "--json", cwd=tmp_path)
    assert json.loads(again.stdout)["models"] == found["models"] and again.stderr.split() == [
        "standard-width64-s1"
    ]


@pytest.mark.slow
def test_weights_that_do_not_grow_with_the_width_are_flat_at_first(tiny_recipe: Path, tmp_path: Path) -> None:
    """The mutant: with the rate 0 nothing changes, so the slope at the end is the one at initialization."""
    done = check(tiny_recipe, "--widths", "32,128", "--json", "optimizer.lr=1e-12", *SHORT, cwd=tmp_path)
    for place in json.loads(done.stdout)["places"]:
        assert place["last"] == pytest.approx(place["first"], abs=0.02)


@pytest.mark.slow
def test_depths(tiny_recipe: Path, tmp_path: Path) -> None:
    done = check(tiny_recipe, "--depths", "1,3", "--json", *SHORT, cwd=tmp_path)
    found = json.loads(done.stdout)
    assert (found["per"], found["sizes"]) == ("depth", [1, 3])
    assert {p["place"] for p in found["places"]} >= {"embedding", "middle.attention", "last.stream", "logits"}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--widths", "32,36"), "multiples of 8"),
        (("--widths", "32"), "two widths or depths at least"),
        (("--depths", "0,1"), "--depths 0,1: give different whole numbers"),
        (("--depths", "1,2", "--widths", "32,64"), "exclude each other"),
        (("data.corpora.0.path=none",), "not a prepared corpus"),
    ],
)
def test_mistakes_show_before_any_training(
    arguments: tuple[str, ...], told: str, tiny_recipe: Path, tmp_path: Path
) -> None:
    done = check(tiny_recipe, *arguments, *SHORT, cwd=tmp_path)
    assert (
        (done.returncode, done.stdout) == (2, "") and told in done.stderr and "Traceback" not in done.stderr
    )
    assert not (tmp_path / "out").exists()


def test_widths_of_a_grid_are_models_of_the_recipe() -> None:
    g = grid()
    g.check()
    assert set(at_width(g.config.model, 128)) < set(g.overrides(PLAIN, 128, 1))
