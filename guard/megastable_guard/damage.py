"""Judges damage to the model that no batch shows, from looks at it once in a while. Pure.

The probe is the losses of a few samples that are never trained on. They are the same at every look, so what differs is
the model: the difference of two looks has hardly any noise. While a run learns they get easier, ever more slowly. A
model that is worse on them than that lets expect is damaged, or learns something else; which of the two, replays decide
(trials.py).

Tensors: an update moves a weight by about the rate, so the norm of a tensor changes slowly, and each tensor has a pace
of its own. Adam's second moments forget no faster than beta2 lets them. What breaks one of the two is not the work of
the optimizer, or of an update that is far beyond all others; whether the same steps do it again, a replay shows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from megastable_guard.robust import MAD_TO_SIGMA

Floats = npt.NDArray[np.float64]

# A rise of the probe's mean loss above what was to be expected is clear beyond so many nats, usual scatters of such
# differences, and standard errors over the samples: then a trial decides.
LEAST, SURE, ERRORS = 0.03, 4.0, 3.0
KNOWN, NEWEST = 3, 16  # fewest and most differences that tell their usual scatter
UNSURE = 10.0  # for a loss that still falls it counts (1 + UNSURE / differences) times, see `_usual`
APART = 5  # fewest steps between two looks that tell how fast the loss falls
REST = 25  # half the steps of a first pause; one that follows soon is twice as long
# A tensor jumps if it changes by this share of its norm, and so many times as fast as ever before.
CHANGED, FASTER = 0.05, 8.0
KNOWN_PACES, NEWEST_PACES = 2, 8  # fewest and most looks that tell the pace of a tensor
FORGOTTEN = (
    0.5  # second moments below this share of what only zero gradients would leave were changed otherwise
)
# A tensor without gradients, as of an expert that no token chooses, has second moments of at most so many times what
# zero gradients leave, and in the end so small ones that their norm in fp32 is imprecise.
UNUSED, VANISHED = 1.01, 1e-18


class _LookState(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


class JudgementPause(_LookState):
    """No judgement for a while after a find that was the run's own work, twice as long each time that happens soon."""

    end: int = 0
    times: int = 0

    def begin_pause(self, step: int) -> None:
        self.times = self.times + 1 if step <= self.end + REST * 2**self.times else 1
        self.end = step + REST * 2**self.times

    def hold_until_settled(self, step: int) -> None:
        """The next step is trained otherwise, on purpose: what follows at once is the effect of that."""
        self.end = max(self.end, step + 2 * REST)


@dataclass(frozen=True)
class Rise:
    """The probe changed by `change` nats between the looks after steps `before` and `step`, which is `nats` more than
    expected."""

    before: int
    step: int
    change: float
    nats: float
    limit: float

    @property
    def reason(self) -> str:
        return (
            f"the loss of the probe samples, which are never trained on, changed by {self.change:+.3f} nats from step "
            f"{self.before} to step {self.step}, where {self.change - self.nats:+.3f} was expected: it is "
            f"{self.nats:.3f} higher, and usual is at most {self.limit:.3f}"
        )


