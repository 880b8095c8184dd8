"""The same model in plain torch, in the style of nanoGPT and torchtitan.

Batch first, fused projections, torch's own norms, attention and cross-entropy, the whole compiled. Parameters have
our names, so that the same weights can be loaded. Without documents kept apart.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers import Contestant, Task, make_training_step, refuse_others
from megastable.config.model import ModelConfig


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [b, heads, s, d], cos and sin fp32 [s, d / 2]."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).type_as(x)


class Attention(nn.Module):
    """x [b, s, hidden] -> the same."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.d = d = c.head_width
        self.sizes = [c.heads * d, c.key_value_heads * d, c.key_value_heads * d]
        self.by_head = c.qk_norm is True
        self.qkv = nn.Linear(c.hidden, sum(self.sizes), bias=False)
        self.q_norm = self.k_norm = None
        if c.qk_norm:
            widths = (d, d) if self.by_head else self.sizes[:2]
            self.q_norm, self.k_norm = (nn.RMSNorm(w, eps=c.norm_eps) for w in widths)
        self.out = nn.Linear(c.heads * d, c.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(x).split(self.sizes, -1)
        if self.q_norm is not None and self.k_norm is not None and not self.by_head:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.view(b, s, -1, self.d) for t in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None and self.by_head:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.out(y.transpose(1, 2).reshape(b, s, -1))


class MLP(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(c.hidden, 2 * c.ffn_width, bias=False)
        self.down = nn.Linear(c.ffn_width, c.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.norms_after = c.norms == "after"
        self.attention_norm = nn.RMSNorm(c.hidden, eps=c.norm_eps)
        self.attention = Attention(c)
        self.mlp_norm = nn.RMSNorm(c.hidden, eps=c.norm_eps)
        self.mlp = MLP(c)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.norms_after:
            x = x + self.attention_norm(self.attention(x, cos, sin))
            return x + self.mlp_norm(self.mlp(x))
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class PlainGPT(nn.Module):
    """tokens, labels: int64 [b, s] -> mean cross-entropy + z_loss * mean(logsumexp^2), fp32."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.config = c
        self.embedding = nn.Embedding(c.padded_vocab, c.hidden)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.final_norm = nn.RMSNorm(c.hidden, eps=c.norm_eps)
        self.head = None if c.tied else nn.Linear(c.hidden, c.padded_vocab, bias=False)
        self.cos, self.sin = (
            torch.empty(0),
            torch.empty(0),
        )  # not buffers: a cast to bf16 would lose precision

    def load_weights(self, weights: dict[str, Tensor], device: torch.device, dtype: torch.dtype) -> PlainGPT:
        """Move to the device, with weights by our names, and build the rotary tables."""
        c = self.config
        self.to(dtype).to_empty(device=device).load_state_dict(weights)
        rate = c.rope_theta ** (-torch.arange(0, c.head_width, 2).float() / c.head_width)
        angle = torch.outer(torch.arange(c.sequence_length).float(), rate).to(device)
        self.cos, self.sin = angle.cos(), angle.sin()
        return self

    def compute_logits(self, tokens: Tensor) -> Tensor:
        """fp32 [b * s, vocabulary]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        x = self.final_norm(x)
        logits = F.linear(x, self.embedding.weight) if self.head is None else self.head(x)
        return logits.float().flatten(0, 1)[:, : self.config.vocab_size]  # padding is no token

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.compute_logits(tokens)
        loss = F.cross_entropy(logits, labels.flatten())
        if self.config.z_loss:
            loss = loss + self.config.z_loss * logits.logsumexp(-1).square().mean()
        return loss


def build(task: Task) -> Contestant:
    """Compiled whole, unless the recipe says kernels.compile=false."""
    refuse_others(task.config.model, {"norms": ("before", "after"), "qk_norm": (True, False, "full")})
    compiled = task.config.kernels.compile is not False
    with torch.device("meta"):  # no weights are drawn only to be overwritten
        module = PlainGPT(task.config.model)
    module.load_weights(task.weights, task.device, task.dtype)
    forward: Any = torch.compile(module) if compiled else module
    how = "compiled whole" if compiled else "eager"
    return Contestant(
        make_training_step(task, module, forward),
        f"plain torch, sdpa, cross_entropy, {how}; AdamW fused, no masters",
    )
