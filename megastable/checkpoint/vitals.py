"""Vitals of a saved state, and the check that a loaded state still matches them. Pure.

Checksums verify the bytes that were written. They do not detect corruption before the write (in host memory, on the way
to the disk) or an edit that also fixed the checksums. So a checkpoint also stores measurements taken on the device
before anything is copied: norms and largest magnitudes of all weights and moments, and the losses of a few fixed
samples. A start measures them again, before its first step. Two moments that average the same gradients must also be
consistent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from megastable.config.training import VitalsConfig
from megastable.engine.flatstate import Size

Floats = npt.NDArray[np.float64]

ROUNDED = 2.0**-8  # relative: maximum change by rounding to bf16
KINDS = {"weight": "weights", "exp_avg": "first moments", "exp_avg_sq": "second moments"}
# The maximum of a first moment's square over the second moment that gradients can produce: see
# `explain_contradiction`. 53 for betas of (0.9, 0.999), 1.4 for (0.9, 0.95); twice that, as the betas may have changed,
# and moments may be rounded. Other betas give more, (0, 0.999) 1000: see `bound_moment_ratio`.
RATIO = 106.0
TINY = 1e-15  # first moments below it are not judged: their squares are near fp32's smallest numbers
# Norms and magnitudes below it are not compared: fp32 rounds their squares away, differently in each kernel. Second
# moments of a tensor without gradients decay to there: 0.95^600 of 1e-6.
FAINT = 1e-18
# How much less than the rounding bound a state must have moved to testify against a newer one. A machine's fault shows
# less in a less trained state, so it can stay below the bound itself: in a measurement, an older state moved by a sixth
# of the newer one.
CLEAR = 10.0


Sizes = Mapping[str, Mapping[str, Size]]


class Vitals(BaseModel):
    """Vitals of a state. losses: of the probes, nats per token, without FP8; samples: digests of their tokens. sizes:
    by kind ("weight", "exp_avg", "exp_avg_sq") and name, of whole tensors. precision: in which the losses were
    computed. doubt: why it may not be called healthy, "" = no doubt."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    losses: list[float] = []
    samples: list[str] = []
    sizes: dict[str, dict[str, Size]] = {}
    precision: str = ""
    doubt: str = ""


@dataclass(frozen=True)
class VitalsVerdict:
    """problem: of a state, a sentence, "" = none. content: its numbers differ from those saved; otherwise they are the
    same, but compute different losses here."""

    problem: str = ""
    content: bool = False


def judge_loaded_state(
    kept: Vitals | None, now: Vitals, bf16_moments: bool, config: VitalsConfig, most: float = RATIO
) -> VitalsVerdict:
    """Whether the loaded state is the saved one.

    kept: its checkpoint's vitals, None if it has none; now: the same, measured on the state. bf16_moments:
    these are kept in bf16 here. most: as in `explain_contradiction`.
    """
    state_problem = explain_contradiction(now.sizes, most)
    if kept is not None and not state_problem:
        state_problem = explain_size_change(kept.sizes, now.sizes, bf16_moments, config.size_change)
    if state_problem or kept is None:
        return VitalsVerdict(state_problem, content=bool(state_problem))
    return VitalsVerdict(explain_loss_change(kept, now, config))


def bound_moment_ratio(*betas: tuple[float, float]) -> float:
    """Twice the maximum of a first moment's square over the second one, for Adam with any of these betas."""
    ratio_bounds = [
        (1 - beta1) ** 2 / (1 - beta2) / (1 - beta1**2 / beta2) if beta1**2 < beta2 < 1 else math.inf
        for beta1, beta2 in betas
    ]
    return max([RATIO, *(2 * ratio_bound for ratio_bound in ratio_bounds)])


def explain_contradiction(sizes: Sizes, most: float = RATIO) -> str:
    """Moments that no sequence of gradients produces: a sentence, or "".

    m = sum (1 - b1) b1^i g_i and v = sum (1 - b2) b2^i g_i^2 over the same gradients, so by Cauchy and Schwarz
    m^2 <= v (1 - b1)^2 / (1 - b2) / (1 - b1^2 / b2) for each element, and for the largest of them. This needs no record
    of the saved state, and has no false alarms for moments made by Adam, with betas for which `bound_moment_ratio` is
    `most`; inf for an optimizer whose moments are of different numbers.
    """
    first_moments, second_moments = sizes.get("exp_avg", {}), sizes.get("exp_avg_sq", {})
    for name in sorted(first_moments.keys() & second_moments.keys()):
        m, v = first_moments[name].largest, second_moments[name].largest
        if m > TINY and m * m > most * v:
            return (
                f"the moments of {name} are inconsistent: the largest first moment is {m:.3g}, the largest "
                f"second one {v:.3g}, and no gradients produce both"
            )
    return ""


def explain_size_change(kept: Sizes, now: Sizes, bf16_moments: bool, change: float) -> str:
    """The tensor whose size differs most from the saved one, a sentence, or ""."""
    worst_excess, worst_sentence = 1.0, ""
    for kind, kept_sizes in kept.items():
        change_bound = max(change, ROUNDED) if bf16_moments and kind != "weight" else change
        for name, size in kept_sizes.items():
            other = now.get(kind, {}).get(name)
            if other is None:
                continue  # moments that are not loaded; a different model is refused elsewhere
            for size_name, size_kept, size_now in (
                ("norm", size.norm, other.norm), ("largest magnitude", size.largest, other.largest),
            ):  # fmt: skip
                excess_ratio = _relative(size_kept, size_now) / change_bound
                if excess_ratio > worst_excess:
                    worst_excess = excess_ratio
                    worst_sentence = (
                        f"the {KINDS.get(kind, kind)} of {name} have a {size_name} of {size_now:.6g}, and had "
                        f"{size_kept:.6g} when saved"
                    )
    return worst_sentence


