"""Early signs of a learning rate that is too high, in the first steps of a run: `StartSigns` measures, `Signs` judges.

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
from itertools import islice
from statistics import median

from pydantic import BaseModel, ConfigDict

from megastable.base import collectives
from megastable.checkpoint.store import RunState
from megastable.config.stability import SignsConfig
from megastable.config.tree import RunConfig
from megastable.data.source import Source
from megastable.data.statistics import sample_entropy
from megastable.engine.layer_stats import LayerStatistics
from megastable.engine.watch import Watch
from megastable.optim.schedule import rates
from megastable.run.events.training_events import Warned
from megastable.run.log import RunLog
from megastable.warnings.trend_signals import Rows

START = 20_000  # updates: reaching the sum of rates later says nothing about the start
RECENT = 10  # losses whose median is compared with the unigram entropy
ADVICE = "a lower optimizer.lr, or a longer warm-up (schedule.warmup_steps or warmup_tokens), is likely to end lower"

Found = tuple[str, dict[str, float]] | None  # what was seen, as the begin of a sentence, and its numbers


class SignsState(BaseModel):
    """State for a checkpoint. told: signs already reported. activation, entropy: first measurement, by block. compared:
    the loss was compared with the unigram entropy."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    told: list[str] = []
    activation: dict[str, float] = {}
    entropy: dict[str, float] = {}
    compared: bool = False


class Signs(Watch):
    """Judges the start of one run. width: of the residual stream. Pure: the same numbers give the same signs on every
    rank."""

    name = "signs"
    state: SignsState

    def __init__(self, config: SignsConfig, width: int) -> None:
        self.config, self.width = config, width
        self.state = SignsState()

    def measures(self, step: int) -> bool:
        """Whether the norms of weights and update are needed after this step: `engine.statistics`."""
        return self.config.enabled and step in (*self.config.norms, *self.config.looks)

    def looks(self, step: int) -> bool:
        """Whether activations and attention of every block are needed as well: `probe.watch` before this step."""
        return self.config.enabled and step in self.config.looks

    def measured(
        self, step: int, overall: Mapping[str, float], layers: Rows, undisturbed: bool = True
    ) -> list[Warned]:
        """The signs in a step's statistics (`LayerStatistics`); only at the configured steps.

        undisturbed: the update was applied, and none was refused recently. During an incident no sign is reported, but
        the first measurement is still stored for comparison: refused updates have not changed the initial weights.
        """
        if not self.measures(step):
            return []
        found = {"update": self._update(step, overall)}
        if self.looks(step):
            found["activations"] = self._activations(step, layers)
            found["attention"] = self._attention(step, layers)
        return self._new(step, found) if undisturbed else []

    def unigram(self, step: int, losses: Sequence[float], entropy: float, rates: float) -> list[Warned]:
        """Called once, after the update given by `due`. losses: the latest, nats per token; entropy: of the corpus's
        tokens, nan if unknown; rates: the sum of those of all updates so far."""
        self.state.compared = True
        latest = [loss for loss in losses[-RECENT:] if math.isfinite(loss)]
        level = median(latest) if latest else math.nan
        if not entropy - level < self.config.below_unigram:  # nan gives no sign
            return []
        text = (
            f"the loss is {level:.3f}, and the unigram entropy {entropy:.3f}, though the learning rates add up to "
            f"{rates:.2g} already: the run has learnt little more than token frequencies"
        )
        numbers = {"loss": level, "unigram_entropy": entropy, "rates": rates}
        return self._new(step, {"unigram": (text, numbers)})

    def _new(self, step: int, found: Mapping[str, Found]) -> list[Warned]:
        """What was not told before."""
        new = {name: sign for name, sign in found.items() if sign is not None and name not in self.state.told}
        self.state.told += new
        return [
            Warned(step=step, text=f"{text}; {ADVICE}", sign=name, numbers=numbers)
            for name, (text, numbers) in new.items()
        ]

    def _update(self, step: int, overall: Mapping[str, float]) -> Found:
        ratio = overall.get("update_ratio", math.nan)
        change = ratio * math.sqrt(self.width) / 2
        if not change >= self.config.change:  # nan gives no sign
            return None
        text = (
            f"the update of step {step} changed the weights by {ratio:.1%} of their norm: the output of a layer of "
            f"width {self.width} may change by {change:.2f} times itself (limit {self.config.change:g}): such "
            "updates are too large"
        )
        return text, {"update_ratio": ratio, "change": change}

    def _activations(self, step: int, layers: Rows) -> Found:
        now = _column(layers, "activation_rms")
        if not self.state.activation:
            self.state.activation = now
            return None
        large = {block: rms for block, rms in now.items() if rms >= self.config.rms}
        growth, block = max(_over(large, self.state.activation), default=(0.0, ""))
        if growth < self.config.growth or self.width < self.config.narrowest:
            return None
        first = self.state.activation[block]
        text = (
            f"the residual stream after {block} has grown {growth:.0f} times since the start of the run (limit "
            f"{self.config.growth:g}), from an RMS of {first:.2g} to {now[block]:.2g} at step {step} (limit "
            f"{self.config.rms:g}): later updates hardly have an effect"
        )
        return text, {"growth": growth, "rms": now[block], "first_rms": first}

    def _attention(self, step: int, layers: Rows) -> Found:
        now = _column(layers, "attention_entropy")
        if not self.state.entropy:
            self.state.entropy = now
            return None
        share, block = max(_over(self.state.entropy, now), default=(0.0, ""))
        if share * self.config.collapse < 1.0:
            return None
        first, logit = self.state.entropy[block], layers[block].get("attention_logit", math.nan)
        text = (
            f"attention of {block} has collapsed: its mean entropy was {first:.2f} nats, and is {now[block]:.2f} at "
            f"step {step}, with logits up to {logit:.0f}: QK-norm (model.qk_norm=true, in a new run) keeps them small"
        )
        return text, {"entropy": now[block], "first_entropy": first, "attention_logit": logit}


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


