"""Builds the optimizer that the recipe names, over its groups of parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megastable.config.model import ModelConfig
from megastable.config.optimizers import OptimizerConfig
from megastable.optim.adafactor import Adafactor
from megastable.optim.adamw import AdamW
from megastable.optim.fused import FusedAdamW
from megastable.optim.lamb import Lamb
from megastable.optim.muon import Muon
from megastable.optim.parameter_groups import parameter_groups
from megastable.optim.pieces import PieceOptimizer
from megastable.optim.sgd import SGD
from megastable.optim.spam import Spam
from megastable.optim.stable_adamw import StableAdamW
from megastable.optim.stable_spam import StableSpam

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