def explain_loss_change(kept: Vitals, now: Vitals, config: VitalsConfig) -> str:
    """Whether the losses of the probes have changed: a sentence, or ""; only for identical samples."""
    median_change, loss_bound = loss_change(kept, now), _rounding(kept, now, config)
    if not median_change > loss_bound:
        return ""
    pairs = pair_losses(kept, now)
    before, after = (fmean(side_losses) for side_losses in zip(*pairs, strict=True))
    return (
        f"{len(pairs)} probe samples have a mean loss of {after:.4f}, and had {before:.4f} when it was saved; half of "
        f"them moved by more than {median_change:.3g}, and rounding explains at most {loss_bound:.3g}"
    )


def explain_unclear_proof(kept: Vitals | None, now: Vitals, config: VitalsConfig) -> str:
    """Why an unchanged state does not prove that this machine computes correctly, a sentence, or ""."""
    if kept is None or not pair_losses(kept, now):
        return "it has no losses of the current probe samples"
    middle, bound = loss_change(kept, now), _rounding(kept, now, config) / CLEAR
    if middle <= bound:
        return ""
    return (
        f"half of its own probe samples moved by more than {middle:.3g}; at most {bound:.3g} would prove it"
    )


def loss_change(kept: Vitals, now: Vitals) -> float:
    """Change of the losses of common probes, nats: the median; inf if that is not finite, 0 without any."""
    changes = [abs(b - a) if math.isfinite(b - a) else math.inf for a, b in pair_losses(kept, now)]
    return median(changes or [0.0])


def size_change(kept: Sizes, now: Sizes) -> float:
    """The largest relative change of a norm or largest magnitude."""
    largest_change = 0.0
    for kind, kept_sizes in kept.items():
        for name in kept_sizes.keys() & now.get(kind, {}).keys():
            a, b = kept_sizes[name], now[kind][name]
            largest_change = max(largest_change, _relative(a.norm, b.norm), _relative(a.largest, b.largest))
    return largest_change


def explain_doubt(now: Vitals, before: Vitals | None, recent: Sequence[float], config: VitalsConfig) -> str:
    """Why a state may not be called healthy when it is saved, a sentence, or "".

    before: of the previous checkpoint; recent: the latest training losses. The probes must be far above both: harder
    data also raises the latest losses, and an unusual probe was unusual before.
    """
    finite_losses = [recent_loss for recent_loss in recent if math.isfinite(recent_loss)]
    if not now.losses or not finite_losses:
        return ""
    level = median(now.losses)
    above = level - median(finite_losses)
    probe_rises = [b - a for a, b in pair_losses(before, now)] if before is not None else [above]
    rise = median(probe_rises) if probe_rises else above
    if math.isfinite(rise) and math.isfinite(above) and min(rise, above) <= config.rise:
        return ""
    return (
        f"the probe samples have a median loss of {level:.3f}, {rise:.3f} above the checkpoint before and {above:.3f} "
        f"above the latest training losses; a healthy state has at most {config.rise:g} (checkpoint.vitals.rise)"
    )


def fallen_behind(
    now: Sequence[float] | Floats, recent: Sequence[float], batch: int, config: VitalsConfig
) -> str:
    """Whether a state is worse than its checkpoint says, a sentence, or "".

    now: losses on it of the samples that it was trained on last, in order; recent: the means of the latest steps, of
    `batch` samples, when they were trained on: a healthy state only improves on them. Medians of steps, so that a few
    bad samples or steps have no effect.
    """
    finite_means, losses = [x for x in recent if math.isfinite(x)], list(map(float, now))
    if not finite_means or not losses:
        return ""
    step_means = [fmean(losses[i : i + batch]) for i in range(0, len(losses), batch)]
    level = median([step_mean if math.isfinite(step_mean) else math.inf for step_mean in step_means])
    usual_loss = median(finite_means)
    # Between neighbours: a fast fall of the loss does not count as scatter.
    loss_scatter = 1.4826 / math.sqrt(2) * median([abs(b - a) for a, b in pairwise(finite_means)] or [0.0])
    allowed_excess = config.worse + 4 * loss_scatter
    if not level - usual_loss > allowed_excess:
        return ""
    return (
        f"the last {len(losses)} samples that it was trained on have a mean loss of {level:.3f} on it, and the last "
        f"{len(finite_means)} steps had {usual_loss:.3f}; a healthy state has at most {allowed_excess:.2f} more"
    )


def pair_losses(kept: Vitals, now: Vitals) -> list[tuple[float, float]]:
    """Losses of the common probes, (kept, now)."""
    known = dict(zip(kept.samples, kept.losses, strict=False))
    return [(known[s], loss) for s, loss in zip(now.samples, now.losses, strict=False) if s in known]


def _rounding(kept: Vitals, now: Vitals, config: VitalsConfig) -> float:
    """Maximum change of losses by rounding."""
    return config.loss_change if {kept.precision, now.precision} == {"fp32"} else config.loss_change_low


def _relative(before: float, after: float) -> float:
    if before == after:
        return 0.0
    if not (math.isfinite(before) and math.isfinite(after)):
        return math.inf
    if max(abs(before), abs(after)) < FAINT:
        return 0.0
    return abs(after - before) / max(abs(before), abs(after))
