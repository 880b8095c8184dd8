"""What a study changes in a recipe, as overrides.

The model at another width or depth: the width of a head stays, so that the number of heads grows with the model;
key/value heads and the inner width of the MLP are in proportion.

Interventions: named changes, switched on alone and together over a baseline without any.

none                the baseline
qk_norm             norm of queries and keys, as in the recipe, else per head; the baseline has none
z_loss              the recipe's weight of the z-loss, else 1e-4; the baseline has none
NAME=KEY=VALUE ...  the user's own: overrides, with spaces between; the baseline is the recipe without them
A+B                 both
all                 qk_norm, z_loss and all of the user's own
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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
    most_shared = max(1, model.key_value_heads * width // model.hidden)
    shared_heads = next(
        shared_count for shared_count in range(most_shared, 0, -1) if heads % shared_count == 0
    )
    inner_width = max(MULTIPLE, round(model.ffn_width * width / model.hidden / MULTIPLE) * MULTIPLE)
    return (
        f"model.hidden={width}", f"model.heads={heads}", f"model.kv_heads={shared_heads}", f"model.ffn={inner_width}",
    )  # fmt: skip


def at_depth(layers: int) -> tuple[str, ...]:
    """Raises ConfigError."""
    if layers < 1:
        raise ConfigError(f"--depths {layers}: a model has at least one block")
    return (f"model.layers={layers}",)


NONE, ALL = "none", "all"
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


Switch = tuple[tuple[str, ...], tuple[str, ...]]  # overrides of the recipe without and with it


def parse_interventions(given: Sequence[str], model: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Overrides by intervention, in the order given. given: names with commas between, or one definition each; see
    above. Raises ConfigError."""
    norm, wanted_names = str(model.qk_norm or True).lower(), list[str]()
    switches: dict[str, Switch] = {  # what every recipe knows (arXiv:2309.14322, section 3.1)
        "qk_norm": (("model.qk_norm=false",), (f"model.qk_norm={norm}",)),
        "z_loss": (("model.z_loss=0",), (f"model.z_loss={model.z_loss or 1e-4}",)),
    }
    for text in given:
        name, equals_sign, overrides = text.partition("=")
        if not equals_sign:
            wanted_names += [part.strip() for part in text.split(",")]
            continue
        if not NAME.fullmatch(name) or name in (NONE, ALL) or name in switches:
            raise ConfigError(
                f"--interventions {text!r}: {name!r} cannot be the name of a new one: take a word that is not yet used"
            )
        if not overrides.split() or not all("=" in one for one in overrides.split()):
            raise ConfigError(
                f"--interventions {text!r}: after the name come overrides, e.g. norms=model.norms=after"
            )
        switches[name] = (), tuple(overrides.split())
        wanted_names.append(name)
    names_used = [
        part for wanted_name in wanted_names for part in wanted_name.split("+") if part not in (NONE, ALL)
    ]
    if unknown := [name for name in names_used if name not in switches]:
        raise ConfigError(
            f"--interventions: there is no {unknown[0]!r}: take {', '.join((NONE, *switches, ALL))}, A+B for both, or "
            "NAME=KEY=VALUE for another"
        )
    return {name: _overrides(name, switches) for name in dict.fromkeys(wanted_names)}


def _overrides(name: str, switches: Mapping[str, Switch]) -> tuple[str, ...]:
    names_on = [] if name == NONE else list(switches) if name == ALL else name.split("+")
    if set(names_on) & {NONE, ALL}:
        raise ConfigError(f"--interventions {name}: {NONE} and {ALL} stand alone")
    off = [
        override
        for switch_key, (without, _) in switches.items()
        if switch_key not in names_on
        for override in without
    ]
    return (*off, *(override for key in names_on for override in switches[key][1]))
