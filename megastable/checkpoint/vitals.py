"""What a checkpoint remembers of the state that it was taken of, and whether a state is still that one. Pure.

Checksums say that the bytes are those that were written. They say nothing of what happened before (in host memory, on
the way to the disk) or of a hand that wrote others and mended the checksums. So a checkpoint also knows, measured on
the device before anything is copied: how large every tensor of weights and moments is, and the losses of a few fixed
samples. A start measures them again, before its first step. And Adam's moments bear witness against each other.
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

from megastable.base.tensor_size import Size
from megastable.config.checkpoint import VitalsConfig

Floats = npt.NDArray[np.float64]

ROUNDED = 2.0**-8  # relative: what rounding to bf16 changes at most
KINDS = {"weight": "weights", "exp_avg": "first moments", "exp_avg_sq": "second moments"}
# A first moment's square over the second moment, beyond what any gradients give: see `contradiction`. 53 for betas of
# (0.9, 0.999), 1.4 for (0.9, 0.95); twice that, as the betas may have been others before, and moments may be rounded.
# Others give more, (0, 0.999) 1000: see `ratio`.
RATIO = 106.0
TINY = (
    1e-15  # first moments below it are not judged: their squares are near the smallest numbers that fp32 has
)
# Norms and magnitudes below it are not compared: fp32 rounds their squares away, each kernel at another place. Second
# moments of a tensor without gradients come there by themselves: 0.95^600 of 1e-6.
FAINT = 1e-18
# How many times less than rounding may do a state must have moved to bear witness against a newer one. What is wrong
# with a machine shows less the less a state has learnt, so it can stay below the bound itself: measured, an older
# state moved by a sixth of the newer one.
CLEAR = 10.0


Sizes = Mapping[str, Mapping[str, Size]]


class Vitals(BaseModel):
    """Of a state. losses: of the probes, nats per token, without FP8; samples: digests of their tokens. sizes: by kind
    ("weight", "exp_avg", "exp_avg_sq") and name, of whole tensors. precision: in which the losses were computed.
    doubt: why it is not to be called healthy, "" = nothing."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    losses: list[float] = []
    samples: list[str] = []
    sizes: dict[str, dict[str, Size]] = {}
    precision: str = ""
    doubt: str = ""


@dataclass(frozen=True)
class VitalsVerdict:
    """problem: what is wrong with a state, a sentence, "" = nothing. content: its numbers are not those that were
    saved; otherwise they are, and compute something else here."""

    problem: str = ""
    content: bool = False


def judge(
    kept: Vitals | None, now: Vitals, bf16_moments: bool, config: VitalsConfig, most: float = RATIO
) -> VitalsVerdict:
    """Whether the state that was loaded is the one that was saved.

    kept: what its checkpoint remembers, None of an older version; now: the same, measured on the state. bf16_moments:
    these are kept in bf16 here. most: as in `contradiction`.
    """
    problem = contradiction(now.sizes, most)
    if kept is not None and not problem:
        problem = resized(kept.sizes, now.sizes, bf16_moments, config.size_change)
    if problem or kept is None:
        return VitalsVerdict(problem, content=bool(problem))
    return VitalsVerdict(moved(kept, now, config))


def ratio(*betas: tuple[float, float]) -> float:
    """Twice the most that a first moment's square is of the second one, by Adams of any of these betas."""
    most = [
        (1 - one) ** 2 / (1 - two) / (1 - one**2 / two) if one**2 < two < 1 else math.inf
        for one, two in betas
    ]
    return max([RATIO, *(2 * x for x in most)])


def contradiction(sizes: Sizes, most: float = RATIO) -> str:
    """Moments that no sequence of gradients leads to: a sentence, or "".

    m = sum (1 - b1) b1^i g_i and v = sum (1 - b2) b2^i g_i^2 over the same gradients, so by Cauchy and Schwarz
    m^2 <= v (1 - b1)^2 / (1 - b2) / (1 - b1^2 / b2) for each element, and for the largest of them. This takes no memory
    of what was saved, and cannot be wrong about moments that Adam made, with betas for which `ratio` is `most`.
    """
    first, second = sizes.get("exp_avg", {}), sizes.get("exp_avg_sq", {})
    for name in sorted(first.keys() & second.keys()):
        m, v = first[name].largest, second[name].largest
        if m > TINY and m * m > most * v:
            return (
                f"Adam's moments of {name} contradict each other: the largest first moment is {m:.3g}, the largest "
                f"second one {v:.3g}, and no gradients lead to both"
            )
    return ""


def resized(kept: Sizes, now: Sizes, bf16_moments: bool, change: float) -> str:
    """The tensor whose size is farthest from what was remembered, a sentence, or ""."""
    worst, told = 1.0, ""
    for kind, of in kept.items():
        bound = max(change, ROUNDED) if bf16_moments and kind != "weight" else change
        for name, size in of.items():
            other = now.get(kind, {}).get(name)
            if other is None:
                continue  # moments that are not loaded; another model is refused elsewhere
            for what, before, after in (
                ("norm", size.norm, other.norm), ("largest magnitude", size.largest, other.largest),
            ):  # fmt: skip
                far = _relative(before, after) / bound
                if far > worst:
                    worst = far
                    of_what = f"the {KINDS.get(kind, kind)} of {name}"
                    told = f"{of_what} have a {what} of {after:.6g}, and had {before:.6g} when saved"
    return told


