"""The recipe's model at another width or depth, as overrides.

The width of a head stays, so that the number of heads grows with the model; key/value heads and the inner width of the
MLP are in proportion.
"""

from __future__ import annotations

from math import gcd

from megastable.base.errors import ConfigError
from megastable.config.model import ModelConfig

MULTIPLE = 8  # of the inner width


def at_width(model: ModelConfig, width: int) -> tuple[str, ...]:
    """Raises ConfigError for a width that is no whole number of heads."""
    unit = model.hidden // gcd(model.hidden, model.heads)
    if width < 1 or width % unit:
        raise ConfigError(
            f"--widths {width}: a head of the recipe takes {unit} of its {model.hidden}, and heads stay as wide as "
            f"they are: choose multiples of {unit}, or other model.heads"
        )
    heads = model.heads * width // model.hidden
    most = max(1, model.key_value_heads * width // model.hidden)
    shared = next(n for n in range(most, 0, -1) if heads % n == 0)
    ffn = max(MULTIPLE, round(model.ffn_width * width / model.hidden / MULTIPLE) * MULTIPLE)
    return (
        f"model.hidden={width}", f"model.heads={heads}", f"model.kv_heads={shared}", f"model.ffn={ffn}",
    )  # fmt: skip


def at_depth(layers: int) -> tuple[str, ...]:
    """Raises ConfigError."""
    if layers < 1:
        raise ConfigError(f"--depths {layers}: a model has at least one block")
    return (f"model.layers={layers}",)
