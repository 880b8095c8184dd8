"""Builds the optimizer that the recipe names, over groups with and without weight decay."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megastable.config.tree import OptimizerConfig
from megastable.optim.adamw import AdamW, decay_groups
from megastable.optim.fused import FusedAdamW
from megastable.optim.muon import Muon, muon_groups
from megastable.optim.pieces import PieceOptimizer
from megastable.optim.sgd import SGD

OPTIMIZERS: tuple[type[torch.optim.Optimizer], ...] = (AdamW, FusedAdamW, SGD, Muon)
# Optimizers whose state means the same: exponential averages of gradients and of their squares.
ADAMS = frozenset({"adamw"})


def build(module: nn.Module, config: OptimizerConfig, compiled: bool) -> torch.optim.Optimizer:
    """The optimizer over `module`'s parameters; compiled: AdamW with bf16 moments as one kernel."""
    groups = decay_groups(module.parameters(), config.weight_decay)
    common: dict[str, Any] = {"lr": config.lr}
    if config.name == "sgd":
        return SGD(groups, **common, momentum=config.momentum)
    adam = common | {"betas": config.betas, "eps": config.eps}
    if config.name == "muon":
        computes = {p.dtype for p in module.parameters()}
        dtype = torch.bfloat16 if torch.bfloat16 in computes else torch.float32
        matrices = muon_groups(module.parameters(), config.weight_decay)
        return Muon(matrices, **adam, momentum=config.momentum, dtype=dtype)
    if config.moments == "bf16":
        return AdamW(groups, **adam, compiled=compiled)
    return FusedAdamW(groups, **adam)


def interchangeable(one: str, other: str) -> bool:
    """Whether the state of one optimizer continues under the other, by their names."""
    return one == other or {one, other} <= ADAMS


def shared_state(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's shared state; empty for those without."""
    return optimizer.shared if isinstance(optimizer, PieceOptimizer) else {}
