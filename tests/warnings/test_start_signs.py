"""Signs of a rate that is too high, in real runs: told early, once, and alike whatever the layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megastable.config.tree import RunConfig
from megastable.run import records
from megastable.run.directory import RunDirectory
from megastable.run.events.stability_events import Discarded, IncidentEvent
from megastable.run.events.training_events import Warned
from tests.conftest import tiny, write_corpus
from tests.distributed import run_ranks
from tests.engine.test_gate import trainer_of
from tests.recovery.test_recovery import recipe as faulty
from tests.recovery.test_recovery import spoil

STEPS = 21


def recipe(corpus: Path, run: Path, **parts: Any) -> RunConfig:
    train = {"steps": STEPS, "global_batch": 8, "micro_batch": 4, "eval_samples": 0, "eval_interval": 0}
    defaults: dict[str, Any] = {
        "train": train,
        "schedule": {"warmup_steps": 0, "kind": "constant", "total_steps": STEPS},
        "optimizer": {"lr": 5e-2},
        "checkpoint": {"interval": 0},
    }
    given = parts.get("stability", {})
    small = {"narrowest": 32, "rms": 0.1}  # the growth alone decides
    parts["stability"] = {**given, "signs": {**small, **given.get("signs", {})}}
    return tiny(corpus, run, **{**defaults, **parts})


def train(config: RunConfig) -> dict[str, Any]:
    """What the run remembers of its signs at the end, on this rank."""
    trainer = trainer_of(config)
    assert trainer.train() in (0, 75)
    return trainer.recovery.watches.signs.state_dict()


def told(run: Path) -> list[tuple[int, str]]:
    """Signs that were measured, without hints on the recipe."""
    warned = [(e["step"], e["sign"]) for e in RunDirectory(run).events(Warned) if "sign" in e]
    return [(step, sign) for step, sign in warned if sign != "recipe"]


def hints(run: Path) -> list[str]:
    """Keys of the recipe that were warned of before the first step."""
    events = [e for e in RunDirectory(run).events(Warned) if e.get("sign") == "recipe"]
    assert all(e["step"] == 0 for e in events)
    return [e["text"].partition("=")[0] for e in events]


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "pp2": (2, {"parallel": {"pipeline": 2}}),
    "tp2-sequence": (2, {"parallel": {"tensor": 2, "sequence": True}}),
    "zero3-dp2": (2, {"parallel": {"zero": 3}}),
    "fp16": (1, {"precision": {"kind": "fp16"}}),  # whose first updates overflow
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_bad_start_is_told_on_every_rank(name: str, corpus: Path, tmp_path: Path) -> None:
    world, parts = LAYOUTS[name]
    states = run_ranks(world, train, recipe(corpus, tmp_path / "run", **parts))
    assert all(state == states[0] for state in states)
    said = told(tmp_path / "run")
    assert {"schedule.warmup_steps", "train.eval_samples"} <= set(hints(tmp_path / "run"))
    assert {"update", "activations"} <= {sign for _, sign in said} and max(step for step, _ in said) <= STEPS
    assert [sign for _, sign in said] == states[0]["told"]


def test_a_good_start_is_silent(corpus: Path, tmp_path: Path) -> None:
    c = recipe(corpus, tmp_path / "run", optimizer={"lr": 3e-3}, schedule={"warmup_steps": 10})
    (state,) = run_ranks(1, train, c)
    assert state["told"] == [] == told(tmp_path / "run") and state["activation"] and state["entropy"]
    steps = records.read(tmp_path / "run/steps").to_pylist()
    measured = [row["step"] for row in steps if row["update_ratio"] is not None]
    assert measured == [1, 2, 5, 10, 15, 20]  # 5, 10, 15 and 20 in any case
    assert [row["step"] for row in steps if row["attention_entropy"] is not None] == [1, 20]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stability", "signs"),
    [({"dry_run": True}, True), ({"enabled": False}, False), ({"signs": {"enabled": False}}, False)],
)
def test_who_wants_none_hears_none(
    stability: dict[str, Any], signs: bool, corpus: Path, tmp_path: Path
) -> None:
    (state,) = run_ranks(1, train, recipe(corpus, tmp_path / "run", stability=stability))
    assert bool(state["told"]) == signs == bool(told(tmp_path / "run")) == bool(hints(tmp_path / "run"))


@pytest.mark.slow
def test_what_was_told_before_a_restart_is_not_told_again(corpus: Path, tmp_path: Path) -> None:
    """The first look is that of the first process."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    for steps in (3, STEPS):
        c = recipe(corpus, run)
        c = c.model_copy(update={"train": c.train.model_copy(update={"steps": steps})})
        (state,) = run_ranks(1, train, c)
    (other,) = run_ranks(1, train, recipe(corpus, whole))
    assert state == other and told(run) == told(whole) and hints(run) == hints(whole)


