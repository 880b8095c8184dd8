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


def newton_schulz(x: Tensor) -> Tensor:
    """Five quintic steps towards U V^T."""
    y = (x if x.shape[0] <= x.shape[1] else x.T) / x.double().norm()
    y = y.float()
    for _ in range(5):
        gram = y @ y.T
        y = 3.4445 * y - 4.7750 * gram @ y + 2.0315 * gram @ gram @ y
    return y if x.shape[0] <= x.shape[1] else y.T


class Muon(Rule):
    """Queries, keys, values, gate and up each for themselves: of 4 heads, 2 key heads, of width 8."""

    def change(self, name: str, p: Tensor, g: Tensor, lr: float, decay: float) -> Tensor:
        if p.dim() < 2 or not name.startswith("blocks."):
            self.m[name] = 0.9 * self.m[name] + 0.1 * g
            self.v[name] = 0.95 * self.v[name] + 0.05 * g * g
            m, v = self.m[name] / (1 - 0.9**self.t), self.v[name] / (1 - 0.95**self.t)
            return lr * m / (v.sqrt() + 1e-8) + lr * decay * p
        self.m[name] = 0.95 * self.m[name] + 0.05 * g
        u = 0.95 * self.m[name] + 0.05 * g
        parts = [u]
        if "qkv" in name:
            parts = list(u.split([32, 16, 16]))
        if "gate_up" in name:
            parts = list(u.chunk(2))
        o = torch.cat([0.2 * math.sqrt(max(part.shape)) * newton_schulz(part) for part in parts])
        return lr * o + lr * decay * p


class MuonClip(Muon):
    """Muon, and then QK-clip at a logit of 1.45."""

    def __init__(self, w: dict[str, Tensor]) -> None:
        super().__init__(w)
        self.highest: dict[tuple[int, int], float] = {}
        self.clipped: list[set[tuple[int, int]]] = []  # by step

    def step(self, grads: dict[str, Tensor], lr: float) -> float:
        total = super().step(grads, lr)
        self.clipped.append({at for at, logit in self.highest.items() if logit > 1.45})
        for layer in {layer for layer, _ in self.highest}:
            gamma = [min(1.0, 1.45 / self.highest[layer, head]) for head in range(4)]
            for name in ("weight", "bias"):
                of = f"blocks.{layer}.attention.qkv.{name}"
                if of not in self.master:
                    continue
                for head in range(4):
                    shared = min(gamma[head // 2 * 2 : head // 2 * 2 + 2]) ** 0.5
                    self.master[of][8 * head : 8 * head + 8] *= gamma[head] / shared
                    if head % 2 == 0:
                        begin = 32 + 8 * (head // 2)
                        self.master[of][begin : begin + 8] *= shared
                self.w[of] = self.master[of].clone()
        self.highest.clear()
        return total
