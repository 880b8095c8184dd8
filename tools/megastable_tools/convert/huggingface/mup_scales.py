"""muP's scales as factors of weights, for formats that have no such scales. Pure.

    plain = without_mup(config)                  # the model of the weights times their factors
    weight * factor_of("head.weight", config)

The factors are ratios of sizes: powers of two, and so exact, where the sizes are.
"""

from __future__ import annotations

import math

from megastable.base.errors import ConfigError
from megastable.config.model import ModelConfig


def without_mup(config: ModelConfig) -> ModelConfig:
    """The same model with muP's scales in its weights. Raises ConfigError if they cannot be there."""
    if config.mup is None:
        return config
    remedy = "export weights of an untied model, or train without model.mup"
    if config.tied and config.width_ratio != 1:
        raise ConfigError(
            f"model.mup with model.tied: the logits' scale 1/{config.width_ratio:g} cannot be a part of the embedding, "
            f"which is the output layer as well: {remedy}"
        )
    scaled = _attention(config) != 1 or (config.depth_ratio != 1 and config.norms != "before")
    if scaled and config.zero_centered_norms:
        raise ConfigError(
            "model.mup with model.zero_centered_norms: a norm that multiplies by 1 + weight takes no factor: train "
            "without one of them"
        )
    if _attention(config) != 1 and not config.qk_norm:
        raise ConfigError(
            "model.mup.base_head_dim with model.qk_norm=false: the scale of attention cannot be a part of the fused "
            "queries, keys and values: leave base_head_dim out"
        )
    return config.model_copy(update={"mup": None})


def factor_of(name: str, config: ModelConfig) -> float:
    """What the parameter `name` is multiplied by."""
    if config.mup is None:
        return 1.0
    if name == "head.weight":
        return 1 / config.width_ratio
    if name.endswith(".attention.q_norm.weight"):
        return _attention(config)
    # The last operation of a branch has its scale.
    last = {
        "before": (".attention.out.weight", ".mlp.down.weight"), "after": ("_norm.weight",),
        "both": ("_post_norm.weight",),
    }  # fmt: skip
    if (
        name.startswith("blocks.")
        and name.endswith(last.get(config.norms, ()))
        and not name.endswith(".k_norm.weight")
    ):
        return 1 / config.depth_ratio
    return 1.0


def exact(config: ModelConfig) -> bool:
    """Whether no factor rounds a weight."""
    factors = (config.width_ratio, config.depth_ratio, _attention(config))
    return all(math.frexp(factor)[0] == 0.5 for factor in factors)


def _attention(config: ModelConfig) -> float:
    """muP's scale of attention over the usual one."""
    assert config.mup is not None
    return math.sqrt((config.mup.base_head_dim or config.head_width) / config.head_width)
