"""Slow signals, each judged against its own history: how far the numbers of a look are from its limit. Pure.

A signal is a function from a look to its readings, one for each place (a block, a kind of parameter); it extends its
history. Its severity is 1 at the limit. `SIGNALS` has all of them by name, each with its remedy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median

from pydantic import BaseModel, ConfigDict

from megastable.config.stability import TrendsConfig

LATEST = 3  # looks whose median is the present level: a look sees one sample a rank
DIVERGED = 1e4  # an attention logit seen at divergence
BEYOND = math.log(100)  # growth of a logarithm that is taken for one without bound
PRODUCTS = {"qkv": "the product for q, k and v", "projection": "attention", "ffn": "the MLP"}
SLOWS = 0.9  # severity of growth that slows down: below the limit, and above trends.CALM
LEAST_GROWTH = 0.1  # relative growth of a norm below which its direction says nothing
SAME, TINY = 1e-6, 1e-30  # least update, relative and absolute, and other divisors

Rows = Mapping[str, Mapping[str, float]]  # of a look, by block and parameter (engine/trend_probe.py)


class Series(BaseModel):
    """A number at the latest looks. best: of the levels so far, slowly forgotten; 0 before the first."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    steps: list[int] = []
    values: list[float] = []
    best: float = 0.0

    @property
    def level(self) -> float:
        return median(self.values[-LATEST:])


@dataclass(frozen=True)
class Reading:
    """A signal at one place. severity: 1 at the limit; text: what is seen there, with its numbers."""

    where: str
    severity: float
    text: str
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class TrendLook:
    """A measured step whose update was applied. rate: its learning rate; None of an optimizer whose update of an
    element is not about as large as it. rows: see `TrendProbe.collect_look`. series: of all places, by name; a signal
    extends each of its own once. width: of the residual stream."""

    step: int
    rate: float | None
    rows: Rows
    series: dict[str, Series]
    config: TrendsConfig
    width: int

    def extend_series(self, name: str, value: float) -> Series:
        """The series, with this value at its end if it is finite."""
        held_series = self.series.setdefault(name, Series())
        if math.isfinite(value):
            held_series.steps.append(self.step)
            held_series.values.append(value)
            del held_series.steps[: -self.config.window], held_series.values[: -self.config.window]
        return held_series

    def compare_with_best(self, name: str, value: float) -> tuple[float, float]:
        """(the present level of a positive number, the best one that it is compared with), nan before there are
        enough. The best is forgotten slowly, but not while the level is below half of it: it would be taken for usual.
        """
        held_series = self.extend_series(name, value)
        if len(held_series.values) < LATEST:
            return math.nan, math.nan
        level = held_series.level
        if level >= held_series.best:
            held_series.best = level
        elif level > held_series.best / 2:
            held_series.best = max(level, held_series.best * (1 - self.config.forget))
        return level, held_series.best

    def rows_with(self, key: str) -> list[tuple[str, Mapping[str, float]]]:
        """The rows with a finite number of that name."""
        return [(name, row) for name, row in self.rows.items() if math.isfinite(row.get(key, math.nan))]


Read = Callable[[TrendLook], Iterator[Reading]]


@dataclass(frozen=True)
class Signal:
    """read: the readings of a look. remedy: for people."""

    read: Read
    remedy: str


SIGNALS: dict[str, Signal] = {}


def signal(name: str, remedy: str) -> Callable[[Read], Read]:
    """Make a function the signal of this name."""

    def register_signal(read: Read) -> Read:
        SIGNALS[name] = Signal(read, remedy)
        return read

    return register_signal


@signal(
    "entropy",
    "a lower optimizer.lr or a longer warm-up; model.qk_norm=true (in a new run) or optimizer.qk_clip keep attention "
    "logits small",
)
def read_entropy(look: TrendLook) -> Iterator[Reading]:
    """Attention of a block collapses (Zhai et al., arXiv:2303.06296)."""
    allowed_fall = 1 - look.config.entropy_left
    for block, block_row in look.rows_with("entropy"):
        level, best = look.compare_with_best(f"entropy {block}", block_row["entropy"])
        if best > 0:
            text = f"the attention entropy of {block} has fallen from {best:.2f} to {level:.2f} nats"
            yield Reading(block, (1 - level / best) / allowed_fall, text, {"entropy": level, "best": best})


