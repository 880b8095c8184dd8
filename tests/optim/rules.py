"""Optimizers over whole tensors in one process, written out plainly from their papers: what ours are compared with."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def norm_of(grads: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))


def to_norm(grads: dict[str, Tensor], most: float) -> dict[str, Tensor]:
    scale = min(1.0, most / (norm_of(grads) + 1e-6))
    return {name: g * scale for name, g in grads.items()}


class Rule:
    """Clips by `clip`, by default to a global norm of 1, and updates every tensor by `change`. State is kept by name.

    acted: how often that which the rule adds to its predecessor made a difference.
    """

    decay = 0.1
    clip: Any = staticmethod(lambda grads, master: to_norm(grads, 1.0))

    def __init__(self, w: dict[str, Tensor]) -> None:
        self.w = w
        self.master = {name: value.detach().float().clone() for name, value in w.items()}
        self.t = self.acted = 0
        self.shared: dict[str, Tensor] = {}
        self.m = {name: torch.zeros_like(p) for name, p in self.master.items()}
        self.v = {name: torch.zeros_like(p) for name, p in self.master.items()}

    def step(self, grads: dict[str, Tensor], lr: float) -> float:
        total = norm_of(grads)
        self.t += 1
        for name, g in self.clip(grads, self.master).items():
            p = self.master[name]
            decay = self.decay if p.dim() > 1 else 0.0
            p -= self.change(name, p, g, lr, decay)
            self.w[name] = p.clone()
        return total

    def change(self, name: str, p: Tensor, g: Tensor, lr: float, decay: float) -> Tensor:
        """What is subtracted from p; updates the state."""
        raise NotImplementedError


class SGD(Rule):
    def change(self, name: str, p: Tensor, g: Tensor, lr: float, decay: float) -> Tensor:
        self.m[name] = 0.9 * self.m[name] + g
        return lr * self.m[name] + lr * decay * p


class Adam(Rule):
    """Averages of gradients and squares; the step that Adam makes of them."""

    betas, eps = (0.9, 0.95), 1e-8

    def adam(self, name: str, g: Tensor, age: int) -> Tensor:
        """Adam's step (arXiv:1412.6980, algorithm 1) with averages that are `age` gradients old, this one included."""
        b1, b2 = self.betas
        self.m[name] = b1 * self.m[name] + (1 - b1) * g
        self.v[name] = b2 * self.v[name] + (1 - b2) * g**2
        m_hat = self.m[name] / (1 - b1**age)
        v_hat = self.v[name] / (1 - b2**age)
        return m_hat / (v_hat.sqrt() + self.eps)


class StableAdamW(Adam):
    """arXiv:2304.13013, algorithm 2, with its corrected betas in place of a bias correction."""

    def change(self, name: str, p: Tensor, g: Tensor, lr: float, decay: float) -> Tensor:
        t = self.t
        b1, b2 = (beta * (1 - beta ** (t - 1)) / (1 - beta**t) for beta in self.betas)
        # Kept as Adam's: the paper's averages times 1 - beta^t.
        before = [1.0 if t == 1 else 1 - beta ** (t - 1) for beta in self.betas]
        v = b1 * (self.m[name] / before[0]) + (1 - b1) * g
        u = b2 * (self.v[name] / before[1]) + (1 - b2) * g**2
        self.m[name], self.v[name] = v * (1 - self.betas[0] ** t), u * (1 - self.betas[1] ** t)
        rms = (g**2 / u.clamp(min=self.eps**2)).mean().sqrt()
        rate = lr / max(1.0, float(rms))
        self.acted += float(rms) > 1.05
        return rate * decay * p + rate * v / (u.sqrt() + self.eps)


class Lamb(Adam):
    """arXiv:1904.00962, algorithm 2; matrices only, as the authors' program."""

    def change(self, name: str, p: Tensor, g: Tensor, lr: float, decay: float) -> Tensor:
        u = self.adam(name, g, self.t) + decay * p
        if p.dim() == 1:
            return lr * u
        ratio = p.norm() / u.norm()
        self.acted += bool(ratio < 0.5)
        return lr * ratio * u


