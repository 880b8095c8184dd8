"""Parameter groups: weight decay, learning rate and epsilon of every parameter. Pure, by names and shapes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from megastable.config.model import ModelConfig
from megastable.config.optimizers import OptimizerConfig
from megastable.optim.matrices import is_orthogonalized
from megastable.parallel.sharding import placement_of, shape_of

EMBEDDING = "embedding.weight"


def settings_of(
    name: str, shape: tuple[int, ...], optimizer: OptimizerConfig, model: ModelConfig
) -> dict[str, Any]:
    """Settings of a parameter: "weight_decay"; with muP "lr_scale" and "eps"; for Muon "orthogonalize".

    muP for Adam (arXiv:2203.03466, table 8): the rate of the blocks' matrices falls with the width. So that rate times
    decay stays the same, their decay grows with it, and epsilon falls with the size of gradients (CompleteP,
    arXiv:2505.01618, table 1; its code scales epsilon for all groups).
    """
    matrix = len(shape) > 1
    decays = matrix and (optimizer.decay_embeddings or name != EMBEDDING)
    found: dict[str, Any] = {"weight_decay": optimizer.weight_decay if decays else 0.0}
    if optimizer.name == "muon":
        found["orthogonalize"] = is_orthogonalized(name, shape)
    if model.mup is not None:
        hidden = matrix and name.startswith("blocks.")
        found["lr_scale"] = 1 / model.width_ratio if hidden else 1.0
        found["eps"] = optimizer.eps / (model.width_ratio * model.depth_ratio)
        if hidden:
            found["weight_decay"] *= model.width_ratio
    return found


def parameter_groups(
    parameters: Iterable[Tensor], optimizer: OptimizerConfig, model: ModelConfig
) -> list[dict[str, Any]]:
    """Groups of parameters with the same settings, none empty, in a fixed order: those that decay most come first."""
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for p in parameters:
        settings = settings_of(placement_of(p).name, shape_of(p), optimizer, model)
        groups.setdefault(tuple(settings.values()), settings | {"params": []})["params"].append(p)
    return [group for _, group in sorted(groups.items(), key=lambda item: item[0], reverse=True)]
