"""The tree: defaults that follow from others, and what is refused as impossible."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from megastable.config.model import ModelConfig
from megastable.config.stability import StabilityConfig
from megastable.config.tree import RunConfig


def refused(**parts: Any) -> str:
    """The message that refuses a tree."""
    with pytest.raises(ValidationError) as error:
        RunConfig.model_validate(parts)
    return "\n".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.value.errors())


# Each with its key and its remedy.
IMPOSSIBLE: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "tensor-heads": (
        {"parallel": {"tensor": 8}, "model": {"heads": 12, "hidden": 768, "kv_heads": 4}},
        ("parallel.tensor=8", "model.heads=12", "change one"),
    ),
    "tensor-kv-heads": (
        {"parallel": {"tensor": 4}, "model": {"heads": 12, "kv_heads": 2}},
        ("parallel.tensor=4", "model.kv_heads=2", "change one"),
    ),
    "tensor-ffn": (
        {"parallel": {"tensor": 3}, "model": {"ffn": 2048, "vocab_multiple": 384}},
        ("parallel.tensor=3", "model.ffn=2048", "change one"),
    ),
    "tensor-vocabulary": (
        {"parallel": {"tensor": 3}, "model": {"ffn": 1536}},
        ("parallel.tensor=3", "model.vocab_multiple=128", "set vocab_multiple to a multiple"),
    ),
    "stages-without-a-block": (
        {"parallel": {"pipeline": 13}},
        ("parallel.pipeline=13", "model.layers=12", "use fewer stages"),
    ),
    "sequence-alone": ({"parallel": {"sequence": True}}, ("parallel.sequence", "parallel.tensor above 1")),
    "sequence-length": (
        {"parallel": {"sequence": True, "tensor": 4}, "model": {"sequence_length": 2050}},
        ("parallel.sequence", "parallel.tensor=4", "model.sequence_length=2050", "change one"),
    ),
    "pipeline-zero-2": (
        {"parallel": {"pipeline": 2, "zero": 2}},
        ("parallel.zero=2", "parallel.pipeline=2", "use parallel.zero=1 or parallel.pipeline=1"),
    ),
    "pipeline-zero-3": (
        {"parallel": {"pipeline": 2, "zero": 3}},
        ("parallel.zero=3", "parallel.pipeline=2", "use parallel.zero=1 or parallel.pipeline=1"),
    ),
    "zero-0": ({"parallel": {"zero": 0}}, ("parallel.zero=0", "use parallel.zero=1")),
    "context-heads": (
        {"parallel": {"context": 4, "tensor": 2}},
        ("parallel.context=4", "parallel.tensor=2", "model.heads=12", "change one"),
    ),
    "context-length": (
        {"parallel": {"context": 4}, "model": {"sequence_length": 2050}},
        ("parallel.context=4", "model.sequence_length=2050", "change one"),
    ),
    "context-sequence": (
        {"parallel": {"context": 2, "sequence": True, "tensor": 2}, "model": {"sequence_length": 2050}},
        ("parallel.tensor=2", "model.sequence_length=2050 / parallel.context=2", "change one"),
    ),
    "micro-batch": (
        {"train": {"global_batch": 64, "micro_batch": 6}},
        ("train.micro_batch=6", "train.global_batch=64", "change one"),
    ),
    "beta-1": ({"optimizer": {"betas": [1.0, 0.95]}}, ("optimizer.betas=[1.0, 0.95]", "below 1")),
    "bf16-moments": (
        {"optimizer": {"name": "lamb", "moments": "bf16"}},
        ("optimizer.moments=bf16", "optimizer.name=lamb", "leave optimizer.moments out"),
    ),
    "spam-warmup": (
        {"optimizer": {"name": "spam", "spam": {"interval": 100}}},
        ("optimizer.spam.warmup=150", "optimizer.spam.interval=100", "shorten"),
    ),
    "stable-spam-max": ({"optimizer": {"stable_spam": {"max_decay": 1}}}, ("max_decay=1", "below 1")),
    "stable-spam-norms": (
        {"optimizer": {"stable_spam": {"norm_decays": [0.7, 1]}}},
        ("norm_decays=[0.7, 1.0]", "below 1"),
    ),
    "momentum-of-adamw": ({"optimizer": {"momentum": 0.9}}, ("only sgd and muon", "optimizer.momentum=0.9")),
    "momentum": ({"optimizer": {"name": "muon", "momentum": 1}}, ("optimizer.momentum=1", "below 1")),
    "adafactor-momentum": ({"optimizer": {"adafactor": {"momentum": 1}}}, ("momentum=1", "below 1")),
    "beta-2": ({"optimizer": {"betas": [0.9, 1.0]}}, ("optimizer.betas=[0.9, 1.0]", "below 1")),
    "kv-heads": ({"model": {"heads": 12, "kv_heads": 5}}, ("kv_heads=5", "heads=12")),
    "heads-hidden": ({"model": {"hidden": 100, "heads": 12}}, ("heads=12", "hidden=100", "set head_dim")),
    "odd-head-by-hidden": ({"model": {"hidden": 36, "heads": 12}}, ("head_dim=3", "odd")),
    "odd-head": ({"model": {"head_dim": 7}}, ("head_dim=7", "odd")),
    "empty-skip": ({"data": {"skip": [[5, 5]]}}, ("empty or reversed",)),
    "reversed-skip": ({"data": {"skip": [[0, 2], [9, 3]]}}, ("empty or reversed",)),
    "no-name": ({"run": {"name": ""}}, ("run.name: ",)),
    "name-of-lines": ({"run": {"name": "a\nb"}}, ("run.name: ",)),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_impossible_combination_names_its_keys_and_a_remedy(name: str) -> None:
    parts, words = IMPOSSIBLE[name]
    message = refused(**parts)
    for word in words:
        assert word in message
    # One reason only, so that no case hides behind another; kv_heads divides heads, so what divides one divides both.
    assert len(message.splitlines()) == (2 if name == "tensor-heads" else 1)


def test_what_follows_from_other_sizes() -> None:
    m = ModelConfig(hidden=768, heads=12, vocab_size=50_257)
    assert (m.key_value_heads, m.head_width, m.ffn_width, m.padded_vocab) == (12, 64, 2048, 50_304)
    m = ModelConfig(
        hidden=4096, heads=32, kv_heads=8, head_dim=64, ffn=100, vocab_size=128, vocab_multiple=64
    )
    assert (m.key_value_heads, m.head_width, m.ffn_width, m.padded_vocab) == (8, 64, 100, 128)
    assert ModelConfig(hidden=4096, heads=32).ffn_width == 11_008  # as Llama 7B


def test_a_tree_cannot_be_changed() -> None:
    c = RunConfig()
    with pytest.raises(ValidationError, match="frozen"):
        c.train.steps = 5  # type: ignore[misc]


@pytest.mark.parametrize("part", [{"samples": {"known": 64}}, {"samples": 3}, {"known": 64}])
def test_a_key_that_never_was_is_refused(part: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"samples|known"):
        StabilityConfig.model_validate(part)


@pytest.mark.parametrize(
    ("given", "trackers"),
    [
        ({}, ("tensorboard",)),
        ({"trackers": "mlflow"}, ("mlflow",)),
        ({"trackers": None}, ()),
    ],
)
def test_trackers_by_one_name_or_none(given: dict[str, Any], trackers: tuple[str, ...]) -> None:
    assert RunConfig.model_validate({"logging": given}).logging.trackers == trackers


def test_trackers_that_cannot_be() -> None:
    assert "no program is given" in refused(logging={"trackers": ["command"]})
    assert "logging.trackers" in refused(logging={"trackers": ["tensorboardd"]})
    assert "logging.tensorboard" in refused(logging={"tensorboard": True})
