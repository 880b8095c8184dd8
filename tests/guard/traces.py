"""Synthetic training traces with known faults: the generator, not the traces.

A run is a loss that falls by a power law with normal noise, and a gradient norm with a heavy-tailed one. Each function
adds one fault to a run and returns a new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from megastable_guard.actions import Action, Cause, Finding, Remedy, Signals, Verdict
from megastable_guard.guard_config import PolicyConfig
from megastable_guard.policy import Policy


@dataclass(frozen=True)
class SyntheticRun:
    """loss, norm: float64 of shape (steps,), nats and L2 norm before clipping. norm None: not measured."""

    loss: np.ndarray
    norm: np.ndarray | None

    def __iter__(self):
        for step, loss in enumerate(self.loss):
            yield Signals(step, float(loss), None if self.norm is None else float(self.norm[step]))


def healthy(
    steps: int,
    seed: int,
    *,
    noise: float = 0.03,
    tail: float = 0.1,
    exponential: bool = False,
    norm: float = 0.4,
) -> SyntheticRun:
    """noise: sigma of the loss, nats. tail: of the norm, times |Student t, 3 degrees|; exponential: in its exponent."""
    rng = np.random.default_rng(seed)
    loss = 3.0 + 8.0 * (1.0 + np.arange(steps) / 20.0) ** -0.5 + noise * rng.standard_normal(steps)
    heavy = tail * rng.standard_t(3, steps)
    return SyntheticRun(loss, norm * (np.exp(heavy) if exponential else 1.0 + np.abs(heavy)))


def plus(run: SyntheticRun, start: int, loss: np.ndarray, norm: np.ndarray | float = 1.0) -> SyntheticRun:
    """`loss` nats added and the norm multiplied by `norm` from `start` on."""
    changed = run.loss.copy()
    end = min(start + len(loss), len(changed))
    changed[start:end] += loss[: end - start]
    if run.norm is None:
        return replace(run, loss=changed)
    factors = run.norm.copy()
    factors[start:end] *= np.broadcast_to(norm, len(loss))[: end - start]
    return SyntheticRun(changed, factors)


def spike(run: SyntheticRun, start: int, *, length: int = 40, height: float = 1.5) -> SyntheticRun:
    return plus(run, start, np.full(length, height))


def divergence(run: SyntheticRun, start: int, *, rate: float = 0.01) -> SyntheticRun:
    """The loss leaves its curve and rises by `rate` nats per step above the level it had."""
    left = len(run.loss) - start
    rising = np.interp(np.arange(left), [0, left], [0.0, rate * left])
    smooth = 3.0 + 8.0 * (1.0 + np.arange(start, len(run.loss)) / 20.0) ** -0.5
    return plus(run, start, rising + smooth[0] - smooth)


def swinging(run: SyntheticRun, start: int, *, amplitude: float, period: int = 8) -> SyntheticRun:
    left = len(run.loss) - start
    return plus(run, start, amplitude * np.sin(2 * np.pi * np.arange(left) / period))


CONFIG = PolicyConfig()
VERDICTS = st.sampled_from(list(Verdict))


def seen(step: int, verdict: Verdict = Verdict.HEALTHY, severity: float = 2.0, **more: object) -> Finding:
    healthy = verdict is Verdict.HEALTHY
    fields = {"onset": step, "reason": f"{verdict} at {step}", "on_trend": healthy} | more
    return Finding(step=step, verdict=verdict, severity=0.0 if healthy else severity, **fields)  # type: ignore[arg-type]


def run(policy: Policy, findings: list[Finding], oldest: int | None = 0) -> list[Action]:
    return [policy.decide_on_step(finding, oldest).action for finding in findings]


def trip(
    policy: Policy,
    step: int,
    cause: Cause,
    corpus: str = "a",
    may_swap: bool = False,
    proven: bool = True,
    bad: Sequence[int] = (),
) -> Action:
    """A spike, and the remedy for its cause as it was found out; by default by a clear trial. may_swap: a
    branch without the corpus would win."""
    decision = policy.decide_on_step(seen(step, Verdict.SPIKE), 0)
    if decision.action is not Action.REWIND:
        return decision.action
    swap = "without it the others are easier" if may_swap and policy.may_swap(corpus) else ""
    return policy.choose_remedy(cause, step, corpus, swap, proven, bad).action


def trip_and_try(
    policy: Policy, step: int, name: str, good_rate: float | None = None, rate: float | None = None
) -> Remedy:
    """A spike, and a remedy whose branch won."""
    assert policy.decide_on_step(seen(step, Verdict.SPIKE), 0).action is Action.REWIND
    offers = {offer.name: offer for offer in policy.offer_remedies(step, good_rate, rate)}
    return policy.adopt_remedy(offers[name], "it won")
