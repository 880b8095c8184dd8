"""A tensor that an update spoils without a sign in the loss: found, and undone to the byte."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from megastable.config.tree import RunConfig
from megastable.run.directory import RunDirectory
from megastable.run.events.training_events import Warned
from megastable_guard.damage import REST
from tests.distributed import run_ranks
from tests.engine.test_gate import trainer_of
from tests.recovery.test_recovery import LAYOUTS, STEPS, easy, incidents, recipe, train_spoilt
from tests.training.test_resume import identical

__all__ = ["easy"]

NAME, EVERY = "blocks.0.attention_norm.weight", 8


def train_watched(config: RunConfig, spoilt: int | None, kind: str, always: bool = False) -> tuple[int, int]:
    """With looks every eight steps; see `train_spoilt`."""
    from megastable.recovery import recovery

    recovery.EVERY = EVERY
    return train_spoilt(config, spoilt, NAME, 0.2 if kind == "weight" else 1e-4, kind, always)


@pytest.mark.quick("one-weight")
@pytest.mark.parametrize("kind", ["weight", "exp_avg_sq"])
@pytest.mark.parametrize("name", ["one", "pp2", "tp2", "zero3-dp2"])
def test_a_jump_that_the_steps_do_not_make_again_is_undone(
    name: str, kind: str, easy: Path, tmp_path: Path
) -> None:
    world, parts = LAYOUTS[name]
    parts = {**parts, "train": {**parts.get("train", {}), "eval_samples": 0}}
    hit, same = tmp_path / "hit", tmp_path / "same"
    # Second moments fill up again within some updates.
    for run, step in ((hit, 36 if kind == "weight" else 40), (same, None)):
        ends = run_ranks(world, train_watched, recipe(easy, run, **parts), step, kind)
        assert all(code == 0 for code, _ in ends)
    (incident,) = incidents(hit)
    assert (incident["verdict"], incident["cause"], incident["outcome"]) == ("damage", "state", "healed")
    assert NAME in incident["reasons"][0] and incident["positions"] == [] and not incident["deferred"]
    assert identical(hit / f"checkpoints/step-{STEPS}", same / f"checkpoints/step-{STEPS}") >= 3


def test_a_jump_that_the_steps_make_again_is_the_runs_own(easy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = recipe(easy, run, train={"eval_samples": 0})
    assert run_ranks(1, train_watched, config, 36, "weight", True) == [
        (0, 2)
    ]  # in the run, and when it was repeated
    told = [event["text"] for event in RunDirectory(run).iterate_events(Warned)]
    assert any(NAME in text and "the same steps make it again" in text for text in told)
    assert not [i for i in incidents(run) if i["verdict"] == "damage"]


def probe_watch(tokens: int, unit: int = 1) -> Any:
    from megastable.recovery.watches import ProbeWatch

    engine: Any = SimpleNamespace()
    log: Any = SimpleNamespace(emit_event=lambda event: None)
    loader: Any = SimpleNamespace(batch=16, unit=unit)
    batch: Any = SimpleNamespace(tokens=torch.full((1, 8), tokens))
    return ProbeWatch(engine, loader, [batch], log)


def test_a_trend_is_continued_on_the_same_samples_alone() -> None:
    probe = probe_watch(1)
    probe.state.judge_look(25, np.arange(4.0))
    saved = json.loads(json.dumps(probe.state_dict()))
    for again, known in ((probe_watch(1), True), (probe_watch(2), False), (probe_watch(1, 2), False)):
        again.load_state_dict(saved)
        assert again.state.looks == ([(25, [0.0, 1.0, 2.0, 3.0])] if known else [])
    again = probe_watch(1)
    again.load_state_dict({})  # of a checkpoint without one
    again.load_state_dict(saved)
    assert again.state.looks
    with pytest.raises(ValidationError):
        again.load_state_dict(saved | {"looks": "rising"})


def test_rates_of_undone_steps_do_not_count() -> None:
    from megastable.recovery import watches

    watch: Any = watches.TensorWatch.__new__(watches.TensorWatch)
    watch.state, measured = watches.TensorPaces(), SimpleNamespace()
    for step in (1, 2):
        watch.after_update(measured, step, 0.25)
    saved = watch.state_dict()
    watch.after_update(measured, 3, 0.25)
    watch.rewound(2, saved)
    assert watch.state.rates == 0.5
    for damaged in ({"rates": "many"}, {"rates": None}, {"rates": []}, {"last": [1, 2]}):
        with pytest.raises(ValidationError):  # which a start tells of, and begins again
            watch.load_state_dict(damaged)


def paused(config: RunConfig, changes: list[list[str]]) -> list[tuple[bool, int, int]]:
    """How the stability system begins after such changes of the recipe: whether tensors have a last look, and until
    which step tensors and the probe are not judged."""
    from megastable.recovery import recovery

    recovery.EVERY = 2
    trainer = trainer_of(config)
    trainer.train()
    state, found = trainer.state, list[tuple[bool, int, int]]()
    for changed in changes:
        made = recovery.Recovery(trainer.recovery.parts, state, changed=changed)
        tensors, probe = made.watches.tensors.state, made.watches.probe.state
        found.append((tensors.last is not None, tensors.pause.end, probe.pause.end))
    return found


def test_a_start_with_other_settings_rests_the_watches_as_a_live_change_does(
    easy: Path, tmp_path: Path
) -> None:
    config = recipe(easy, tmp_path / "run", train={"steps": 4, "eval_samples": 0})
    changes = [["logging.steps_interval: 1 -> 2"], ["optimizer.lr: 0.001 -> 0.003"], ["train.steps: 4 -> 40"]]
    (found,) = run_ranks(1, paused, config, changes)
    as_before, rests = (True, 0, 0), (False, 4 + 2 * REST, 4 + 2 * REST)
    assert found == [as_before, rests, as_before]  # the schedule has its own length
    schedule = config.schedule.model_copy(update={"total_steps": None})
    (found,) = run_ranks(1, paused, config.model_copy(update={"schedule": schedule}), changes[2:])
    assert found == [rests]
