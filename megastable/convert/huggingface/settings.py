"""Translate config.json of a Hugging Face folder to our model's configuration, and back. Pure.

Both spellings are written: `rope_theta` and `torch_dtype` for transformers 4, `rope_parameters` and `dtype` for 5. An
option that our model does not support is refused by name, as is an unknown key: it might change what the model
computes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megastable.base.errors import CheckpointError
from megastable.config.model import ModelConfig
from megastable.convert.huggingface.architectures import (
    ARCHITECTURES,
    GELU,
    GEMMA2,
    MISTRAL,
    QWEN2,
    QWEN3,
    Architecture,
    architecture_of,
    query_scalar,
)
from megastable.convert.huggingface.rope_settings import LAYERS, Settings, number, read_rope, rope_of

KNOWN = {architecture.name: architecture for architecture in ARCHITECTURES}
SIZES = {  # ours and theirs
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "vocab_size": "vocab_size",
}
MAY_LACK = {"num_key_value_heads", "head_dim"}
ACTIVATIONS: dict[str, tuple[tuple[Any, ...], str]] = {  # theirs, and the MLP
    "silu": (("silu", "swish"), "its MLP is a SwiGLU"), "gelu": ((GELU,), "its MLP is a GeGLU (tanh)"),
}  # fmt: skip
FULL, SLIDING = LAYERS
OF_WINDOWS = ("sliding_window", "use_sliding_window", "layer_types")
QWENS = (QWEN3, QWEN2)
# Gemma 2's caps: ours and theirs.
CAPS = {"attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"}
SCALAR = "query_pre_attn_scalar"
# Their options, and the only supported value of each, with the reason.
ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "attention_bias": ((False,), "its only biases are those of q, k and v, as Qwen2 has them"),
    "mlp_bias": ((False,), "it has no biases"),
    "attention_dropout": ((0,), "attention has no dropout"),
    "use_sliding_window": ((False,), "it attends to all that came before"),
    "use_bidirectional_attention": ((False, None), "its attention is causal"),
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
# Keys about the file, the training, or text generation, which do not change the logits; and those always read.
NO_MATTER = frozenset(
    "architectures model_type transformers_version torch_dtype dtype use_cache bos_token_id eos_token_id pad_token_id "
    "sep_token_id decoder_start_token_id initializer_range _name_or_path return_dict output_hidden_states "
    "output_attentions id2label label2id max_window_layers is_decoder chunk_size_feed_forward max_length min_length "
    "do_sample num_beams temperature top_k top_p typical_p repetition_penalty length_penalty num_beam_groups "
    "diversity_penalty num_return_sequences tokenizer_class max_position_embeddings rms_norm_eps tie_word_embeddings "
    "rope_theta rope_parameters rope_scaling sliding_window layer_types max_sequence_length is_llama_config "
    "cache_implementation transformers.js_config".split()
)


def settings_of(config: ModelConfig, dtype: str, tokens: Mapping[str, int | None]) -> dict[str, Any]:
    """config.json. dtype: of the weights, as torch calls it ("bfloat16"); tokens: "bos", "eos" and "pad", ids or None.

    Raises ConfigError as `architecture_of`.
    """
    kind = architecture_of(config)
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
        "hidden_act": ACTIVATIONS[config.activation][0][0],
        "max_position_embeddings": config.longest,
        "rms_norm_eps": config.norm_eps,
        **rope_of(config, kind),
        "tie_word_embeddings": config.tied,
        "attention_dropout": 0.0,
        "initializer_range": config.init_std,
        "use_cache": True,
        **{f"{name}_token_id": id for name, id in tokens.items()},
        "torch_dtype": dtype,
        "dtype": dtype,
        **kind.written,
        **_windows_of(config, kind),
    }
    if kind is GEMMA2:
        found |= {SCALAR: query_scalar(config)}
        found |= {theirs: getattr(config, ours) for ours, theirs in CAPS.items()}
    return found


def _windows_of(config: ModelConfig, kind: Architecture) -> dict[str, Any]:
    """The entries of config.json."""
    if kind is MISTRAL:
        return {"sliding_window": config.window}
    if "window" not in kind.free:
        return {}
    types = [FULL if config.window_of(block) is None else SLIDING for block in range(config.layers)]
    if kind in QWENS and config.window is None:
        return {"use_sliding_window": False, "sliding_window": None}
    used = {"use_sliding_window": True} if kind in QWENS else {}
    # Transformers want a size even where no layer has the window.
    return used | {"sliding_window": config.window or config.longest, "layer_types": types}


def model_of(given: Settings, where: str, accept: Collection[str] = ()) -> dict[str, Any]:
    """Our model by config.json: keys of `ModelConfig`. `sequence_length` is the longest that it supports.

    where: for messages; accept: keys that the user declared irrelevant. Raises CheckpointError.
    """
    kind = _architecture(given, where)
    if "window" not in kind.free:
        given = {key: value for key, value in given.items() if key not in accept or key not in OF_WINDOWS}
    for key, value in given.items():
        if key not in accept:
            _refuse(kind, key, value, where)
    sizes = _sizes(given, kind, where)
    tied = _given(given, "tie_word_embeddings", kind, False)
    if not isinstance(tied, bool):
        raise CheckpointError(f"{where}: tie_word_embeddings={tied!r}: it must be true or false")
    theta, scaling = read_rope(given, kind, where)
    window, every = _windows(given, kind, sizes["layers"], where)
    found = kind.values() | sizes | {
        "tied": tied,
        "norm_eps": number(_given(given, "rms_norm_eps", kind), "rms_norm_eps", where),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "window": window,
        "full_attention_every": every,
        "sequence_length": _count(_given(given, "max_position_embeddings", kind), "max_position_embeddings", where),
    }  # fmt: skip
    if kind is GEMMA2:
        scalar = number(_given(given, SCALAR, kind), SCALAR, where)
        found["attention_scale"] = None if scalar == sizes["head_dim"] else scalar**-0.5
        for ours, theirs in CAPS.items():
            cap = _given(given, theirs, kind)
            found[ours] = None if cap is None else number(cap, theirs, where)
    return found


def _given(given: Settings, key: str, kind: Architecture, default: Any = None) -> Any:
    """The file's value; if it has none, the architecture's default."""
    return given[key] if key in given else kind.defaults.get(key, default)


def _sizes(given: Settings, kind: Architecture, where: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for ours, theirs in SIZES.items():
        value = given.get(theirs)
        if value is None and theirs in MAY_LACK:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise CheckpointError(f"{where}: {theirs}={value!r}: it must be a number of at least 1")
        found[ours] = value
    # Their defaults for missing keys.
    found.setdefault("kv_heads", _given(given, "num_key_value_heads", kind) or found["heads"])
    if "head_dim" not in found:
        if "head_dim" not in kind.defaults and found["hidden"] % found["heads"]:
            raise CheckpointError(
                f"{where}: head_dim is missing, and num_attention_heads={found['heads']} does not divide "
                f"hidden_size={found['hidden']}"
            )
        found["head_dim"] = kind.defaults.get("head_dim", found["hidden"] // found["heads"])
    return found


def _windows(given: Settings, kind: Architecture, layers: int, where: str) -> tuple[int | None, int | None]:
    """`window` and `full_attention_every`. Raises CheckpointError for other patterns of windows."""
    window, types = _window(given, kind, where), given.get("layer_types")
    if types is None:
        if window is None or (kind in QWENS and not _has_windows(given, kind, layers, where)):
            return None, None
        return window, kind.full_every or None
    if not isinstance(types, list) or len(types) != layers or not set(map(str, types)) <= {FULL, SLIDING}:
        raise _layers_refused(types, f"it must list {FULL} or {SLIDING} for each of {layers} layers", where)
    full = [name == FULL for name in types]
    if all(full) and (window is None or kind is not MISTRAL):
        return None, None
    if window is None:
        why = "the model has no window, and attends to all that came before in every layer"
        raise _layers_refused(types, why, where)
    if not any(full):
        return window, None
    every = full.index(True) + 1
    if kind is MISTRAL or full != [(i + 1) % every == 0 for i in range(layers)]:
        either = "" if kind is MISTRAL else ", or all but every n-th"
        raise _layers_refused(types, f"all layers of a {kind.name} have the window{either}", where)
    return window, every


def _layers_refused(types: Any, why: str, where: str) -> CheckpointError:
    return CheckpointError(f"{where}: layer_types={types!r}: not supported: {why}")


def _window(given: Settings, kind: Architecture, where: str) -> int | None:
    value, used = _given(given, "sliding_window", kind), given.get("use_sliding_window")
    if kind in QWENS or "window" not in kind.free:
        # Qwen's files contain a window also where it is not used.
        if used is False or given.get("sliding_window") is None:
            return None
        if used is not True:
            raise CheckpointError(
                f"{where}: sliding_window={value!r}: not supported: the model attends to all that came before"
            )
    return None if value is None else _count(value, "sliding_window", where)


def _has_windows(given: Settings, kind: Architecture, layers: int, where: str) -> bool:
    """Whether all layers of a Qwen have the window, or none; Qwen's first layers have none."""
    first = _given(given, "max_window_layers", kind)
    if isinstance(first, bool) or not isinstance(first, int) or 0 < first < layers:
        raise CheckpointError(
            f"{where}: max_window_layers={first!r}: not supported: of {layers} layers the first attend to all, and "
            "the others do not: here either all layers have the window, or all but every n-th"
        )
    return first <= 0


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


