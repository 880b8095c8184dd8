"""The Hugging Face architectures that equal a model of ours, and the model keys that each has: hugging_face.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic.fields import FieldInfo

from megastable.base.errors import ConfigError
from megastable.config.model import ModelConfig

# What hugging_face.yaml says: this table, and the entries of config.json that settings.py translates.
TABLES: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_name("hugging_face.yaml").read_text(encoding="utf-8")
)
OWN, EVERYWHERE = frozenset[str](TABLES["own"]), frozenset[str](TABLES["everywhere"])


@dataclass(frozen=True)
class Architecture:
    """type: "model_type" of config.json; name: the class. norms: their names of a block's norms, by ours.

    has: its values of our model keys, where they are not ModelConfig's defaults (`qk_norm`: False). free: further keys
    that it has with any value. full_every: with a window, every n-th block attends to all unless the file says
    otherwise; 0: none does. written: further entries of config.json, always the same. defaults: values of entries that
    a config.json may omit.
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


ARCHITECTURES = tuple(
    Architecture(**row | {"free": frozenset(row.get("free", ()))}) for row in TABLES["architectures"]
)
QWEN3, LLAMA, QWEN2, OLMO2, MISTRAL, OLMO3, GEMMA2 = ARCHITECTURES


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