def moved(kept: Vitals, now: Vitals, config: VitalsConfig) -> str:
    """Whether the probes have other losses than they had: a sentence, or ""; of those that are the same samples."""
    pairs, middle, bound = paired(kept, now), loss_change(kept, now), _rounding(kept, now, config)
    if not middle > bound:
        return ""
    before, after = (fmean(side) for side in zip(*pairs, strict=True))
    return (
        f"{len(pairs)} probe samples have a mean loss of {after:.4f}, and had {before:.4f} when it was saved; half of "
        f"them moved by more than {middle:.3g}, and {bound:.3g} is what rounding may do"
    )


def unclear(kept: Vitals | None, now: Vitals, config: VitalsConfig) -> str:
    """Why a state that is as it was saved does not prove that what computes here is right, a sentence, or ""."""
    if kept is None or not paired(kept, now):
        return "it remembers no losses of the probe samples of now"
    middle, bound = loss_change(kept, now), _rounding(kept, now, config) / CLEAR
    if middle <= bound:
        return ""
    return (
        f"half of its own probe samples moved by more than {middle:.3g}; up to {bound:.3g} it would prove it"
    )


def loss_change(kept: Vitals, now: Vitals) -> float:
    """By how much the probes that both know moved, nats: the median; inf where that is not finite, 0 without any."""
    return median([abs(b - a) if math.isfinite(b - a) else math.inf for a, b in paired(kept, now)] or [0.0])


def size_change(kept: Sizes, now: Sizes) -> float:
    """The largest relative change of a norm or largest magnitude."""
    pairs = [
        (size, now[kind][name])
        for kind, of in kept.items()
        for name, size in of.items()
        if name in now.get(kind, {})
    ]
    return max(
        (max(_relative(a.norm, b.norm), _relative(a.largest, b.largest)) for a, b in pairs), default=0.0
    )


def doubt(now: Vitals, before: Vitals | None, recent: Sequence[float], config: VitalsConfig) -> str:
    """Why a state that is about to be saved is not to be called healthy, a sentence, or "".

    before: of the checkpoint before; recent: the latest training losses. The probes must be far above both: harder data
    raises the latest losses, a probe that is odd by itself was so before.
    """
    known = [x for x in recent if math.isfinite(x)]
    if not now.losses or not known:
        return ""
    level = median(now.losses)
    above = level - median(known)
    rises = [b - a for a, b in paired(before, now)] if before is not None else [above]
    rise = median(rises) if rises else above
    if all(math.isfinite(x) for x in (rise, above)) and not min(rise, above) > config.rise:
        return ""
    return (
        f"the probe samples have a median loss of {level:.3f}, {rise:.3f} above the checkpoint before and {above:.3f} "
        f"above the latest training losses; {config.rise:g} is the most of a healthy one (checkpoint.vitals.rise)"
    )


def fallen_behind(
    now: Sequence[float] | Floats, recent: Sequence[float], batch: int, config: VitalsConfig
) -> str:
    """Whether a state is worse than its checkpoint says, a sentence, or "".

    now: losses on it of the samples that it was trained on last, in order; recent: the means of the latest steps, of
    `batch` samples, when they were trained on: a healthy state only got better at them. Medians of steps, so that a few
    bad samples or steps count for nothing.
    """
    known, losses = [x for x in recent if math.isfinite(x)], list(map(float, now))
    if not known or not losses:
        return ""
    means = [fmean(losses[i : i + batch]) for i in range(0, len(losses), batch)]
    level = median([x if math.isfinite(x) else math.inf for x in means])
    usual = median(known)
    # Of neighbours: a loss that falls fast does not scatter by that.
    scatter = 1.4826 / math.sqrt(2) * median([abs(b - a) for a, b in pairwise(known)] or [0.0])
    bound = config.worse + 4 * scatter
    if not level - usual > bound:
        return ""
    return (
        f"the last {len(losses)} samples that it was trained on have a mean loss of {level:.3f} on it, and the last "
        f"{len(known)} steps had {usual:.3f}; {bound:.2f} more would be the most of a healthy one"
    )


def paired(kept: Vitals, now: Vitals) -> list[tuple[float, float]]:
    """Losses of the probes that both know, (kept, now)."""
    known = dict(zip(kept.samples, kept.losses, strict=False))
    return [(known[s], loss) for s, loss in zip(now.samples, now.losses, strict=False) if s in known]


def _rounding(kept: Vitals, now: Vitals, config: VitalsConfig) -> float:
    """By how much it moves losses at most."""
    return config.loss_change if {kept.precision, now.precision} == {"fp32"} else config.loss_change_low


def _relative(before: float, after: float) -> float:
    if before == after:
        return 0.0
    if not (math.isfinite(before) and math.isfinite(after)):
        return math.inf
    if max(abs(before), abs(after)) < FAINT:
        return 0.0
    return abs(after - before) / max(abs(before), abs(after))
