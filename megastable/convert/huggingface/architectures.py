"""Table of the Hugging Face architectures that equal a model of ours, and the model keys that each has. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic.fields import FieldInfo

from megastable.base.errors import ConfigError
from megastable.config.model import ModelConfig

# Keys about training, initialisation and padding, which neither choose an architecture nor lie in a folder.
OWN = frozenset(
    "sequence_length max_positions vocab_multiple dropout init init_std residual_init z_loss".split()
)
# Keys that every architecture has, with any value.
EVERYWHERE = frozenset(
    "layers hidden heads kv_heads head_dim ffn vocab_size rope_theta rope_scaling norm_eps tied".split()
)
WINDOWS = frozenset({"window", "full_attention_every"})
BEFORE = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
AFTER = {"attention_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"}
AROUND = {
    "attention_norm": "input_layernorm", "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm", "mlp_post_norm": "post_feedforward_layernorm",
}  # fmt: skip
GELU = "gelu_pytorch_tanh"


@dataclass(frozen=True)
class Architecture:
    """type: "model_type" of config.json; name: the class. norms: their names of a block's norms, by ours.

    has: its values of our model keys, where they are not ModelConfig's defaults (`qk_norm`: False). free: further keys
    that it has with any value. full_every: with a window, every n-th block attends to all unless the file says
    otherwise; 0: none does. written: further entries of config.json, always the same. defaults: values of entries that
    a config.json may omit (configuration_*.py of transformers 4.57 and 5.23).
    """

    type: str
    name: str
    norms: Mapping[str, str]
    has: Mapping[str, Any] = field(default_factory=dict)
    free: frozenset[str] = frozenset()
    full_every: int = 0
    written: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def values(self, fields: Mapping[str, FieldInfo] = ModelConfig.model_fields) -> dict[str, Any]:
        """The model keys that it fixes, with its values. fields: of the configuration."""
        plain = {key: f.default for key, f in fields.items() if key not in OWN | EVERYWHERE | self.free}
        return plain | {"qk_norm": False} | dict(self.has)


QWEN3 = Architecture(
    "qwen3", "Qwen3ForCausalLM", BEFORE, {"qk_norm": True}, WINDOWS, written={"attention_bias": False},
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128,
              "sliding_window": 4096, "max_window_layers": 28},
)  # fmt: skip
QWEN2 = Architecture(
    "qwen2", "Qwen2ForCausalLM", BEFORE, {"qkv_bias": True}, WINDOWS,
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "num_key_value_heads": 32,
              "sliding_window": 4096, "max_window_layers": 28},
)  # fmt: skip
LLAMA = Architecture(
    "llama", "LlamaForCausalLM", BEFORE, written={"attention_bias": False, "mlp_bias": False},
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
)  # fmt: skip
MISTRAL = Architecture(  # without a window it is a Llama
    "mistral", "MistralForCausalLM", BEFORE, free=frozenset({"window"}),
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 131_072, "num_key_value_heads": 8,
              "sliding_window": 4096},
)  # fmt: skip
OLMO2 = Architecture(
    "olmo2", "Olmo2ForCausalLM", AFTER, {"qk_norm": "full", "norms": "after"}, written={"attention_bias": False},
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
)  # fmt: skip
OLMO3 = Architecture(  # it scales the rotary embeddings of some blocks only: here, of none
    "olmo3", "Olmo3ForCausalLM", AFTER, {"qk_norm": "full", "norms": "after", "rope_scaling": None}, WINDOWS,
    full_every=4, written={"attention_bias": False},
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "rope_theta": 500_000.0, "sliding_window": 4096},
)  # fmt: skip
GEMMA2 = Architecture(
    "gemma2", "Gemma2ForCausalLM", AROUND,
    {"norms": "both", "zero_centered_norms": True, "activation": "gelu", "embedding_scale": "sqrt_hidden"},
    WINDOWS | {"attention_scale", "attention_softcap", "logit_softcap"}, full_every=2,
    written={"attention_bias": False, "hidden_activation": GELU},
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 8192, "num_key_value_heads": 4, "head_dim": 256,
              "sliding_window": 4096, "tie_word_embeddings": True, "query_pre_attn_scalar": 256,
              "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
)  # fmt: skip

# The first that fits is the one that is written.
ARCHITECTURES = (QWEN3, LLAMA, QWEN2, OLMO2, MISTRAL, OLMO3, GEMMA2)


def architecture_of(config: ModelConfig) -> Architecture:
    """The equivalent architecture. Raises ConfigError with the options that have no equivalent."""
    found = [(kind, _differences(config, kind)) for kind in ARCHITECTURES]
    least = min(len(lacking) for _, lacking in found)
    near = [(kind, lacking) for kind, lacking in found if len(lacking) == least]
    if least:
        keys = dict.fromkeys(key for _, lacking in near for key in lacking)
        ours = " with ".join(f"model.{key}={getattr(config, key)}" for key in keys)
        theirs = "; ".join(
            f"{kind.name} with " + " ".join(f"{key}={value}" for key, value in lacking.items())
            for kind, lacking in near
        )
        raise ConfigError(f"{ours}: no supported Hugging Face architecture has this; the nearest: {theirs}")
    kind = near[0][0]
    if kind is GEMMA2:
        query_scalar(config)
    return kind


def _differences(config: ModelConfig, kind: Architecture) -> dict[str, Any]:
    """The architecture's values of the keys in which it is not this model."""
    wanted = kind.values(type(config).model_fields)
    return {key: value for key, value in wanted.items() if getattr(config, key) != value}


def query_scalar(config: ModelConfig) -> int:
    """Gemma 2's `query_pre_attn_scalar`: n of the scale 1 / sqrt(n). Raises ConfigError."""
    if config.attention_scale is None:
        return config.head_width
    n = max(1, round(config.attention_scale**-2))
    if n**-0.5 != config.attention_scale:
        raise ConfigError(
            f"model.attention_scale={config.attention_scale}: {GEMMA2.name} has 1 / sqrt(n) of a whole number n only: "
            f"the nearest is {n**-0.5!r}"
        )
    return n