@signal(
    "flatness",
    "a lower optimizer.lr or less optimizer.weight_decay: gains of QK-norm, or the weights of q and k, shrink; a look "
    "at the precision of attention",
)
def read_flatness(look: TrendLook) -> Iterator[Reading]:
    """Attention of a block returns towards uniform, where all tokens that it sees weigh alike: q and k no longer say
    where to look. It is near uniform at the start of a run and sharpens, so that what the entropy is below the uniform
    one is compared with the most that it was."""
    allowed_fall = 1 - look.config.focus_left
    for block, block_row in look.rows_with("focus"):
        level, best = look.compare_with_best(f"focus {block}", block_row["focus"])
        if best > look.config.focus_floor:
            what_fell = (
                f"attention of {block} goes back to uniform: its entropy was {best:.2f} nats below that of uniform "
                f"attention, and is {level:.2f}"
            )
            yield Reading(block, (1 - level / best) / allowed_fall, what_fell, {"focus": level, "best": best})


@signal(
    "logits",
    "model.qk_norm=true (in a new run), optimizer.qk_clip or model.attention_softcap; a lower optimizer.lr",
)
def read_logits(look: TrendLook) -> Iterator[Reading]:
    """The largest attention logit grows towards divergence, at about 1e4 (Dehghani et al., arXiv:2302.05442, section 2;
    Wortsman et al., arXiv:2309.14322, section 3.1): growth of the logarithm over the window and over its newer half,
    extrapolated. If it slows down so fast that it would end before, it is no warning, nor the end of one: two halves of
    a window are noisy."""
    c = look.config
    for block, block_row in look.rows_with("logit"):
        held_series = look.extend_series(f"logit {block}", block_row["logit"])
        level = held_series.level
        if not level >= c.logit_floor:
            yield Reading(block, 0.0, "", {})
            continue
        log_values = [math.log(max(value, 1.0)) for value in held_series.values]
        log_left = math.log(DIVERGED / min(level, DIVERGED))
        grows, steps, slows = _reaches(held_series.steps, log_values, log_left)
        what_grows = (
            f"the largest attention logit of {block} is {level:.0f}, and at its present growth (a factor of "
            f"{math.exp(min(100 * grows, 99.0)):.2g} per 100 steps) it reaches {DIVERGED:,.0f} in {steps:.0f} steps"
        )
        capped_severity = c.logit_horizon / max(steps, 1.0)
        if slows:
            capped_severity = min(capped_severity, SLOWS)
        yield Reading(block, capped_severity, what_grows, {"logit": level, "growth": grows, "steps": steps})


