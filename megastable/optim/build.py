"""Builds the optimizer that the recipe names, over its groups of parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from megastable.config.model import ModelConfig
from megastable.config.optimizers import OptimizerConfig
from megastable.optim.adafactor import Adafactor
from megastable.optim.adam_pieces import Lamb, Spam, StableAdamW, StableSpam
from megastable.optim.adamw import AdamW, FusedAdamW
from megastable.optim.muon import Muon
from megastable.optim.ownership import is_orthogonalized
from megastable.optim.pieces import SGD, PieceOptimizer
from megastable.parallel.sharding import is_split, placement_of, shape_of

OPTIMIZERS: tuple[type[torch.optim.Optimizer], ...] = (
    AdamW, FusedAdamW, StableAdamW, Spam, StableSpam, Adafactor, Lamb, SGD, Muon,
)  # fmt: skip
# Optimizers whose state means the same: exponential averages of gradients and of their squares. SPAM's begin again at
# some updates, and Stable-SPAM's are of scaled gradients.
ADAMS = frozenset({"adamw", "stable_adamw", "lamb"})
# Those whose two moments are averages, with the rates of `betas`, of the same numbers and of their squares.
AVERAGES = ADAMS | {"spam", "stable_spam"}


def build_optimizer(
    module: nn.Module, config: OptimizerConfig, model: ModelConfig, compiled: bool
) -> torch.optim.Optimizer:
    """The optimizer over `module`'s parameters; compiled: AdamW as one kernel; with fp32 moments on a GPU only."""
    groups = parameter_groups(module.parameters(), config, model)
    common_settings: dict[str, Any] = {"lr": config.lr}
    if config.name == "sgd":
        return SGD(groups, **common_settings, momentum=0.9 if config.momentum is None else config.momentum)
    if config.name == "adafactor":
        return Adafactor(groups, **common_settings, **dict(config.adafactor))
    adam_settings = common_settings | {"betas": config.betas, "eps": config.eps}
    if config.name == "stable_adamw":
        return StableAdamW(groups, **adam_settings)
    if config.name == "lamb":
        return Lamb(groups, **adam_settings)
    if config.name == "spam":
        return Spam(groups, **adam_settings, **dict(config.spam))
    if config.name == "stable_spam":
        return StableSpam(groups, **adam_settings, **dict(config.stable_spam))
    if config.name == "muon":
        parameter_dtypes = {p.dtype for p in module.parameters()}
        message_dtype = torch.bfloat16 if torch.bfloat16 in parameter_dtypes else torch.float32
        return Muon(
            groups,
            **adam_settings,
            momentum=0.95 if config.momentum is None else config.momentum,
            dtype=message_dtype,
        )
    if config.moments == "bf16":
        return AdamW(groups, **adam_settings, compiled=compiled)
    return FusedAdamW(groups, **adam_settings, compiled=compiled)


def is_interchangeable(one: str, other: str) -> bool:
    """Whether the state of one optimizer continues under the other, by their names."""
    return one == other or {one, other} <= ADAMS


def shared_state(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's shared state; empty for those without."""
    return optimizer.shared if isinstance(optimizer, PieceOptimizer) else {}


EMBEDDING = "embedding.weight"


def settings_of(
    name: str, shape: tuple[int, ...], optimizer: OptimizerConfig, model: ModelConfig
) -> dict[str, Any]:
    """Settings of a parameter: "weight_decay"; with muP "lr_scale" and "eps"; for Muon "orthogonalize"; with experts
    "router", whose rate a remedy may lower.

    muP for Adam (arXiv:2203.03466, table 8): the rate of the blocks' matrices falls with the width. So that rate times
    decay stays the same, their decay grows with it, and epsilon falls with the size of gradients (CompleteP,
    arXiv:2505.01618, table 1; its code scales epsilon for all groups).
    """
    is_matrix = len(shape) > 1
    is_decayed = is_matrix and (optimizer.decay_embeddings or name != EMBEDDING)
    group_settings: dict[str, Any] = {"weight_decay": optimizer.weight_decay if is_decayed else 0.0}
    if optimizer.name == "muon":
        group_settings["orthogonalize"] = is_orthogonalized(name, shape)
    if model.experts is not None:
        group_settings["router"] = name.endswith(".router.weight")
    if model.mup is not None:
        is_hidden = is_matrix and name.startswith("blocks.")
        group_settings["lr_scale"] = 1 / model.width_ratio if is_hidden else 1.0
        group_settings["eps"] = optimizer.eps / (model.width_ratio * model.depth_ratio)
        if is_hidden:
            group_settings["weight_decay"] *= model.width_ratio
    return group_settings


def parameter_groups(
    parameters: Iterable[Tensor], optimizer: OptimizerConfig, model: ModelConfig
) -> list[dict[str, Any]]:
    """Groups of parameters with the same settings, none empty, in a fixed order: those that decay most come first.
    Those that only some data ranks have are apart: "split"."""
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for p in parameters:
        settings = settings_of(placement_of(p).name, shape_of(p), optimizer, model)
        if is_split(p):
            settings["split"] = True
        groups.setdefault(tuple(settings.values()), settings | {"params": []})["params"].append(p)
    return [group for _, group in sorted(groups.items(), key=lambda item: item[0], reverse=True)]
