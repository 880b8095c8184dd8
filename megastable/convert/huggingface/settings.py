"""Translate config.json of a Hugging Face folder to our model's configuration, and back. Pure.

Both spellings are written: `rope_theta` and `torch_dtype` for transformers 4, `rope_parameters` and `dtype` for 5. An
option that our model does not support is refused by name, as is an unknown key: it might change what the model
computes.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import ValidationError

from megastable.base.errors import CheckpointError
from megastable.config.model import ModelConfig, RopeScalingConfig
from megastable.convert.huggingface.names import (
    LLAMA,
    MISTRAL,
    OLMO2,
    QWEN2,
    QWEN3,
    Architecture,
    architecture_of,
)

Settings = Mapping[str, Any]

KNOWN = {architecture.name: architecture for architecture in (QWEN3, QWEN2, LLAMA, MISTRAL, OLMO2)}
SIZES = {  # ours and theirs
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "vocab_size": "vocab_size",
}
# Defaults of keys that a config.json may omit (configuration_*.py of transformers 4.57 and 5.23).
MAY_LACK = {"num_key_value_heads", "head_dim"}
EPS = {QWEN3.type: 1e-6, QWEN2.type: 1e-6, LLAMA.type: 1e-6, MISTRAL.type: 1e-6, OLMO2.type: 1e-5}
POSITIONS = {QWEN3.type: 32768, QWEN2.type: 32768, LLAMA.type: 2048, MISTRAL.type: 131_072, OLMO2.type: 2048}
KV_HEADS = {QWEN3.type: 32, QWEN2.type: 32, MISTRAL.type: 8}  # others: the number of heads
WINDOW = 4096  # of a Mistral
THETA = 10_000.0
# Supported scalings of rotary embeddings: keys of `RopeScalingConfig`, and theirs.
SCALED = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
        "original_length": "original_max_position_embeddings",
    },
}  # fmt: skip
MOST = sys.float_info.max  # a larger JSON integer does not fit a float
# Their options, and the only supported value of each, with the reason.
ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu", "swish"), "its MLP is a SwiGLU"),
    "attention_bias": ((False,), "its only biases are those of q, k and v, as Qwen2 has them"),
    "mlp_bias": ((False,), "it has no biases"),
    "attention_dropout": ((0,), "it has no dropout"),
    "use_sliding_window": ((False,), "it attends to all that came before"),
    "pretraining_tp": ((1,), "its products are whole"),
    "partial_rotary_factor": ((1, None), "it rotates whole heads"),
    "rope_interleaved": ((False,), "its rotary embeddings are half-split"),
    "quantization_config": ((None,), "its weights are not quantized"),
    "logits_scaling": ((1, None), "its logits are not scaled"),
    "logit_scale": ((1, None), "its logits are not scaled"),
    "final_logit_softcapping": ((None,), "its logits are not capped"),
    "attn_logit_softcapping": ((None,), "its attention is not capped"),
    "embedding_multiplier": ((1, None), "its embeddings are not scaled"),
    "residual_multiplier": ((1, None), "its residuals are not scaled"),
    "is_encoder_decoder": ((False,), "it is a decoder"),
}
# Keys about the file, the training, or text generation, which do not change the logits.
NO_MATTER = frozenset(
    "architectures model_type transformers_version torch_dtype dtype use_cache bos_token_id eos_token_id pad_token_id "
    "sep_token_id decoder_start_token_id initializer_range _name_or_path return_dict output_hidden_states "
    "output_attentions id2label label2id max_window_layers is_decoder chunk_size_feed_forward max_length min_length "
    "do_sample num_beams temperature top_k top_p typical_p repetition_penalty length_penalty num_beam_groups "
    "diversity_penalty num_return_sequences tokenizer_class max_position_embeddings rms_norm_eps tie_word_embeddings "
    "rope_theta rope_parameters rope_scaling sliding_window layer_types max_sequence_length is_llama_config "
    "transformers.js_config".split()
)


def settings_of(config: ModelConfig, dtype: str, tokens: Mapping[str, int | None]) -> dict[str, Any]:
    """config.json. dtype: of the weights, as torch calls it ("bfloat16"); tokens: "bos", "eos" and "pad", ids or None.

    Raises ConfigError as `architecture_of`.
    """
    kind, rope = architecture_of(config), _written(config.rope_scaling)
    found: dict[str, Any] = {
        "architectures": [kind.name],
        "model_type": kind.type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.key_value_heads,
        "head_dim": config.head_width,
        "hidden_act": "silu",
        "max_position_embeddings": config.longest,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": rope | {"rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tied,
        "attention_dropout": 0.0,
        "initializer_range": config.init_std,
        "use_cache": True,
        **{f"{name}_token_id": id for name, id in tokens.items()},
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    if config.rope_scaling is not None:
        found["rope_scaling"] = rope
    if kind is not QWEN2:  # which has them by default
        found["attention_bias"] = False
    if kind is LLAMA:
        found["mlp_bias"] = False
    if kind in (QWEN3, QWEN2):
        found |= {"use_sliding_window": False, "sliding_window": None}
    return found


def _written(scaling: RopeScalingConfig | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default"}
    keys = SCALED[scaling.kind]
    return {"rope_type": scaling.kind} | {theirs: getattr(scaling, ours) for ours, theirs in keys.items()}


def model_of(given: Settings, where: str, accept: Collection[str] = ()) -> dict[str, Any]:
    """Our model by config.json: keys of `ModelConfig`. `sequence_length` is the longest that it supports, or on which
    it computes the same as ours: within its window a Mistral attends to all earlier tokens.

    where: for messages; accept: keys that the user declared irrelevant. Raises CheckpointError.
    """
    kind = _architecture(given, where)
    for key, value in given.items():
        _refuse(kind, key, value, where, given, accept)
    found: dict[str, Any] = {}
    for ours, theirs in SIZES.items():
        value = given.get(theirs)
        if value is None and theirs in MAY_LACK:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise CheckpointError(f"{where}: {theirs}={value!r}: it must be a number of at least 1")
        found[ours] = value
    # Their defaults for missing keys.
    silent = kind.type in KV_HEADS and "num_key_value_heads" not in given
    found.setdefault("kv_heads", KV_HEADS[kind.type] if silent else found["heads"])
    if "head_dim" not in found:
        if kind is not QWEN3 and found["hidden"] % found["heads"]:
            raise CheckpointError(
                f"{where}: head_dim is missing, and num_attention_heads={found['heads']} does not divide "
                f"hidden_size={found['hidden']}"
            )
        found["head_dim"] = 128 if kind is QWEN3 else found["hidden"] // found["heads"]
    tied = given.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise CheckpointError(f"{where}: tie_word_embeddings={tied!r}: it must be true or false")
    positions = _count(
        given.get("max_position_embeddings", POSITIONS[kind.type]), "max_position_embeddings", where
    )
    if kind is MISTRAL and (window := given.get("sliding_window", WINDOW)) is not None:
        positions = min(positions, _count(window, "sliding_window", where))
    norms: dict[str, bool | str] = {QWEN3.type: True, OLMO2.type: "full"}
    theta, scaling = _rope(given, where)
    return found | {
        "qk_norm": norms.get(kind.type, False),
        "qkv_bias": kind is QWEN2,
        "norms": "after" if kind is OLMO2 else "before",
        "tied": tied,
        "norm_eps": _number(given.get("rms_norm_eps", EPS[kind.type]), "rms_norm_eps", where),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "sequence_length": positions,
    }


def _architecture(given: Settings, where: str) -> Architecture:
    names = given.get("architectures")
    if isinstance(names, list) and len(names) == 1 and str(names[0]) in KNOWN:
        found = KNOWN[str(names[0])]
        if given.get("model_type", found.type) == found.type:
            return found
    raise CheckpointError(
        f"{where}: architectures={names!r}, model_type={given.get('model_type')!r}: those that are known here: "
        f"{', '.join(f'{a.name} ({a.type})' for a in KNOWN.values())}"
    )


def _refuse(
    kind: Architecture, key: str, value: Any, where: str, given: Settings, accept: Collection[str]
) -> None:
    """Raises CheckpointError for an option that our model does not support."""
    problem = ""
    if key in accept:
        return
    if key in ONLY:
        allowed, why = ONLY[key]
        if not any(
            value == other and isinstance(value, bool) == isinstance(other, bool) for other in allowed
        ):
            problem = f"not supported: {why}"
    elif key == "sliding_window":
        # Qwen's files contain an unused window. A Mistral's limits the sequence length; see `model_of`.
        if value is not None and given.get("use_sliding_window") is not False and kind is not MISTRAL:
            problem = "not supported: the model attends to all that came before"
    elif key == "layer_types":
        if value is not None and not (isinstance(value, list) and set(map(str, value)) <= {"full_attention"}):
            problem = "not supported: the model attends to all that came before in every layer"
    elif key not in NO_MATTER and key not in SIZES.values() and value not in (None, False, {}, []):
        problem = f"unknown key, which may change what the model computes; if it does not, add --accept {key}"
    if problem:
        raise CheckpointError(f"{where}: {key}={value!r}: {problem}")


def _rope(given: Settings, where: str) -> tuple[float, RopeScalingConfig | None]:
    """Base and scaling of the rotary embeddings, by the old keys and the new; they must agree."""
    bases: dict[str, float] = {}
    scalings: dict[str, RopeScalingConfig | None] = {}
    if given.get("rope_theta") is not None:
        bases["rope_theta"] = _number(given["rope_theta"], "rope_theta", where)
    for key in ("rope_scaling", "rope_parameters"):
        value = given.get(key)
        if value is None or value == {}:
            continue
        if not isinstance(value, dict):
            raise CheckpointError(f"{where}: {key}={value!r}: it must be a mapping")
        scalings[key] = _scaling(value, key, where)
        if value.get("rope_theta") is not None:
            bases[f"{key}.rope_theta"] = _number(value["rope_theta"], f"{key}.rope_theta", where)
    if len(set(scalings.values())) > 1:
        raise CheckpointError(f"{where}: rope_scaling and rope_parameters disagree: correct one")
    if len(set(bases.values())) > 1:
        both = " and ".join(f"{key}={value}" for key, value in bases.items())
        raise CheckpointError(f"{where}: {both} disagree: correct one")
    return next(iter(bases.values()), THETA), next(iter(scalings.values()), None)


def _scaling(value: Settings, key: str, where: str) -> RopeScalingConfig | None:
    # Older files use another key for the type.
    kinds = {str(value[k]) for k in ("rope_type", "type") if value.get(k) is not None} or {"default"}
    rest = {k: v for k, v in value.items() if k not in ("rope_type", "type", "rope_theta") and v is not None}
    whole = rest.pop("partial_rotary_factor", 1) == 1
    (kind,) = kinds if len(kinds) == 1 else ("",)
    keys = SCALED.get(kind, {})
    problem = ""
    if not whole:
        problem = "it rotates whole heads"
    elif kind not in (*SCALED, "default"):
        problem = f"its rotary embeddings can be scaled as {' or '.join(SCALED)} only"
    elif missing := sorted(set(keys.values()) - set(rest)):
        problem = f"rotary embeddings of type {kind} need {missing[0]}"
    elif strange := sorted(set(rest) - set(keys.values())):
        problem = f"rotary embeddings of type {kind} have no {strange[0]}"
    if problem:
        raise CheckpointError(f"{where}: {key}={value!r}: not supported: {problem}")
    if kind == "default":
        return None
    numbers = {ours: _number(rest[theirs], f"{key}.{theirs}", where) for ours, theirs in keys.items()}
    try:
        return RopeScalingConfig.model_validate({"kind": kind, **numbers})
    except ValidationError as error:
        detail = error.errors()[0]
        named = ".".join(map(str, detail["loc"])) or "as ours"
        problem = detail["msg"].removeprefix("Value error, ")
        raise CheckpointError(f"{where}: {key}={value!r}: {named}: {problem}") from None


def _count(value: Any, key: str, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{where}: {key}={value!r}: it must be a number of at least 1")
    return value


def _number(value: Any, key: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MOST:
        raise CheckpointError(f"{where}: {key}={value!r}: it must be a number above 0")
    return float(value)
