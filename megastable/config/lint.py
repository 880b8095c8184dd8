"""Lints a recipe: settings that are possible but known to be dangerous. Hints only; nothing is refused. Pure.

A rule is a function of the configuration with its threshold: None, or what happens, where that is from and what to
set. To add one, write the function and name it in `RULES`, or in `OF` if it holds for some optimizers only; those about
the model are in model_lint.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megastable.config import model_lint
from megastable.config.model_lint import PROXIES, Hint, Rule, block_weights, bounded_logits, matrix_std
from megastable.config.tree import RunConfig

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


def lint(config: RunConfig) -> list[str]:
    """Warnings about the recipe of a new run: key=value, what happens, source, remedy."""
    rules = [*RULES, *(rule for rule, names in OF if config.optimizer.name in names)]
    return [str(hint) for rule in rules if (hint := rule(config)) is not None]


def compute(c: RunConfig) -> float:
    """Training compute without the embeddings, as DeepSeek LLM counts it (arXiv:2401.02954, section 3.2). [FLOP]"""
    m = c.model
    per_token = 6 * block_weights(m) + 12 * m.layers * m.heads * m.head_width * m.sequence_length
    return float(per_token) * c.tokens


def best_rate(c: RunConfig) -> float:
    """The peak rate of lowest loss for AdamW by the power law of DeepSeek LLM (arXiv:2401.02954, section 3.1)."""
    return 0.3118 * float(compute(c) ** -0.1250)


def tokens(c: RunConfig) -> int:
    """Tokens of an update."""
    return c.train.global_batch * c.model.sequence_length


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


def lengths(c: RunConfig) -> Lengths:
    """The lengths of run and schedule."""
    s = c.schedule
    if s.by_tokens:
        run = c.tokens
        return Lengths(
            "tokens",
            run,
            s.total_tokens or run,
            s.warmup_tokens or 0,
            s.decay_tokens,
            f"{run} tokens of the run",
        )
    run = c.train.steps
    return Lengths(
        "steps", run, s.total_steps or run, s.warmup_steps or 0, s.decay_steps, f"train.steps={run}"
    )


def first_rate(c: RunConfig) -> float:
    """The mean rate of the first updates."""
    warmup, done, cursor, rates = max(1, lengths(c).warmup), 0, 0, []
    for _ in range(FIRST):
        size = c.batches.at(cursor)
        cursor += size
        done += size * c.model.sequence_length if c.schedule.by_tokens else 1
        rates.append(c.optimizer.lr * min(1.0, done / warmup))
    return sum(rates) / FIRST


# The schedule


def warmup_outlasts_run(c: RunConfig) -> Hint | None:
    """The peak rate is never reached."""
    of = lengths(c)
    end, setting = of.run, of.setting
    if c.schedule.kind != "constant" and of.total < end:
        end, setting = of.total, f"schedule.total_{of.unit}={of.total}"
    if of.warmup < end:
        return None
    return Hint(
        f"schedule.warmup_{of.unit}={of.warmup}",
        f"not below {setting}, so the learning rate never reaches its peak or skips its decay",
        f"375M tokens in {GPT3}; 2,000 steps in {LLAMA}",
        "a shorter warm-up, or more steps",
    )


def data_warmup_outlasts_run(c: RunConfig) -> Hint | None:
    """The full batch or the whole samples never come."""
    for key, of in (("batch", c.train.batch_warmup), ("sequence", c.train.sequence_warmup)):
        if of is not None and of.tokens >= c.tokens:
            what = "batch is never full" if key == "batch" else "samples are never whole"
            return Hint(
                f"train.{key}_warmup.tokens={of.tokens}",
                f"not below the {c.tokens} tokens of the run, so {what}",
                f"the batch grows over the first 4-12 billion of 300 billion tokens in {GPT3}"
                if key == "batch"
                else "arXiv:2108.06084, section 4",
                "a shorter warm-up, or more steps",
            )
    return None


def schedule_ends_early(c: RunConfig) -> Hint | None:
    """The run trains on at the lowest rate."""
    of = lengths(c)
    if c.schedule.kind == "constant" or of.total >= EARLY * of.run:
        return None
    return Hint(
        f"schedule.total_{of.unit}={of.total}",
        f"the last {of.run - of.total} of {of.setting} have {c.schedule.floor:g} of the peak rate",
        f"the best schedule is as long as the run: {CHINCHILLA}",
        f"schedule.total_{of.unit}=null or {of.run}",
    )


def schedule_outlasts_run(c: RunConfig) -> Hint | None:
    """The run ends at a high rate."""
    of = lengths(c)
    if c.schedule.kind == "constant" or of.total <= OUTLASTS * of.run:
        return None
    return Hint(
        f"schedule.total_{of.unit}={of.total}",
        f"{of.total / of.run:.2g} times {of.setting}: the run ends before the decay does, which costs loss beyond "
        f"{OUTLASTS:g} times",
        CHINCHILLA,
        f"schedule.total_{of.unit}=null, or kind=wsd and a decay later (megastable checkpoint branch)",
    )


def no_decay(c: RunConfig) -> Hint | None:
    """A decay that ends where it began."""
    if c.schedule.kind == "constant" or c.schedule.floor < 1:
        return None
    return Hint(
        f"schedule.floor={c.schedule.floor:g}",
        f"kind={c.schedule.kind} decays to its own peak: the rate stays constant",
        f"decay to a tenth: {GPT3}; {LLAMA}",
        "schedule.floor=0.1, or schedule.kind=constant if that is meant",
    )


def no_constant_phase(c: RunConfig) -> Hint | None:
    """The final decay of `wsd` takes the whole run."""
    of = lengths(c)
    room = of.total - of.warmup
    if c.schedule.kind != "wsd" or of.decay is None or of.decay <= room:
        return None
    return Hint(
        f"schedule.decay_{of.unit}={of.decay}",
        f"only {max(0, room)} {of.unit} follow the warm-up: the decay is shortened to them, and no rate is constant",
        "a tenth of the run suffices: arXiv:2404.06395, section 4; a fifth at most: arXiv:2405.18392, section 3",
        f"a shorter schedule.decay_{of.unit}",
    )


# Safety nets


def decay_of_weights(c: RunConfig) -> Hint | None:
    """None or hardly any, or so much that weights cannot be learnt."""
    o = c.optimizer
    if (product := o.lr * o.weight_decay) >= 1:
        effect = f"times optimizer.lr={o.lr:g} it is {product:.2g}: from 1 on every update turns the sign of a weight"
        return Hint(
            f"optimizer.weight_decay={o.weight_decay:g}",
            effect,
            "arXiv:1711.05101, algorithm 2",
            "less of both",
        )
    if LEAST_DECAY <= o.weight_decay <= MOST_DECAY:
        return None
    growth = "weights grow without bound, and bf16 runs have diverged"
    effect, source = (
        (
            growth if o.weight_decay == 0 else f"below {LEAST_DECAY:g} it is nearly none: {growth}",
            "arXiv:2310.04415, section 4",
        )
        if o.weight_decay < LEAST_DECAY
        else (f"above {MOST_DECAY:g}, weights are pulled to zero faster than known runs learn them", GPT3)
    )
    return Hint(
        f"optimizer.weight_decay={o.weight_decay:g}",
        effect,
        f"{source}; 0.1 in {LLAMA}",
        "optimizer.weight_decay=0.1",
    )


def clipping(c: RunConfig) -> Hint | None:
    """One batch may move all weights."""
    clip = c.optimizer.clip
    if 0 < clip <= MOST_CLIP or c.optimizer.clipping.kind not in ("norm", "worker"):
        return None
    effect = (
        "gradients are not clipped" if clip == 0 else f"above {MOST_CLIP:g}, hardly any gradient is clipped"
    )
    return Hint(
        f"optimizer.clip={clip:g}",
        f"{effect}: a single bad batch enters both moments in full",
        f"arXiv:1211.5063, section 3.2; 1.0 in {GPT3}, and {LLAMA}",
        "optimizer.clip=1.0",
    )


def no_checkpoints(c: RunConfig) -> Hint | None:
    """A crash loses the whole run."""
    if c.checkpoint.interval:
        return None
    written = "only one is written, at the end" if c.checkpoint.at_end else "none is written"
    return Hint(
        "checkpoint.interval=0",
        f"{written}: a crash loses the run, and a spike has no healthy checkpoint to return to",
        "419 interruptions in 54 days: Llama 3, arXiv:2407.21783, section 3.3.4",
        "checkpoint.interval, e.g. 500 or 30min",
    )


def no_evaluation(c: RunConfig) -> Hint | None:
    """Overfitting and damage that training data hides stay unseen."""
    if c.train.eval_samples:
        return None
    return Hint(
        "train.eval_samples=0",
        "the run is never evaluated: repeated data lowers the training loss, not the validation loss",
        "Hernandez et al., arXiv:2205.10487, section 1",
        "train.eval_samples=256",
    )


# Adam's updates


def first_updates(c: RunConfig) -> Hint | None:
    """The first updates are too large for the initial weights, or there is no warm-up."""
    of, lr = lengths(c), first_rate(c)
    setting = f"schedule.warmup_{of.unit}={of.warmup}"
    std = matrix_std(c.model)
    change = lr / c.model.width_ratio * math.sqrt(c.model.hidden) / (2 * std)
    each = c.batches.at(0) * c.model.sequence_length if c.schedule.by_tokens else 1
    thumb = math.ceil(each * 2 / max(1 - c.optimizer.betas[1], 1e-9))
    if change >= CHANGE:
        return Hint(
            setting,
            f"the first {FIRST} updates have a mean rate of {lr:.2g}: with weights of {std:g} and a width "
            f"of {c.model.hidden} each may change what a layer puts out by {change:.2f} times itself, limit {CHANGE:g}",
            "measured: docs/stability-method.md, warnings at the start",
            f"schedule.warmup_{of.unit}={max(thumb, math.ceil(min(of.warmup * change / CHANGE, 1e15)))} or more, "
            "or a lower optimizer.lr",
        )
    if of.warmup:
        return None
    return Hint(
        setting,
        "no warm-up: the second moment of the first updates is that of a few batches, and high rates diverge sooner",
        f"{PROXIES} 3.2.1",
        f"schedule.warmup_{of.unit}={thumb} (2 / (1 - beta2) updates, arXiv:1910.04209) or more",
    )


def peak_rate(c: RunConfig) -> Hint | None:
    """The peak rate against a scaling law."""
    best = best_rate(c) * c.model.width_ratio  # by which muP divides the rate of the blocks' matrices
    if c.optimizer.lr <= ABOVE_LAW * best:
        return None
    return Hint(
        f"optimizer.lr={c.optimizer.lr:g}",
        f"{c.optimizer.lr / best:.2g} times {best:.2g}, the best rate of AdamW for the {compute(c):.1e} FLOP of this "
        f"run (limit {ABOVE_LAW:g} times): it diverges or ends at a higher loss",
        "DeepSeek LLM, arXiv:2401.02954, section 3.1: 0.3118 C^-0.125",
        f"optimizer.lr={best:.2g} or less",
    )


def rate_without_qk_norm(c: RunConfig) -> Hint | None:
    """Attention logits grow at high rates."""
    if bounded_logits(c) or c.optimizer.lr < WITHOUT_QK_NORM:
        return None
    return Hint(
        "model.qk_norm=false",
        f"with optimizer.lr={c.optimizer.lr:g}, from {WITHOUT_QK_NORM:g} on, attention logits grow without bound",
        f"{PROXIES} 3.1.1",
        "model.qk_norm=true, optimizer.qk_clip=100 or a lower optimizer.lr",
    )


def stale_second_moment(c: RunConfig) -> Hint | None:
    """A long memory in runs of few, large updates."""
    beta2, batch = c.optimizer.betas[1], tokens(c)
    if beta2 <= LONG_MEMORY or batch < LARGE_BATCH:
        return None
    return Hint(
        f"optimizer.betas=[{c.optimizer.betas[0]:g}, {beta2:g}]",
        f"the second moment is a mean over {1 / max(1 - beta2, 1e-9):.0f} updates, of {batch / 1e6:.2g}M tokens each: "
        "when gradients grow it is stale and too small, and updates too large: the loss spikes",
        f"Wortsman et al., arXiv:2304.13013, section 3; 0.95 in {GPT3}, and {LLAMA}",
        "optimizer.betas=[0.9, 0.95]",
    )


def epsilon(c: RunConfig) -> Hint | None:
    """Epsilon against the gradients: clipped to a norm g, those of n weights have a root mean square of g / sqrt(n)."""
    norm = c.optimizer.clip if c.optimizer.clip and c.optimizer.clipping.kind in ("norm", "worker") else 1.0
    largest = norm / math.sqrt(block_weights(c.model))
    if c.optimizer.eps <= EPS_SHARE * largest:
        return None
    return Hint(
        f"optimizer.eps={c.optimizer.eps:g}",
        f"{c.optimizer.eps / largest:.2g} times {largest:.1e}, the largest root mean square of a gradient after "
        f"clipping (limit {EPS_SHARE:g}): it damps the updates, the more the smaller gradients become",
        f"{PROXIES} 3.4; 1e-8 in {GPT3}",
        "optimizer.eps=1e-8 or less",
    )


RULES: tuple[Rule, ...] = (
    warmup_outlasts_run, data_warmup_outlasts_run, schedule_ends_early, schedule_outlasts_run, no_decay,
    no_constant_phase, *model_lint.RULES, decay_of_weights, clipping, no_checkpoints, no_evaluation,
)  # fmt: skip
# Rules whose thresholds are for a certain kind of update, with the optimizers that make it: of the size of the rate;
# of about its size (Muon's is matched to AdamW's, arXiv:2502.16982); divided by the root of a second moment.
RATE_SIZED = frozenset({"adamw", "stable_adamw", "spam", "stable_spam"})
OF: tuple[tuple[Rule, frozenset[str]], ...] = (
    (first_updates, RATE_SIZED | {"adafactor"}),
    (peak_rate, RATE_SIZED | {"adafactor", "muon"}),
    (rate_without_qk_norm, RATE_SIZED | {"adafactor", "muon"}),
    (stale_second_moment, RATE_SIZED | {"lamb"}),
    (epsilon, RATE_SIZED | {"lamb"}),
)
