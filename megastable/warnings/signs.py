"""Early signs of a learning rate that is too high, or too low, at the start of a run: `StartSigns` measures, `Signs`
judges.

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
- `judge_unigram`: the sum of the rates so far is large, and the loss is no better than that of token frequencies alone.
- `peak`: updates are half as large as for `update`, and half a warm-up after its end, though the rate no longer rises,
  they are as large a share of the weights as at its end, or larger. In healthy runs weights outgrow large updates.

A rate that is too low shows as well:

- `slow`: long after the warm-up the loss is above that of token frequencies, and still falls in proportion to the sum
  of the rates, as at the beginning of training. In healthy runs most of the fall is in the first half of that sum.

A sign is a warning without an action. Each is reported once per run, and the state is stored in checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from statistics import median

from pydantic import BaseModel, ConfigDict

from megastable.base import collectives
from megastable.checkpoint.store import RunState
from megastable.config.stability import SignsConfig
from megastable.config.tree import RunConfig
from megastable.data.samples import Source, sample_entropy
from megastable.engine.layer_stats import LayerStatistics
from megastable.engine.watch import Watch
from megastable.optim.schedule import list_rates
from megastable.run.events.training_events import Warned
from megastable.run.log import RunLog
from megastable.warnings.trend_signals import Rows

START = 20_000  # updates: reaching the sum of rates later says nothing about the start
RECENT = 10  # losses whose median is compared with the unigram entropy
BEGIN = 3  # updates whose median loss is that of the beginning
SHORTEST = 20  # updates of a warm-up whose end is judged
NOISE = 0.02  # nats: of a median of losses
ADVICE = "a lower optimizer.lr, or a longer warm-up (schedule.warmup_steps or warmup_tokens), is likely to end lower"
REMEDIES = {
    "peak": f"{ADVICE}; so is less optimizer.weight_decay",
    "slow": "a higher optimizer.lr is likely to end lower (megastable study finds it)",
}  # of signs that have another than ADVICE

BY_RATES = ("peak", "slow", "unigram")  # signs that are judged by the recipe's rates

Found = tuple[str, dict[str, float]] | None  # what was seen, as the begin of a sentence, and its numbers


class SignsState(BaseModel):
    """State for a checkpoint. told: signs already reported. activation, entropy: first measurement, by block. compared:
    the loss was compared with the unigram entropy. ratios: update to weight, by step, around the end of the warm-up.
    losses: "begin", "half" (of the rates) and, when it was judged whether the run learns, "end"."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    told: list[str] = []
    activation: dict[str, float] = {}
    entropy: dict[str, float] = {}
    compared: bool = False
    ratios: dict[int, float] = {}
    losses: dict[str, float] = {}