def _column(layers: Rows, key: str) -> dict[str, float]:
    """Values by block, without those that are zero or not finite."""
    return {name: row[key] for name, row in layers.items() if 0.0 < row.get(key, 0.0) < math.inf}


def _over(one: Mapping[str, float], other: Mapping[str, float]) -> list[tuple[float, str]]:
    """Ratios of the common keys."""
    return [(one[name] / other[name], name) for name in one if name in other]


class StartSigns(Signs):
    """Measures and journals as well, in one training process. All methods are collective: every rank gets the same
    numbers."""

    def __init__(self, config: RunConfig, source: Source, log: RunLog) -> None:
        c = config.stability
        enabled = c.enabled and c.signs.enabled
        super().__init__(c.signs.model_copy(update={"enabled": enabled}), config.model.hidden)
        self.source, self.log, self.vocabulary = source, log, config.model.vocab_size
        self._due, self._rates = due(islice(rates(config), START), c.signs) if enabled else (0, 0.0)
        self._refused = -START  # last step with a refused update
        self._calm = c.policy.discards  # steps after it whose numbers say nothing

    def after(self, state: RunState, statistics: LayerStatistics | None, incident: bool = False) -> None:
        """Judge the step that ended at `state`; call after every step. incident: one is open."""
        if not self.config.enabled:
            return
        if state.discards_in_a_row:
            self._refused = state.step
        undisturbed, found = not incident and state.step >= self._refused + self._calm, list[Warned]()
        if statistics is not None:
            found += self.measured(state.step, statistics.overall, statistics.layers, undisturbed)
        due = 0 < self._due <= state.updates < self._due + RECENT
        if undisturbed and due and not self.state.compared:
            found += self.unigram(state.step, state.recent_losses, self._unigram_entropy(), self._rates)
        for sign in found:
            self.log.emit(sign, say=f"step {state.step}: WARNING: {sign.text}")

    def _unigram_entropy(self) -> float:
        """Unigram entropy of the run's first samples, a mix as blended; nats."""
        size = self.vocabulary
        assert size is not None, "the vocabulary size is taken from the corpus first"
        return collectives.first(lambda: sample_entropy(self.source, self.config.sample, size))
