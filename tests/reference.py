"""An independent GPT and training step in one process: plain torch, no module of megastable inside.

What the parallel runs are compared with. Weights are a dictionary by name, in the dtype to compute in; the
forward pass, cross-entropy, z-loss, clipping, AdamW and the schedule are written out once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass
class Shape:
    layers: int
    heads: int
    kv_heads: int
    width: int  # of a head
    vocabulary: int
    theta: float = 10_000.0
    linear: float = 1.0  # positions are divided by it
    llama3: tuple[float, float, float, int] | None = None  # factor, low, high, original length
    eps: float = 1e-5
    z: float = 1e-4
    qk_norm: bool | str = True  # "full": over all heads together
    norms_after: bool = False
    tied: bool = False


def norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    y = x.float()
    return (y / (y.square().mean(-1, keepdim=True) + eps).sqrt() * w.float()).to(x.dtype)


def rates(shape: Shape) -> Tensor:
    """Radians per position of every pair. Llama 3: by how often it turns within the original length."""
    half = shape.width // 2
    found = []
    for i in range(half):
        rate = shape.theta ** (-i / half) / shape.linear
        if shape.llama3 is not None:
            factor, low, high, length = shape.llama3
            share = min(max((length * rate / (2 * math.pi) - low) / (high - low), 0.0), 1.0)
            rate *= share + (1 - share) / factor
        found.append(rate)
    return torch.tensor(found)


def rope(x: Tensor, position: Tensor, rate: Tensor) -> Tensor:
    """x [b, h, s, d], position [b, s], rate [d / 2]."""
    half = x.shape[-1] // 2
    angle = position[:, None, :, None].float() * rate
    a, b = x[..., :half].float(), x[..., half:].float()
    return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1).to(x.dtype)


def logits(
    w: dict[str, Tensor], shape: Shape, tokens: Tensor, segments: Tensor | None = None,
    highest: dict[tuple[int, int], float] | None = None,
) -> Tensor:  # fmt: skip
    """tokens [b, s] -> fp32 [b, s, vocabulary]. highest: raised by the attention logits, by (layer, head)."""
    b, s = tokens.shape
    mask = torch.ones(s, s, dtype=torch.bool).tril().expand(b, s, s)
    position = torch.arange(s).expand(b, s)
    if segments is not None:
        mask = mask & (segments[:, :, None] == segments[:, None, :])
        position = torch.stack(
            [
                torch.cat([torch.arange(n) for n in row.unique_consecutive(return_counts=True)[1]])
                for row in segments
            ]
        )
    x = w["embedding.weight"][tokens]
    h, k, d = shape.heads, shape.kv_heads, shape.width
    for i in range(shape.layers):
        p = f"blocks.{i}."
        y = x if shape.norms_after else norm(x, w[p + "attention_norm.weight"], shape.eps)
        y = y @ w[p + "attention.qkv.weight"].T
        if p + "attention.qkv.bias" in w:
            y = y + w[p + "attention.qkv.bias"]
        q, key, v = y.split([h * d, k * d, k * d], -1)
        if shape.qk_norm == "full":
            q = norm(q, w[p + "attention.q_norm.weight"], shape.eps)
            key = norm(key, w[p + "attention.k_norm.weight"], shape.eps)
        q, key, v = (t.reshape(b, s, -1, d).transpose(1, 2) for t in (q, key, v))
        if shape.qk_norm is True:
            q = norm(q, w[p + "attention.q_norm.weight"], shape.eps)
            key = norm(key, w[p + "attention.k_norm.weight"], shape.eps)
        q, key = rope(q, position, rates(shape)), rope(key, position, rates(shape))
        heads = []
        for j in range(h):
            group = j // (h // k)
            score = q[:, j].float() @ key[:, group].float().transpose(1, 2) / math.sqrt(d)
            score = score.masked_fill(~mask, -math.inf)
            if highest is not None:
                highest[i, j] = max(highest.get((i, j), -math.inf), float(score.detach().max()))
            heads.append((torch.softmax(score, -1) @ v[:, group].float()).to(x.dtype))
        y = torch.cat(heads, -1) @ w[p + "attention.out.weight"].T
        x = x + (norm(y, w[p + "attention_norm.weight"], shape.eps) if shape.norms_after else y)
        y = x if shape.norms_after else norm(x, w[p + "mlp_norm.weight"], shape.eps)
        gate, up = (y @ w[p + "mlp.gate_up.weight"].T).chunk(2, -1)
        y = (gate * torch.sigmoid(gate) * up) @ w[p + "mlp.down.weight"].T
        x = x + (norm(y, w[p + "mlp_norm.weight"], shape.eps) if shape.norms_after else y)
    x = norm(x, w["final_norm.weight"], shape.eps)
    head = w["embedding.weight"] if shape.tied else w["head.weight"]
    return (x @ head.T).float()[..., : shape.vocabulary]


def losses(out: Tensor, labels: Tensor, z: float) -> tuple[Tensor, Tensor]:
    """(objective, mean cross-entropy)."""
    lse = out.exp().sum(-1).log()
    ce = (lse - out.gather(-1, labels[..., None])[..., 0]).mean()
    return ce + z * lse.square().mean(), ce.detach()


@dataclass
class AdamW:
    """fp32 masters; `w` holds the weights to compute with, in their dtype."""

    w: dict[str, Tensor]
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    decay: float = 0.1
    clip: float = 1.0
    t: int = 0
    master: dict[str, Tensor] = field(default_factory=dict)
    m: dict[str, Tensor] = field(default_factory=dict)
    v: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in self.w.items():
            self.master[name] = value.detach().float().clone()
            self.m[name], self.v[name] = (
                torch.zeros_like(self.master[name]),
                torch.zeros_like(self.master[name]),
            )

    def step(self, grads: dict[str, Tensor], lr: float) -> float:
        """Clip, update; the gradient norm before clipping."""
        total = math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))
        scale = min(1.0, self.clip / (total + 1e-6))
        self.t += 1
        for name, g in grads.items():
            g = g * scale
            p = self.master[name]
            if p.dim() > 1:
                p.mul_(1 - lr * self.decay)
            self.m[name].mul_(self.beta1).add_(g, alpha=1 - self.beta1)
            self.v[name].mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
            mhat = self.m[name] / (1 - self.beta1**self.t)
            vhat = self.v[name] / (1 - self.beta2**self.t)
            p.sub_(lr * mhat / (vhat.sqrt() + self.eps))
            self.w[name] = p.to(self.w[name].dtype).clone()
        return total


class Rule(Protocol):
    """An optimizer over whole tensors. w: fp32 weights by name. It may have `highest`: a dictionary of the largest
    attention logits of the step, by (layer, head)."""

    w: dict[str, Tensor]

    def step(self, grads: dict[str, Tensor], lr: float) -> float:
        """Clip to a global norm of 1, update; returns the norm before."""
        ...


def train(
    w: dict[str, Tensor],
    shape: Shape,
    batches: list[tuple[Tensor, Tensor, Tensor | None]],
    rates: list[float],
    micro_batches: int = 1,
    rule: Callable[[dict[str, Tensor]], Rule] = AdamW,
) -> tuple[list[float], list[float], Any]:
    """Train on whole global batches (tokens, labels, segments), gradients of `micro_batches` equal parts summed in
    fp32: losses, gradient norms, and the optimizer, made by `rule`, with the final weights and moments.
    """
    optimizer = rule({k: v.clone() for k, v in w.items()})
    loss_history, norm_history = [], []
    for (tokens, labels, segments), lr in zip(batches, rates, strict=True):
        grads: dict[str, Tensor] = {}
        loss = 0.0
        for part in torch.arange(len(tokens)).chunk(micro_batches):
            leaves = {k: v.detach().clone().requires_grad_() for k, v in optimizer.w.items()}
            apart, highest = None if segments is None else segments[part], getattr(optimizer, "highest", None)
            out = logits(leaves, shape, tokens[part], apart, highest)
            objective, ce = losses(out, labels[part], shape.z)
            loss += float(ce) / micro_batches
            for name, g in zip(leaves, torch.autograd.grad(objective, list(leaves.values())), strict=True):
                grads[name] = grads.get(name, 0) + g.float() / micro_batches
        loss_history.append(loss)
        norm_history.append(optimizer.step(grads, lr))
    return loss_history, norm_history, optimizer