def splitmix(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finalizer (doi:10.1145/2660193.2660195), of unsigned numbers."""
    x = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sparse(name: str, p: Tensor, period: int, density: float) -> Tensor:
    """M of arXiv:2501.06842, algorithm 1: rand < d for each element of a matrix; vectors are whole."""
    if p.dim() != 2:
        return torch.ones_like(p, dtype=torch.bool)
    key = hashlib.blake2b(f"{period} {name}".encode(), digest_size=8).digest()
    counts = np.arange(1, p.numel() + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    uniform = (splitmix(counts + np.frombuffer(key, "<u8")) >> np.uint64(32)).astype(np.float64) / 2**32
    return torch.from_numpy(uniform < density).view(p.shape)


class Spam(Rule):
    """arXiv:2501.06842, algorithm 1, with a reset before updates 1, 5, 9 and a warm-up of 3 updates.

    In fp64: g, m and v are those of M alone, and so is the update.
    """

    interval, threshold, warmup, density = 4, 30.0, 3, 0.4

    def change(self, name: str, p: Tensor, g: Tensor, lr: float, decay: float) -> Tensor:
        periods, age = divmod(self.t - 1, self.interval)
        mask = sparse(name, p, periods, self.density)
        w, g, age = p.double()[mask], g.double()[mask], age + 1
        if age == 1:
            self.m[name], self.v[name] = torch.zeros_like(p).double(), torch.zeros_like(p).double()
        m, v = self.m[name][mask], self.v[name][mask]
        spikes = (g**2 > self.threshold * v) & (v != 0)
        self.acted += int(spikes.sum())
        g[spikes] = g[spikes].sign() * (self.threshold * v[spikes]).sqrt()
        m, v = 0.9 * m + (1 - 0.9) * g, 0.95 * v + (1 - 0.95) * g**2
        self.m[name][mask], self.v[name][mask] = m, v
        scale = 1 - 0.5 * (1 + math.cos(math.pi * min(age, self.warmup) / self.warmup))
        step = (m / (1 - 0.9**age)) / ((v / (1 - 0.95**age)).sqrt() + 1e-8) + decay * w
        found = torch.zeros_like(p).double()
        found[mask] = scale * lr * step
        return found.to(p.dtype)


class StableSpam(Adam):
    """arXiv:2502.17055, algorithm 1, with a reset before updates 1, 5, 9, and the sparse momentum of SPAM."""

    interval, gammas = 4, (0.7, 0.9, 0.8)  # gamma 1, 2 and 3

    def change(self, name: str, p: Tensor, g: Tensor, lr: float, decay: float) -> Tensor:
        t, (g1, g2, g3) = self.t, self.gammas
        age = (t - 1) % self.interval + 1
        if age == 1:
            self.m[name], self.v[name] = torch.zeros_like(p), torch.zeros_like(p)
        limit, mean, square = self.shared.get(f"gradient_sizes/{name}", torch.zeros(3).double()).tolist()
        g_max = float(g.abs().max())
        limit = g3 * limit + (1 - g3) * g_max
        limit_hat = limit / (1 - g3**t)
        mask = g.abs() > limit_hat * (1 + 1e-9)
        self.acted += int(mask.sum())
        g = torch.where(mask, g / g_max * limit_hat, g)
        norm = float(g.double().norm())
        mean, square = g1 * mean + (1 - g1) * norm, g2 * square + (1 - g2) * norm**2
        wanted = mean / (1 - g1**t) / (math.sqrt(square / (1 - g2**t)) + self.eps)
        self.shared[f"gradient_sizes/{name}"] = torch.tensor([limit, mean, square], dtype=torch.float64)
        chosen = sparse(name, p, (t - 1) // self.interval, 0.4).float()
        g = (g / norm * wanted if norm else g) * chosen
        return lr * (self.adam(name, g, age) + decay * p) * chosen


class WholeSpam(Spam):
    """With moments of all elements."""

    density = 1.0


class Adafactor(Rule):
    """arXiv:1804.04235, algorithms 4 and 5, with sums over rows and columns as in its section 3."""

    momentum = 0.0

    def change(self, name: str, p: Tensor, g: Tensor, lr: float, decay: float) -> Tensor:
        beta = 1 - self.t**-0.8
        squares = g**2 + 1e-30
        if p.dim() == 1:
            self.v[name] = v = beta * self.v[name] + (1 - beta) * squares
        else:
            n, m = p.shape
            rows = self.shared.get(f"rows/{name}", torch.zeros(n)) * m
            columns = self.shared.get(f"columns/{name}", torch.zeros(m)) * n
            rows = beta * rows + (1 - beta) * squares @ torch.ones(m)
            columns = beta * columns + (1 - beta) * torch.ones(n) @ squares
            # Where all gradients are zero, the product of two sums of 1e-30 is no fp32 number.
            v = (torch.outer(rows.double(), columns.double()) / rows.double().sum()).to(p.dtype)
            self.shared[f"rows/{name}"], self.shared[f"columns/{name}"] = rows / m, columns / n
        u = g / v.sqrt()
        rms = float(u.square().mean().sqrt())
        self.acted += rms > 1.05
        u = u / max(1.0, rms)
        if self.momentum:
            self.m[name] = u = self.momentum * self.m[name] + (1 - self.momentum) * u
        return lr * u + lr * decay * p


class AdafactorMomentum(Adafactor):
    momentum = 0.8


def newton_schulz(x: Tensor) -> Tensor:
    """Five quintic steps towards U V^T."""
    y = (x if x.shape[0] <= x.shape[1] else x.T) / x.double().norm().clamp_min(1e-30)
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
        self.acted += 1
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
            gamma = [1.45 / max(1.45, self.highest[layer, head]) for head in range(4)]
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


Grads = dict[str, Tensor]


class Clip:
    """Called once per update with gradients and fp32 weights by name; notes the share of the norm that is left."""

    def __init__(self) -> None:
        self.kept: list[float] = []

    def __call__(self, grads: Grads, master: Grads) -> Grads:
        clipped = self.clipped(grads, master)
        self.kept.append(norm_of(clipped) / norm_of(grads))
        return clipped

    def clipped(self, grads: Grads, master: Grads) -> Grads:
        raise NotImplementedError

    def state(self) -> dict[str, list[float]]:
        """As megastable keeps it."""
        return {}


class Norm(Clip):
    def clipped(self, grads: Grads, master: Grads) -> Grads:
        return to_norm(grads, 1.0)


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
        whole = norm_of(grads)
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
        norm = norm_of(grads)
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
