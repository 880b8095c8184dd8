"""Lints a recipe: settings that are possible but known to be dangerous. Hints only; nothing is refused. Pure.

A rule is an `if` with its threshold, and a hint: what happens, where that is from and what to set. To add one, write it
into the function of its subject, or into `lint_updates` if it holds for some optimizers only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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


SCALE = 1e9  # weights of the blocks from which a rule calls a model large
TIED_LOGITS = 2.0  # standard deviation of the first logits: it adds half its square to the first loss, 2 nats
# Updates in which gradients keep one direction: Adam's change every weight by the whole rate.
FIRST = 5
# Of a layer's output, by one of these updates. Runs of 3 layers of 128 tolerate 0.28 (1e-3 without warm-up), and end
# 0.2 to 0.5 nat too high at 0.85 (3e-3); of the public 774M runs without warm-up 1e-4 (0.09) is healthy, 1e-3 (0.9)
# diverges (docs/stability-method.md).
CHANGE = 0.5
# Times the best rate by DeepSeek's law; GPT-3, Llama and DeepSeek took 0.17 to 1 times. The law was fitted from 1e17
# FLOP on; our drills (1e12 FLOP) already end higher at half its rate.
ABOVE_LAW = 3.0
# Where small models without QK-norm begin to diverge.
WITHOUT_QK_NORM = 1e-2
# The second moment remembers 1 / (1 - beta2) updates. 0.95 in every model of GPT-3's table, 0.999 is PyTorch's default.
LONG_MEMORY = 0.99
LARGE_BATCH = 500_000  # tokens of an update: the smallest batch of that table
# Of the largest root mean square that clipping lets a gradient have.
EPS_SHARE = 0.1
LEAST_DECAY = 0.01  # a tenth of that of GPT-3, Llama, OLMo 2
MOST_DECAY = 0.5  # five times the 0.1 of GPT-3, Llama, OLMo 2
MOST_CLIP = 10.0  # ten times the 1.0 of these
EARLY = 0.98  # a schedule counts applied updates, and some steps may be refused
OUTLASTS = 1.25  # a schedule longer than the run by this factor costs loss

GPT3 = "GPT-3, arXiv:2005.14165, appendix B"
LLAMA = "Llama, arXiv:2302.13971, section 2.3"
CHINCHILLA = "Chinchilla, arXiv:2203.15556, appendix B"
PROXIES = "Wortsman et al., arXiv:2309.14322, section"

# Optimizers whose updates are of the size of the rate.
RATE_SIZED = frozenset({"adamw", "stable_adamw", "spam", "stable_spam"})


def lint_recipe(config: RunConfig) -> list[str]:
    """Warnings about the recipe of a new run: key=value, what happens, source, remedy."""
    rules = (lint_schedule, lint_numerics, lint_structure, lint_safety_nets, lint_updates)
    return [str(hint) for rule in rules for hint in rule(config)]


def lint_schedule(c: RunConfig) -> Iterator[Hint]:
    """Warm-ups and decays against the length of the run."""
    spans, decays = measure_lengths(c), c.schedule.kind != "constant"
    run_end, end_setting = spans.run, spans.setting
    if decays and spans.total < run_end:
        run_end, end_setting = spans.total, f"schedule.total_{spans.unit}={spans.total}"
    if spans.warmup >= run_end:
        yield Hint(
            f"schedule.warmup_{spans.unit}={spans.warmup}",
            f"not below {end_setting}, so the learning rate never reaches its peak or skips its decay",
            f"375M tokens in {GPT3}; 2,000 steps in {LLAMA}",
            "a shorter warm-up, or more steps",
        )
    batch_warmup, sequence_warmup = c.train.batch_warmup, c.train.sequence_warmup
    if batch_warmup is not None and batch_warmup.tokens >= c.tokens:
        yield Hint(
            f"train.batch_warmup.tokens={batch_warmup.tokens}",
            f"not below the {c.tokens} tokens of the run, so batch is never full",
            f"the batch grows over the first 4-12 billion of 300 billion tokens in {GPT3}",
            "a shorter warm-up, or more steps",
        )
    elif sequence_warmup is not None and sequence_warmup.tokens >= c.tokens:
        yield Hint(
            f"train.sequence_warmup.tokens={sequence_warmup.tokens}",
            f"not below the {c.tokens} tokens of the run, so samples are never whole",
            "arXiv:2108.06084, section 4",
            "a shorter warm-up, or more steps",
        )
    if decays and spans.total < EARLY * spans.run:
        yield Hint(
            f"schedule.total_{spans.unit}={spans.total}",
            f"the last {spans.run - spans.total} of {spans.setting} have {c.schedule.floor:g} of the peak rate",
            f"the best schedule is as long as the run: {CHINCHILLA}",
            f"schedule.total_{spans.unit}=null or {spans.run}",
        )
    if decays and spans.total > OUTLASTS * spans.run:
        yield Hint(
            f"schedule.total_{spans.unit}={spans.total}",
            f"{spans.total / spans.run:.2g} times {spans.setting}: the run ends before the decay does, which costs "
            f"loss beyond {OUTLASTS:g} times",
            CHINCHILLA,
            f"schedule.total_{spans.unit}=null, or kind=wsd and a decay later (megastable checkpoint branch)",
        )
    if decays and c.schedule.floor >= 1:
        yield Hint(
            f"schedule.floor={c.schedule.floor:g}",
            f"kind={c.schedule.kind} decays to its own peak: the rate stays constant",
            f"decay to a tenth: {GPT3}; {LLAMA}",
            "schedule.floor=0.1, or schedule.kind=constant if that is meant",
        )
    decay_room = spans.total - spans.warmup
    if c.schedule.kind == "wsd" and spans.decay is not None and spans.decay > decay_room:
        yield Hint(
            f"schedule.decay_{spans.unit}={spans.decay}",
            f"only {max(0, decay_room)} {spans.unit} follow the warm-up: the decay is shortened to them, and no "
            "rate is constant",
            "a tenth of the run suffices: arXiv:2404.06395, section 4; a fifth at most: arXiv:2405.18392, section 3",
            f"a shorter schedule.decay_{spans.unit}",
        )


def lint_numerics(c: RunConfig) -> Iterator[Hint]:
    """Logits beyond what the precision, or the first loss, bears."""
    m, weight_count = c.model, block_weights(c.model)
    if c.precision.kind == "fp16" and not bounded_logits(c):
        yield Hint(
            "model.qk_norm=false",
            "with precision.kind=fp16 nothing bounds the attention scores, and beyond 65,504 they are infinite",
            "GLM-130B, arXiv:2210.02414, section 3; ViT-22B, arXiv:2302.05442, section 2",
            "model.qk_norm=true, or precision.kind=bf16",
        )
    is_bounded = m.z_loss or m.logit_softcap is not None
    if c.precision.kind == "bf16" and weight_count >= SCALE and not is_bounded:
        yield Hint(
            "model.z_loss=0",
            f"with precision.kind=bf16 and {weight_count / 1e9:.2g}B weights in the blocks: logits may drift from "
            "zero, where bf16 rounds coarsely",
            f"PaLM, arXiv:2204.02311, section 5; {PROXIES} 3.1.2",
            "model.z_loss=1e-4",
        )
    # The embedding is the output layer, and gets features of size 1; muP divides them.
    logit_spread = m.init_std * math.sqrt(m.hidden) / m.width_ratio
    if m.tied and logit_spread > TIED_LOGITS:
        yield Hint(
            f"model.init_std={m.init_std:g}",
            f"with model.tied=true and a width of {m.hidden} the first logits scatter by {logit_spread:.2g}, "
            f"which adds {logit_spread**2 / 2:.2g} nats to the first loss",
            "PaLM scales the logits of its tied embedding by 1 / sqrt(width): arXiv:2204.02311, section 5",
            f"model.init_std={m.width_ratio / math.sqrt(m.hidden):.1g} or less, or model.tied=false",
        )


def lint_structure(c: RunConfig) -> Iterator[Hint]:
    """Experts, norms and initialisation, attention, dropout."""
    m = c.model
    if m.experts is not None and not (m.experts.bias_rate or m.experts.balance_loss):
        yield Hint(
            "model.experts.bias_rate=0",
            "with model.experts.balance_loss=0 nothing balances the experts, and a few may get all tokens",
            "arXiv:1701.06538, section 4",
            "model.experts.bias_rate=0.001, or model.experts.balance_loss=0.01",
        )
    if m.norms == "deep" and m.init != "xavier":
        yield Hint(
            f"model.init={m.init}",
            "with model.norms=deep: DeepNorm scales Xavier's initial weights, and its bound on the updates holds for "
            "these",
            "arXiv:2203.00555, section 3",
            "model.init=xavier",
        )
    # The model is evaluated later with branches of their full size.
    if m.norms == "branch" and m.branch_steps > c.train.steps:
        yield Hint(
            f"model.branch_steps={m.branch_steps}",
            f"more than train.steps={c.train.steps}: the branches only reach {c.train.steps / m.branch_steps:.3g} of "
            "their size",
            "4,000 of 100,000 updates and more in arXiv:2305.02790",
            f"model.branch_steps={c.train.steps} or less",
        )
    if m.residual_init == "zero" and m.norms in ("after", "both"):
        yield Hint(
            "model.residual_init=zero",
            f"with model.norms={m.norms} the norms of branches that are zero multiply their first gradients by "
            f"{m.norm_eps**-0.5:.3g} (1 / sqrt(norm_eps)), and the first update ends this",
            "measured: docs/stability-method.md, a gradient norm of 144 in place of 2.6",
            "model.residual_init=depth",
        )
    if m.window is not None and m.window >= m.sequence_length:
        yield Hint(
            f"model.window={m.window}",
            f"not below model.sequence_length={m.sequence_length}: every token sees all before it, and the window is "
            "never trained",
            "4,096 of 8,192 tokens in Mistral 7B (arXiv:2310.06825) and Gemma 2 (arXiv:2408.00118)",
            "a shorter model.window, or null",
        )
    qk_clip, logit_cap = c.optimizer.qk_clip, m.attention_softcap
    if qk_clip is not None and logit_cap is not None:
        yield Hint(
            f"optimizer.qk_clip={qk_clip:g}",
            f"with model.attention_softcap={logit_cap:g}, which already bounds the logits: the clip measures them "
            "before the cap and shrinks weights that the cap makes harmless",
            "Kimi K2, arXiv:2507.20534, section 2.1; Gemma 2, arXiv:2408.00118, section 2",
            "one of them to null",
        )
    if m.dropout:
        yield Hint(
            f"model.dropout={m.dropout:g}",
            "unless the data is repeated several times there is no overfitting, and dropout only raises the loss",
            "arXiv:2505.24788, 160M and 1.4B parameters, one epoch",
            "model.dropout=0, or ignore this for several epochs",
        )


def lint_safety_nets(c: RunConfig) -> Iterator[Hint]:
    """Weight decay, clipping, checkpoints, evaluation."""
    o = c.optimizer
    decay_setting, rate_times_decay = f"optimizer.weight_decay={o.weight_decay:g}", o.lr * o.weight_decay
    unbounded = "weights grow without bound, and bf16 runs have diverged"
    if rate_times_decay >= 1:
        yield Hint(
            decay_setting,
            f"times optimizer.lr={o.lr:g} it is {rate_times_decay:.2g}: from 1 on every update turns the sign of a "
            "weight",
            "arXiv:1711.05101, algorithm 2",
            "less of both",
        )
    elif o.weight_decay < LEAST_DECAY:
        yield Hint(
            decay_setting,
            unbounded if o.weight_decay == 0 else f"below {LEAST_DECAY:g} it is nearly none: {unbounded}",
            f"arXiv:2310.04415, section 4; 0.1 in {LLAMA}",
            "optimizer.weight_decay=0.1",
        )
    elif o.weight_decay > MOST_DECAY:
        yield Hint(
            decay_setting,
            f"above {MOST_DECAY:g}, weights are pulled to zero faster than known runs learn them",
            f"{GPT3}; 0.1 in {LLAMA}",
            "optimizer.weight_decay=0.1",
        )
    if o.clipping.kind in ("norm", "worker") and not 0 < o.clip <= MOST_CLIP:
        effect = "gradients are not clipped"
        if o.clip:
            effect = f"above {MOST_CLIP:g}, hardly any gradient is clipped"
        yield Hint(
            f"optimizer.clip={o.clip:g}",
            f"{effect}: a single bad batch enters both moments in full",
            f"arXiv:1211.5063, section 3.2; 1.0 in {GPT3}, and {LLAMA}",
            "optimizer.clip=1.0",
        )
    if not c.checkpoint.interval:
        written_ones = "only one is written, at the end" if c.checkpoint.at_end else "none is written"
        yield Hint(
            "checkpoint.interval=0",
            f"{written_ones}: a crash loses the run, and a spike has no healthy checkpoint to return to",
            "419 interruptions in 54 days: Llama 3, arXiv:2407.21783, section 3.3.4",
            "checkpoint.interval, e.g. 500 or 30min",
        )
    if not c.train.eval_samples:
        yield Hint(
            "train.eval_samples=0",
            "the run is never evaluated: repeated data lowers the training loss, not the validation loss",
            "Hernandez et al., arXiv:2205.10487, section 1",
            "train.eval_samples=256",
        )


def lint_updates(c: RunConfig) -> Iterator[Hint]:
    """Rules whose thresholds are for a certain kind of update: of the size of the rate; of about its size (Muon's is
    matched to AdamW's, arXiv:2502.16982); divided by the root of a second moment."""
    m, o = c.model, c.optimizer
    if o.name in RATE_SIZED | {"adafactor"}:
        yield from _lint_first_updates(c)
    law_rate = best_rate(c) * m.width_ratio  # by which muP divides the rate of the blocks' matrices
    is_near_rate = o.name in RATE_SIZED | {"adafactor", "muon"}
    if is_near_rate and o.lr > ABOVE_LAW * law_rate:
        yield Hint(
            f"optimizer.lr={o.lr:g}",
            f"{o.lr / law_rate:.2g} times {law_rate:.2g}, the best rate of AdamW for the {estimate_compute(c):.1e} "
            f"FLOP of this run (limit {ABOVE_LAW:g} times): it diverges or ends at a higher loss",
            "DeepSeek LLM, arXiv:2401.02954, section 3.1: 0.3118 C^-0.125",
            f"optimizer.lr={law_rate:.2g} or less",
        )
    if is_near_rate and o.lr >= WITHOUT_QK_NORM and not bounded_logits(c):
        yield Hint(
            "model.qk_norm=false",
            f"with optimizer.lr={o.lr:g}, from {WITHOUT_QK_NORM:g} on, attention logits grow without bound",
            f"{PROXIES} 3.1.1",
            "model.qk_norm=true, optimizer.qk_clip=100 or a lower optimizer.lr",
        )
    has_second_moment = o.name in RATE_SIZED | {"lamb"}
    beta2, batch_tokens = o.betas[1], c.train.global_batch * m.sequence_length
    if has_second_moment and beta2 > LONG_MEMORY and batch_tokens >= LARGE_BATCH:
        yield Hint(
            f"optimizer.betas=[{o.betas[0]:g}, {beta2:g}]",
            f"the second moment is a mean over {1 / max(1 - beta2, 1e-9):.0f} updates, of {batch_tokens / 1e6:.2g}M "
            "tokens each: when gradients grow it is stale and too small, and updates too large: the loss spikes",
            f"Wortsman et al., arXiv:2304.13013, section 3; 0.95 in {GPT3}, and {LLAMA}",
            "optimizer.betas=[0.9, 0.95]",
        )
    # Clipped to a norm g, the gradients of n weights have a root mean square of g / sqrt(n).
    norm = o.clip if o.clip and o.clipping.kind in ("norm", "worker") else 1.0
    largest = norm / math.sqrt(block_weights(m))
    if has_second_moment and o.eps > EPS_SHARE * largest:
        yield Hint(
            f"optimizer.eps={o.eps:g}",
            f"{o.eps / largest:.2g} times {largest:.1e}, the largest root mean square of a gradient after "
            f"clipping (limit {EPS_SHARE:g}): it damps the updates, the more the smaller gradients become",
            f"{PROXIES} 3.4; 1e-8 in {GPT3}",
            "optimizer.eps=1e-8 or less",
        )


def _lint_first_updates(c: RunConfig) -> Iterator[Hint]:
    """The first updates are too large for the initial weights, or there is no warm-up."""
    m, spans, mean_rate = c.model, measure_lengths(c), first_rate(c)
    warmup_setting = f"schedule.warmup_{spans.unit}={spans.warmup}"
    glorot = m.hidden**-0.5
    matrix_stds = {
        "normal": m.init_std,
        "fan_in": glorot,
        "xavier": glorot,
        "small": math.sqrt(2 / (5 * m.hidden)),
    }
    initial_std = matrix_stds[m.init] / math.sqrt(m.width_ratio)  # of a square matrix of the blocks
    output_change = mean_rate / m.width_ratio * math.sqrt(m.hidden) / (2 * initial_std)
    update_length = c.batches.value_at(0) * m.sequence_length if c.schedule.by_tokens else 1
    warmup_by_thumb = math.ceil(update_length * 2 / max(1 - c.optimizer.betas[1], 1e-9))
    if output_change >= CHANGE:
        longer_warmup = math.ceil(min(spans.warmup * output_change / CHANGE, 1e15))
        yield Hint(
            warmup_setting,
            f"the first {FIRST} updates have a mean rate of {mean_rate:.2g}: with weights of {initial_std:g} and a "
            f"width of {m.hidden} each may change what a layer puts out by {output_change:.2f} times itself, limit "
            f"{CHANGE:g}",
            "measured: docs/stability-method.md, warnings at the start",
            f"schedule.warmup_{spans.unit}={max(warmup_by_thumb, longer_warmup)} or more, or a lower optimizer.lr",
        )
    elif not spans.warmup:
        yield Hint(
            warmup_setting,
            "no warm-up: the second moment of the first updates is that of a few batches, and high rates diverge "
            "sooner",
            f"{PROXIES} 3.2.1",
            f"schedule.warmup_{spans.unit}={warmup_by_thumb} (2 / (1 - beta2) updates, arXiv:1910.04209) or more",
        )


def bounded_logits(c: RunConfig) -> bool:
    """Whether anything bounds the attention logits."""
    m = c.model
    return m.qk_norm is not False or m.attention_softcap is not None or c.optimizer.qk_clip is not None


def block_weights(m: ModelConfig) -> int:
    """Weights of all blocks that are used for a token, without embedding, output layer and vectors."""
    attention_weights = m.hidden * m.head_width * 2 * (m.heads + m.key_value_heads)
    return m.layers * attention_weights + 3 * m.hidden * m.mlp_widths(of_token=True)


def estimate_compute(c: RunConfig) -> float:
    """Training compute without the embeddings, as DeepSeek LLM counts it (arXiv:2401.02954, section 3.2). [FLOP]"""
    m = c.model
    per_token = 6 * block_weights(m) + 12 * m.layers * m.heads * m.head_width * m.sequence_length
    return float(per_token) * c.tokens


def best_rate(c: RunConfig) -> float:
    """The peak rate of lowest loss for AdamW by the power law of DeepSeek LLM (arXiv:2401.02954, section 3.1)."""
    return 0.3118 * float(estimate_compute(c) ** -0.1250)


@dataclass(frozen=True)
class Lengths:
    """Lengths in the schedule's unit, "steps" or "tokens". decay: of wsd's final one, None if not given. setting: the
    key that says how long the run is, with its value."""

    unit: str
    run: int
    total: int
    warmup: int
    decay: int | None
    setting: str


def measure_lengths(c: RunConfig) -> Lengths:
    """The lengths of run and schedule."""
    s = c.schedule
    if s.by_tokens:
        total, setting = s.total_tokens or c.tokens, f"{c.tokens} tokens of the run"
        return Lengths("tokens", c.tokens, total, s.warmup_tokens or 0, s.decay_tokens, setting)
    steps = c.train.steps
    return Lengths(
        "steps", steps, s.total_steps or steps, s.warmup_steps or 0, s.decay_steps, f"train.steps={steps}"
    )


def first_rate(c: RunConfig) -> float:
    """The mean rate of the first updates."""
    warmup_length, done_length, data_cursor, first_rates = max(1, measure_lengths(c).warmup), 0, 0, []
    for _ in range(FIRST):
        batch_size = c.batches.value_at(data_cursor)
        data_cursor += batch_size
        done_length += batch_size * c.model.sequence_length if c.schedule.by_tokens else 1
        first_rates.append(c.optimizer.lr * min(1.0, done_length / warmup_length))
    return sum(first_rates) / FIRST
