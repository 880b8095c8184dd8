"""Translate config.json of a Hugging Face folder to our model's configuration, and back. Pure.

Both spellings are written: `rope_theta` and `torch_dtype` for transformers 4, `rope_parameters` and `dtype` for 5. An
option that our model does not support is refused by name, as is an unknown key: it might change what the model
computes.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from megastable.base.errors import CheckpointError
from megastable.config.model import ModelConfig, RopeScalingConfig
from megastable_tools.convert.huggingface.architectures import (
    ARCHITECTURES,
    DOTS1,
    GEMMA2,
    OLMO3,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    TABLES,
    Architecture,
    architecture_of,
    query_scalar,
)

Settings = Mapping[str, Any]

KNOWN = {architecture.name: architecture for architecture in ARCHITECTURES}
MAY_LACK = {"num_key_value_heads", "head_dim"}
FULL, SLIDING = LAYERS = ("full_attention", "sliding_attention")
OF_WINDOWS = ("sliding_window", "use_sliding_window", "layer_types")
QWENS = (QWEN3, QWEN2, QWEN3_MOE)
# Their layers have the window from max_window_layers on, unless layer_types says otherwise.
LATE = (QWEN3, QWEN2, DOTS1)
CAPS: dict[str, str] = TABLES["caps"]  # Gemma 2's: ours and theirs
MLP_ONLY, SPARSE_STEP = "mlp_only_layers", "decoder_sparse_step"
SCALAR = "query_pre_attn_scalar"
READ = frozenset(TABLES["no_matter"].split()) | set(TABLES["sizes"].values())  # or do not matter
THETA = 10_000.0  # of rotary embeddings, unless the architecture has another default
SCALED: dict[str, dict[str, str]] = TABLES["rope_scalings"]
ROPE_MAY_LACK = {"beta_slow", "beta_fast", "attention_factor"}
KINDS = "linear, llama3 or yarn"
MOST = sys.float_info.max  # a larger JSON integer does not fit a float


def settings_of(config: ModelConfig, dtype: str, tokens: Mapping[str, int | None]) -> dict[str, Any]:
    """config.json. dtype: of the weights, as torch calls it ("bfloat16"); tokens: "bos", "eos" and "pad", ids or None.

    Raises ConfigError as `architecture_of`.
    """
    model_kind = architecture_of(config)
    rope_whole = _written(config.rope_scaling) | {"rope_theta": config.rope_theta}
    # Transformers 5 have one set for each kind of layer of an OLMo 3.
    rope_parameters = {kind: dict(rope_whole) for kind in LAYERS} if model_kind is OLMO3 else rope_whole
    rope_entries: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_parameters": rope_parameters}
    if config.rope_scaling is not None:
        rope_entries["rope_scaling"] = _written(config.rope_scaling)
    config_entries: dict[str, Any] = {
        "architectures": [model_kind.name],
        "model_type": model_kind.type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.key_value_heads,
        "head_dim": config.head_width,
        "hidden_act": TABLES["activations"][config.activation][0][0],
        "max_position_embeddings": config.longest,
        "rms_norm_eps": config.norm_eps,
        **rope_entries,
        "tie_word_embeddings": config.tied,
        "attention_dropout": 0.0,
        "initializer_range": config.init_std,
        "use_cache": True,
        **{f"{token_name}_token_id": token_id for token_name, token_id in tokens.items()},
        "torch_dtype": dtype,
        "dtype": dtype,
        **model_kind.written,
        **_windows_of(config, model_kind),
        **_experts_of(config, model_kind),
    }
    if model_kind is GEMMA2:
        config_entries |= {SCALAR: query_scalar(config)}
        config_entries |= {their_key: getattr(config, our_key) for our_key, their_key in CAPS.items()}
    return config_entries


def _windows_of(config: ModelConfig, kind: Architecture) -> dict[str, Any]:
    """The entries of config.json."""
    if "window" not in kind.free:
        return {}
    if "full_attention_every" not in kind.free and kind not in QWENS:
        return {"sliding_window": config.window}
    layer_types = [FULL if config.window_of(block) is None else SLIDING for block in range(config.layers)]
    if kind in QWENS and config.window is None:
        return {"use_sliding_window": False, "sliding_window": None}
    is_used = {"use_sliding_window": True} if kind in QWENS else {}
    if "full_attention_every" not in kind.free:
        return is_used | {"sliding_window": config.window}
    # Transformers want a size even where no layer has the window.
    return is_used | {"sliding_window": config.window or config.longest, "layer_types": layer_types}


def _experts_of(config: ModelConfig, kind: Architecture) -> dict[str, Any]:
    """The entries of config.json."""
    if kind.experts is None or config.experts is None:
        return {}
    our_values = config.experts.model_dump() | {"ffn": config.expert_width}
    expert_entries = {theirs[0]: our_values[our_key] for our_key, theirs in kind.experts.keys.items()}
    if kind is QWEN3_MOE:
        expert_entries |= {MLP_ONLY: list(range(config.experts.first_dense)), SPARSE_STEP: 1}
    return expert_entries


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
    model_sizes = _sizes(given, kind, where)
    is_tied = _given(given, "tie_word_embeddings", kind, False)
    if not isinstance(is_tied, bool):
        raise CheckpointError(f"{where}: tie_word_embeddings={is_tied!r}: it must be true or false")
    rope_theta, rope_scaling = read_rope(given, kind, where)
    window_size, full_every = _windows(given, kind, model_sizes["layers"], where)
    model_settings = kind.fixed_values() | model_sizes | {
        "tied": is_tied,
        "norm_eps": read_positive_number(_given(given, "rms_norm_eps", kind), "rms_norm_eps", where),
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "window": window_size,
        "full_attention_every": full_every,
        "sequence_length": _count(_given(given, "max_position_embeddings", kind), "max_position_embeddings", where),
    }  # fmt: skip
    if kind.experts is not None:
        model_settings["experts"] = _read_experts(given, kind, model_sizes["layers"], where)
    if kind is GEMMA2:
        scalar = read_positive_number(_given(given, SCALAR, kind), SCALAR, where)
        model_settings["attention_scale"] = None if scalar == model_sizes["head_dim"] else scalar**-0.5
        for our_key, their_key in CAPS.items():
            cap = _given(given, their_key, kind)
            model_settings[our_key] = None if cap is None else read_positive_number(cap, their_key, where)
    return model_settings


def _given(given: Settings, key: str, kind: Architecture, default: Any = None) -> Any:
    """The file's value; if it has none, the architecture's default."""
    return given[key] if key in given else kind.defaults.get(key, default)


def _sizes(given: Settings, kind: Architecture, where: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for our_key, their_key in TABLES["sizes"].items():
        given_value = given.get(their_key)
        if given_value is not None or their_key not in MAY_LACK:
            found[our_key] = _count(given_value, their_key, where)
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


def _read_experts(given: Settings, kind: Architecture, layers: int, where: str) -> dict[str, Any]:
    """Keys of `ExpertsConfig`, without those about training. Raises CheckpointError."""
    assert kind.experts is not None
    expert_settings = kind.experts.fixed_values()
    for our_key, their_keys in kind.experts.keys.items():
        if kind is QWEN3_MOE and our_key == "first_dense":
            expert_settings[our_key] = _count_dense(given, layers, where)
            continue
        spellings = {used_key: given[used_key] for used_key in their_keys if used_key in given}
        if len(set(map(repr, spellings.values()))) > 1:
            raise CheckpointError(f"{where}: {' and '.join(spellings)} disagree: correct one")
        used_key = next(iter(spellings), their_keys[0])
        given_value = _given(given, used_key, kind)
        if our_key == "normalize":
            if not isinstance(given_value, bool):
                raise CheckpointError(f"{where}: {used_key}={given_value!r}: it must be true or false")
            expert_settings[our_key] = given_value
        elif our_key == "scale":
            expert_settings[our_key] = read_positive_number(given_value, used_key, where)
        elif our_key == "first_dense" and type(given_value) is int and given_value == 0:
            expert_settings[our_key] = 0
        else:
            expert_settings[our_key] = _count(given_value, used_key, where)
    return expert_settings


def _count_dense(given: Settings, layers: int, where: str) -> int:
    """How many of the first layers have no experts. Raises CheckpointError for other patterns."""
    sparse_step = _count(given.get(SPARSE_STEP, 1), SPARSE_STEP, where)
    named_layers = [] if given.get(MLP_ONLY) is None else given[MLP_ONLY]
    if not isinstance(named_layers, list) or not all(type(number) is int for number in named_layers):
        raise CheckpointError(f"{where}: {MLP_ONLY}={named_layers!r}: it must list numbers of layers")
    dense_layers = [layer for layer in range(layers) if layer in named_layers or (layer + 1) % sparse_step]
    if dense_layers != list(range(len(dense_layers))) or len(dense_layers) == layers:
        raise CheckpointError(
            f"{where}: {MLP_ONLY}={named_layers!r}, {SPARSE_STEP}={sparse_step}: not supported: of {layers} layers, "
            f"{len(dense_layers)} have no experts; here only the first ones can lack them, and not all"
        )
    return len(dense_layers)


def _windows(given: Settings, kind: Architecture, layers: int, where: str) -> tuple[int | None, int | None]:
    """`window` and `full_attention_every`. Raises CheckpointError for other patterns of windows."""
    window, types = _window(given, kind, where), given.get("layer_types")
    if types is None:
        if window is None or (kind in LATE and not _has_windows(given, kind, layers, where)):
            return None, None
        return window, kind.full_every or None
    if not isinstance(types, list) or len(types) != layers or not set(map(str, types)) <= {FULL, SLIDING}:
        raise _layers_refused(types, f"it must list {FULL} or {SLIDING} for each of {layers} layers", where)
    full, is_alike = [layer_type == FULL for layer_type in types], "full_attention_every" not in kind.free
    if all(full) and (window is None or not is_alike):
        return None, None
    if window is None:
        refusal_reason = "the model has no window, and attends to all that came before in every layer"
        raise _layers_refused(types, refusal_reason, where)
    if not any(full):
        return window, None
    full_every = full.index(True) + 1
    if is_alike or full != [(layer_number + 1) % full_every == 0 for layer_number in range(layers)]:
        either_text = "" if is_alike else ", or all but every n-th"
        raise _layers_refused(types, f"all layers of a {kind.name} have the window{either_text}", where)
    return window, full_every


def _layers_refused(types: Any, why: str, where: str) -> CheckpointError:
    return CheckpointError(f"{where}: layer_types={types!r}: not supported: {why}")


def _window(given: Settings, kind: Architecture, where: str) -> int | None:
    value, is_used = _given(given, "sliding_window", kind), given.get("use_sliding_window")
    if kind in QWENS or "window" not in kind.free:
        # Qwen's files contain a window also where it is not used.
        if is_used is False or given.get("sliding_window") is None:
            return None
        if is_used is not True:
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
        known_kind = KNOWN[str(names[0])]
        if given.get("model_type", known_kind.type) == known_kind.type:
            return known_kind
    raise CheckpointError(
        f"{where}: architectures={names!r}, model_type={given.get('model_type')!r}: those that are known here: "
        f"{', '.join(f'{a.name} ({a.type})' for a in KNOWN.values())}"
    )


def _refuse(kind: Architecture, key: str, value: Any, where: str) -> None:
    """Raises CheckpointError for an option that our model does not support."""
    problem = ""
    allowed, refusal_reason = {**TABLES["only"], **kind.only}.get(key, ([], ""))
    if key in ("hidden_act", "hidden_activation"):
        # Gemma 2's key is the second one; elsewhere it does not matter if it is null.
        allowed, refusal_reason = TABLES["activations"][kind.fixed_values()["activation"]]
        allowed = [*allowed, *([None] if key == "hidden_activation" and kind is not GEMMA2 else [])]
    elif key == "use_sliding_window" and kind in QWENS:
        allowed = [False, True]
    if kind is GEMMA2 and key in (SCALAR, *CAPS.values()):
        return
    if kind.experts is not None and any(key in their_keys for their_keys in kind.experts.keys.values()):
        return
    if refusal_reason:
        is_bool = isinstance(value, bool)
        if not any(value == other and is_bool == isinstance(other, bool) for other in allowed):
            problem = f"not supported: {refusal_reason}"
    elif key not in READ and value not in (None, False, {}, []):
        problem = f"unknown key, which may change what the model computes; if it does not, add --accept {key}"
    if problem:
        raise CheckpointError(f"{where}: {key}={value!r}: {problem}")


def _count(value: Any, key: str, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise CheckpointError(f"{where}: {key}={value!r}: it must be a whole number from 1 to 2147483647")
    return value


# Rotary embeddings: base and scaling, by the keys of transformers 4 and of 5


def _written(scaling: RopeScalingConfig | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default"}
    given = {their_key: getattr(scaling, our_key) for our_key, their_key in SCALED[scaling.kind].items()}
    return {"rope_type": scaling.kind} | {key: value for key, value in given.items() if value is not None}


def read_rope(given: Settings, kind: Architecture, where: str) -> tuple[float, RopeScalingConfig | None]:
    """Base and scaling, by the old keys and the new; they must agree. Raises CheckpointError."""
    rope_bases: dict[str, float] = {}
    scalings: dict[str, RopeScalingConfig | None] = {}
    if given.get("rope_theta") is not None:
        rope_bases["rope_theta"] = read_positive_number(given["rope_theta"], "rope_theta", where)
    for key, value in _entries(given, kind, where):
        scalings[key] = _scaling(value, key, where)
        base_key, base = f"{key}.rope_theta", value.get("rope_theta")
        if base is not None:
            rope_bases[base_key] = read_positive_number(base, base_key, where)
    if kind is OLMO3 and any(scalings.values()):
        raise CheckpointError(
            f"{where}: {next(key for key, value in scalings.items() if value)}: not supported: {kind.name} scales the "
            "rotary embeddings of the blocks that attend to all, and only of those; here all blocks have the same"
        )
    if len(set(scalings.values())) > 1:
        raise CheckpointError(f"{where}: rope_scaling and rope_parameters disagree: correct one")
    if len(set(rope_bases.values())) > 1:
        bases_text = " and ".join(f"{key}={base_value}" for key, base_value in rope_bases.items())
        raise CheckpointError(f"{where}: {bases_text} disagree: correct one")
    default_base: float = kind.defaults.get("rope_theta", THETA)
    return next(iter(rope_bases.values()), default_base), next(iter(scalings.values()), None)


def _entries(given: Settings, kind: Architecture, where: str) -> Iterator[tuple[str, Settings]]:
    """The descriptions of rotary embeddings in the file, with their keys."""
    for key in ("rope_scaling", "rope_parameters"):
        given_value = given.get(key)
        if given_value is None or given_value == {}:
            continue
        if not isinstance(given_value, dict):
            raise CheckpointError(f"{where}: {key}={given_value!r}: it must be a mapping")
        if kind is not OLMO3 or not set(given_value) <= set(LAYERS):
            yield key, given_value
            continue
        for layer_kind, inner_entry in given_value.items():
            if not isinstance(inner_entry, dict):
                raise CheckpointError(f"{where}: {key}.{layer_kind}={inner_entry!r}: it must be a mapping")
            yield f"{key}.{layer_kind}", inner_entry


def _scaling(value: Settings, key: str, where: str) -> RopeScalingConfig | None:
    # Older files use another key for the type.
    rope_kinds = {str(value[k]) for k in ("rope_type", "type") if value.get(k) is not None} or {"default"}
    rest = {k: v for k, v in value.items() if k not in ("rope_type", "type", "rope_theta") and v is not None}
    is_whole = rest.pop("partial_rotary_factor", 1) == 1
    (rope_kind,) = rope_kinds if len(rope_kinds) == 1 else ("",)
    is_rounded = rope_kind != "yarn" or rest.pop("truncate", True) is True
    scaling_keys = SCALED.get(rope_kind, {})
    needed_keys = {their_key for our_key, their_key in scaling_keys.items() if our_key not in ROPE_MAY_LACK}
    refusal_text = ""
    if not is_whole:
        refusal_text = "it rotates whole heads"
    elif not is_rounded:
        refusal_text = "YaRN's ramp begins and ends at whole numbers"
    elif rope_kind not in (*SCALED, "default"):
        refusal_text = f"its rotary embeddings can be scaled as {KINDS} only"
    elif missing_keys := sorted(needed_keys - set(rest)):
        refusal_text = f"rotary embeddings of type {rope_kind} need {missing_keys[0]}"
    elif strange_keys := sorted(set(rest) - set(scaling_keys.values())):
        refusal_text = f"rotary embeddings of type {rope_kind} have no {strange_keys[0]}"
    if refusal_text:
        raise CheckpointError(f"{where}: {key}={value!r}: not supported: {refusal_text}")
    if rope_kind == "default":
        return None
    scaling_numbers = {
        our_key: read_positive_number(rest[their_key], f"{key}.{their_key}", where)
        for our_key, their_key in scaling_keys.items() if their_key in rest
    }  # fmt: skip
    try:
        return RopeScalingConfig.model_validate({"kind": rope_kind, **scaling_numbers})
    except ValidationError as error:
        error_detail = error.errors()[0]
        key_name = ".".join(map(str, error_detail["loc"])) or "as ours"
        refusal_text = error_detail["msg"].removeprefix("Value error, ")
        raise CheckpointError(f"{where}: {key}={value!r}: {key_name}: {refusal_text}") from None


def read_positive_number(value: Any, key: str, where: str) -> float:
    """A number above 0, as a float. Raises CheckpointError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MOST:
        raise CheckpointError(f"{where}: {key}={value!r}: it must be a number above 0")
    return float(value)
