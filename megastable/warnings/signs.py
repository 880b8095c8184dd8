"""Early signs of a learning rate that is too high, in the first steps of a run. Pure: numbers in, warnings out.

A rate that is too high from the start causes no jump for the detector: the loss falls, but to a worse level and for
good. Inside the model it shows within a few steps:

- `update`: one update changes a large share of the weights. The output of a random matrix changes by up to about
  |dw| / |w| * sqrt(width) / 2 times itself if the update has rank one, as Adam's first ones nearly have (the
  spectral norms of both; Yang, Simon & Bernstein, arXiv:2310.17813).
- `activations`: the residual stream has grown far beyond its initial value, and beyond the scale of what blocks
  add to it. Every block reads it normalised, so later updates hardly have an effect. The growth alone means nothing:
  the stream starts at the scale of the initial embedding, which healthy runs leave as well. Very narrow models
  tolerate both.
- `attention`: the entropy of attention has collapsed (Zhai et al., arXiv:2303.06296): large logits without QK-norm.
- `unigram`: the sum of the rates so far is large, and the loss is no better than that of token frequencies alone.

A sign is a warning without an action. Each is reported once per run, and the state is stored in checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from pydantic import BaseModel, ConfigDict

from megastable.config.stability import SignsConfig

RECENT = 10  # losses whose median is compared with the unigram entropy
ADVICE = "a lower optimizer.lr, or a longer warm-up (schedule.warmup_steps or warmup_tokens), is likely to end lower"


@dataclass(frozen=True)
class Sign:
    """One warning: its sign, a sentence with reason and remedy, and its numbers."""

    name: str
    text: str
    numbers: dict[str, float]


class SignsState(BaseModel):
    """State for a checkpoint. told: signs already reported. activation, entropy: first measurement, by block. compared:
    the loss was compared with the unigram entropy."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    told: list[str] = []
    activation: dict[str, float] = {}
    entropy: dict[str, float] = {}
    compared: bool = False


class Signs:
    """The start of one run. width: of the residual stream. The same numbers give the same signs on every rank."""

    def __init__(self, config: SignsConfig, width: int, state: SignsState | None = None) -> None:
        self.config, self.width = config, width
        self._state = (state or SignsState()).model_copy(deep=True)

    @property
    def state(self) -> SignsState:
        """A copy, for a checkpoint."""
        return self._state.model_copy(deep=True)

    @property
    def compared(self) -> bool:
        """Whether the loss was compared with the unigram entropy already."""
        return self._state.compared

    def measures(self, step: int) -> bool:
        """Whether the norms of weights and update are needed at this step."""
        return step in self.config.norms or self.looks(step)

    def looks(self, step: int) -> bool:
        """Whether activations and attention of every block are needed as well."""
        return step in self.config.looks

    def measured(
        self,
        step: int,
        overall: Mapping[str, float],
        layers: Mapping[str, Mapping[str, float]],
        undisturbed: bool = True,
    ) -> list[Sign]:
        """The signs in a step's statistics (`LayerStatistics`); only at the configured steps.

        undisturbed: the update was applied, and none was refused recently. During an incident no sign is reported, but
        the first measurement is still stored for comparison: refused updates have not changed the initial weights.
        """
        if not self.measures(step):
            return []
        found = [self._update(step, overall)]
        if self.looks(step):
            found += [self._activations(step, layers), self._attention(step, layers)]
        return self._new(found) if undisturbed else []

    def unigram(self, losses: Sequence[float], entropy: float, rates: float) -> list[Sign]:
        """Called once, after the update given by `due`. losses: the latest, nats per token; entropy: of the corpus's
        tokens, nan if unknown; rates: the sum of those of all updates so far."""
        self._state.compared = True
        latest = [loss for loss in losses[-RECENT:] if math.isfinite(loss)]
        level = median(latest) if latest else math.nan
        if not entropy - level < self.config.below_unigram:  # nan gives no sign
            return []
        text = (
            f"the loss is {level:.3f}, and the unigram entropy {entropy:.3f}, though the learning rates add up to "
            f"{rates:.2g} already: the run has learnt little more than token frequencies; {ADVICE}"
        )
        return self._new([Sign("unigram", text, {"loss": level, "unigram_entropy": entropy, "rates": rates})])

    def _new(self, found: Iterable[Sign | None]) -> list[Sign]:
        told = self._state.told
        new = [sign for sign in found if sign is not None and sign.name not in told]
        told += [sign.name for sign in new]
        return new

    def _update(self, step: int, overall: Mapping[str, float]) -> Sign | None:
        ratio = overall.get("update_ratio", math.nan)
        change = ratio * math.sqrt(self.width) / 2
        if not change >= self.config.change:  # nan gives no sign
            return None
        text = (
            f"the update of step {step} changed the weights by {ratio:.1%} of their norm: the output of a layer of "
            f"width {self.width} may change by {change:.2f} times itself (limit {self.config.change:g}): such "
            f"updates are too large; {ADVICE}"
        )
        return Sign("update", text, {"update_ratio": ratio, "change": change})

    def _activations(self, step: int, layers: Mapping[str, Mapping[str, float]]) -> Sign | None:
        now = _column(layers, "activation_rms")
        if not self._state.activation:
            self._state.activation = now
            return None
        large = {block: rms for block, rms in now.items() if rms >= self.config.rms}
        growth, block = max(_over(large, self._state.activation), default=(0.0, ""))
        if growth < self.config.growth or self.width < self.config.narrowest:
            return None
        first = self._state.activation[block]
        text = (
            f"the residual stream after {block} has grown {growth:.0f} times since the start of the run (limit "
            f"{self.config.growth:g}), from an RMS of {first:.2g} to {now[block]:.2g} at step {step} (limit "
            f"{self.config.rms:g}): later updates hardly have an effect; {ADVICE}"
        )
        return Sign("activations", text, {"growth": growth, "rms": now[block], "first_rms": first})

    def _attention(self, step: int, layers: Mapping[str, Mapping[str, float]]) -> Sign | None:
        now = _column(layers, "attention_entropy")
        if not self._state.entropy:
            self._state.entropy = now
            return None
        share, block = max(_over(self._state.entropy, now), default=(0.0, ""))
        if share * self.config.collapse < 1.0:
            return None
        first, logit = self._state.entropy[block], layers[block].get("attention_logit", math.nan)
        text = (
            f"attention of {block} has collapsed: its mean entropy was {first:.2f} nats, and is {now[block]:.2f} at "
            f"step {step}, with logits up to {logit:.0f}: QK-norm (model.qk_norm=true, in a new run) keeps them small; "
            f"{ADVICE}"
        )
        numbers = {"entropy": now[block], "first_entropy": first, "attention_logit": logit}
        return Sign("attention", text, numbers)


def due(rates: Iterable[float], config: SignsConfig) -> tuple[int, float]:
    """The number of updates after which the loss is compared with the unigram entropy, and the sum of their rates; 0:
    never.

    rates: of all updates of the run, from the first on.
    """
    total = 0.0
    for updates, lr in enumerate(rates, 1):
        total += lr
        if total >= config.rate_sum and updates >= config.updates:
            return updates, total
    return 0, total


def _column(layers: Mapping[str, Mapping[str, float]], key: str) -> dict[str, float]:
    """Values by block, without those that are zero or not finite."""
    return {name: row[key] for name, row in layers.items() if 0.0 < row.get(key, 0.0) < math.inf}


def _over(one: Mapping[str, float], other: Mapping[str, float]) -> list[tuple[float, str]]:
    """Ratios of the common keys."""
    return [(one[name] / other[name], name) for name in one if name in other]
