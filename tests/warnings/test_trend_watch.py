"""Slow signals in real runs: warned of alike on every rank, continued by a resume, undone by a rewind, and evidence."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megastable.config.tree import RunConfig
from megastable.report.postmortem import write_incidents
from megastable.run.directory import RunDirectory
from megastable.run.events.data_events import LengthChanged
from megastable.run.events.stability_events import IncidentEvent, TrendEvent
from megastable.run.events.training_events import Evaluated
from tests.conftest import tiny, write_corpus
from tests.distributed import run_ranks
from tests.engine.test_gate import trainer_of
from tests.recovery.test_recovery import recipe as faulty

STEPS, FAULT = 40, 16
# Norms grow straight at the start of a run, and outputs many times, which is not judged otherwise.
TRENDS = {"start": 2, "interval": 2, "confirm": 2, "straightness": 5.0, "output_growth": 1e3}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "pp2": (2, {"parallel": {"pipeline": 2}}),
    "tp2": (2, {"parallel": {"tensor": 2}}),
    "zero1-dp2": (2, {"parallel": {"zero": 1}}),
    "zero3-dp2": (2, {"parallel": {"zero": 3}}),
}


def recipe(corpus: Path, run: Path, **parts: Any) -> RunConfig:
    train = {"steps": STEPS, "global_batch": 8, "micro_batch": 4, "eval_samples": 0, "eval_interval": 0}
    return tiny(corpus, run, **{
        "train": train, "schedule": {"warmup_steps": 5, "kind": "constant", "total_steps": STEPS},
        "checkpoint": {"interval": 20}, "stability": {"dry_run": True, "trends": TRENDS}, **parts,
    })  # fmt: skip


def train(config: RunConfig, gain: float) -> dict[str, Any]:
    """Train while the gains of q and k grow by a factor at every step from `FAULT` on; what is remembered then."""
    trainer = trainer_of(config)
    engine, real = trainer.engine, trainer.engine.train_step

    def train_step(*args: Any, **options: Any) -> Any:
        if trainer.state.step + 1 >= FAULT:
            flat = engine.flat_state()
            for f in flat.fragments:
                if f.name.endswith(("q_norm.weight", "k_norm.weight")):
                    flat.piece(f, "weight").mul_(gain)
            engine.refresh_weights()
        return real(*args, **options)

    engine.train_step = train_step
    assert trainer.train() == 0
    return trainer.recovery.watches.trends.state_dict()


def told(run: Path) -> list[dict[str, Any]]:
    """All that was told of trends, without the time."""
    return [{k: v for k, v in e.fields.items() if k != "time"} for e in RunDirectory(run).events(TrendEvent)]


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_collapse_is_warned_of_on_every_rank_alike(name: str, corpus: Path, tmp_path: Path) -> None:
    world, parts = LAYOUTS[name]
    states = run_ranks(world, train, recipe(corpus, tmp_path / "run", **parts), 1.2)
    assert all(state == states[0] for state in states)
    found = told(tmp_path / "run")
    assert all(event["what"] == "warned" and event["step"] > FAULT for event in found)
    assert {"entropy", "weights"} <= {event["signal"] for event in found}
    assert set(states[0]["standing"]) == {event["signal"] for event in found}
    # Each place once, with others of the same look in one line.
    for signal, places in states[0]["standing"].items():
        lines = [event["text"].partition("; and so for ")[2] for event in found if event["signal"] == signal]
        assert sum(1 + int(others.split()[0] if others else 0) for others in lines) == len(places)
    assert {"blocks.0", "blocks.1"} == {place["where"] for place in states[0]["standing"]["entropy"]}


@pytest.mark.slow
def test_a_healthy_run_is_silent_and_what_is_off_measures_nothing(corpus: Path, tmp_path: Path) -> None:
    (state,) = run_ranks(1, train, recipe(corpus, tmp_path / "run"), 1.0)
    assert told(tmp_path / "run") == [] and state["series"]
    off = {"dry_run": True, "trends": {**TRENDS, "enabled": False}}
    (state,) = run_ranks(1, train, recipe(corpus, tmp_path / "off", stability=off), 1.2)
    assert told(tmp_path / "off") == [] and not state["series"]


@pytest.mark.slow
def test_a_resume_goes_on_bit_for_bit(corpus: Path, tmp_path: Path) -> None:
    """Stopped right after the fault began: the warnings, and what is remembered, are those of the whole run."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    (expected,) = run_ranks(1, train, recipe(corpus, whole), 1.2)
    for steps in (20, STEPS):
        c = recipe(corpus, run)
        c = c.model_copy(update={"train": c.train.model_copy(update={"steps": steps})})
        (state,) = run_ranks(1, train, c, 1.2)
    assert state == expected and told(run) == told(whole) != []


