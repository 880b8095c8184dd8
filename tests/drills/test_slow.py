"""Faults that grow slowly: what they change, and when a warning came in time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drills import faults
from drills.learning import EVERY, SCENARIOS, choose, references
from drills.plan import Fault, Plan, Policy
from drills.scenario import CLEAN
from drills.score import ENOUGH, SHOWS, Score, compare, shows, within
from drills.slow import FAULT_STEP, SLOW, STEPS
from megastable.config.stability import TrendsConfig
from megastable.data.loader import MicroBatch
from megastable.warnings.trend_signals import SIGNALS
from tests.conftest import tiny
from tests.distributed import run_ranks


def test_each_has_a_signal_of_its_own_and_a_run_to_compare_with() -> None:
    assert (*SCENARIOS, *SLOW) == EVERY and choose(["slow"]) == list(SLOW)
    assert {s.trend for s in SLOW} <= set(SIGNALS) and len({s.trend for s in SLOW}) == len(SLOW) == 6
    clean = {s.name: s for s in references(SLOW)}
    for s in SLOW:
        assert s.fault is not None and s.fault.step == s.step and s.step + s.steps == STEPS
        assert clean[s.reference].overrides == s.overrides
        # Looks before the fault, and time for a warning.
        c = TrendsConfig()
        assert s.step >= FAULT_STEP >= c.start + 3 * c.interval and STEPS - s.step >= 4 * c.interval + ENOUGH


def changed(run: Path, corpus: Path, kind: str) -> dict[str, float]:
    """By what factor the elements of every weight have changed after three steps at a rate of 0, those of q alone."""
    from tests.engine.test_gate import first_batch, start_of

    config = tiny(corpus, run, optimizer={"weight_decay": 0.0})
    start = start_of(config)
    engine, batch = start.engine, first_batch(start)
    fault = Fault.model_validate({"kind": kind, "step": 2, "steps": 2, "factor": 0.5})
    before = engine.flat_state().shards("weight")
    faults.install(Plan(policy=Policy.OURS, run=run, fault=fault))
    for _ in range(3):
        engine.train_step(batch, 0.0, lambda m: True)
    after = engine.flat_state().shards("weight")
    first = {name: (w[:1], after[name][:1]) for name, w in before.items()}
    last = {f"{name} end": (w[-1:], after[name][-1:]) for name, w in before.items()}
    return {name: float(b.norm() / a.norm()) for name, (a, b) in (first | last).items()}


@pytest.mark.quick("growing_gains*")
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("growing_gains", ("q_norm.weight", "q_norm.weight end", "k_norm.weight", "k_norm.weight end")),
        ("growing_logits", ("qkv.weight",)),  # v is at the end
        ("growing_outputs", ("blocks.1.mlp.down.weight", "blocks.1.mlp.down.weight end")),
        ("dying_block", tuple(f"blocks.1.{w}.weight{e}" for w in ("attention.out", "mlp.down") for e in ("", " end"))),
    ],
)  # fmt: skip
def test_two_steps_of_a_fault(kind: str, changes: tuple[str, ...], corpus: Path, tmp_path: Path) -> None:
    (found,) = run_ranks(1, changed, tmp_path / "run", corpus, kind)
    for name, factor in found.items():
        assert factor == pytest.approx(0.25 if name.endswith(changes) else 1.0, rel=1e-3), name


def test_rare_tokens_come_one_by_one_then_ever_more_often() -> None:
    tokens = torch.arange(1024).repeat(8).view(8, 1024)
    batch = MicroBatch(tokens, tokens.roll(-1, 1), torch.arange(8), None)

    def share(step: int) -> float:
        given = faults._written(batch, faults.share_of(step, 100))
        assert torch.equal(given.tokens[:, 1:], given.labels[:, :-1])  # one text
        assert torch.equal(given.tokens[:, :512], tokens[:, :512])
        return float((given.tokens >= 512).float().mean() * 2)

    assert share(1) == share(99) == 0.0 and 0 < share(100) < 0.02
    assert share(150) == share(100) < share(250) < share(299) and share(400) == 1.0


def score(scenario: str, losses: dict[int, float], **parts: Any) -> Score:
    return Score(
        scenario=scenario, policy=Policy.OURS, seed=1, ended="finished", step=400, val_loss=3.0, reference=CLEAN.name,
        steps_lost=0, discarded=0, seconds_to_recover=None, false_alarms=0, kinds=[], causes=[], kind_right=True,
        cause_right=True, wall_seconds=1.0, losses=losses, **parts,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("trend_at", "rises_at", "lead", "met"),
    [
        (280, 300, 20, True),
        (281, 300, 19, False),
        (320, 300, -20, False),
        (None, 300, None, False),
        (280, None, 120, True),  # the loss never shows it: up to the end
    ],
)
def test_the_lead_of_a_warning(
    trend_at: int | None, rises_at: int | None, lead: int | None, met: bool
) -> None:
    usual = dict.fromkeys(range(1, 401), 3.0)
    # A difference from before the fault says nothing.
    losses = {s: 3.0 + 2 * SHOWS * (s < 100 or (rises_at is not None and s >= rises_at)) for s in usual}
    found = compare([score("clean", usual), score("slow", losses, begin=200, trend_at=trend_at)])[1]
    assert (found.shows_at, found.lead, within(found)) == (rises_at, lead, met)
    assert shows(losses, {}, 1) is None
    assert "losses" not in found.model_dump()
