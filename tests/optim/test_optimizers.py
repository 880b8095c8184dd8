"""Every optimizer under every layout against its plain rule on whole tensors; refusals and rewinds leave no trace."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megastable.config.tree import RunConfig
from tests.distributed import run_ranks
from tests.optim import rules, trained
from tests.parallel.test_layouts import BIAS, QWEN2, ROUNDING, relative

# By name: the recipe's section, and the rule that it stands for.
OPTIMIZERS: dict[str, tuple[dict[str, Any], Any]] = {
    "sgd": ({"name": "sgd"}, rules.SGD),
    "stable_adamw": ({"name": "stable_adamw"}, rules.StableAdamW),
    "lamb": ({"name": "lamb"}, rules.Lamb),
    "spam": ({"name": "spam", "spam": {"interval": 4, "threshold": 30.0, "warmup": 3}}, rules.Spam),
    "stable_spam": (
        {"name": "stable_spam", "stable_spam": {"interval": 4, "max_decay": 0.8}}, rules.StableSpam
    ),
    "spam-sparse": (
        {"name": "spam", "spam": {"interval": 4, "threshold": 30.0, "warmup": 3, "density": 0.4}}, rules.SparseSpam
    ),
    "stable_spam-sparse": (
        {"name": "stable_spam", "stable_spam": {"interval": 4, "max_decay": 0.8, "density": 0.4}},
        rules.SparseStableSpam,
    ),
    "adafactor": ({"name": "adafactor"}, rules.Adafactor),
    "adafactor-momentum": (
        {"name": "adafactor", "adafactor": {"momentum": 0.8}}, rules.AdafactorMomentum
    ),
    "muon": ({"name": "muon", "momentum": 0.95}, rules.Muon),
    "muon-clip": ({"name": "muon", "momentum": 0.95, "qk_clip": 1.45}, rules.MuonClip),
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {"muon-clip": QWEN2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tensor": 2}),
    "pp2": (2, {"pipeline": 2}),
    # Stages between have neither embedding nor head, and so fewer groups of parameters.
    "pp3": (3, {"pipeline": 3, "model": {"layers": 3}}),
    "tied-pp4": (4, {"tied": True, "pipeline": 4, "model": {"layers": 4}}),
    "tp2-pp3": (6, {"tensor": 2, "pipeline": 3, "model": {"layers": 3}}),
    "dp3": (3, {}),
    "tp2-pp2": (4, {"tensor": 2, "pipeline": 2}),
    "tied-pp2-dp3": (6, {"tied": True, "pipeline": 2, "model": {"layers": 3}}),
    "zero2-dp2": (2, {"zero": 2}),
    "zero3-dp3": (3, {"zero": 3}),
    "tp2-context2-zero2": (4, {"tensor": 2, "context": 2, "zero": 2}),
}
KINDS = {"exp_avg": "m", "exp_avg_sq": "v"}
# With ranks of their own, so that the quick suite trains no others.
QUICK = ("adafactor", "muon")


@cache
def ran(layout: str, *names: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The recipes of the optimizers of these names, and what each rank found in one start."""
    world, options = LAYOUTS[layout]
    recipes = {
        name: trained.recipe(
            OPTIMIZERS[name][0], **options | {"model": options.get("model", {}) | MODELS.get(name, {})}
        )
        for name in names
    }
    return recipes, run_ranks(world, trained.train_rank, recipes, world)


@cache
def plainly(name: str, tied: bool, layers: int) -> Any:
    model = trained.recipe({}, tied=tied, model={"layers": layers} | MODELS.get(name, {})).model
    return trained.expected(model, OPTIMIZERS[name][1])


@pytest.mark.quick(*(f"{name}-zero2-dp2" for name in QUICK))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ten_steps(layout: str, name: str) -> None:
    recipes, ranks = ran(
        layout, *(QUICK if name in QUICK else [name for name in OPTIMIZERS if name not in QUICK])
    )
    check(name, recipes[name], ranks)


def test_a_stage_without_embedding_and_head_waits_for_nobody() -> None:
    """DeepSpeed's sum for every group of parameters hung: Muon's stages have different groups."""
    recipes, ranks = ran("pp3", "muon")
    check("muon", recipes["muon"], ranks)


@pytest.mark.slow
def test_zero_3_updates_some_parameters_at_a_time(tmp_path: Path) -> None:
    """DeepSpeed calls the optimizer once for each of its groups."""
    given = json.loads(Path("ds_configs/zero3.json").read_text())
    given["zero_optimization"]["sub_group_size"] = 5000
    (tmp_path / "groups.json").write_text(json.dumps(given))
    recipes = {
        name: trained.recipe(section, zero=3, model=MODELS.get(name, {})).model_copy(
            update={"deepspeed": str(tmp_path / "groups.json")}
        )
        for name, (section, _) in OPTIMIZERS.items()
    }
    ranks = run_ranks(2, trained.train_rank, recipes, 2)
    for name, c in recipes.items():
        check(name, c, ranks)


def check(name: str, c: RunConfig, ranks: list[dict[str, Any]]) -> None:
    """Weights, norms and state of all ranks against the plain rule."""
    norms, rule = plainly(name, c.model.tied, c.model.layers)
    if name == "muon-clip":
        assert 0 < len(rule.clipped[0]) < 4 * c.model.layers
    for rank in ranks:
        assert rank[name]["norms"] == ranks[0][name]["norms"]
        assert rank[name]["norms"] == pytest.approx(norms, rel=ROUNDING)
        assert rank[name]["unchanged"] and rank[name]["rewound"]
        assert rank[name]["shared"].keys() == ranks[0][name]["shared"].keys()
        for key, value in rank[name]["shared"].items():
            assert value.equal(ranks[0][name]["shared"][key]), f"{key} differs between ranks"
    got = trained.whole(ranks, name, "weight", c.parallel.tensor)
    assert got.keys() == rule.master.keys()
    for parameter, wanted in rule.master.items():
        allowed = BIAS if parameter.endswith(".bias") else ROUNDING
        assert relative(got[parameter], wanted) < allowed, parameter
    for kind, attribute in KINDS.items():
        if kind in ranks[0][name]["state"] and name in HELD and kind in HELD[name]:
            state = trained.whole(ranks, name, kind, c.parallel.tensor)
            for parameter, wanted in getattr(rule, attribute).items():
                assert relative(state[parameter], wanted) < 1e-4, f"{kind} of {parameter}"
    shared = ranks[0][name]["shared"]
    assert shared.keys() == rule.shared.keys()
    for key, wanted in rule.shared.items():
        assert relative(shared[key], wanted) < 1e-4, key
    assert ranks[0][name]["update_ratio"] > 0
    assert rule.acted >= 10 or name == "sgd"  # otherwise nothing but AdamW was tested


# The kinds of state that a rule keeps for every parameter.
BOTH = ("exp_avg", "exp_avg_sq")
HELD = {
    "sgd": ("exp_avg",),
    "stable_adamw": BOTH,
    "lamb": BOTH,
    "spam": BOTH,
    "stable_spam": BOTH,
    "spam-sparse": BOTH,
    "stable_spam-sparse": BOTH,
    "adafactor-momentum": ("exp_avg",),
    "muon": ("exp_avg",),
    "muon-clip": (),
}
