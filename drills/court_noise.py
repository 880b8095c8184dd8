"""The guard on noise alone: every action is a false alarm. Pure; no training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from benchmarks.noise import SIGMA, healthy
from drills.court_scenarios import Row, Wish
from megastable.config.stability import StabilityConfig
from megastable.guard.actions import Action
from megastable.guard.guard import Recorded, simulate

STEPS = 20_000
FEW = 5  # refusals in 10,000 steps
ONE_IN, HEIGHT = 300, 8.0  # of steps have a spike of so many sigma

WISHES = (
    Wish("1 rewind at most", lambda r: r.rewinds <= 1),
    Wish(f"{FEW} refusals in 10,000 steps at most", lambda r: 1e4 * r.refused / STEPS <= FEW),
)


def make_noise(name: str, seed: int) -> Iterator[Recorded]:
    """The steps of a healthy run: its width changes slowly, or in bursts, or it has spikes that mean nothing."""
    if name != "noise-spikes":
        yield from healthy({"noise-volatile": "heteroscedastic", "noise-bursts": "bursts"}[name], STEPS, seed)
        return
    chance = np.random.default_rng((seed, 2))
    for row in healthy("white", STEPS, seed):
        spike = HEIGHT * (chance.random() < 1 / ONE_IN)
        assert row.grad_norm is not None
        # The scatter of the log norm: 0.1 times Student's t of 3 degrees, whose robust deviation is 0.113.
        yield row._replace(loss=row.loss + SIGMA * spike, grad_norm=row.grad_norm * np.exp(0.113 * spike))


def judge_noise(name: str, seed: int) -> Row:
    """What the guard, with default settings, would have done."""
    done, undone = Counter[Action](), list[str]()
    for judged in simulate(make_noise(name, seed), StabilityConfig()):
        done[judged.action] += 1
        if judged.action not in (Action.APPLY, Action.DISCARD):
            undone.append(f"{judged.verdict}: {judged.action}")
    row = Row(
        scenario=name, seed=seed, refused=done[Action.DISCARD], rewinds=done[Action.REWIND],
        handovers=done[Action.HANDOVER], alerts=done[Action.ALERT], incidents=undone,
    )  # fmt: skip
    return row.model_copy(update={"missed": [wish.words for wish in WISHES if not wish.grants(row)]})