@signal(
    "outputs",
    "a lower optimizer.lr, more optimizer.weight_decay; in a new run model.norms=both or model.swiglu_clamp",
)
def read_outputs(look: TrendLook) -> Iterator[Reading]:
    """What a block's products for q, k and v, attention's projection or the MLP give grows without bound, as a SwiGLU's
    outputs may after long training (Fishman et al., arXiv:2409.12517): it has grown by a factor, and goes on
    to grow exponentially. All grow at the start of a run, ever more slowly."""
    c = look.config
    for block, block_row in look.rows.items():
        for kind_name, product in PRODUCTS.items():
            block_rms = block_row.get(kind_name, math.nan)
            if not 0 < block_rms < math.inf:
                continue
            where = f"{block} {kind_name}"
            level, best_level = look.compare_with_best(f"output {where}", 1 / block_rms)
            held = look.series[f"output {where}"]
            logs = [-math.log(value) for value in held.values]
            grows, steps_left, _ = _reaches(held.steps, logs, BEYOND)
            # Slopes of a quarter of the window are noisy: they only tell of growth that has ended.
            half = max(2 * LATEST, len(logs) // 2)
            growth_left = (
                remaining_growth(held.steps[-half:], logs[-half:]) if len(logs) >= half else math.inf
            )
            slows_down = len(logs) >= half and (
                remaining_growth(held.steps, logs) < BEYOND or growth_left < math.log(2)
            )
            grown = best_level / level
            raw_severity = min(grown / c.output_growth, c.output_horizon / max(steps_left, 1.0))
            text = (
                f"the output of {product} of {block} has grown {grown:.1f} times, to an RMS of {1 / level:.3g}, and "
                f"grows on (a factor of {math.exp(min(100 * grows, 99.0)):.2g} per 100 steps)"
            )
            reading_numbers = {"rms": 1 / level, "grown": grown, "growth": grows}
            yield Reading(
                where, min(raw_severity, SLOWS) if slows_down else raw_severity, text, reading_numbers
            )


@signal("gradients", "a lower optimizer.lr; a smaller optimizer.clip keeps single updates small")
def read_gradients(look: TrendLook) -> Iterator[Reading]:
    """The norm of the gradient grows, and second moments with it, as they are averages of its square. It falls at the
    start of a run, and then hardly changes: the lowest level is what it is compared with."""
    norm = math.hypot(*(block_row["gradient"] for _, block_row in look.rows_with("gradient")))
    level, best_level = look.compare_with_best("gradient", 1 / norm if norm > 0 else math.nan)
    if best_level > 0:
        what_grew = f"the gradient norm has grown from {1 / best_level:.3g} to {1 / level:.3g}"
        reading_numbers = {"norm": 1 / level, "lowest": 1 / best_level}
        yield Reading("", best_level / level / look.config.gradient_growth, what_grew, reading_numbers)


@signal("weights", "find what else changes the weights: other code, or memory that is damaged")
def read_weights(look: TrendLook) -> Iterator[Reading]:
    """The norm of a kind of parameter grows by more than the sum of its updates. Straightness is that growth, relative
    to the summed norms of the updates of all steps: about 0 if their directions are random, 1 if all point straight
    outwards. More than 1 cannot come from the optimizer alone."""
    for kind, (norm, update_norm, _) in norms_by_kind(look.rows).items():
        norms, updates = (
            look.extend_series(f"norm {kind}", norm),
            look.extend_series(f"update {kind}", update_norm),
        )
        n = min(len(norms.values), LATEST + 1)
        if n <= LATEST or norms.steps != updates.steps:
            continue
        last = list(zip(norms.steps[-n:], norms.values[-n:], updates.values[-n:], strict=True))
        straight_parts = [
            (w2 - w1) / max((later - earlier) * max(u1, u2), SAME * w1, TINY)
            for (earlier, w1, u1), (later, w2, u2) in pairwise(last)
        ]
        first_norm, last_norm = last[0][1], last[-1][1]
        straight, grown = median(straight_parts), last_norm / max(first_norm, TINY) - 1
        what_grew = (
            f"the norm of the {kind} weights has grown by {grown:.0%} in {last[-1][0] - last[0][0]} steps, "
            f"{straight:.2g} times what all updates of these steps add up to: "
            "something besides the optimizer changes them"
        )
        severe = straight / look.config.straightness if grown > LEAST_GROWTH else 0.0
        yield Reading(kind, severe, what_grew, {"straightness": straight, "growth": grown, "norm": last_norm})


@signal("updates", "too large: a lower optimizer.lr or a longer warm-up; too small: a smaller optimizer.eps")
def read_updates(look: TrendLook) -> Iterator[Reading]:
    """Updates are too large for the weights (Yang, Simon & Bernstein, arXiv:2310.17813), or, of optimizers with updates
    like Adam's, far smaller than the learning rate: eps outweighs the second moment (arXiv:2309.14322, section 3.4)."""
    c = look.config
    for kind, (norm, update, numel) in norms_by_kind(look.rows).items():
        if kind not in ("attention", "mlp") or not norm > 0:
            continue
        output_change = update / norm * math.sqrt(look.width) / 2
        small = update / math.sqrt(numel) / look.rate if look.rate else math.inf
        large, small_severity = output_change / c.update_change, c.update_least / max(small, TINY)
        if large >= small_severity:
            text = (
                f"an update changes the {kind} weights by {update / norm:.1%} of their norm: the output of a layer may "
                f"change by {output_change:.2f} times itself"
            )
            yield Reading(kind, large, text, {"update_ratio": update / norm, "change": output_change})
        else:
            text = (
                f"an update changes the {kind} weights by only {small:.1e} times the learning rate: Adam's eps "
                "outweighs their second moments"
            )
            yield Reading(kind, small_severity, text, {"update_by_rate": small})


@signal("tokens", "optimizer.betas=[0.9, 0.95], or optimizer.name=stable_adamw; new text mixed in slowly")
def read_tokens(look: TrendLook) -> Iterator[Reading]:
    """Second moments of rows of embedding or head have not kept up with fresh gradients (Wortsman et al.,
    arXiv:2304.13013, section 3): rare tokens have become frequent."""
    c = look.config
    for table, row in look.rows_with("stale"):
        name = table.removesuffix(".weight")
        share = look.extend_series(f"stale {name}", row["stale"]).level
        usually = look.series.setdefault(f"usually stale {name}", Series())
        usual = median(usually.values) if usually.values else 0.0
        is_known, share_limit = len(usually.values) >= 2 * LATEST, max(c.stale_share, c.stale_factor * usual)
        if share < share_limit or not is_known:  # what is beyond it is not to become usual
            look.extend_series(f"usually stale {name}", row["stale"])
        text = (
            f"{share:.1%} of the {name}'s rows with a gradient (usually {usual:.1%}) have a second moment that has not "
            "kept up with it: tokens that were rare until now are frequent, and each moves its row by more than a "
            "full learning rate"
        )
        yield Reading(name, share / share_limit if is_known else 0.0, text, {"stale": share, "usual": usual})


@signal(
    "layers",
    "a look at the block's learning rate, weight decay and precision; a lower optimizer.lr if others follow",
)
def read_layers(look: TrendLook) -> Iterator[Reading]:
    """A block adds less and less to the residual stream. Gradients reach its input weights (q, k, v, gate, up) through
    its output weights, which get theirs directly: the ratio of both falls with the scale of what the block passes on,
    whatever the loss, the other blocks and the noise of the batch do. Or the block adds next to nothing."""
    c, gradients = look.config, _gradients_by_side(look.rows)
    for block, block_row in look.rows_with("added"):
        inner, outer = gradients.get(block, (math.nan, math.nan))
        ratio = inner / outer if outer > 0 else math.nan
        level, best = look.compare_with_best(f"passed {block}", ratio)
        added_share = look.extend_series(f"added {block}", block_row["added"]).level
        share_left = level / best if best > 0 else math.nan
        if added_share <= c.layer_added:
            what_fades = f"{block} adds no more than {added_share:.1e} times the residual stream's RMS to it"
        else:
            what_fades = (
                f"{block} passes on less and less: of the gradient of its output weights, {level:.2g} times reaches "
                f"its input weights, {best:.2g} before; it adds {added_share:.2g} times the residual stream's RMS to it"
            )
        fall_severity = c.layer_gradient / max(share_left, TINY) if math.isfinite(share_left) else 0.0
        severe = max(fall_severity, c.layer_added / max(added_share, TINY))
        yield Reading(block, severe, what_fades, {"passed": level, "before": best, "added": added_share})


def norms_by_kind(rows: Rows) -> dict[str, tuple[float, float, float]]:
    """By kind of parameter: norm, norm of the update, number of elements."""
    kind_norms: dict[str, tuple[float, float, float]] = {}
    for row_name, row in rows.items():
        if "weight" in row and "update" in row:
            kind_name = kind_of(row_name)
            weight_norm, update, numel = kind_norms.get(kind_name, (0.0, 0.0, 0.0))
            weight_norm, update = math.hypot(weight_norm, row["weight"]), math.hypot(update, row["update"])
            kind_norms[kind_name] = weight_norm, update, numel + row["numel"]
    return kind_norms


def kind_of(name: str) -> str:
    """embedding, head, norm, attention or mlp."""
    name_part = name.split(".", 2)[2] if name.startswith("blocks.") else name
    return "norm" if "norm" in name_part else name_part.partition(".")[0]


def median_slope(steps: list[int], values: list[float]) -> float:
    """Median slope of all pairs (Theil and Sen), per step."""
    point_pairs = combinations(zip(steps, values, strict=True), 2)
    return median((late - early) / (after - before) for (before, early), (after, late) in point_pairs)


def remaining_growth(steps: list[int], values: list[float]) -> float:
    """By how much values still grow if their slope goes on to shrink as it did from the older half to the newer one;
    0 if they no longer grow, inf if they do not slow down."""
    half = len(values) // 2
    older, newer = median_slope(steps[:half], values[:half]), median_slope(steps[half:], values[half:])
    if newer <= 0:
        return 0.0
    if newer >= older:
        return math.inf
    shrink_factor = newer / older  # in half of the time
    return newer * (steps[-1] - steps[0]) / 2 * shrink_factor / (1 - shrink_factor)


def _reaches(steps: list[int], logs: list[float], left: float) -> tuple[float, float, bool]:
    """Growth of a logarithm per step, over the window and over its newer half, the lesser; in how many steps it has
    grown by `left` at that; whether it slows down so fast that it ends before."""
    grows, growth_ahead = 0.0, math.inf
    if len(logs) >= 2 * LATEST:
        two_spans = [(steps[-n:], logs[-n:]) for n in (len(logs), max(2 * LATEST, len(logs) // 2))]
        grows, growth_ahead = (
            min(median_slope(*two_span) for two_span in two_spans),
            min(remaining_growth(*span_of) for span_of in two_spans),
        )
    return grows, left / grows if grows > 0 else (0.0 if not left else math.inf), growth_ahead < left


def _gradients_by_side(rows: Rows) -> dict[str, tuple[float, float]]:
    """By block, the gradient norms of its input weights and of its output weights; of experts, those of all."""
    side_norms: dict[str, tuple[float, float]] = {}
    for row_name, row in rows.items():
        is_outer = row_name.endswith((".attention.out.weight", ".down.weight"))
        if is_outer or row_name.endswith((".attention.qkv.weight", ".gate_up.weight")):
            block = ".".join(row_name.split(".", 2)[:2])
            inner, outer = side_norms.get(block, (0.0, 0.0))
            gradient = row.get("gradient", math.nan)
            side_norms[block] = (
                (inner, math.hypot(outer, gradient)) if is_outer else (math.hypot(inner, gradient), outer)
            )
    return side_norms
