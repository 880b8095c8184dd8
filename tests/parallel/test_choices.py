"""Every choice of architecture, initialisation and transfer under every layout against the plain reference: ten steps,
with a refused update and a rewind that leave no trace."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from megastable.config.tree import RunConfig
from tests import reference
from tests.distributed import run_ranks
from tests.optim import trained
from tests.parallel.test_layouts import ROUNDING, relative
from tests.shapes import rates_of

YARN = {"kind": "yarn", "factor": 4.0, "original_length": 16, "beta_fast": 4.0}
# By name: keys of the model, and of the optimizer.
CHOICES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "both": ({"norms": "both"}, {}),
    "mixed": ({"norms": "mixed", "mixed_share": 0.5, "residual_init": "same"}, {}),
    "deep": ({"norms": "deep", "init": "xavier"}, {}),
    "branch": ({"norms": "branch", "branch_steps": 7}, {}),
    "norm-scaling": ({"norm_scaling": True, "init": "fan_in"}, {}),
    "zero-centered": ({"norms": "after", "qk_norm": "full", "zero_centered_norms": True}, {}),
    "caps": ({"attention_softcap": 1.5, "logit_softcap": 1.0, "qk_norm": False}, {}),
    "windows": ({"window": 6, "full_attention_every": 2, "rope_scaling": YARN}, {}),
    "clamp": ({"activation": "gelu", "swiglu_clamp": 0.5}, {}),
    "spike-no-more": ({"init": "small", "embedding_scale": "sqrt_hidden"}, {"decay_embeddings": False}),
    "zero-residual": ({"residual_init": "zero"}, {}),
    "dropout": ({"dropout": 0.2, "norms": "both"}, {}),
    "mup": ({"mup": {"base_width": 8, "base_layers": 1, "base_head_dim": 2}}, {}),
    "gemma2": (
        dict(norms="both", zero_centered_norms=True, activation="gelu", embedding_scale="sqrt_hidden", qk_norm=False,
             attention_scale=0.3, attention_softcap=2.0, logit_softcap=5.0, window=9, full_attention_every=2),
        {},
    ),
}  # fmt: skip
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tensor": 2}),
    "pp2-deeper": (2, {"pipeline": 2, "model": {"layers": 5}}),
    "pp3": (3, {"pipeline": 3, "model": {"layers": 3}}),
    "tied-pp4": (4, {"tied": True, "pipeline": 4, "model": {"layers": 4}}),
    "dp3": (3, {}),
    "tp2-pp2": (4, {"tensor": 2, "pipeline": 2}),
    "sequence-tp2-pp2-full": (4, {"tensor": 2, "pipeline": 2, "sequence": True, "recompute": "full"}),
    "tied-pp2-dp3": (6, {"tied": True, "pipeline": 2}),
    "zero2-dp2-selective": (2, {"zero": 2, "recompute": "selective"}),
    "zero3-dp3": (3, {"zero": 3}),
    "sequence-tp2-context2-zero2": (4, {"tensor": 2, "context": 2, "zero": 2, "sequence": True}),
}


QUICK = ("deep", "gemma2", "mup")  # with ranks of their own, so that the quick suite trains no others


def recipe(name: str, options: dict[str, Any]) -> RunConfig:
    model, optimizer = CHOICES[name]
    return trained.recipe(optimizer, **options | {"model": options.get("model", {}) | model})


@cache
def ran(layout: str, *names: str) -> list[dict[str, Any]]:
    world, options = LAYOUTS[layout]
    return run_ranks(world, trained.train_rank, {name: recipe(name, options) for name in names}, world)


@cache
def plainly(name: str, tied: bool, layers: int = 2) -> Any:
    c = recipe(name, {"tied": tied, "model": {"layers": layers}})
    decay = c.optimizer.weight_decay

    def rule(w: Any) -> reference.AdamW:
        return reference.AdamW(w, decay=decay, scales=rates_of(c, w))

    return trained.expected(c.model, rule)


@pytest.mark.quick(*(f"{name}-one" for name in QUICK))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CHOICES)
def test_ten_steps(layout: str, name: str) -> None:
    ranks = ran(layout, *(QUICK if name in QUICK else [name for name in CHOICES if name not in QUICK]))
    c = recipe(name, LAYOUTS[layout][1])
    norms, rule = plainly(name, c.model.tied, c.model.layers)
    for rank in ranks:
        assert rank[name]["norms"] == ranks[0][name]["norms"]
        assert rank[name]["norms"] == pytest.approx(norms, rel=ROUNDING)
        assert rank[name]["unchanged"] and rank[name]["rewound"]
    got = trained.whole(ranks, name, "weight", c.parallel.tensor)
    assert got.keys() == rule.master.keys()
    for parameter, wanted in rule.master.items():
        assert relative(got[parameter], wanted) < ROUNDING, parameter


@pytest.mark.slow
def test_every_choice_changes_the_steps() -> None:
    """Otherwise the default model was tested."""
    found = {name: tuple(plainly(name, False)[0]) for name in CHOICES}
    assert len({norms[:5] for norms in found.values()}) == len(CHOICES)
    usual = trained.expected(trained.recipe({}).model, reference.AdamW)[0]
    for name, norms in found.items():
        assert norms != pytest.approx(usual, rel=1e-3), name
