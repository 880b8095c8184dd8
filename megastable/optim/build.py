"""Builds the optimizer that the recipe names, over its groups of parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from megastable.config.model import ModelConfig
from megastable.config.optimizers import OptimizerConfig
from megastable.optim.adafactor import Adafactor
from megastable.optim.adam_pieces import Lamb, StableAdamW
from megastable.optim.adamw import AdamW
from megastable.optim.fused import FusedAdamW
from megastable.optim.matrices import is_orthogonalized
from megastable.optim.muon import Muon
from megastable.optim.pieces import PieceOptimizer
from megastable.optim.sgd import SGD
from megastable.optim.spam import Spam
from megastable.optim.stable_spam import StableSpam
from megastable.parallel.sharding import placement_of, shape_of

OPTIMIZERS: tuple[type[torch.optim.Optimizer], ...] = (
    AdamW, FusedAdamW, StableAdamW, Spam, StableSpam, Adafactor, Lamb, SGD, Muon,
)  # fmt: skip
# Optimizers whose state means the same: exponential averages of gradients and of their squares. SPAM's begin anew at
# some updates, and Stable-SPAM's are of scaled gradients.
ADAMS = frozenset({"adamw", "stable_adamw", "lamb"})
# Those whose two moments are averages, with the rates of `betas`, of the same numbers and of their squares.
AVERAGES = ADAMS | {"spam", "stable_spam"}


def build(
    module: nn.Module, config: OptimizerConfig, model: ModelConfig, compiled: bool
) -> torch.optim.Optimizer:
    """The optimizer over `module`'s parameters; compiled: AdamW with bf16 moments as one kernel."""
    groups = parameter_groups(module.parameters(), config, model)
    common: dict[str, Any] = {"lr": config.lr}
    if config.name == "sgd":
        return SGD(groups, **common, momentum=0.9 if config.momentum is None else config.momentum)
    if config.name == "adafactor":
        return Adafactor(groups, **common, **dict(config.adafactor))
    adam = common | {"betas": config.betas, "eps": config.eps}
    if config.name == "stable_adamw":
        return StableAdamW(groups, **adam)
    if config.name == "lamb":
        return Lamb(groups, **adam)
    if config.name == "spam":
        return Spam(groups, **adam, **dict(config.spam))
    if config.name == "stable_spam":
        return StableSpam(groups, **adam, **dict(config.stable_spam))
    if config.name == "muon":
        computes = {p.dtype for p in module.parameters()}
        dtype = torch.bfloat16 if torch.bfloat16 in computes else torch.float32
        return Muon(
            groups, **adam, momentum=0.95 if config.momentum is None else config.momentum, dtype=dtype
        )
    if config.moments == "bf16":
        return AdamW(groups, **adam, compiled=compiled)
    return FusedAdamW(groups, **adam)


def interchangeable(one: str, other: str) -> bool:
    """Whether the state of one optimizer continues under the other, by their names."""
    return one == other or {one, other} <= ADAMS


def shared_state(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's shared state; empty for those without."""
    return optimizer.shared if isinstance(optimizer, PieceOptimizer) else {}


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
