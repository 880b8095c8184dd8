"""config.json: both transformers' ways of saying it, and every option without a home refused by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from megastable.base.errors import CheckpointError, ConfigError
from megastable.base.process import ROOT
from megastable.checkpoint.whole import describe_parameters
from megastable.config.model import ModelConfig
from megastable.config.recipe import load_recipe
from megastable_tools.convert.huggingface.architectures import (
    ARCHITECTURES,
    EVERYWHERE,
    GEMMA2,
    architecture_of,
    map_biases,
    map_tensor_names,
    merge_tensors,
    split_tensor,
)
from megastable_tools.convert.huggingface.settings import KNOWN, model_of, settings_of
from tests.convert.huggingface.conftest import GEMMA2 as GEMMA2_MODEL
from tests.convert.huggingface.conftest import MODELS, choices, random_weights

LLAMA_3 = {"kind": "llama3", "factor": 8.0, "low_freq_factor": 0.5, "original_length": 8192}
YARN = {"kind": "yarn", "factor": 4.0, "original_length": 32768}
TOKENS = {"bos": 0, "eos": 2, "pad": None}
OLMO_3 = {"qk_norm": "full", "norms": "after", "window": 9}
OWN = EVERYWHERE | GEMMA2.fixed_values().keys() | GEMMA2.free | {"sequence_length"}  # all that a folder says


TWO_EXPERTS = {"count": 8, "top_k": 2, "ffn": 16}
MIXTURES = {name: MODELS[name] for name in ("qwen3-moe", "mixtral", "olmoe", "dots1")}


@pytest.mark.parametrize(
    "path", sorted((ROOT / "launch/recipes").glob("moe-*.yaml")), ids=lambda path: path.stem
)
def test_recipes_of_mixtures_can_be_exported(path: Path) -> None:
    model = load_recipe(path, ["model.vocab_size=1000"]).model
    assert model.experts is not None and (map_biases(model) or model.experts.bias_rate == 0)


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    kv_heads, chosen = draw(st.integers(1, 8)), draw(choices())
    yarn = {"kind": "yarn", "factor": 3.5, "original_length": 99, "beta_fast": 30.5, "attention_factor": 1.1}
    scaling = draw(st.sampled_from([None, {"kind": "linear", "factor": 2.5}, LLAMA_3, yarn]))
    config = ModelConfig(
        layers=draw(st.integers(1, 99)), heads=kv_heads * draw(st.integers(1, 8)), kv_heads=kv_heads,
        hidden=draw(st.integers(1, 9999)), head_dim=2 * draw(st.integers(1, 128)), ffn=draw(st.integers(1, 9999)),
        vocab_size=draw(st.integers(1, 10**6)), tied=draw(st.booleans()),
        norm_eps=draw(st.floats(1e-8, 1e-2)), rope_theta=draw(st.floats(1.5, 1e8)),
        sequence_length=draw(st.integers(1, 10**6)), **{"rope_scaling": scaling} | chosen,
    )  # fmt: skip
    return fit_heads(config)


def fit_heads(config: ModelConfig) -> ModelConfig:
    """An OLMoE's heads are as wide as `hidden` together."""
    is_olmoe = config.qk_norm == "full" and config.experts is not None
    return config.model_copy(update={"hidden": config.heads * config.head_width} if is_olmoe else {})


@given(models())
def test_settings_of_reads_back(config: ModelConfig) -> None:
    settings = json.loads(json.dumps(settings_of(config, "bfloat16", TOKENS)))
    found = model_of(settings, "config.json")
    assert found.keys() == OWN
    read = ModelConfig(**found)
    assert (read.score_scale, *map(read.window_of, range(config.layers))) == (
        config.score_scale, *map(config.window_of, range(config.layers))
    )  # fmt: skip
    written = {
        "attention_scale",
        "window",
        "full_attention_every",
        "experts",
        "ffn",
    }  # which have several spellings
    if config.experts is not None:
        assert read.experts is not None and read.expert_width == config.expert_width
        assert read.experts == config.experts.model_copy(update={"ffn": read.experts.ffn})
    else:
        assert read.ffn_width == config.ffn_width
    assert all(found[key] == getattr(config, key) for key in OWN - written)
    # As one transformers or the other writes it.
    for keys in (("rope_theta", "rope_scaling"), ("rope_parameters",)):
        assert model_of({k: v for k, v in settings.items() if k not in keys}, "config.json") == found


