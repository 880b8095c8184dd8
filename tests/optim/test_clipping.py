"""Every kind of clipping under every layout against its formula on whole tensors; refusals, rewinds leave no trace."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.distributed import run_ranks
from tests.optim import clip_rules, rules, trained
from tests.optim.test_optimizers import LAYOUTS
from tests.parallel.test_layouts import ROUNDING, relative

SPIKE = 7
# By name: the recipe's section, and the rule that it stands for; its argument: the name of the output layer.
CLIPPINGS: dict[str, tuple[Any, Callable[[str], clip_rules.Clip]]] = {
    "norm": ("norm", lambda _: clip_rules.Norm()),
    "value": ({"kind": "value", "threshold": 0.01}, lambda _: clip_rules.Value(0.01)),
    "adagc": ({"kind": "adagc", "warmup": 4}, lambda _: clip_rules.AdaGC(4)),
    "zclip": ({"kind": "zclip", "warmup": 4}, lambda _: clip_rules.ZClip(4)),
    "agc": ({"kind": "agc", "threshold": 0.1}, lambda head: clip_rules.AGC(0.1, head)),
}


@cache
def ran(layout: str, *names: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    world, options = LAYOUTS[layout]
    recipes = {
        name: trained.recipe({"name": "sgd", "clipping": CLIPPINGS[name][0]}, **options) for name in names
    }
    return recipes, run_ranks(world, trained.train_rank, recipes, world, SPIKE)


@cache
def plainly(name: str, tied: bool, layers: int) -> Any:
    model = trained.recipe({}, tied=tied, model={"layers": layers}).model
    clip = CLIPPINGS[name][1]("embedding.weight" if tied else "head.weight")

    def rule(w: Any) -> rules.Rule:
        made = rules.SGD(w)
        made.clip = clip
        return made

    return *trained.expected(model, rule, spike=SPIKE), clip


# A pipeline alone and ZeRO 2 over two data ranks: test_clipped_gradients.py.
QUICK = ("norm", "adagc")  # with ranks of their own, so that the quick suite trains no others
MORE = [name for name in LAYOUTS if name not in ("one", "pp2", "pp3", "zero2-dp2")]


@pytest.mark.quick(*(f"{name}-dp3" for name in QUICK))
@pytest.mark.parametrize("layout", MORE)
@pytest.mark.parametrize("name", CLIPPINGS)
def test_ten_steps(layout: str, name: str) -> None:
    recipes, ranks = ran(layout, *(QUICK if name in QUICK else CLIPPINGS))
    c = recipes[name]
    norms, rule, clip = plainly(name, c.model.tied, c.model.layers)
    assert min(clip.kept) < 0.9, "nothing was clipped"
    assert name not in ("zclip", "adagc") or clip.kept[SPIKE] < 0.8, "the spike was not clipped"
    for rank in ranks:
        assert rank[name]["norms"] == ranks[0][name]["norms"]
        assert rank[name]["norms"] == pytest.approx(norms, rel=ROUNDING)
        assert rank[name]["norms"][0] == rank["norm"]["norms"][0], "the gate saw another norm"
        assert rank[name]["kept"] == ranks[0][name]["kept"]
        assert rank[name]["kept"] == pytest.approx(clip.kept, rel=1e-4)
        assert rank[name]["unchanged"] and rank[name]["rewound"]
        assert rank[name]["shared"].keys() == clip.state().keys()
        for key, value in rank[name]["shared"].items():
            assert value.equal(ranks[0][name]["shared"][key]), f"{key} differs between ranks"
            assert value.tolist() == pytest.approx(clip.state()[key], rel=1e-4), key
    got = trained.whole(ranks, name, "weight", c.parallel.tensor)
    assert got.keys() == rule.master.keys()
    for parameter, wanted in rule.master.items():
        assert relative(got[parameter], wanted) < ROUNDING, parameter
    momentum = trained.whole(ranks, name, "exp_avg", c.parallel.tensor)
    for parameter, wanted in rule.m.items():
        assert relative(momentum[parameter], wanted) < 1e-4, parameter