class ProbeTrend(_LookState):
    """One `judge_look` per look, in order; a state for checkpoints. samples: which ones. looks: the newest ones, step
    and losses of each. surprises: changes less the expected ones, in units of these: while a run learns fast, they are
    larger."""

    samples: str = ""
    looks: list[tuple[int, list[float]]] = []
    surprises: list[float] = []
    pause: JudgementPause = JudgementPause()

    def judge_look(self, step: int, losses: Floats) -> Rise | None:
        """A look after `step`: losses of the samples, [n] nats. A rise is no part of the trend until it is accepted."""
        if not self.looks:
            self.looks = [(step, losses.tolist())]
            return None
        last_step, last_losses = self.looks[-1]
        loss_changes = losses - np.array(last_losses)
        mean = float(loss_changes.mean()) if np.isfinite(losses).all() else math.inf
        error = (
            float(loss_changes.std()) / math.sqrt(max(1, loss_changes.size - 1))
            if math.isfinite(mean)
            else 0.0
        )
        expected_change = self.expect(step)
        if expected_change is not None:
            surprise_unit = LEAST / SURE + abs(expected_change)
            rise_limit = max(LEAST, ERRORS * error, surprise_unit * self._usual(mean < 0))
            if mean - expected_change > rise_limit and step >= self.pause.end:
                return Rise(last_step, step, mean, mean - expected_change, rise_limit)
            if math.isfinite(mean):
                self.surprises = [*self.surprises, (mean - expected_change) / surprise_unit][-NEWEST:]
        if math.isfinite(mean):
            self.looks = [*self.looks[-2 * NEWEST :], (step, losses.tolist())]
        return None

    def expect(self, step: int) -> float | None:
        """The change of the mean loss from the newest look to one after `step`: what the last rate of its fall makes,
        which goes on to slow down as it did; a loss that rose is expected to stay. None: too few looks are known."""
        known = [(look_step, float(np.mean(losses))) for look_step, losses in self.looks]
        spread_looks = [known[-1]]
        for look_step, loss in reversed(known[:-1]):
            if spread_looks[-1][0] - look_step >= APART:
                spread_looks.append((look_step, loss))
        if len(spread_looks) < 3:
            return None
        (last, last_loss), (middle, middle_loss), (first_step, start) = spread_looks[:3]
        rate, earlier_rate = (
            (last_loss - middle_loss) / (last - middle),
            (middle_loss - start) / (middle - first_step),
        )
        slowing_factor = min(1.0, rate / earlier_rate) if earlier_rate < 0 else 1.0
        return min(0.0, rate) * slowing_factor * (step - last)

    def accept_rise(self, step: int, losses: Floats) -> None:
        """A rise was no damage: it is the level from now on."""
        if not np.isfinite(losses).all():
            return
        self.pause.begin_pause(step)
        # At another level the loss falls as fast as before, for want of anything better.
        level_shift = losses - np.array(self.looks[-1][1])
        shifted_looks = [
            (look_step, (np.array(known) + level_shift).tolist()) for look_step, known in self.looks[:-1]
        ]
        self.looks = [*shifted_looks, (step, losses.tolist())]

    def begin_again(self) -> None:
        """The run trains otherwise from here on: how fast the loss fell until now says nothing."""
        self.looks = self.looks[-1:]

    def forget_after(self, step: int) -> None:
        """The run is back after `step`."""
        self.looks = [(look_step, look_losses) for look_step, look_losses in self.looks if look_step <= step]

    def _usual(self, falls: bool) -> float:
        """The largest surprise that is usual, in its unit. At the start of a run, while the rate rises, any is. falls:
        the loss is lower than at the look before: then the surprise is that it fell more slowly than it did, and what
        is usual of that, a scatter of few differences tells badly (Student's t)."""
        if len(self.surprises) < KNOWN:
            return math.inf
        median_surprise = float(np.median(self.surprises))
        surprise_scatter = MAD_TO_SIGMA * float(np.median(np.abs(np.array(self.surprises) - median_surprise)))
        unsure_factor = 1 + UNSURE / len(self.surprises) if falls else 1.0
        return median_surprise + SURE * surprise_scatter * unsure_factor


class TensorNorms(NamedTuple):
    """L2 norms of a tensor's weights and of its second moments; None if the optimizer has none."""

    weight: float
    second_moment: float | None


@dataclass(frozen=True)
class TensorJump:
    """The norm of `tensor` jumped from `old` to `new` between the looks after steps `before` and `step`. kind: weight
    or second_moment."""

    before: int
    step: int
    tensor: str
    kind: str
    old: float
    new: float

    @property
    def reason(self) -> str:
        if self.kind == "weight":
            told, why_wrong = "weights", f"at least {FASTER:g} times as fast as ever before"
        else:
            told, why_wrong = "second moments", "which is faster than they can forget"
        return (
            f"the norm of the {told} of {self.tensor} changed from {self.old:.4g} to {self.new:.4g} between the steps "
            f"{self.before} and {self.step}, {why_wrong}"
        )

    def is_repeated(self, norms: Mapping[str, TensorNorms]) -> bool:
        """Whether a replay of the steps, which led to these norms, has made at least half of the jump again."""
        repeated_norm = getattr(norms[self.tensor], self.kind)
        half = (self.old + self.new) / 2
        return bool(repeated_norm >= half if self.new > self.old else repeated_norm <= half)