@pytest.mark.parametrize(
    "options",
    [
        {}, {"qk_norm": False}, {"qk_norm": "full", "norms": "after"}, {"qk_norm": False, "qkv_bias": True},
        {"qk_norm": False, "rope_scaling": LLAMA_3}, {"rope_scaling": {"kind": "linear", "factor": 2}},
        {"rope_scaling": YARN}, {"qk_norm": False, "rope_scaling": YARN | {"attention_factor": 1.5, "beta_fast": 9.0}},
        {"window": 9}, {"window": 9, "full_attention_every": 3}, {"qk_norm": False, "window": 9}, OLMO_3,
        {**OLMO_3, "full_attention_every": 4}, GEMMA2_MODEL,
        GEMMA2_MODEL | {"window": None, "full_attention_every": None},
        *(MODELS[name] | {"kv_heads": 2} for name in MIXTURES),
    ],
)  # fmt: skip
def test_settings_of_is_read_by_transformers(options: dict[str, Any]) -> None:
    from transformers import AutoConfig

    sizes = {"vocab_size": 90, "hidden": 64, "heads": 4, "kv_heads": 2, "rope_theta": 5e5, "ffn": 64}
    config = ModelConfig(**sizes | options)
    settings = settings_of(config, "bfloat16", TOKENS)
    theirs = AutoConfig.for_model(**settings)
    scaling, rope = config.rope_scaling, theirs.rope_parameters
    rope = rope.get("sliding_attention", rope)
    assert rope["rope_type"] == (scaling.kind if scaling else "default")
    assert rope.get("factor") == (scaling.factor if scaling else None)
    assert (rope["rope_theta"], theirs.head_dim, str(theirs.dtype)) == (5e5, 16, "torch.bfloat16")
    assert (theirs.eos_token_id, theirs.bos_token_id, theirs.pad_token_id) == (2, 0, None)
    written = json.loads(theirs.to_json_string())
    assert model_of(written, "config.json") == model_of(settings, "config.json")


@pytest.mark.parametrize("kind", [kind.type for kind in ARCHITECTURES])
def test_model_of_takes_the_defaults_of_transformers(kind: str) -> None:
    from transformers import AutoConfig

    name = {one.type: one.name for one in KNOWN.values()}[kind]
    least = {"model_type": kind, "architectures": [name], "hidden_size": 128, "intermediate_size": 100}
    least |= {"num_hidden_layers": 9, "num_attention_heads": 32, "vocab_size": 10}
    if kind == "dots1":
        least |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}
    theirs, found = AutoConfig.for_model(**least), model_of(least, "config.json")
    assert found["kv_heads"] == theirs.num_key_value_heads
    heads_width = theirs.hidden_size // theirs.num_attention_heads
    assert found["head_dim"] == (getattr(theirs, "head_dim", None) or heads_width)
    rope = theirs.rope_parameters
    assert found["norm_eps"] == theirs.rms_norm_eps
    assert found["rope_theta"] == rope.get("sliding_attention", rope)["rope_theta"]
    assert found["tied"] == theirs.tie_word_embeddings
    assert found["sequence_length"] == theirs.max_position_embeddings
    read, types = ModelConfig(**found), getattr(theirs, "layer_types", None)
    if kind == "mistral":
        types = ["sliding_attention"] * 9
    for block, layer in enumerate(types or ["full_attention"] * 9):
        assert read.window_of(block) == (theirs.sliding_window if layer == "sliding_attention" else None)
    if read.experts is not None:
        assert (
            read.experts.count == theirs.num_local_experts
            and read.experts.top_k == theirs.num_experts_per_tok
        )
        assert read.expert_width == getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
        assert read.experts.normalize == getattr(theirs, "norm_topk_prob", True)
        assert read.experts.scale == getattr(theirs, "routed_scaling_factor", 1)
        assert read.experts.first_dense == 0
    if kind == "gemma2":
        assert read.score_scale == theirs.query_pre_attn_scalar**-0.5
        assert read.attention_softcap == theirs.attn_logit_softcapping == 50
        assert read.logit_softcap == theirs.final_logit_softcapping == 30


