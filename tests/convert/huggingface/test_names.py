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
from megastable_tools.convert.huggingface.architectures import ARCHITECTURES, architecture_of
from megastable_tools.convert.huggingface.names import merge, split, table
from tests.convert.huggingface.conftest import GEMMA2, MODELS, choices, random_weights


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    kv_heads = draw(st.integers(1, 3))
    return ModelConfig(
        layers=draw(st.integers(1, 3)), hidden=draw(st.integers(1, 9)), heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads, head_dim=2 * draw(st.integers(1, 4)), ffn=draw(st.integers(1, 11)),
        vocab_size=draw(st.integers(1, 30)), vocab_multiple=draw(st.sampled_from([1, 8, 16])),
        tied=draw(st.booleans()), **draw(choices()),
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


@pytest.mark.parametrize("name", MODELS)
def test_the_names_are_those_of_transformers(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from megastable_tools.convert.huggingface.settings import settings_of

    sizes = {"hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab_size": 50}
    config = ModelConfig(**sizes | MODELS[name])
    settings = settings_of(config, "float32", {"bos": None, "eos": None, "pad": None})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    theirs = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert type(model).__name__ == architecture_of(config).name
    assert {p.name: p.shape for parts in table(config).values() for p in parts} == theirs


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"norms": "after"}, "model.norms=after with model.qk_norm=True: .*Qwen3ForCausalLM with norms=before; Olmo2"),
        ({"qk_norm": "full"}, "model.qk_norm=full .*Qwen3ForCausalLM with qk_norm=True; .*Olmo2.* with norms=after"),
        ({"qkv_bias": True}, "model.qkv_bias=True .*Qwen3ForCausalLM with qkv_bias=False; Qwen2.* with qk_norm=False"),
        ({"mup": {"base_width": 256}}, "model.mup=.*with mup=None"),
        ({"norms": "mixed", "mixed_share": 0.5}, "model.norms=mixed with model.mixed_share=0.5: .*with norms=before "),
        ({"qk_norm": False, "window": 9, "full_attention_every": 2},
         "model.full_attention_every=2: .*MistralForCausalLM with full_attention_every=None"),
        (GEMMA2 | {"embedding_scale": 5.0}, "model.embedding_scale=5.0: .*Gemma2.*with embedding_scale=sqrt_hidden"),
        (GEMMA2 | {"attention_scale": 0.07}, "attention_scale=0.07: .*whole number n only: the nearest is 0.07001"),
        ({"qk_norm": "full", "norms": "after", "window": 9, "rope_scaling": {"kind": "linear", "factor": 2.0}},
         "model.window=9 .*model.rope_scaling=.*Olmo2ForCausalLM with window=None; Olmo3.* with rope_scaling=None"),
    ],
)  # fmt: skip
def test_what_has_no_home_is_refused_by_its_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        table(ModelConfig(vocab_size=10, **options))


@given(choices())
def test_every_choice_of_an_architecture_is_one_that_is_written(options: dict[str, Any]) -> None:
    kind = architecture_of(ModelConfig(**options))
    assert all(options[key] == value for key, value in kind.values().items())


def test_no_two_architectures_are_the_same() -> None:
    assert len({(str(kind.values()), kind.free) for kind in ARCHITECTURES}) == len(ARCHITECTURES)


def test_an_option_that_the_table_does_not_know_is_refused() -> None:
    class Later(ModelConfig):
        later: int | None = None

    assert architecture_of(Later(vocab_size=10)).name == "Qwen3ForCausalLM"
    with pytest.raises(ConfigError, match=r"model.later=128"):
        architecture_of(Later(vocab_size=10, later=128))
