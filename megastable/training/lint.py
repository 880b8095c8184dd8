"""Lints a recipe: settings that are possible but have caused trouble before. Hints only; nothing is refused."""

from __future__ import annotations

import math
from itertools import islice

from megastable.config.tree import RunConfig
from megastable.optim.schedule import rates, warmup

# Updates in which gradients keep one direction: Adam's change every weight by the whole rate.
FIRST = 5
# Of a layer's output, by one of these updates. Runs of 3 layers of 128 tolerate 0.28 (1e-3 without warm-up), and end
# 0.2 to 0.5 nat too high at 0.85 (3e-3); of the public 774M runs without warm-up 1e-4 (0.09) is healthy, 1e-3 (0.9)
# diverges (docs/stability.md).
CHANGE = 0.5
# Where small models without QK-norm begin to diverge (Wortsman et al., arXiv:2309.14322, section 3.1).
WITHOUT_QK_NORM = 1e-2
HIGHEST = 0.3  # the highest rate of that study, with QK-norm: nothing beyond it is known to train


def lint(config: RunConfig) -> list[str]:
    """Warnings about the recipe of a new run, each with its reason and a remedy."""
    c, found = config, []
    unit, updates = ("tokens", " updates") if c.schedule.by_tokens else ("steps", "")
    key, length = f"schedule.warmup_{unit}", warmup(c.schedule)
    first = list(islice(rates(c), FIRST))
    lr = sum(first) / len(first)
    change = lr * math.sqrt(c.model.hidden) / (2 * c.model.init_std)
    if change >= CHANGE:
        found.append(
            f"the first {FIRST} updates have a mean rate of {lr:.2g}: with weights of {c.model.init_std:g} and a width "
            f"of {c.model.hidden} each may change what a layer puts out by {change:.2f} times itself (limit "
            f"{CHANGE:g}). Set a longer {key} (now {length}; 2 / (1 - beta2) = "
            f"{2 / max(1 - c.optimizer.betas[1], 1e-9):.0f}{updates} is a rule of thumb, arXiv:1910.04209), or a lower "
            "optimizer.lr"
        )
    if not c.model.qk_norm and c.optimizer.lr >= WITHOUT_QK_NORM:
        found.append(
            f"model.qk_norm=false with optimizer.lr={c.optimizer.lr:g}: from {WITHOUT_QK_NORM:g} on attention logits "
            "have been seen to grow without bound. Set model.qk_norm=true, or a lower optimizer.lr"
        )
    if c.optimizer.lr > HIGHEST:
        found.append(
            f"optimizer.lr={c.optimizer.lr:g} is above {HIGHEST:g}, the highest rate that AdamW is known to train with "
            "(arXiv:2309.14322). Set one between 1e-4 and 1e-2, as the recipes do"
        )
    if (decay := c.optimizer.lr * c.optimizer.weight_decay) >= 1:
        found.append(
            f"optimizer.lr x optimizer.weight_decay = {decay:g}: from 1 on decay turns the sign of every weight. Lower "
            "one of them"
        )
    run = c.tokens if c.schedule.by_tokens else c.train.steps
    if length >= run:
        of = f"the {run} tokens of the run" if c.schedule.by_tokens else f"train.steps={run}"
        found.append(
            f"{key}={length} is not below {of}: the learning rate "
            "never reaches its peak. Set a shorter warm-up, or more steps"
        )
    return found
