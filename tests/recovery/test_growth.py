"""A cascade without a NaN: the layer in which it began is named in the incident."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megastable.engine.growth_locator import GROWN, TensorPlace, find_first_growth
from megastable.run.directory import RunDirectory
from megastable.run.events.stability_events import Located
from tests.distributed import run_ranks
from tests.recovery.test_recovery import LAYOUTS, easy, incidents, recipe, train_spoilt

__all__ = ["easy"]


CASES = {
    "norm": ("blocks.1.attention_norm.weight", 100.0, "output of blocks.1.attention_norm"),
    "logits": ("blocks.1.attention.qkv.weight", 300.0, "output of blocks.1.attention.qkv"),
}


@pytest.mark.quick("norm-one")
@pytest.mark.parametrize("layout", ["one", "pp2", "tp2", "zero3-dp2"])
@pytest.mark.parametrize("case", CASES)
def test_the_layer_that_grew_first_is_named(case: str, layout: str, easy: Path, tmp_path: Path) -> None:
    world, parts = LAYOUTS[layout]
    model = {**parts.get("model", {}), "qk_norm": False}
    name, factor, place = CASES[case]
    config = recipe(easy, tmp_path / "run", **{**parts, "model": model})
    assert run_ranks(world, train_spoilt, config, 36, name, factor) == [(0, 1)] * world
    incident = incidents(tmp_path / "run")[0]
    assert any(f"the {place} is the first to grow" in reason for reason in incident["reasons"])
    assert incident["cause"] == "state" and not incident["positions"]
    located = [e for e in RunDirectory(tmp_path / "run").events(Located) if e["kind"] == "growth"]
    assert located and f"the {located[0]['tensor']} of {located[0]['layer']}" == f"the {place}"


def place_of(layer: str, depth: int, backward: bool = False, tick: int = 0) -> TensorPlace:
    return TensorPlace(backward, -depth if backward else depth, tick, layer, "output")


def test_what_grows_first_is_the_first_in_the_order_of_computing() -> None:
    down, up = place_of("blocks.0.mlp.down", 1, tick=3), place_of("blocks.0.mlp.gate_up", 1, tick=1)
    last, back = place_of("head", 5), place_of("blocks.3", 4, backward=True)
    good = dict.fromkeys((back, last, down, up), 0.5)
    for grown, first in (([back], back), ([back, last], last), ([last, down, up], up)):
        growth = find_first_growth(good, good | dict.fromkeys(grown, 3.0))
        assert growth is not None and growth.first == first and growth.times == 6
    assert find_first_growth(good, good | {last: 0.5 * GROWN - 0.01, down: 0.1}) is None
    assert find_first_growth({last: 0.0}, {last: 7.0}) is None and find_first_growth({}, good) is None
    growth = find_first_growth(good, good | {up: 4.0, last: math.inf})
    assert (
        growth is not None
        and growth.last == last
        and "up to more than any number of times" in growth.sentence
    )