class TensorLook(NamedTuple):
    """After `step`: the sum of the rates of all updates, and their number; norms by tensor, the same on every rank."""

    step: int
    rates: float
    updates: int
    norms: dict[str, TensorNorms]


class TensorPaces(_LookState):
    """One `judge_look` per look, in order; a state for checkpoints. rates: the sum of those of all updates so far.
    last: the newest look. paces: how fast the norms of tensors have moved, the newest ones, by tensor."""

    rates: float = 0.0
    last: TensorLook | None = None
    paces: dict[str, list[float]] = {}
    pause: JudgementPause = JudgementPause()

    def judge_look(self, look: TensorLook, beta2: float | None) -> TensorJump | None:
        """The farthest jump, if any; then the look is no part of the history. beta2: the decay rate of second moments,
        None if they are no such averages."""
        last_look = self.last
        if last_look is None or look.updates <= last_look.updates:
            self.last = look
            return None
        rates_moved = max(look.rates - last_look.rates, 1e-30)
        found_jumps, unused_tensors = list[tuple[float, TensorJump]](), set[str]()
        for tensor_name, norms_now in look.norms.items():
            then, known_paces = last_look.norms.get(tensor_name), self.paces.get(tensor_name, [])
            if then is None:
                continue
            norm_change, jump_place = (
                abs(norms_now.weight - then.weight),
                (last_look.step, look.step, tensor_name),
            )
            if len(known_paces) >= KNOWN_PACES and not norm_change <= CHANGED * then.weight:
                times_faster = norm_change / rates_moved / max(*known_paces, 1e-30)
                if not times_faster <= FASTER:
                    found_jumps.append(
                        (times_faster, TensorJump(*jump_place, "weight", then.weight, norms_now.weight))
                    )
            if beta2 is not None and then.second_moment is not None and norms_now.second_moment is not None:
                moments = then.second_moment, norms_now.second_moment
                faded_moment = beta2 ** (look.updates - last_look.updates) * then.second_moment
                if then.second_moment > VANISHED and not norms_now.second_moment >= FORGOTTEN * faded_moment:
                    found_jumps.append((math.inf, TensorJump(*jump_place, "second_moment", *moments)))
                if norms_now.second_moment <= max(VANISHED, UNUSED * faded_moment):
                    unused_tensors.add(tensor_name)
        if found_jumps and look.step >= self.pause.end:
            return max(found_jumps, key=lambda found: found[0])[1]
        self._learn(look, unused_tensors)
        return None

    def _learn(self, look: TensorLook, unused: Collection[str] = ()) -> None:
        """unused: tensors that had no gradients, whose pace is not that of their updates."""
        last_norms = {} if self.last is None else self.last.norms
        rates_moved = max(look.rates - (0.0 if self.last is None else self.last.rates), 1e-30)
        for tensor_name, norms_now in look.norms.items():
            is_known = tensor_name in last_norms and tensor_name not in unused
            if is_known and math.isfinite(norms_now.weight):
                tensor_pace = abs(norms_now.weight - last_norms[tensor_name].weight) / rates_moved
                self.paces[tensor_name] = [*self.paces.get(tensor_name, []), tensor_pace][-NEWEST_PACES:]
        self.last = look

    def accept_jump(self, look: TensorLook) -> None:
        """The jump of the last look was the run's own work: it goes on from there, at this pace."""
        self.pause.begin_pause(look.step)
        self._learn(look)

    def begin_again(self) -> None:
        """The optimizer begins again, on purpose."""
        self.last = None

    def forget_after(self, step: int) -> None:
        """The run is back after `step`: a look after that is forgotten."""
        if self.last is not None and self.last.step > step:
            self.last = None