class Signs(Watch):
    """Judges the start of one run. width: of the residual stream. peak: the step at the end of the warm-up, 0: none is
    judged. Pure: the same numbers give the same signs on every rank."""

    name = "signs"
    state: SignsState

    def __init__(self, config: SignsConfig, width: int, peak: int = 0) -> None:
        self.config, self.width = config, width
        self.peak = range(peak - 2, peak + 1) if peak else range(0)
        self.later = range(peak * 3 // 2 - 2, peak * 3 // 2 + 1) if peak else range(0)
        self.state = SignsState()

    def leave_rates(self, keys: Iterable[str]) -> None:
        """People have changed these keys live: if the rates are no longer those of the recipe, signs that are judged
        by them would be wrong, and are not told any more."""
        if any(key == "optimizer.lr" or key.startswith("schedule.") for key in keys):
            self.state.told += [by_rate for by_rate in BY_RATES if by_rate not in self.state.told]

    def needs_norms(self, step: int) -> bool:
        """Whether the norms of weights and update are needed after this step: `engine.statistics`."""
        return self.config.enabled and step in (
            *self.config.norms, *self.config.looks, *self.peak, *self.later
        )  # fmt: skip

    def is_look(self, step: int) -> bool:
        """Whether activations and attention of every block are needed as well: `probe.watch` before this step."""
        return self.config.enabled and step in self.config.looks

    def judge_statistics(
        self, step: int, overall: Mapping[str, float], layers: Rows, undisturbed: bool = True
    ) -> list[Warned]:
        """The signs in a step's statistics (`LayerStatistics`); only at the configured steps.

        undisturbed: the update was applied, and none was refused recently. During an incident no sign is reported, but
        the first measurement is still stored for comparison: refused updates have not changed the initial weights.
        """
        if not self.needs_norms(step):
            return []
        found_signs = {"peak": self._peak(step, overall)}
        if step in (*self.config.norms, *self.config.looks):
            found_signs["update"] = self._update(step, overall)
        if self.is_look(step):
            found_signs["activations"] = self._activations(step, layers)
            found_signs["attention"] = self._attention(step, layers)
        return self._new(step, found_signs) if undisturbed else []

    def judge_unigram(self, step: int, losses: Sequence[float], entropy: float, rates: float) -> list[Warned]:
        """Called once, after the update given by `find_comparison`. losses: the latest, nats per token; entropy: of
        the corpus's tokens, nan if unknown; rates: the sum of those of all updates so far."""
        self.state.compared = True
        loss_level = _level(losses)
        if not entropy - loss_level < self.config.below_unigram:  # nan gives no sign
            return []
        sign_text = (
            f"the loss is {loss_level:.3f}, and the unigram entropy {entropy:.3f}, though the learning rates add up to "
            f"{rates:.2g} already: the run has learnt little more than token frequencies"
        )
        sign_numbers = {"loss": loss_level, "unigram_entropy": entropy, "rates": rates}
        return self._new(step, {"unigram": (sign_text, sign_numbers)})

    def judge_learning(
        self, step: int, updates: int, losses: Sequence[float], entropy: Callable[[], float]
    ) -> list[Warned]:
        """Called once, at the end given by `find_halves`, with the number of updates. losses, entropy: see
        `judge_unigram`; the latter is asked for only if the loss falls in proportion."""
        held_losses = self.state.losses
        held_losses["end"] = level = _level(losses)
        begin_loss, half = held_losses.get("begin", math.nan), held_losses.get("half", math.nan)
        total_fall, late = begin_loss - level, half - level
        if not late >= self.config.slow_share * total_fall - NOISE:  # nan gives no sign
            return []
        unigram = entropy()
        if not (level > unigram and begin_loss - unigram > self.config.below_unigram):
            return []
        sign_text = (
            f"after {updates} updates the loss is {level:.3f}, above the unigram entropy of {unigram:.3f}, and still "
            f"falls in proportion to the sum of the learning rates ({late:.2f} of {total_fall:.2f} nats in its second "
            "half): the rate is too low to learn much"
        )
        sign_numbers = {"loss": level, "unigram_entropy": unigram, "begin": begin_loss, "half": half}
        return self._new(step, {"slow": (sign_text, sign_numbers)})

    def _new(self, step: int, found: Mapping[str, Found]) -> list[Warned]:
        new = {name: sign for name, sign in found.items() if sign is not None and name not in self.state.told}
        self.state.told += new
        return [
            Warned(step=step, text=f"{text}; {REMEDIES.get(name, ADVICE)}", sign=name, numbers=numbers)
            for name, (text, numbers) in new.items()
        ]

    def _update(self, step: int, overall: Mapping[str, float]) -> Found:
        ratio = overall.get("update_ratio", math.nan)
        change = ratio * math.sqrt(self.width) / 2
        if not change >= self.config.change:  # nan gives no sign
            return None
        sign_text = (
            f"the update of step {step} changed the weights by {ratio:.1%} of their norm: the output of a layer of "
            f"width {self.width} may change by {change:.2f} times itself (limit {self.config.change:g}): such "
            "updates are too large"
        )
        return sign_text, {"update_ratio": ratio, "change": change}

    def _peak(self, step: int, overall: Mapping[str, float]) -> Found:
        update_ratio, held_ratios = overall.get("update_ratio", math.nan), self.state.ratios
        if 0 < update_ratio < math.inf and (step in self.peak or step in self.later):
            held_ratios[step] = update_ratio
        parts = [[held_ratios[s] for s in steps if s in held_ratios] for steps in (self.peak, self.later)]
        if step not in self.later or not all(len(known_part) == len(self.peak) for known_part in parts):
            return None
        peak, now = (median(known_part) for known_part in parts)
        change = now * math.sqrt(self.width) / 2
        if now < self.config.peak * peak or change < self.config.change / 2:
            return None
        sign_text = (
            f"the warm-up ended at step {self.peak[-1]} with updates of {peak:.2%} of the weights' norm, and at step "
            f"{step} they are {now:.2%}, though the rate no longer rises: the output of a layer may go on to change by "
            f"{change:.2f} times itself a step"
        )
        return sign_text, {"update_ratio": now, "at_peak": peak, "change": change}

    def _activations(self, step: int, layers: Rows) -> Found:
        block_rms = _column(layers, "activation_rms")
        if not self.state.activation:
            self.state.activation = block_rms
            return None
        large_blocks = {block: rms for block, rms in block_rms.items() if rms >= self.config.rms}
        rms_growth, block = max(_over(large_blocks, self.state.activation), default=(0.0, ""))
        if rms_growth < self.config.growth or self.width < self.config.narrowest:
            return None
        first = self.state.activation[block]
        sign_text = (
            f"the residual stream after {block} has grown {rms_growth:.0f} times since the start of the run (limit "
            f"{self.config.growth:g}), from an RMS of {first:.2g} to {block_rms[block]:.2g} at step {step} (limit "
            f"{self.config.rms:g}): later updates hardly have an effect"
        )
        return sign_text, {"growth": rms_growth, "rms": block_rms[block], "first_rms": first}

    def _attention(self, step: int, layers: Rows) -> Found:
        now = _column(layers, "attention_entropy")
        if not self.state.entropy:
            self.state.entropy = now
            return None
        entropy_ratio, block = max(_over(self.state.entropy, now), default=(0.0, ""))
        if entropy_ratio * self.config.collapse < 1.0:
            return None
        first, logit = self.state.entropy[block], layers[block].get("attention_logit", math.nan)
        sign_text = (
            f"attention of {block} has collapsed: its mean entropy was {first:.2f} nats, and is {now[block]:.2f} at "
            f"step {step}, with logits up to {logit:.0f}: QK-norm (model.qk_norm=true, in a new run) keeps them small"
        )
        return sign_text, {"entropy": now[block], "first_entropy": first, "attention_logit": logit}


def find_comparison(rates: Iterable[float], config: SignsConfig) -> tuple[int, float]:
    """The number of updates after which the loss is compared with the unigram entropy, and the sum of their rates; 0:
    never.

    rates: of all updates of the run, from the first on.
    """
    rate_sum = 0.0
    for updates, lr in enumerate(rates, 1):
        rate_sum += lr
        if rate_sum >= config.rate_sum and updates >= config.updates:
            return updates, rate_sum
    return 0, rate_sum


def find_peak(rates: Sequence[float]) -> int:
    """The number of updates after which the rate is highest first: the end of the warm-up; 0: it is too short to be
    judged, or does not end. rates: of the run's updates."""
    peak_update = rates.index(max(rates)) + 1 if rates else 0
    return peak_update if SHORTEST <= peak_update < len(rates) else 0


def find_halves(rates: Sequence[float], peak: int, config: SignsConfig) -> tuple[int, int]:
    """After how many updates it is judged whether the run learns, and half of the sum of their rates before; (half,
    end), 0 both: never. At that end the run has trained at its peak rate for as long as it has warmed up."""
    end = max(config.slow_updates, 2 * peak)
    if not 0 < end <= len(rates):
        return 0, 0
    whole_sum, rate_sum = sum(rates[:end]), 0.0
    for updates, lr in enumerate(rates, 1):
        rate_sum += lr
        if rate_sum >= whole_sum / 2:
            return updates, end
    return 0, 0


def _level(losses: Sequence[float]) -> float:
    """The median of the latest losses; nan without any."""
    latest_losses = [loss for loss in losses[-RECENT:] if math.isfinite(loss)]
    return median(latest_losses) if latest_losses else math.nan


def _column(layers: Rows, key: str) -> dict[str, float]:
    """Values by block, without those that are zero or not finite."""
    return {block_name: row[key] for block_name, row in layers.items() if 0.0 < row.get(key, 0.0) < math.inf}


def _over(one: Mapping[str, float], other: Mapping[str, float]) -> list[tuple[float, str]]:
    """Ratios of the common keys."""
    return [(one[block_name] / other[block_name], block_name) for block_name in one if block_name in other]


class StartSigns(Signs):
    """Measures and journals as well, in one training process. All methods are collective: every rank gets the same
    numbers."""

    def __init__(self, config: RunConfig, source: Source, log: RunLog) -> None:
        c = config.stability
        is_enabled = c.enabled and c.signs.enabled
        update_rates = list(islice(list_rates(config), START)) if is_enabled else []
        peak = find_peak(update_rates)
        super().__init__(c.signs.model_copy(update={"enabled": is_enabled}), config.model.hidden, peak)
        self.source, self.log, self.vocabulary = source, log, config.model.vocab_size
        self._due, self._rates = find_comparison(update_rates, c.signs)
        self._half, self._end = find_halves(update_rates, peak, c.signs)
        self._refused = -START  # last step with a refused update
        self._calm = c.policy.discards  # steps after it whose numbers say nothing

    def judge_step(self, state: RunState, statistics: LayerStatistics | None, incident: bool = False) -> None:
        """Judge the step that ended at `state`; call after every step. incident: one is open."""
        if not self.config.enabled:
            return
        if state.discards_in_a_row:
            self._refused = state.step
        undisturbed, found_signs = not incident and state.step >= self._refused + self._calm, list[Warned]()
        if statistics is not None:
            found_signs += self.judge_statistics(
                state.step, statistics.overall, statistics.layers, undisturbed
            )
        is_due = 0 < self._due <= state.updates < self._due + RECENT
        if undisturbed and is_due and not self.state.compared:
            found_signs += self.judge_unigram(
                state.step, state.recent_losses, self._unigram_entropy(), self._rates
            )
        found_signs += self._learns(state, undisturbed)
        for found_sign in found_signs:
            self.log.emit_event(found_sign, say=f"step {state.step}: WARNING: {found_sign.text}")

    def _learns(self, state: RunState, undisturbed: bool) -> list[Warned]:
        held_losses, updates = self.state.losses, state.updates
        if updates == BEGIN:
            held_losses["begin"] = _level(state.recent_losses[-BEGIN:])
        if updates == self._half:
            held_losses["half"] = _level(state.recent_losses)
        if undisturbed and 0 < self._end <= updates < self._end + RECENT and "end" not in held_losses:
            return self.judge_learning(state.step, updates, state.recent_losses, self._unigram_entropy)
        return []

    def _unigram_entropy(self) -> float:
        """Unigram entropy of the run's first samples, a mix as blended; nats."""
        vocabulary_size = self.vocabulary
        assert vocabulary_size is not None, "the vocabulary size is taken from the corpus first"
        return collectives.run_on_first(
            lambda: sample_entropy(self.source, self.config.sample, vocabulary_size)
        )
