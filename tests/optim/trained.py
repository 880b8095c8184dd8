"""Train a tiny model with several optimizers under one layout, in one group of ranks, and the same in one process.

ranks = run_ranks(world, train_rank, {"sgd": recipe(...), ...})
check(ranks, "sgd", c, plainly(c, "sgd"))         # against a plain rule after the same steps, see rules.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megastable.config.model import ModelConfig
from megastable.config.tree import RunConfig
from tests import reference
from tests.engine.engines import are_same, build_engine, take_batch
from tests.optim import rules
from tests.parallel.test_layouts import BIAS, LENGTH, VOCABULARY, config, merge, plain, relative, state_of
from tests.shapes import rates_of

STEPS, HALF, BATCH = 10, 5, 12
RATES = [3e-3 * min(i + 1, 4) / 4 for i in range(STEPS)]


def recipe(optimizer: dict[str, Any], **options: Any) -> RunConfig:
    """The tiny model under a layout with an optimizer's settings; a global batch of 12, for 1, 2, 3 data ranks."""
    made = config(batch=BATCH, **{"micro_batch": 2} | options)
    tree = made.model_dump(exclude_unset=True)
    return RunConfig.model_validate(tree | {"optimizer": optimizer})


def batches(spike: int | None = None) -> list[tuple[Tensor, Tensor, None]]:
    """spike: a step whose batch repeats one token, with a gradient far larger than usual."""
    g = torch.Generator().manual_seed(11)
    made = []
    for _ in range(STEPS):
        t = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=g)
        if len(made) == spike:
            t.fill_(3)
        made.append((t[:, :-1].contiguous(), t[:, 1:].contiguous(), None))
    return made


def train_rank(recipes: dict[str, RunConfig], spike: int | None = None) -> dict[str, Any]:
    """What one rank sees, by optimizer: `_train`."""
    return {name: _train(c, spike) for name, c in recipes.items()}


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in state.items()}


def _train(c: RunConfig, spike: int | None) -> dict[str, Any]:
    """Ten steps, with a refused one and a rewind in the middle that must leave no trace: the final state of this
    rank, norms, the shares of them that clipping left, sizes of updates, and whether the two left none."""
    engine = build_engine(c)
    norms, kept, unchanged, point = [], [], True, None
    data = list(zip(batches(spike), RATES, strict=True))

    def step(index: int, accept: bool = True) -> float:
        batch, lr = data[index]
        micro_batches = take_batch(engine, batch)
        measured, applied = engine.train_step(micro_batches, lr, judge=lambda m: accept and m.finite)
        assert applied == accept
        return measured.grad_norm

    for index in range(STEPS):
        if index == HALF:
            point = copied(engine.optimizer_state()), engine.read_counters()
            step(index, accept=False)
            unchanged = are_same(point[0], engine.optimizer_state())
        engine.measures_update = index == STEPS - 1
        norms.append(step(index))
        kept.append(engine.kept)
    final = copied(engine.optimizer_state())
    ratio = engine.collect_statistics().overall.get("update_ratio")
    assert point is not None
    engine.restore_optimizer_state(point[0])
    engine.restore_counters(point[1])
    engine.refresh_weights()
    for index in range(HALF, STEPS):
        step(index)
    return state_of(engine) | {
        "norms": norms, "kept": kept, "unchanged": unchanged, "rewound": are_same(final, engine.optimizer_state()),
        "shared": copied(engine.shared_state), "update_ratio": ratio,
    }  # fmt: skip


def whole(ranks: list[dict[str, Any]], name: str, kind: str, tensor: int) -> dict[str, Tensor]:
    """Whole tensors of the final state under optimizer `name`; copies must be the same bytes."""
    return merge([rank[name] for rank in ranks], kind, tensor)


def expected(
    model: ModelConfig,
    rule: Any,
    micro_batches: int = BATCH // 2,
    spike: int | None = None,
    **shape_parts: Any,
) -> tuple[list[float], Any]:
    """Gradient norms and the rule after the same ten steps in one process. shape_parts: of `reference.Shape`."""
    weights, shape = plain(model)
    shape = replace(shape, **shape_parts)
    _, norms, optimizer = reference.train(weights, shape, batches(spike), RATES, micro_batches, rule)
    return norms, optimizer


class AdamW(rules.Adam):
    """With muP's rates and epsilons, and the decay that the recipe asks for."""

    scales: dict[str, tuple[float, float, float]]

    def change(self, name: str, p: Tensor, g: Tensor, lr: float, decay: float) -> Tensor:
        rate, decays, eps = self.scales[name]
        self.eps = 1e-8 * eps
        return lr * rate * (self.decay * decays * p + self.adam(name, g, self.t))


