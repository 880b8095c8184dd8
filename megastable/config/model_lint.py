"""Rules of the recipe lint about the model: its precision, and choices that do not go well together. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from megastable.config.model import ModelConfig
from megastable.config.tree import RunConfig


@dataclass(frozen=True)
class Hint:
    """setting: key=value. effect: what it does, with numbers. source: paper and section, or measurement. remedy: what
    to set."""

    setting: str
    effect: str
    source: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.setting}: {self.effect} ({self.source}). Set {self.remedy}"


Rule = Callable[[RunConfig], Hint | None]


SCALE = 1e9  # weights of the blocks from which a rule calls a model large
TIED_LOGITS = 2.0  # standard deviation of the first logits: it adds half its square to the first loss, 2 nats
PROXIES = "Wortsman et al., arXiv:2309.14322, section"


def matrix_std(m: ModelConfig) -> float:
    """Initial standard deviation of a square matrix of the blocks."""
    glorot = m.hidden**-0.5
    kinds = {"normal": m.init_std, "fan_in": glorot, "xavier": glorot, "small": math.sqrt(2 / (5 * m.hidden))}
    return kinds[m.init] / math.sqrt(m.width_ratio)


def bounded_logits(c: RunConfig) -> bool:
    """Whether anything bounds the attention logits."""
    m = c.model
    return m.qk_norm is not False or m.attention_softcap is not None or c.optimizer.qk_clip is not None


def block_weights(m: ModelConfig) -> int:
    """Weights of all blocks, without embedding, output layer and vectors."""
    attention = m.hidden * m.head_width * 2 * (m.heads + m.key_value_heads)
    return m.layers * (attention + 3 * m.hidden * m.ffn_width)


def fp16_without_qk_norm(c: RunConfig) -> Hint | None:
    """Attention scores beyond the range of fp16."""
    if c.precision.kind != "fp16" or bounded_logits(c):
        return None
    return Hint(
        "model.qk_norm=false",
        "with precision.kind=fp16 nothing bounds the attention scores, and beyond 65,504 they are infinite",
        "GLM-130B, arXiv:2210.02414, section 3; ViT-22B, arXiv:2302.05442, section 2",
        "model.qk_norm=true, or precision.kind=bf16",
    )


def no_z_loss(c: RunConfig) -> Hint | None:
    """Output logits drift in bf16."""
    weights = block_weights(c.model)
    bounded = c.model.z_loss or c.model.logit_softcap is not None
    if bounded or c.precision.kind != "bf16" or weights < SCALE:
        return None
    return Hint(
        "model.z_loss=0",
        f"with precision.kind=bf16 and {weights / 1e9:.2g}B weights in the blocks: logits may drift from zero, where "
        "bf16 rounds coarsely",
        f"PaLM, arXiv:2204.02311, section 5; {PROXIES} 3.1.2",
        "model.z_loss=1e-4",
    )


def tied_and_large(c: RunConfig) -> Hint | None:
    """The embedding is the output layer: its scale is that of the first logits."""
    # Of features of size 1; muP divides them.
    spread = c.model.init_std * math.sqrt(c.model.hidden) / c.model.width_ratio
    if not c.model.tied or spread <= TIED_LOGITS:
        return None
    return Hint(
        f"model.init_std={c.model.init_std:g}",
        f"with model.tied=true and a width of {c.model.hidden} the first logits scatter by {spread:.2g}, which adds "
        f"{spread**2 / 2:.2g} nats to the first loss",
        "PaLM scales the logits of its tied embedding by 1 / sqrt(width): arXiv:2204.02311, section 5",
        f"model.init_std={c.model.width_ratio / math.sqrt(c.model.hidden):.1g} or less, or model.tied=false",
    )


# Norms and initialisation


def depth_norm_without_xavier(c: RunConfig) -> Hint | None:
    """DeepNorm's factors are derived for another initialisation."""
    m = c.model
    if m.norms != "deep" or m.init == "xavier":
        return None
    return Hint(
        f"model.init={m.init}",
        "with model.norms=deep: DeepNorm scales Xavier's initial weights, and its bound on the updates holds for these",
        "arXiv:2203.00555, section 3",
        "model.init=xavier",
    )


def branches_never_grown(c: RunConfig) -> Hint | None:
    """The run ends before the branches have their full size, with which the model is evaluated later."""
    if c.model.norms != "branch" or c.model.branch_steps <= c.train.steps:
        return None
    return Hint(
        f"model.branch_steps={c.model.branch_steps}",
        f"more than train.steps={c.train.steps}: the branches only reach {c.train.steps / c.model.branch_steps:.3g} of "
        "their size",
        "4,000 of 100,000 updates and more in arXiv:2305.02790",
        f"model.branch_steps={c.train.steps} or less",
    )


def norm_of_nothing(c: RunConfig) -> Hint | None:
    """A norm after a branch of zero multiplies its gradient by 1 / sqrt(eps)."""
    m = c.model
    if m.residual_init != "zero" or m.norms not in ("after", "both"):
        return None
    return Hint(
        "model.residual_init=zero",
        f"with model.norms={m.norms} the norms of branches that are zero multiply their first gradients by "
        f"{m.norm_eps**-0.5:.3g} (1 / sqrt(norm_eps)), and the first update ends this",
        "measured: docs/stability-method.md, a gradient norm of 144 in place of 2.6",
        "model.residual_init=depth",
    )


# Attention, dropout


def window_of_everything(c: RunConfig) -> Hint | None:
    """A window that no sample exceeds."""
    m = c.model
    if m.window is None or m.window < m.sequence_length:
        return None
    return Hint(
        f"model.window={m.window}",
        f"not below model.sequence_length={m.sequence_length}: every token sees all before it, and the window is never "
        "trained",
        "4,096 of 8,192 tokens in Mistral 7B (arXiv:2310.06825) and Gemma 2 (arXiv:2408.00118)",
        "a shorter model.window, or null",
    )


def clip_of_capped_logits(c: RunConfig) -> Hint | None:
    """Two bounds on the attention logits; the clip measures them before the cap."""
    clip, cap = c.optimizer.qk_clip, c.model.attention_softcap
    if clip is None or cap is None:
        return None
    return Hint(
        f"optimizer.qk_clip={clip:g}",
        f"with model.attention_softcap={cap:g}, which already bounds the logits: the clip measures them before the cap "
        "and shrinks weights that the cap makes harmless",
        "Kimi K2, arXiv:2507.20534, section 2.1; Gemma 2, arXiv:2408.00118, section 2",
        "one of them to null",
    )


def dropout_of_fresh_data(c: RunConfig) -> Hint | None:
    """Dropout costs loss where nothing is read twice."""
    if not c.model.dropout:
        return None
    return Hint(
        f"model.dropout={c.model.dropout:g}",
        "unless the data is repeated several times there is no overfitting, and dropout only raises the loss",
        "arXiv:2505.24788, 160M and 1.4B parameters, one epoch",
        "model.dropout=0, or ignore this for several epochs",
    )


RULES: tuple[Rule, ...] = (
    fp16_without_qk_norm, no_z_loss, tied_and_large, depth_norm_without_xavier, branches_never_grown, norm_of_nothing,
    window_of_everything, clip_of_capped_logits, dropout_of_fresh_data,
)  # fmt: skip
