"""Clipping of whole gradients in one process, written out plainly from the papers: what ours is compared with."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.optim import rules

Grads = dict[str, Tensor]


class Clip:
    """Called once per update with gradients and fp32 weights by name; notes the share of the norm that is left."""

    def __init__(self) -> None:
        self.kept: list[float] = []

    def __call__(self, grads: Grads, master: Grads) -> Grads:
        clipped = self.clipped(grads, master)
        self.kept.append(rules.norm_of(clipped) / rules.norm_of(grads))
        return clipped

    def clipped(self, grads: Grads, master: Grads) -> Grads:
        raise NotImplementedError

    def state(self) -> dict[str, list[float]]:
        """As megastable keeps it."""
        return {}


class Norm(Clip):
    def clipped(self, grads: Grads, master: Grads) -> Grads:
        return rules.to_norm(grads, 1.0)


class Value(Clip):
    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold

    def clipped(self, grads: Grads, master: Grads) -> Grads:
        return {name: g.clamp(-self.threshold, self.threshold) for name, g in grads.items()}


class AdaGC(Clip):
    """lambda_abs = 1, beta = 0.98, lambda_rel = 1.05."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.start, self.t = start, 0
        self.gamma: dict[str, float] = {}

    def clipped(self, grads: Grads, master: Grads) -> Grads:
        self.t += 1
        made = {}
        whole = rules.norm_of(grads)
        for name, g in grads.items():
            norm = float(g.double().norm())
            if self.t <= self.start:
                h = min(1.0 / whole, 1.0)
                self.gamma[name] = min(self.gamma.get(name, math.inf), h * norm)
            else:
                h = min(1.05 * self.gamma[name] / norm, 1.0) if norm else 1.0
                self.gamma[name] = 0.98 * self.gamma[name] + 0.02 * h * norm
            made[name] = g * h
        return made

    def state(self) -> dict[str, list[float]]:
        return {
            "clipping/adagc/norms": [self.gamma[name] for name in sorted(self.gamma)],
            "clipping/adagc/updates": [self.t],
        }


class ZClip(Clip):
    """alpha = 0.97, z_thres = 2.5."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.t = 0
        self.start, self.seen = start, torch.zeros(0, dtype=torch.float64)
        self.mean = self.variance = 0.0

    def clipped(self, grads: Grads, master: Grads) -> Grads:
        self.t += 1
        norm = rules.norm_of(grads)
        if len(self.seen) < self.start:
            self.seen = torch.cat((self.seen, torch.tensor([norm], dtype=torch.float64)))
            self.mean, self.variance = float(self.seen.mean()), float(self.seen.var(correction=0))
            return grads
        to, z = norm, (norm - self.mean) / math.sqrt(self.variance)
        if z > 2.5:
            to = self.mean + 2.5**2 / z * math.sqrt(self.variance)
        self.mean = 0.97 * self.mean + 0.03 * to
        self.variance = 0.97 * self.variance + 0.03 * (to - self.mean) ** 2
        return {name: g * (to / norm) for name, g in grads.items()}

    def state(self) -> dict[str, list[float]]:
        values = {"mean": self.mean, "variance": self.variance, "updates": self.t}
        return {f"clipping/zclip/{name}": [value] for name, value in values.items()}


class AGC(Clip):
    """epsilon = 1e-3; rows of matrices, whole vectors, not the output layer."""

    def __init__(self, threshold: float, head: str) -> None:
        super().__init__()
        self.threshold, self.head = threshold, head

    def clipped(self, grads: Grads, master: Grads) -> Grads:
        made = {}
        for name, g in grads.items():
            g = g.clone()
            rows = zip(g, master[name], strict=True) if g.dim() > 1 else [(g, master[name])]
            for row, weight in rows if name != self.head else ():
                most = self.threshold * max(float(weight.norm()), 1e-3)
                if float(row.norm()) > most:
                    row *= most / float(row.norm())
            made[name] = g
        return made