def of_mixture(name: str) -> dict[str, Any]:
    config = ModelConfig(**{"vocab_size": 90, "hidden": 32, "heads": 4, "ffn": 64} | MIXTURES[name])
    return settings_of(config, "float32", TOKENS)


@pytest.mark.parametrize(
    ("name", "change", "experts"),
    [
        ("qwen3-moe", {"mlp_only_layers": [], "decoder_sparse_step": 3}, {"first_dense": 2}),
        ("qwen3-moe", {"mlp_only_layers": None}, {"first_dense": 0}),
        ("qwen3-moe", {"num_experts": ..., "num_local_experts": 7}, {"count": 7}),
        ("qwen3-moe", {"norm_topk_prob": ...}, {"normalize": False}),
        ("dots1", {"first_k_dense_replace": 2, "scoring_func": "noaux_tc"}, {"first_dense": 2}),
        ("dots1", {"routed_scaling_factor": ...}, {"scale": 1.0}),
        ("olmoe", {"router_aux_loss_coef": 0.3, "output_router_logits": True}, {"top_k": 3}),
        ("mixtral", {"router_jitter_noise": 0.1, "num_experts_per_tok": 3}, {"top_k": 3}),
    ],
)  # fmt: skip
def test_model_of_reads_experts(name: str, change: dict[str, Any], experts: dict[str, Any]) -> None:
    given = {key: value for key, value in (of_mixture(name) | change).items() if value is not ...}
    assert model_of(given, "config.json")["experts"].items() >= experts.items()


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("qwen3-moe", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\], .*: of 3 layers, 1 have no experts"),
        ("qwen3-moe", {"mlp_only_layers": [], "decoder_sparse_step": 2}, r"mlp_only_.*, decoder_sparse_step=2: not s"),
        ("qwen3-moe", {"mlp_only_layers": [0, 1, 2]}, ".* 3 have no experts"),
        ("qwen3-moe", {"mlp_only_layers": [True]}, "mlp_only_layers=.*must list numbers"),
        ("qwen3-moe", {"num_local_experts": 9}, "num_experts and num_local_experts disagree"),
        ("qwen3-moe", {"num_experts": 0}, "num_experts=0: it must be a whole number"),
        ("qwen3-moe", {"norm_topk_prob": 1}, "norm_topk_prob=1: it must be true or false"),
        ("qwen3-moe", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid': unknown key"),
        ("qwen3-moe", {"n_shared_experts": 1}, "n_shared_experts=1: unknown key"),
        ("dots1", {"n_group": 4}, "n_group=4: not supported: its experts are of one group"),
        ("dots1", {"topk_group": 2}, "topk_group=2: not supported"),
        ("dots1", {"scoring_func": "softmax"}, "scoring_func='softmax': not supported: its scores are sigmoids"),
        ("dots1", {"n_shared_experts": None}, "n_shared_experts=None: it must be a whole number"),
        ("dots1", {"first_k_dense_replace": -1}, "first_k_dense_replace=-1: it must be a whole number"),
        ("dots1", {"routed_scaling_factor": 0}, "routed_scaling_factor=0: it must be a number above 0"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0: not supported"),
    ],
)  # fmt: skip
def test_model_of_refuses_other_experts(name: str, change: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=f"^config.json: {named}"):
        model_of(of_mixture(name) | change, "config.json")


