"""Optimizers over whole tensors in one process, written out plainly from their papers: what ours are compared with."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Rule:
    """Clips to a global norm of 1, and updates every tensor by `change`. State is kept by name."""

    decay = 0.1

    def __init__(self, w: dict[str, Tensor]) -> None:
        self.w = w
        self.master = {name: value.detach().float().clone() for name, value in w.items()}
        self.t = 0
        self.m = {name: torch.zeros_like(p) for name, p in self.master.items()}
        self.v = {name: torch.zeros_like(p) for name, p in self.master.items()}

    def step(self, grads: dict[str, Tensor], lr: float) -> float:
        total = math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))
        scale = min(1.0, 1.0 / (total + 1e-6))
        self.t += 1
        for name, g in grads.items():
            p = self.master[name]
            decay = self.decay if p.dim() > 1 else 0.0
            p -= self.change(name, p, g * scale, lr, decay)
            self.w[name] = p.clone()
        return total

    def change(self, name: str, p: Tensor, g: Tensor, lr: float, decay: float) -> Tensor:
        """What is subtracted from p; updates the state."""
        raise NotImplementedError


class SGD(Rule):
    def change(self, name: str, p: Tensor, g: Tensor, lr: float, decay: float) -> Tensor:
        self.m[name] = 0.9 * self.m[name] + g
        return lr * self.m[name] + lr * decay * p