SPARSE = {"interval": 4, "density": 0.4}
# By name: the recipe's section, the rule that it stands for, and its attributes that are kept as flat state.
BOTH = {"exp_avg": "m", "exp_avg_sq": "v"}
FIRST = {"exp_avg": "m"}
OPTIMIZERS: dict[str, tuple[dict[str, Any], Any, dict[str, str]]] = {
    "adamw": ({}, AdamW, BOTH),
    "sgd": ({"name": "sgd"}, rules.SGD, FIRST),
    "stable_adamw": ({"name": "stable_adamw"}, rules.StableAdamW, BOTH),
    "lamb": ({"name": "lamb"}, rules.Lamb, BOTH),
    "spam": ({"name": "spam", "spam": SPARSE | {"threshold": 30.0, "warmup": 3}}, rules.Spam, BOTH),
    "spam-whole": (
        {"name": "spam", "spam": {"interval": 4, "threshold": 30.0, "warmup": 3}}, rules.WholeSpam, BOTH
    ),
    "stable_spam": ({"name": "stable_spam", "stable_spam": SPARSE | {"max_decay": 0.8}}, rules.StableSpam, BOTH),
    "adafactor": ({"name": "adafactor"}, rules.Adafactor, {}),
    "adafactor-momentum": (
        {"name": "adafactor", "adafactor": {"momentum": 0.8}}, rules.AdafactorMomentum, FIRST
    ),
    "muon": ({"name": "muon", "momentum": 0.95}, rules.Muon, FIRST),
    "muon-clip": ({"name": "muon", "momentum": 0.95, "qk_clip": 1.45}, rules.MuonClip, {}),
}  # fmt: skip
# By name: the recipe's section, and the rule that it stands for; its argument: the name of the output layer.
CLIPPINGS: dict[str, tuple[Any, Callable[[str], rules.Clip]]] = {
    "norm": ("norm", lambda _: rules.Norm()),
    "value": ({"kind": "value", "threshold": 0.01}, lambda _: rules.Value(0.01)),
    "adagc": ({"kind": "adagc", "warmup": 4}, lambda _: rules.AdaGC(4)),
    "zclip": ({"kind": "zclip", "warmup": 4}, lambda _: rules.ZClip(4)),
    "agc": ({"kind": "agc", "threshold": 0.1}, lambda head: rules.AGC(0.1, head)),
}


def plainly(
    c: RunConfig, optimizer: str, clipping: str = "norm", spike: int | None = None, **shape_parts: Any
) -> Any:
    """Norms, the rule and its clipping after the same ten steps in one process, in fp32; shape_parts: `expected`."""
    clip = CLIPPINGS[clipping][1]("embedding.weight" if c.model.tied else "head.weight")

    def make(w: dict[str, Tensor]) -> rules.Rule:
        made = OPTIMIZERS[optimizer][1](w)
        made.clip = clip
        if isinstance(made, AdamW):
            made.scales = rates_of(c, w)
        return made

    return *expected(c.model, make, spike=spike, **shape_parts), clip


def check(
    ranks: list[dict[str, Any]], name: str, c: RunConfig, optimizer: str, plainly: Any, far: float
) -> None:
    """Weights, norms and state of all ranks against the plain rule. far: a relative difference of sums in another
    order."""
    norms, rule, clip = plainly
    mine = [rank[name] for rank in ranks]
    for rank in mine:
        assert rank["norms"] == mine[0]["norms"] and rank["kept"] == mine[0]["kept"]
        assert rank["unchanged"] and rank["rewound"]
        assert rank["shared"].keys() == mine[0]["shared"].keys()
        assert all(value.equal(mine[0]["shared"][key]) for key, value in rank["shared"].items())
    assert mine[0]["norms"] == pytest.approx(norms, rel=far)
    assert mine[0]["kept"] == pytest.approx(clip.kept, rel=20 * far)
    got = whole(ranks, name, "weight", c.parallel.tensor)
    assert got.keys() == rule.master.keys()
    for parameter, wanted in rule.master.items():
        allowed = BIAS if parameter.endswith(".bias") else far
        assert relative(got[parameter], wanted) < allowed, parameter
    for kind, attribute in OPTIMIZERS[optimizer][2].items():
        state = whole(ranks, name, kind, c.parallel.tensor)
        for parameter, wanted in getattr(rule, attribute).items():
            if kind in mine[0]["state"] and parameter in state and not parameter.endswith(".bias"):
                assert relative(state[parameter], wanted) < 20 * far, f"{kind} of {parameter}"
    shared = rule.shared | {key: torch.tensor(values) for key, values in clip.state().items()}
    assert mine[0]["shared"].keys() == shared.keys()
    for key, wanted in shared.items():
        assert relative(mine[0]["shared"][key], wanted) < 20 * far, key
    assert mine[0]["update_ratio"] > 0
