"""Rotary embeddings in config.json: base and scaling, by the keys of transformers 4 and of 5. Pure."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from megastable.base.errors import CheckpointError
from megastable.config.model import ModelConfig, RopeScalingConfig
from megastable.convert.huggingface.architectures import OLMO3, Architecture

Settings = Mapping[str, Any]

THETA = 10_000.0  # unless the architecture has another default
# Supported scalings: keys of `RopeScalingConfig`, and theirs.
SCALED = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
        "original_length": "original_max_position_embeddings",
    },
    "yarn": {
        "factor": "factor", "original_length": "original_max_position_embeddings", "beta_slow": "beta_slow",
        "beta_fast": "beta_fast", "attention_factor": "attention_factor",
    },
}  # fmt: skip
MAY_LACK = {"beta_slow", "beta_fast", "attention_factor"}
KINDS = "linear, llama3 or yarn"
LAYERS = ("full_attention", "sliding_attention")
MOST = sys.float_info.max  # a larger JSON integer does not fit a float


def rope_of(config: ModelConfig, kind: Architecture) -> dict[str, Any]:
    """The entries of config.json."""
    scaling = _written(config.rope_scaling)
    whole = scaling | {"rope_theta": config.rope_theta}
    # Transformers 5 have one set for each kind of layer of an OLMo 3.
    rope = {layer: dict(whole) for layer in LAYERS} if kind is OLMO3 else whole
    found: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_parameters": rope}
    return found | ({"rope_scaling": scaling} if config.rope_scaling is not None else {})


def _written(scaling: RopeScalingConfig | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default"}
    given = {theirs: getattr(scaling, ours) for ours, theirs in SCALED[scaling.kind].items()}
    return {"rope_type": scaling.kind} | {key: value for key, value in given.items() if value is not None}


def read_rope(given: Settings, kind: Architecture, where: str) -> tuple[float, RopeScalingConfig | None]:
    """Base and scaling, by the old keys and the new; they must agree. Raises CheckpointError."""
    bases: dict[str, float] = {}
    scalings: dict[str, RopeScalingConfig | None] = {}
    if given.get("rope_theta") is not None:
        bases["rope_theta"] = number(given["rope_theta"], "rope_theta", where)
    for key, value in _entries(given, kind, where):
        scalings[key] = _scaling(value, key, where)
        if value.get("rope_theta") is not None:
            bases[f"{key}.rope_theta"] = number(value["rope_theta"], f"{key}.rope_theta", where)
    if kind is OLMO3 and any(scalings.values()):
        raise CheckpointError(
            f"{where}: {next(key for key, value in scalings.items() if value)}: not supported: {kind.name} scales the "
            "rotary embeddings of the blocks that attend to all, and only of those; here all blocks have the same"
        )
    if len(set(scalings.values())) > 1:
        raise CheckpointError(f"{where}: rope_scaling and rope_parameters disagree: correct one")
    if len(set(bases.values())) > 1:
        both = " and ".join(f"{key}={value}" for key, value in bases.items())
        raise CheckpointError(f"{where}: {both} disagree: correct one")
    default: float = kind.defaults.get("rope_theta", THETA)
    return next(iter(bases.values()), default), next(iter(scalings.values()), None)


def _entries(given: Settings, kind: Architecture, where: str) -> Iterator[tuple[str, Settings]]:
    """The descriptions of rotary embeddings in the file, with their keys."""
    for key in ("rope_scaling", "rope_parameters"):
        value = given.get(key)
        if value is None or value == {}:
            continue
        if not isinstance(value, dict):
            raise CheckpointError(f"{where}: {key}={value!r}: it must be a mapping")
        if kind is not OLMO3 or not set(value) <= set(LAYERS):
            yield key, value
            continue
        for layer, inner in value.items():
            if not isinstance(inner, dict):
                raise CheckpointError(f"{where}: {key}.{layer}={inner!r}: it must be a mapping")
            yield f"{key}.{layer}", inner


def _scaling(value: Settings, key: str, where: str) -> RopeScalingConfig | None:
    # Older files use another key for the type.
    kinds = {str(value[k]) for k in ("rope_type", "type") if value.get(k) is not None} or {"default"}
    rest = {k: v for k, v in value.items() if k not in ("rope_type", "type", "rope_theta") and v is not None}
    whole = rest.pop("partial_rotary_factor", 1) == 1
    (kind,) = kinds if len(kinds) == 1 else ("",)
    rounded = kind != "yarn" or rest.pop("truncate", True) is True
    keys = SCALED.get(kind, {})
    needed = {theirs for ours, theirs in keys.items() if ours not in MAY_LACK}
    problem = ""
    if not whole:
        problem = "it rotates whole heads"
    elif not rounded:
        problem = "YaRN's ramp begins and ends at whole numbers"
    elif kind not in (*SCALED, "default"):
        problem = f"its rotary embeddings can be scaled as {KINDS} only"
    elif missing := sorted(needed - set(rest)):
        problem = f"rotary embeddings of type {kind} need {missing[0]}"
    elif strange := sorted(set(rest) - set(keys.values())):
        problem = f"rotary embeddings of type {kind} have no {strange[0]}"
    if problem:
        raise CheckpointError(f"{where}: {key}={value!r}: not supported: {problem}")
    if kind == "default":
        return None
    numbers = {
        ours: number(rest[theirs], f"{key}.{theirs}", where)
        for ours, theirs in keys.items() if theirs in rest
    }  # fmt: skip
    try:
        return RopeScalingConfig.model_validate({"kind": kind, **numbers})
    except ValidationError as error:
        detail = error.errors()[0]
        named = ".".join(map(str, detail["loc"])) or "as ours"
        problem = detail["msg"].removeprefix("Value error, ")
        raise CheckpointError(f"{where}: {key}={value!r}: {named}: {problem}") from None


def number(value: Any, key: str, where: str) -> float:
    """A number above 0, as a float. Raises CheckpointError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MOST:
        raise CheckpointError(f"{where}: {key}={value!r}: it must be a number above 0")
    return float(value)
