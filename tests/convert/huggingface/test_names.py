"""The table of names: our parameters become disjoint tensors of theirs, and come back exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megastable.base.errors import ConfigError
from megastable.checkpoint.whole import parameters
from megastable.config.model import ModelConfig
from megastable.convert.huggingface.names import ARCHITECTURES, architecture_of, merge, split, table
from tests.convert.huggingface.conftest import random_weights

QWEN2 = {"qk_norm": False, "qkv_bias": True}


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    kv_heads = draw(st.integers(1, 3))
    qk_norm, norms, bias = draw(st.sampled_from(sorted(ARCHITECTURES, key=str)))
    return ModelConfig(
        layers=draw(st.integers(1, 3)), hidden=draw(st.integers(1, 9)), heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads, head_dim=2 * draw(st.integers(1, 4)), ffn=draw(st.integers(1, 11)),
        vocab_size=draw(st.integers(1, 30)), vocab_multiple=draw(st.sampled_from([1, 8, 16])), qk_norm=qk_norm,
        norms=norms, tied=draw(st.booleans()), qkv_bias=bias,
    )  # fmt: skip


@given(models())
def test_every_parameter_maps_to_disjoint_tensors_and_back(config: ModelConfig) -> None:
    ours, known = random_weights(config), table(config)
    assert list(known) == list(parameters(config))  # in the model's order
    names = [part.name for parts in known.values() for part in parts]
    assert len(set(names)) == len(names)
    for name, weight in ours.items():
        theirs = split(weight, known[name])
        assert {n: tuple(t.shape) for n, t in theirs.items()} == {p.name: p.shape for p in known[name]}
        # Side by side from the first row on: nothing twice, nothing left out but the vocabulary's padding.
        assert torch.equal(torch.cat(list(theirs.values())), weight[: sum(map(len, theirs.values()))])
        left = len(weight) - sum(map(len, theirs.values()))
        assert left == (len(weight) - config.vocab_size if name in ("embedding.weight", "head.weight") else 0)
        back = merge(theirs, known[name], len(weight))
        assert torch.equal(back[: len(weight) - left], weight[: len(weight) - left])
        assert not back[len(weight) - left :].any()


def test_the_names_are_those_of_transformers() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from megastable.convert.huggingface.settings import settings_of

    for options in ({}, {"qk_norm": False}, {"qk_norm": "full", "norms": "after"}, {"tied": True}, QWEN2):
        config = ModelConfig(
            layers=2, hidden=32, heads=4, kv_heads=2, head_dim=16, ffn=48, vocab_size=50, **options
        )  # type: ignore[arg-type]
        settings = settings_of(config, "float32", {"bos": None, "eos": None, "pad": None})
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
        theirs = {name: tuple(p.shape) for name, p in model.named_parameters()}
        assert type(model).__name__ == architecture_of(config).name
        assert {p.name: p.shape for parts in table(config).values() for p in parts} == theirs


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"norms": "after"}, "model.qk_norm=True with model.norms=after"),
        ({"qk_norm": False, "norms": "after"}, "model.qk_norm=False with model.norms=after"),
        ({"qk_norm": "full"}, "model.qk_norm=full with model.norms=before"),
        ({"qkv_bias": True}, "model.qk_norm=True .*model.qkv_bias=True.* supported are: .*Qwen2ForCausalLM"),
    ],
)
def test_what_has_no_home_is_refused_by_its_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        table(ModelConfig(vocab_size=10, **options))


def test_an_option_that_the_table_does_not_know_is_refused() -> None:
    class Later(ModelConfig):
        window: int | None = None

    assert architecture_of(Later(vocab_size=10)).name == "Qwen3ForCausalLM"
    with pytest.raises(ConfigError, match=r"model.window=128"):
        architecture_of(Later(vocab_size=10, window=128))