# config.json of models as they lie on the Hub.
HUB = json.loads(Path(__file__).with_name("hub_configs.json").read_text())
SCALING_3 = HUB["llama-3.2"]["rope_scaling"]
QWEN_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
GOOD = settings_of(ModelConfig(vocab_size=90, hidden=64, heads=4, layers=99), "float32", TOKENS)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"attention_bias": True}, "attention_bias=True: not supported: its only biases"),
        ({"use_sliding_window": True, "sliding_window": 512}, "max_window_layers=28: .*of 99 layers"),
        ({"use_sliding_window": "yes", "sliding_window": 512}, "use_sliding_window='yes'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "type llama3 need high_freq_factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling and rope_parameters disagree"),
        ({"rope_scaling": {"type": "linear", "rope_type": "llama3", "factor": 2.0}}, "as linear, llama3 or yarn"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta_fast": 32}}, "linear have no beta_fast"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, "factor: .*greater than or equal to 1"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "type yarn need original_max_position_embeddings"),
        ({"rope_parameters": QWEN_YARN | {"truncate": False}}, "ramp begins and ends at whole numbers"),
        ({"rope_parameters": QWEN_YARN | {"beta_fast": 0.5}}, "beta_slow=1 must be below beta_fast=0.5"),
        ({"rope_parameters": SCALING_3 | {"low_freq_factor": 4}}, "low_freq_factor=4 must be below"),
        ({"rope_theta": 5e5}, "rope_theta=500000.0 and rope_parameters.rope_theta=10000.0 disagree"),
        ({"num_experts": 8}, "num_experts=8: unknown key.* --accept num_experts"),
        ({"architectures": ["GemmaForCausalLM"]}, r"architectures=\['GemmaForCausalLM'\].*MistralForCausalLM"),
        ({"model_type": "qwen2"}, "model_type='qwen2'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        ({"rope_theta": 10**400}, "rope_theta=1000"),
    ],
)  # fmt: skip
def test_model_of_refuses_what_has_no_home(change: dict[str, Any], named: str) -> None:
    model_of(GOOD, "config.json")
    with pytest.raises(CheckpointError, match=f"^config.json: .*{named}"):
        model_of(GOOD | change, "config.json")


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("gemma2", {"hidden_activation": "gelu"}, r"hidden_activation='gelu': .*GeGLU \(tanh\)"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True: .*causal"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0"),
        ("gemma2", {"layer_types": ["full_attention", "sliding_attention"] * 23}, "layer_types=.*all but every n-th"),
        ("gemma2", {"layer_types": ["sliding_attention"]}, "layer_types=.*for each of 46 layers"),
        ("gemma2", {"layer_types": ["sliding_attention"] * 46, "sliding_window": None}, "layer_types=.*has no window"),
        ("qwen3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0: not supported: its logits"),
        ("qwen3", {"query_pre_attn_scalar": 256}, "query_pre_attn_scalar=256: unknown key"),
        ("qwen3", {"hidden_activation": "gelu_pytorch_tanh"}, "hidden_activation='gelu_pytorch_tanh': .*SwiGLU"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 20}, "max_window_layers=20"),
        ("llama-3.2", {"use_sliding_window": True, "sliding_window": 7}, "use_sliding_window=True: .*all that came"),
        ("mistral-0.1", {"layer_types": ["full_attention"] * 32}, "layer_types=.*all layers of a Mistral.* have"),
        ("olmo3", {"rope_scaling": QWEN_YARN}, "rope_scaling: .*Olmo3ForCausalLM scales .* and only of those"),
        ("olmo3", {"rope_parameters": {"full_attention": QWEN_YARN, "sliding_attention": {"rope_type": "default"}}},
         "rope_parameters.full_attention: .*Olmo3ForCausalLM scales"),
        ("olmo3", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention.rope_theta=1.0 disa"),
    ],
)  # fmt: skip
def test_model_of_refuses_what_an_architecture_has_in_part(
    name: str, change: dict[str, Any], named: str
) -> None:
    model_of(HUB[name], "config.json")
    with pytest.raises(CheckpointError, match=f"^config.json: .*{named}"):
        model_of(HUB[name] | change, "config.json")


# Names of tensors