@pytest.mark.slow
def test_a_corpus_without_order_is_told_by_its_loss(corpus: Path, tmp_path: Path) -> None:
    """At a rate at which nothing can be learnt, the loss stays at the unigram entropy, or above."""
    c = recipe(corpus, tmp_path / "run", optimizer={"lr": 0.5}, stability={"dry_run": True})
    run_ranks(1, train, c)
    (event,) = [e for e in RunDirectory(tmp_path / "run").events(Warned) if e.get("sign") == "unigram"]
    assert event["step"] == 20 and event["numbers"]["loss"] > event["numbers"]["unigram_entropy"] - 0.3


@pytest.mark.slow
@pytest.mark.parametrize(("lr", "slow"), [(1e-5, True), (2e-2, False)])
def test_a_rate_that_is_too_low_is_told(lr: float, slow: bool, tmp_path: Path) -> None:
    """Of 20 tokens of a larger vocabulary: their frequencies are to be learnt first."""
    write_corpus(tmp_path / "corpus", ids=20)
    c = recipe(
        tmp_path / "corpus", tmp_path / "run", optimizer={"lr": lr}, stability={"signs": {"slow_updates": 40}},
        schedule={"warmup_steps": 20, "kind": "constant", "total_steps": 40}, train={
            "steps": 40, "global_batch": 8, "micro_batch": 4, "eval_samples": 0, "eval_interval": 0,
        },
    )  # fmt: skip
    states = run_ranks(2, train, c)
    state = states[0]
    assert state == states[1]
    assert ("slow" in state["told"]) == slow == ((40, "slow") in told(tmp_path / "run"))
    assert set(state["losses"]) == {"begin", "half", "end"} and set(state["ratios"]) == {
        18,
        19,
        20,
        28,
        29,
        30,
    }


@pytest.mark.slow
def test_trouble_later_in_the_start_is_no_sign(tmp_path: Path) -> None:
    """Step 33 is a look of the configuration, and the second refused update: the residual stream has grown a lot
    there. It is done again while the incident is open."""
    write_corpus(tmp_path / "corpus", ids=20)
    signs = {
        "norms": [1, 2, 5, 10, 20, 33],
        "looks": [1, 20, 33],
        "growth": 12.0,
        "rms": 0.1,
        "narrowest": 32,
    }
    parts = {"model": {"layers": 2}, "optimizer": {"lr": 1e-3}}
    c = faulty(tmp_path / "corpus", tmp_path / "run", stability={"signs": signs}, **parts)
    (end,) = run_ranks(1, spoil, c, "weights", [32])
    run = RunDirectory(tmp_path / "run")
    refused = [event["step"] for event in run.events(Discarded)]
    assert end["code"] == 0 and 33 in refused and list(run.events(IncidentEvent))

    def streams(newest: bool) -> list[float]:
        rows = records.read(tmp_path / "run/layers", records.LAYER_SCHEMA, newest).to_pylist()
        return [row["activation_rms"] for row in rows if row["name"] == "blocks.1"]

    (first, regular, refused_at), (_, _, again) = streams(newest=False), streams(newest=True)
    assert told(tmp_path / "run") == [] and max(regular, again) < 12 * first < refused_at