def rewound(config: RunConfig, spoilt: int) -> dict[str, Any]:
    """Train with spoilt weights at a step, which a rewind undoes; all looks are kept."""
    import torch

    trainer = trainer_of(config)
    engine, real, judge = trainer.engine, trainer.engine.train_step, trainer.recovery.watches.trends
    measured, looks, done = judge.measured, list[int](), list[int]()

    def train_step(*args: Any, **options: Any) -> Any:
        if trainer.state.step + 1 == spoilt and not engine._probing and not done:
            done.append(spoilt)
            master = engine.masters[0]
            engine._wait_for_copies()
            master.data += torch.randn(master.shape, generator=torch.Generator().manual_seed(1)) * 0.2
            engine.refresh_weights()
        return real(*args, **options)

    def look(step: int, rate: float, rows: Any) -> Any:
        looks.append(step)
        return measured(step, rate, rows)

    engine.train_step, judge.measured = train_step, look
    code = trainer.train()
    return {"code": code, "looks": looks, "state": judge.state.model_dump(), "done": done}


@pytest.mark.slow
def test_a_rewind_rolls_the_history_back(tmp_path: Path) -> None:
    """What was looked at and then undone is not in the history, and nothing of the time until the incident is over;
    what stands warned is in the incident, and in its report."""
    write_corpus(tmp_path / "corpus", ids=20)
    # A limit that every run is beyond, so that something stands.
    trends = {**TRENDS, "interval": 1, "layer_gradient": 0.01, "update_change": 1e-6}
    parts = {"model": {"layers": 2}, "optimizer": {"lr": 1e-3}, "stability": {"trends": trends}}
    (end,) = run_ranks(1, rewound, faulty(tmp_path / "corpus", tmp_path / "run", **parts), 32)
    run = RunDirectory(tmp_path / "run")
    incidents = list(run.events(IncidentEvent))
    assert end["code"] == 0 and end["done"] and any(event["what"] == "rewound" for event in incidents)
    (back,) = [event["to_step"] for event in incidents if event["what"] == "rewound"]
    assert back == 30 and end["looks"] == [*range(11, 32), 49, 50]
    norms = end["state"]["series"]["norm mlp"]["steps"]
    assert norms == [step for step in end["looks"] if step != 31][-len(norms) :] and 30 in norms
    (warned, *_) = told(tmp_path / "run")
    assert (warned["signal"], warned["step"]) == ("updates", 12)
    (sentence,) = incidents[0]["summary"]["warnings"]
    assert sentence == f"step 12: {warned['text']}"
    write_incidents(tmp_path / "run")
    pages = list((tmp_path / "run").rglob("postmortem.md"))
    assert pages and all(f"Warned before, and not over: {sentence}" in page.read_text() for page in pages)