@st.composite
def small_models(draw: st.DrawFn) -> ModelConfig:
    kv_heads = draw(st.integers(1, 3))
    config = ModelConfig(
        layers=draw(st.integers(1, 3)), hidden=draw(st.integers(1, 9)), heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads, head_dim=2 * draw(st.integers(1, 4)), ffn=draw(st.integers(1, 11)),
        vocab_size=draw(st.integers(1, 30)), vocab_multiple=draw(st.sampled_from([1, 8, 16])),
        tied=draw(st.booleans()), **draw(choices()),
    )  # fmt: skip
    return fit_heads(config)


@given(small_models())
def test_table_maps_parameters_to_disjoint_tensors_and_back(config: ModelConfig) -> None:
    ours, known = random_weights(config), map_tensor_names(config)
    assert list(known) == list(describe_parameters(config))  # in the model's order
    names = [part.name for parts in known.values() for part in parts]
    assert len(set(names)) == len(names)
    for name, weight in ours.items():
        theirs = split_tensor(weight, known[name])
        assert {n: tuple(t.shape) for n, t in theirs.items()} == {p.name: p.shape for p in known[name]}
        # Side by side from the first row on: nothing twice, nothing left out but the vocabulary's padding.
        assert torch.equal(torch.cat(list(theirs.values())), weight[: sum(map(len, theirs.values()))])
        left = len(weight) - sum(map(len, theirs.values()))
        assert left == (len(weight) - config.vocab_size if name in ("embedding.weight", "head.weight") else 0)
        back = merge_tensors(theirs, known[name], len(weight))
        assert torch.equal(back[: len(weight) - left], weight[: len(weight) - left])
        assert not back[len(weight) - left :].any()


@pytest.mark.parametrize("name", MODELS)
def test_table_has_the_names_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab_size": 50}
    config = ModelConfig(**sizes | MODELS[name])
    settings = settings_of(config, "float32", {"bos": None, "eos": None, "pad": None})
    with torch.device("meta" if config.experts is None else "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    theirs = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if config.experts is not None:  # in files they have other names
        model.save_pretrained(tmp_path)
        theirs = {name: tuple(t.shape) for name, t in load_file(tmp_path / "model.safetensors").items()}
    assert type(model).__name__ == architecture_of(config).name
    ours = [part for parts in map_tensor_names(config).values() for part in parts]
    assert {part.name: part.shape for part in [*ours, *map_biases(config).values()]} == theirs


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
        (GEMMA2_MODEL | {"embedding_scale": 5.0}, "model.embedding_scale=5.0: .*with embedding_scale=sqrt_hidden"),
        (GEMMA2_MODEL | {"attention_scale": 0.07}, "attention_scale=0.07: .*the nearest is 0.07001"),
        ({"qk_norm": "full", "norms": "after", "window": 9, "rope_scaling": {"kind": "linear", "factor": 2.0}},
         "model.window=9 .*model.rope_scaling=.*Olmo2ForCausalLM with window=None; Olmo3.* with rope_scaling=None"),
        ({"experts": TWO_EXPERTS | {"gate": "sigmoid"}},
         "model.experts.gate=sigmoid with model.experts.shared=0: .*Qwen3Moe.* with experts.gate=softmax; "
         "Dots1ForCausalLM with experts.shared=1"),
        ({"experts": TWO_EXPERTS | {"capacity": 1.25}}, "experts.capacity=1.25: .*Qwen3Moe.* experts.capacity=None"),
        ({"experts": TWO_EXPERTS | {"shared": 1}}, "model.experts.shared=1 .*Qwen3Moe.* with experts.shared=0; Dots1"),
        ({"qk_norm": False, "experts": TWO_EXPERTS | {"normalize": False}},
         "model.qk_norm=False with model.experts.normalize=False: .*Mixtral.* with experts.normalize=True"),
        ({"qk_norm": "full", "norms": "after", "experts": TWO_EXPERTS}, "model.norms=after: .*Olmoe.* norms=before"),
        ({"qk_norm": "full", "head_dim": 32, "experts": TWO_EXPERTS}, "model.head_dim=32: Olmoe.* hidden / heads = 64"),
    ],
)  # fmt: skip
def test_table_refuses_what_has_no_home(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        map_tensor_names(ModelConfig(vocab_size=10, **options))
