"""An independent GPT and training step in one process: plain torch, no module of megastable inside.

What the parallel runs are compared with. Weights are a dictionary by name, in the dtype to compute in; the
forward pass, cross-entropy, z-loss, clipping, AdamW and the schedule are written out once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass
class Experts:
    """Of routed experts: what a run must know, and what its routers have done since `train` looked last."""

    count: int
    top_k: int
    sigmoid: bool = False
    normalize: bool = True
    scale: float = 1.0
    bias_rate: float = 1e-3
    balance: float = 1e-4
    over_step: bool = False  # the balance loss counts the choices of the step before
    z: float = 1e-3
    bias: dict[int, Tensor] = field(default_factory=dict)  # by layer
    shares: dict[int, Tensor] = field(default_factory=dict)  # of the choices of the step before
    choices: dict[int, Tensor] = field(default_factory=dict)  # of each expert, in this step
    losses: list[Tensor] = field(default_factory=list)  # weighted, of this micro-batch

    def route(self, i: int, y: Tensor, router: Tensor) -> Tensor:
        """Of layer i, y [b, s, h]: the weight of every expert for every token, fp32 [b, s, experts], mostly zero."""
        z = y.float() @ router.float().T
        score = torch.sigmoid(z) if self.sigmoid else z.exp() / z.exp().sum(-1, keepdim=True)
        wanted = score.detach() + self.bias.get(i, torch.zeros(self.count))
        least = wanted.sort(-1, descending=True).values[..., self.top_k - 1 : self.top_k]
        chosen = (wanted >= least).float()
        weight = score * chosen
        if self.normalize:
            weight = weight / weight.sum(-1, keepdim=True)
        counts = chosen.sum((0, 1))
        self.choices[i] = self.choices.get(i, 0) + counts
        share = counts / counts.sum()
        if self.over_step:
            share = self.shares.get(i, torch.full((self.count,), 1 / self.count))
        even = (score / score.sum(-1, keepdim=True)).mean((0, 1))
        self.losses.append(self.balance * self.count * (share * even).sum())
        self.losses.append(self.z * z.exp().sum(-1).log().square().mean())
        return weight * self.scale

    def follow(self) -> None:
        """A step is done."""
        for i, counts in self.choices.items():
            self.bias[i] = self.bias.get(i, torch.zeros(self.count))
            self.bias[i] = self.bias[i] + self.bias_rate * torch.sign(counts.mean() - counts)
            self.shares[i] = counts / counts.sum()
        self.choices.clear()


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
    yarn: tuple[float, float, float, int, float] | None = (
        None  # factor, slow, fast, original length, magnitude
    )
    eps: float = 1e-5
    z: float = 1e-4
    qk_norm: bool | str = True  # "full": over all heads together
    norms: str = "before"
    mixed_share: float = 0.25
    branch_steps: int = 4000
    norm_scaling: bool = False
    centered: bool = False  # norms multiply by 1 + weight
    scale: float | None = None  # of attention logits
    attention_cap: float | None = None
    cap: float | None = None
    window: int | None = None
    full_every: int | None = None
    gelu: bool = False
    clamp: float | None = None
    embedding_scale: float = 1.0
    branch_scale: float = 1.0
    logit_scale: float = 1.0
    tied: bool = False
    experts: Experts | None = None
    # With dropout: factors of [b, s, h] for samples of the batch and a place in the model, 0 or 1 / (1 - share).
    kept: Callable[[Tensor, int, int, int], Tensor] | None = None
    updates: int = 0  # applied so far: `train` counts them
    product: Callable[[Tensor, Tensor], Tensor] = lambda x, w: x @ w.T  # of the blocks' linear layers
    samples: Tensor = field(default_factory=lambda: torch.arange(0))  # of the batch, as `train` sets them

    def drop(self, x: Tensor, place: int) -> Tensor:
        return x if self.kept is None else x * self.kept(self.samples, *x.shape[1:], place)


def norm(x: Tensor, w: Tensor, eps: float, centered: bool = False) -> Tensor:
    y, w = x.float(), w.float() + 1 if centered else w.float()
    return (y / (y.square().mean(-1, keepdim=True) + eps).sqrt() * w).to(x.dtype)


def rates(shape: Shape) -> Tensor:
    """Radians per position of every pair. Llama 3: by how often it turns within the original length."""
    half = shape.width // 2
    found = []
    for i in range(half):
        rate = shape.theta ** (-i / half) / shape.linear
        if shape.yarn is not None:
            factor, slow, fast, length, _ = shape.yarn
            # The index at which a pair turns so often in the original length: theta^(-i / half) length / 2 pi = turns.
            at = [
                half * math.log(length / (2 * math.pi * turns)) / math.log(shape.theta)
                for turns in (fast, slow)
            ]
            first, last = max(math.floor(at[0]), 0), min(math.ceil(at[1]), 2 * half - 1)
            share = min(max((i - first) / (last - first), 0.0), 1.0)  # of the divided frequency
            rate = rate * (1 - share) + rate / factor * share
        if shape.llama3 is not None:
            factor, low, high, length = shape.llama3
            share = min(max((length * rate / (2 * math.pi) - low) / (high - low), 0.0), 1.0)
            rate *= share + (1 - share) / factor
        found.append(rate)
    return torch.tensor(found)


def rope(x: Tensor, position: Tensor, rate: Tensor, magnitude: float = 1.0) -> Tensor:
    """x [b, h, s, d], position [b, s], rate [d / 2]."""
    half = x.shape[-1] // 2
    angle = position[:, None, :, None].float() * rate
    a, b = x[..., :half].float(), x[..., half:].float()
    turned = torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1)
    return (turned * magnitude).to(x.dtype)


def capped(z: Tensor, cap: float | None) -> Tensor:
    return z if cap is None else cap * torch.tanh(z / cap)


def joined(
    w: dict[str, Tensor], shape: Shape, i: int, which: str, x: Tensor, f: Callable[[Tensor], Tensor]
) -> Tensor:
    """The stream after a branch f, "attention" or "mlp", of block i."""
    weight = w[f"blocks.{i}.{which}_norm.weight"]

    def n(y: Tensor, of: Tensor = weight) -> Tensor:
        return norm(y, of, shape.eps, shape.centered)

    def d(y: Tensor) -> Tensor:
        return shape.drop(y, 1 + 2 * i + (which == "mlp"))

    if shape.norms == "mixed":
        post = i < round(shape.mixed_share * shape.layers)
        return n(x + d(f(x))) if post else x + d(f(n(x)))
    if shape.norms == "deep":
        return n((2 * shape.layers) ** 0.25 * x + d(f(x)))
    if shape.norms == "branch":
        return n(x + d(min(1.0, shape.updates / shape.branch_steps) * f(x)))
    if shape.norms == "after":
        return x + d(shape.branch_scale * n(f(x)))
    inner = n(x) / math.sqrt(i + 1) if shape.norm_scaling else n(x)
    y = f(inner.to(x.dtype))
    if shape.norms == "both":
        y = n(y, w[f"blocks.{i}.{which}_post_norm.weight"])
    return x + d(shape.branch_scale * y)


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
    x = shape.drop(w["embedding.weight"][tokens] * shape.embedding_scale, 0)
    h, k, d = shape.heads, shape.kv_heads, shape.width
    behind = torch.arange(s)[:, None] - torch.arange(s)
    for i in range(shape.layers):
        p = f"blocks.{i}."
        near = shape.window is not None and not (shape.full_every and (i + 1) % shape.full_every == 0)
        seen = mask & (behind < shape.window) if near else mask

        def attention(y: Tensor, p: str = p, i: int = i, seen: Tensor = seen) -> Tensor:
            y = shape.product(y, w[p + "attention.qkv.weight"])
            if p + "attention.qkv.bias" in w:
                y = y + w[p + "attention.qkv.bias"]
            q, key, v = y.split([h * d, k * d, k * d], -1)
            if shape.qk_norm == "full":
                q = norm(q, w[p + "attention.q_norm.weight"], shape.eps, shape.centered)
                key = norm(key, w[p + "attention.k_norm.weight"], shape.eps, shape.centered)
            q, key, v = (t.reshape(b, s, -1, d).transpose(1, 2) for t in (q, key, v))
            if shape.qk_norm is True:
                q = norm(q, w[p + "attention.q_norm.weight"], shape.eps, shape.centered)
                key = norm(key, w[p + "attention.k_norm.weight"], shape.eps, shape.centered)
            magnitude = shape.yarn[-1] if shape.yarn else 1.0
            q, key = (rope(t, position, rates(shape), magnitude) for t in (q, key))
            heads = []
            for j in range(h):
                group = j // (h // k)
                score = q[:, j].float() @ key[:, group].float().transpose(1, 2)
                score = (score * (shape.scale or 1 / math.sqrt(d))).masked_fill(~seen, -math.inf)
                if highest is not None:
                    highest[i, j] = max(highest.get((i, j), -math.inf), float(score.detach().max()))
                score = capped(score, shape.attention_cap).masked_fill(~seen, -math.inf)
                heads.append((torch.softmax(score, -1) @ v[:, group].float()).to(y.dtype))
            return shape.product(torch.cat(heads, -1), w[p + "attention.out.weight"])

        def routed(y: Tensor, p: str = p, i: int = i) -> Tensor:
            if p + "mlp.router.weight" not in w:
                return mlp(y, p + "mlp.")
            assert shape.experts is not None
            weight, total = shape.experts.route(i, y, w[p + "mlp.router.weight"]), torch.zeros_like(y).float()
            for j in range(shape.experts.count):
                total = total + weight[..., j : j + 1] * mlp(y, f"{p}mlp.experts.{j}.").float()
            total = total.to(y.dtype)
            return total + mlp(y, p + "mlp.shared.") if p + "mlp.shared.down.weight" in w else total

        def mlp(y: Tensor, p: str) -> Tensor:
            gate, up = shape.product(y, w[p + "gate_up.weight"]).chunk(2, -1)
            if shape.clamp is not None:
                gate, up = gate.clamp(max=shape.clamp), up.clamp(-shape.clamp, shape.clamp)
            if shape.gelu:
                inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
                gate = 0.5 * gate * (1 + torch.tanh(inner))
            else:
                gate = gate * torch.sigmoid(gate)
            return shape.product(gate * up, w[p + "down.weight"])

        x = joined(w, shape, i, "attention", x, attention)
        x = joined(w, shape, i, "mlp", x, routed)
    x = norm(x, w["final_norm.weight"], shape.eps, shape.centered) * shape.logit_scale
    head = w["embedding.weight"] if shape.tied else w["head.weight"]
    return capped((x @ head.T).float(), shape.cap)[..., : shape.vocabulary]


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
    scales: dict[str, tuple[float, float, float]] = field(default_factory=dict)  # of lr, decay, eps, by name
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
            of_rate, of_decay, of_eps = self.scales.get(name, (1.0, 1.0 if p.dim() > 1 else 0.0, 1.0))
            rate = lr * of_rate
            p.mul_(1 - rate * self.decay * of_decay)
            self.m[name].mul_(self.beta1).add_(g, alpha=1 - self.beta1)
            self.v[name].mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
            mhat = self.m[name] / (1 - self.beta1**self.t)
            vhat = self.v[name] / (1 - self.beta2**self.t)
            p.sub_(rate * mhat / (vhat.sqrt() + self.eps * of_eps))
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
    shape = replace(shape)
    if shape.experts is not None:
        shape.experts = replace(shape.experts, bias={}, shares={}, choices={}, losses=[])
    loss_history, norm_history = [], []
    for (tokens, labels, segments), lr in zip(batches, rates, strict=True):
        grads: dict[str, Tensor] = {}
        loss = 0.0
        for part in torch.arange(len(tokens)).chunk(micro_batches):
            leaves = {k: v.detach().clone().requires_grad_() for k, v in optimizer.w.items()}
            apart, highest = None if segments is None else segments[part], getattr(optimizer, "highest", None)
            shape.samples = part
            out = logits(leaves, shape, tokens[part], apart, highest)
            objective, ce = losses(out, labels[part], shape.z)
            if shape.experts is not None:
                objective = objective + sum(shape.experts.losses)
                shape.experts.losses.clear()
            loss += float(ce) / micro_batches
            for name, g in zip(leaves, torch.autograd.grad(objective, list(leaves.values())), strict=True):
                grads[name] = grads.get(name, 0) + g.float() / micro_batches
        loss_history.append(loss)
        norm_history.append(optimizer.step(grads, lr))
        shape.updates += 1
        if shape.experts is not None:
            shape.experts.follow()
    return loss_history, norm_history, optimizer
