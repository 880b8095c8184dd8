"""Synthetic training traces with known faults: the generator, not the traces.

A run is a loss that falls by a power law with normal noise, and a gradient norm with a heavy-tailed one. Each function
adds one fault to a run and returns a new one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from megastable_guard.signals import Signals


@dataclass(frozen=True)
class Run:
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
) -> Run:
    """noise: sigma of the loss, nats. tail: of the norm, times |Student t, 3 degrees|; exponential: in its exponent."""
    rng = np.random.default_rng(seed)
    loss = 3.0 + 8.0 * (1.0 + np.arange(steps) / 20.0) ** -0.5 + noise * rng.standard_normal(steps)
    heavy = tail * rng.standard_t(3, steps)
    return Run(loss, norm * (np.exp(heavy) if exponential else 1.0 + np.abs(heavy)))


def plus(run: Run, start: int, loss: np.ndarray, norm: np.ndarray | float = 1.0) -> Run:
    """`loss` nats added and the norm multiplied by `norm` from `start` on."""
    changed = run.loss.copy()
    end = min(start + len(loss), len(changed))
    changed[start:end] += loss[: end - start]
    if run.norm is None:
        return replace(run, loss=changed)
    factors = run.norm.copy()
    factors[start:end] *= np.broadcast_to(norm, len(loss))[: end - start]
    return Run(changed, factors)


def spike(run: Run, start: int, *, length: int = 40, height: float = 1.5) -> Run:
    return plus(run, start, np.full(length, height))


def divergence(run: Run, start: int, *, rate: float = 0.01) -> Run:
    """The loss leaves its curve and rises by `rate` nats per step above the level it had."""
    left = len(run.loss) - start
    rising = np.interp(np.arange(left), [0, left], [0.0, rate * left])
    smooth = 3.0 + 8.0 * (1.0 + np.arange(start, len(run.loss)) / 20.0) ** -0.5
    return plus(run, start, rising + smooth[0] - smooth)


def swinging(run: Run, start: int, *, amplitude: float, period: int = 8) -> Run:
    left = len(run.loss) - start
    return plus(run, start, amplitude * np.sin(2 * np.pi * np.arange(left) / period))
