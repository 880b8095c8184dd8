"""config.json: both transformers' ways of saying it, and every option without a home refused by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.base.errors import CheckpointError
from megastable.config.model import ModelConfig, RopeScalingConfig
from megastable_tools.convert.huggingface.architectures import ARCHITECTURES, EVERYWHERE, GEMMA2
from megastable_tools.convert.huggingface.settings import CAPS, KNOWN, model_of, settings_of
from tests.convert.huggingface.conftest import GEMMA2 as GEMMA2_MODEL
from tests.convert.huggingface.conftest import choices

LLAMA_3 = {"kind": "llama3", "factor": 8.0, "low_freq_factor": 0.5, "original_length": 8192}
YARN = {"kind": "yarn", "factor": 4.0, "original_length": 32768}
TOKENS = {"bos": 0, "eos": 2, "pad": None}
OLMO_3 = {"qk_norm": "full", "norms": "after", "window": 9}
OWN = EVERYWHERE | GEMMA2.values().keys() | GEMMA2.free | {"sequence_length"}  # all that a folder says


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    kv_heads, chosen = draw(st.integers(1, 8)), draw(choices())
    yarn = {"kind": "yarn", "factor": 3.5, "original_length": 99, "beta_fast": 30.5, "attention_factor": 1.1}
    scaling = draw(st.sampled_from([None, {"kind": "linear", "factor": 2.5}, LLAMA_3, yarn]))
    return ModelConfig(
        layers=draw(st.integers(1, 99)), heads=kv_heads * draw(st.integers(1, 8)), kv_heads=kv_heads,
        hidden=draw(st.integers(1, 9999)), head_dim=2 * draw(st.integers(1, 128)), ffn=draw(st.integers(1, 9999)),
        vocab_size=draw(st.integers(1, 10**6)), tied=draw(st.booleans()),
        norm_eps=draw(st.floats(1e-8, 1e-2)), rope_theta=draw(st.floats(1.5, 1e8)),
        sequence_length=draw(st.integers(1, 10**6)), **{"rope_scaling": scaling} | chosen,
    )  # fmt: skip


@given(models())
def test_what_is_written_reads_back(config: ModelConfig) -> None:
    settings = json.loads(json.dumps(settings_of(config, "bfloat16", TOKENS)))
    found = model_of(settings, "config.json")
    assert found.keys() == OWN
    read = ModelConfig(**found)
    assert (read.score_scale, *map(read.window_of, range(config.layers))) == (
        config.score_scale, *map(config.window_of, range(config.layers))
    )  # fmt: skip
    written = {"attention_scale", "window", "full_attention_every"}  # which have several spellings
    assert all(found[key] == getattr(config, key) for key in OWN - written)
    for keys in (
        ("rope_theta", "rope_scaling"),
        ("rope_parameters",),
    ):  # as one transformers or the other writes it
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
    ],
)  # fmt: skip
def test_transformers_write_what_we_read_and_read_what_we_write(options: dict[str, Any]) -> None:
    from transformers import AutoConfig

    sizes = {"vocab_size": 90, "hidden": 64, "heads": 4, "kv_heads": 2, "rope_theta": 5e5}
    config = ModelConfig(**sizes | options)
    settings = settings_of(config, "bfloat16", TOKENS)
    theirs = AutoConfig.for_model(**settings)
    scaling, rope = config.rope_scaling, theirs.rope_parameters
    rope = rope.get("sliding_attention", rope)
    assert rope["rope_type"] == (scaling.kind if scaling else "default")
    assert rope.get("factor") == (scaling.factor if scaling else None)
    assert (rope["rope_theta"], theirs.head_dim, str(theirs.dtype)) == (
        5e5,
        16,
        "torch.bfloat16",
    )
    assert (theirs.eos_token_id, theirs.bos_token_id, theirs.pad_token_id) == (2, 0, None)
    written = json.loads(theirs.to_json_string())
    assert model_of(written, "config.json") == model_of(settings, "config.json")


@pytest.mark.parametrize("kind", [kind.type for kind in ARCHITECTURES])
def test_what_is_left_out_is_what_transformers_take(kind: str) -> None:
    from transformers import AutoConfig

    name = {one.type: one.name for one in KNOWN.values()}[kind]
    least = {"model_type": kind, "architectures": [name], "hidden_size": 128, "intermediate_size": 100}
    least |= {"num_hidden_layers": 9, "num_attention_heads": 32, "vocab_size": 10}
    theirs, found = AutoConfig.for_model(**least), model_of(least, "config.json")
    assert found["kv_heads"] == theirs.num_key_value_heads
    assert found["head_dim"] == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    rope = theirs.rope_parameters
    assert (
        found["norm_eps"] == theirs.rms_norm_eps
        and found["rope_theta"] == rope.get("sliding_attention", rope)["rope_theta"]
    )
    assert found["tied"] == theirs.tie_word_embeddings
    assert found["sequence_length"] == theirs.max_position_embeddings
    read, types = ModelConfig(**found), getattr(theirs, "layer_types", None)
    if kind == "mistral":
        types = ["sliding_attention"] * 9
    for block, layer in enumerate(types or ["full_attention"] * 9):
        assert read.window_of(block) == (theirs.sliding_window if layer == "sliding_attention" else None)
    if kind == "gemma2":
        assert read.score_scale == theirs.query_pre_attn_scalar**-0.5
        assert read.attention_softcap == theirs.attn_logit_softcapping == 50
        assert read.logit_softcap == theirs.final_logit_softcapping == 30


# config.json of models as they lie on the Hub.
HUB = json.loads(Path(__file__).with_name("hub_configs.json").read_text())
SCALING_3 = HUB["llama-3.2"]["rope_scaling"]
QWEN_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
GOOD = settings_of(ModelConfig(vocab_size=90, hidden=64, heads=4, layers=99), "float32", TOKENS)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"attention_bias": True}, "attention_bias=True: not supported: its only biases"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"use_sliding_window": True, "sliding_window": 512}, "max_window_layers=28: .*of 99 layers"),
        ({"use_sliding_window": "yes", "sliding_window": 512}, "use_sliding_window='yes'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "type llama3 need high_freq_factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling and rope_parameters disagree"),
        ({"rope_scaling": {"type": "linear", "rope_type": "llama3", "factor": 2.0}}, "as linear, llama3 or yarn"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta_fast": 32}}, "linear have no beta_fast"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "2"}}, "rope_parameters.factor='2'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, "factor: .*greater than or equal to 1"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "type yarn need original_max_position_embeddings"),
        ({"rope_parameters": QWEN_YARN | {"mscale": 1.0}}, "type yarn have no mscale"),
        ({"rope_parameters": QWEN_YARN | {"truncate": False}}, "ramp begins and ends at whole numbers"),
        ({"rope_parameters": QWEN_YARN | {"beta_fast": 0.5}}, "beta_slow=1 must be below beta_fast=0.5"),
        ({"rope_parameters": SCALING_3 | {"original_max_position_embeddings": 0.5}},
         "rope_parameters=.*original_length: .*integer"),
        ({"rope_parameters": SCALING_3 | {"low_freq_factor": 4}}, "low_freq_factor=4 must be below"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "rope_parameters="),
        ({"rope_theta": 5e5}, "rope_theta=500000.0 and rope_parameters.rope_theta=10000.0 disagree"),
        ({"num_experts": 8}, "num_experts=8: unknown key.* --accept num_experts"),
        ({"architectures": ["GemmaForCausalLM"]}, r"architectures=\['GemmaForCausalLM'\].*MistralForCausalLM"),
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": True},
         "sliding_window=True"),
        ({"model_type": "qwen2"}, "model_type='qwen2'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"head_dim": -2}, "head_dim=-2"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
        ({"max_position_embeddings": 0}, "max_position_embeddings=0"),
        ({"rope_parameters": 7}, "rope_parameters=7"),
        ({"rope_theta": 10**400}, "rope_theta=1000"),
    ],
)  # fmt: skip
def test_what_has_no_home_is_refused_by_its_name(change: dict[str, Any], named: str) -> None:
    model_of(GOOD, "config.json")
    with pytest.raises(CheckpointError, match=f"^config.json: .*{named}"):
        model_of(GOOD | change, "config.json")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("llama-1", (32, 128, 10_000.0, 1e-6, False, 2048)), ("llama-2", (32, 128, 10_000.0, 1e-5, False, 4096)),
        ("tinyllama", (4, 64, 10_000.0, 1e-5, False, 2048)), ("smollm2", (3, 64, 100_000.0, 1e-5, True, 8192)),
        ("llama-3.2", (8, 64, 500_000.0, 1e-5, True, 131_072)), ("qwen3", (8, 128, 1_000_000.0, 1e-6, True, 40_960)),
        ("mistral-0.1", (8, 128, 10_000.0, 1e-5, False, 32_768)), ("olmo2", (32, 128, 500_000.0, 1e-6, False, 4096)),
        ("mistral-0.3", (8, 128, 1_000_000.0, 1e-5, False, 32_768)), ("gemma2", (16, 128, 10_000.0, 1e-6, True, 8192)),
        ("qwen2.5", (2, 64, 1_000_000.0, 1e-6, True, 32_768)), ("olmo3", (32, 128, 500_000.0, 1e-6, False, 8192)),
    ],
)  # fmt: skip
def test_files_of_the_hub_are_read(name: str, wanted: tuple[Any, ...]) -> None:
    found = model_of(HUB[name], "config.json")
    keys = ("kv_heads", "head_dim", "rope_theta", "norm_eps", "tied", "sequence_length", "vocab_size")
    assert tuple(found[key] for key in keys) == (*wanted, HUB[name]["vocab_size"])


def test_windows_and_scales_of_the_hub() -> None:
    def found(settings: dict[str, Any], *keys: str) -> list[Any]:
        return [model_of(settings, "config.json")[key] for key in keys]

    windows = "window", "full_attention_every"
    assert found(HUB["mistral-0.1"], *windows) == [4096, None] and found(HUB["mistral-0.3"], *windows) == [
        None,
        None,
    ]
    assert found(HUB["gemma2"], *windows) == [4096, 2] and found(HUB["olmo3"], *windows) == [4096, 4]
    keys = (
        "norms",
        "zero_centered_norms",
        "activation",
        "embedding_scale",
        "attention_softcap",
        "logit_softcap",
    )
    assert found(HUB["gemma2"], *keys) == ["both", True, "gelu", "sqrt_hidden", 50.0, 30.0]
    assert found(HUB["gemma2"], "attention_scale", "qk_norm") == [1 / 12, False]
    assert found(HUB["gemma2"] | {"query_pre_attn_scalar": 128}, "attention_scale") == [None]
    assert found(HUB["gemma2"] | dict.fromkeys(CAPS.values()), *CAPS) == [None, None]
    (scaling,) = found(HUB["qwen2.5"] | {"rope_scaling": QWEN_YARN}, "rope_scaling")
    assert scaling == RopeScalingConfig(kind="yarn", factor=4, original_length=32768)
    used = HUB["qwen2.5"] | {"use_sliding_window": True, "sliding_window": 7}
    assert found(used, *windows) == [None, None]  # max_window_layers is the number of layers
    assert found(used | {"max_window_layers": 0}, *windows) == [7, None]
    types = [*["sliding_attention"] * 7, "full_attention"] * 3
    assert found(used | {"layer_types": types}, *windows) == [7, 8]


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("gemma2", {"attention_bias": True}, "attention_bias=True: not supported: its only biases"),
        ("gemma2", {"hidden_activation": "gelu"}, r"hidden_activation='gelu': .*GeGLU \(tanh\)"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True: .*causal"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0"),
        ("gemma2", {"attn_logit_softcapping": "50"}, "attn_logit_softcapping='50'"),
        ("gemma2", {"layer_types": ["full_attention", "sliding_attention"] * 23}, "layer_types=.*all but every n-th"),
        ("gemma2", {"layer_types": ["sliding_attention"]}, "layer_types=.*for each of 46 layers"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 46}, "layer_types=.*it must list full_attention or"),
        ("gemma2", {"layer_types": ["sliding_attention"] * 46, "sliding_window": None}, "layer_types=.*has no window"),
        ("qwen3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0: not supported: its logits"),
        ("qwen3", {"query_pre_attn_scalar": 256}, "query_pre_attn_scalar=256: unknown key"),
        ("qwen3", {"hidden_activation": "gelu_pytorch_tanh"}, "hidden_activation='gelu_pytorch_tanh': .*SwiGLU"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 20}, "max_window_layers=20"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": "a"}, "max_window_layers='a'"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 28}, "layer_types=.*has no window"),
        ("llama-3.2", {"use_sliding_window": True, "sliding_window": 7}, "use_sliding_window=True: .*all that came"),
        ("llama-3.2", {"sliding_window": 7}, "sliding_window=7: .*all that came before"),
        ("mistral-0.1", {"layer_types": ["full_attention"] * 32}, "layer_types=.*all layers of a Mistral.* have"),
        ("olmo3", {"rope_scaling": QWEN_YARN}, "rope_scaling: .*Olmo3ForCausalLM scales .* and only of those"),
        ("olmo3", {"rope_parameters": {"full_attention": QWEN_YARN, "sliding_attention": {"rope_type": "default"}}},
         "rope_parameters.full_attention: .*Olmo3ForCausalLM scales"),
        ("olmo3", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention.rope_theta=1.0 disa"),
        ("olmo3", {"rope_parameters": {"full_attention": 7}}, "rope_parameters.full_attention=7"),
    ],
)  # fmt: skip
def test_what_an_architecture_has_only_in_part_is_refused(
    name: str, change: dict[str, Any], named: str
) -> None:
    model_of(HUB[name], "config.json")
    with pytest.raises(CheckpointError, match=f"^config.json: .*{named}"):
        model_of(HUB[name] | change, "config.json")


def test_an_imported_model_keeps_its_positions() -> None:
    config = ModelConfig(vocab_size=90, sequence_length=64)
    for positions, wanted in ((None, 64), (8192, 8192), (32, 64)):
        given = config.model_copy(update={"max_positions": positions})
        assert settings_of(given, "float32", TOKENS)["max_position_embeddings"] == wanted


def test_what_is_null_is_not_what_is_left_out() -> None:
    assert model_of(HUB["qwen3"] | {"num_key_value_heads": None}, "config.json")["kv_heads"] == 16
    left_out = {key: value for key, value in HUB["qwen3"].items() if key != "num_key_value_heads"}
    assert model_of(left_out, "config.json")["kv_heads"] == 32


def test_what_a_person_says_does_not_matter_is_let_through() -> None:
    given = GOOD | {"training_note": "x", "is_mine": True}
    with pytest.raises(CheckpointError, match=r"training_note='x'"):
        model_of(given, "config.json", ["is_mine"])
    assert model_of(given, "config.json", ["is_mine", "training_note"]) == model_of(GOOD, "config.json")


def test_the_window_that_qwen_writes_without_using_it_is_no_window() -> None:
    given = GOOD | {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}
    assert model_of(given, "config.json") == model_of(GOOD, "config.json")
    with pytest.raises(CheckpointError, match=r"sliding_window=4096"):
        model_of({k: v for k, v in given.items() if k != "use_sliding_window"}, "config.json")