def _refuse(kind: Architecture, key: str, value: Any, where: str) -> None:
    """Raises CheckpointError for an option that our model does not support."""
    problem = ""
    allowed, why = ONLY.get(key, ((), ""))
    if key in ("hidden_act", "hidden_activation"):
        # Gemma 2's key is the second one; elsewhere it does not matter if it is null.
        allowed, why = ACTIVATIONS[kind.values()["activation"]]
        allowed += (None,) if key == "hidden_activation" and kind is not GEMMA2 else ()
    elif key == "use_sliding_window" and kind in QWENS:
        allowed = (False, True)
    if why and not (kind is GEMMA2 and key in CAPS.values()):
        if not any(
            value == other and isinstance(value, bool) == isinstance(other, bool) for other in allowed
        ):
            problem = f"not supported: {why}"
    elif key not in _read(kind) and value not in (None, False, {}, []):
        problem = f"unknown key, which may change what the model computes; if it does not, add --accept {key}"
    if problem:
        raise CheckpointError(f"{where}: {key}={value!r}: {problem}")


def _read(kind: Architecture) -> Collection[str]:
    """Keys that `model_of` reads, or that do not matter."""
    return NO_MATTER.union(SIZES.values(), (SCALAR, *CAPS.values()) if kind is GEMMA2 else ())


def _count(value: Any, key: str, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{where}: {key}={value!r}: it must be a number of at least 1")
    return value