def overfit(config: RunConfig) -> list[str]:
    """Evaluations whose losses rise while the run learns."""
    trainer = trainer_of(config)
    losses = iter([3.0, 3.1, 3.2, 3.3, 3.4, 3.5, 3.6, 3.7])

    def measure(step: int) -> Evaluated:
        return Evaluated(step=step, loss=next(losses), samples=8, seconds=0.0)

    trainer.evaluation = SimpleNamespace(measure=measure)  # type: ignore[assignment]
    assert trainer.train() == 0
    return list(trainer.recovery.watches.trends.state_dict()["standing"])


@pytest.mark.slow
def test_an_evaluation_is_judged(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", ids=20)
    train = {"steps": 40, "eval_interval": 10, "eval_samples": 8}
    parts = {"optimizer": {"lr": 1e-2}, "schedule": {"total_steps": 40}}
    states = run_ranks(
        2, overfit, recipe(tmp_path / "corpus", tmp_path / "run", train=train | {"global_batch": 8}, **parts)
    )
    assert all("validation" in state for state in states)
    (event,) = [event for event in told(tmp_path / "run") if event["signal"] == "validation"]
    assert event["step"] == 30 and event["remedy"] and event["numbers"]["risen"] > 0.02


def looked(config: RunConfig) -> dict[str, Any]:
    """Steps that are looked at, and the state in the end."""
    trainer, looks = trainer_of(config), list[int]()
    judge = trainer.recovery.watches.trends
    measured = judge.measured

    def look(step: int, rate: float | None, rows: Any) -> Any:
        looks.append(step)
        return measured(step, rate, rows)

    judge.measured = look
    assert trainer.train() == 0
    return {"looks": looks, "state": judge.state.model_dump()}


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["steps", "tokens"])
def test_no_look_while_the_rate_warms_up(unit: str, corpus: Path, tmp_path: Path) -> None:
    each = 8 * 32 if unit == "tokens" else 1
    schedule = dict.fromkeys(("warmup_steps", "total_steps"))
    schedule |= {f"warmup_{unit}": 20 * each, f"total_{unit}": 30 * each}
    parts = {"schedule": schedule, "train": {"steps": 30, "global_batch": 8}}
    (end,) = run_ranks(1, looked, recipe(corpus, tmp_path / "run", **parts))
    assert end["looks"] == [22, 24, 26, 28, 30]


@pytest.mark.slow
def test_a_change_of_the_length_starts_entropy_and_evaluations_anew(corpus: Path, tmp_path: Path) -> None:
    """Samples of 16 tokens in the first half, of 32 in the second."""
    parts = {
        "train": {
            "steps": 40, "global_batch": 8, "eval_interval": 5, "eval_samples": 8,
            "sequence_warmup": {"start": 16, "tokens": 20 * 8 * 32},
        },
    }  # fmt: skip
    (end,) = run_ranks(1, looked, recipe(corpus, tmp_path / "run", **parts))
    series = end["state"]["series"]
    changed = max(e.step for e in RunDirectory(tmp_path / "run").events(LengthChanged))
    assert 10 < changed < 30
    assert series["entropy blocks.0"]["steps"] == [step for step in end["looks"] if step >= changed][-16:]
    assert min(series["added blocks.0"]["steps"]) < changed
    assert {e["step"] for e in end["state"]["evaluations"]} == {s for s in range(5, 41, 5) if s >= changed}


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "signals"), [("adamw", {"updates"}), ("lamb", set())])
def test_only_updates_like_adams_are_measured_against_the_rate(
    optimizer: str, signals: set[str], corpus: Path, tmp_path: Path
) -> None:
    """A limit that every update is below."""
    parts = {
        "optimizer": {"name": optimizer, "lr": 1e-3}, "schedule": {"warmup_steps": 2},
        "stability": {"trends": {**TRENDS, "update_least": 1e3, "update_change": 1e3}},
        "train": {"steps": 12, "global_batch": 8},
    }  # fmt: skip
    run_ranks(1, looked, recipe(corpus, tmp_path / "run", **parts))
    assert {event["signal"] for event in told(tmp_path / "run")} == signals
