"""What a resume says of the next update: every key that changes it by a factor, with the numbers, and nothing else."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from megastable.config import recipe
from megastable.config.model import ModelConfig
from megastable.config.optimizers import OptimizerConfig
from megastable.config.tree import RunConfig
from megastable.model.gpt import GPT
from megastable.optim.build import build_optimizer
from megastable.optim.next_update import RunPosition, compare_next_update, describe_next_update
from megastable.parallel.topology import TensorParallel

DONE = RunPosition(updates=100, trained_tokens=100 * 8 * 64, cursor=100 * 8)


def config(**sections: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "model": {"sequence_length": 64},
        "optimizer": {"lr": 1e-3},
        "schedule": {"warmup_steps": 10},
        "train": {"steps": 100, "global_batch": 8},
    }
    return recipe.validate_tree(
        {name: tree.get(name, {}) | sections.get(name, {}) for name in {*tree, *sections}}, ""
    )


def changes(old: RunConfig, new: RunConfig, at: RunPosition = DONE) -> dict[str, float | None]:
    return {change.name: change.factor for change in compare_next_update(old, new, at)}


@pytest.mark.parametrize(("kind", "factor"), [("cosine", 5.9), ("linear", 5.7), ("wsd", 10)])
def test_compare_next_update_says_how_far_the_rate_of_a_prolonged_run_jumps(kind: str, factor: float) -> None:
    schedule = {"kind": kind, "warmup_steps": 10}
    old = config(schedule=schedule)
    new = config(schedule=schedule, train={"steps": 200})
    assert changes(old, new) == {"learning rate": pytest.approx(factor, rel=0.02)}
    text = describe_next_update(old, new, DONE, compare_next_update(old, new, DONE))
    assert "learning rate 0.0001 -> " in text and "times" in text
    assert "schedule.total_steps=100" in text and "checkpoint branch" in text
    # The remedy that it names is one.
    kept = config(schedule=schedule | {"total_steps": 100}, train={"steps": 200})
    assert changes(old, kept) == {}


@pytest.mark.parametrize(
    ("section", "keys", "expected"),
    [
        ("optimizer", {"lr": 1e-2}, {"learning rate": 10}),
        ("optimizer", {"weight_decay": 1.0}, {"optimizer.weight_decay": 10}),
        ("optimizer", {"clip": 0.25}, {"optimizer.clip": 0.25}),
        ("optimizer", {"clipping": "adagc"}, {"optimizer.clipping.kind": None}),
        ("optimizer", {"spam": {"threshold": 1.0}}, {}),  # of a rule that is not used
        ("train", {"global_batch": 32}, {"global batch": 4}),
        ("train", {"batch_warmup": {"start": 2, "tokens": 10**6}}, {"global batch": 0.25}),
        ("train", {"sequence_warmup": {"start": 32, "tokens": 10**6}}, {"sequence length": 0.5}),
        ("schedule", {"warmup_steps": 500}, {"learning rate": 2.02}),
        ("precision", {"fp8": "delayed"}, {"precision.fp8": None}),
        ("logging", {"interval": 100}, {}),
        ("optimizer", {"lr": 1.1e-3}, {}),  # below the factor
    ],
)  # fmt: skip
def test_compare_next_update_names_a_changed_key_that_acts_at_once(
    section: str, keys: dict[str, Any], expected: dict[str, float | None]
) -> None:
    found = changes(config(), config(**{section: keys}))
    for name, factor in expected.items():
        assert found[name] == (factor if factor is None else pytest.approx(factor, rel=0.02)), found
    assert expected or not found


@pytest.mark.parametrize(
    ("rule", "keys", "expected"),
    [
        ({"name": "sgd"}, {"eps": 1e-6}, set()),
        ({"name": "sgd"}, {"momentum": 0.5}, {"optimizer.momentum"}),
        ({"name": "adafactor"}, {"eps": 1e-6, "betas": (0.5, 0.5)}, set()),
        ({"name": "adafactor"}, {"adafactor": {"momentum": 0.5}}, {"optimizer.adafactor.momentum"}),
        ({"name": "muon"}, {"eps": 1e-6, "momentum": 0.5}, {"optimizer.eps", "optimizer.momentum"}),
        ({"clipping": "adagc"}, {"clip": 0.25}, {"optimizer.clip"}),  # until its warm-up ends
        # What only one of the two reads goes with what is told.
        ({"name": "sgd", "momentum": 0.5}, {"name": "adamw", "momentum": None}, {"optimizer.name"}),
    ],
)  # fmt: skip
def test_compare_next_update_leaves_out_keys_that_nothing_reads(
    rule: dict[str, Any], keys: dict[str, Any], expected: set[str]
) -> None:
    assert changes(config(optimizer=rule), config(optimizer=rule | keys)).keys() == expected


@pytest.mark.parametrize("name", get_args(OptimizerConfig.model_fields["name"].annotation))
def test_the_table_of_who_reads_what_is_that_of_the_optimizers(name: Any) -> None:
    given = OptimizerConfig(name=name)
    model = ModelConfig(layers=1, hidden=16, heads=2, ffn=16, vocab_size=16)
    with torch.device("meta"):
        gpt = GPT(model, TensorParallel(), "none", None)
    built = build_optimizer(gpt, given, model, compiled=False)
    for key in ("betas", "eps"):
        assert (key in built.defaults) == given.reads_key(key)
