"""Signs of the start and slow signals in real runs: told alike on every rank, once, continued by a resume, undone by a
rewind, and evidence of an incident."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megastable.config.tree import RunConfig
from megastable.report.postmortem import write_incidents
from megastable.run import records
from megastable.run.directory import RunDirectory
from megastable.run.events.data_events import LengthChanged
from megastable.run.events.stability_events import IncidentEvent, TrendEvent
from megastable.run.events.training_events import Warned
from tests.conftest import tiny, write_corpus
from tests.distributed import run_ranks
from tests.engine.test_gate import trainer_of
from tests.recovery.test_recovery import recipe as faulty
from tests.recovery.test_recovery import spoil

STEPS, FAULT = 40, 16
# Norms grow straight at the start of a run, and outputs many times, which is not judged otherwise.
TRENDS = {"start": 2, "interval": 2, "confirm": 2, "straightness": 5.0, "output_growth": 1e3}
SIGNS = {"narrowest": 32, "rms": 0.1}  # the growth alone decides
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, {"parallel": {"pipeline": 2}}),
    "tp2-sequence": (2, {"parallel": {"tensor": 2, "sequence": True}}),
    "zero3-dp2": (2, {"parallel": {"zero": 3}}),
    "fp16": (1, {"precision": {"kind": "fp16"}}),  # whose first updates overflow
}


def recipe(corpus: Path, run: Path, **parts: Any) -> RunConfig:
    """At a good rate."""
    train = {"steps": STEPS, "global_batch": 8, "micro_batch": 4, "eval_samples": 0, "eval_interval": 0}
    stability = {"dry_run": True, "trends": TRENDS, "signs": SIGNS, **parts.pop("stability", {})}
    return tiny(corpus, run, **{
        "schedule": {"warmup_steps": 5, "kind": "constant", "total_steps": STEPS}, "checkpoint": {"interval": 20},
        "stability": stability, **parts, "train": {**train, **parts.get("train", {})},
    })  # fmt: skip


def bad_start(corpus: Path, run: Path, **parts: Any) -> RunConfig:
    """Without a warm-up, at a rate that is far too high."""
    schedule = {"warmup_steps": 0, "kind": "constant", "total_steps": STEPS}
    return recipe(corpus, run, **{"optimizer": {"lr": 5e-2}, "schedule": schedule, **parts})


def train(config: RunConfig, gain: float = 1.0) -> tuple[dict[str, Any], dict[str, Any], list[int]]:
    """Train while the gains of q and k grow by a factor at every step from `FAULT` on; what trends and signs remember
    at the end, and at which steps there was a look."""
    trainer = trainer_of(config)
    engine, real, watches = trainer.engine, trainer.engine.train_step, trainer.recovery.watches
    measured, looks = watches.trends.judge_look, list[int]()

    def train_step(*args: Any, **options: Any) -> Any:
        if trainer.state.step + 1 >= FAULT and gain != 1:
            flat = engine.flat_state()
            for f in flat.fragments:
                if f.name.endswith(("q_norm.weight", "k_norm.weight")):
                    flat.view_piece(f, "weight").mul_(gain)
            engine.refresh_weights()
        return real(*args, **options)

    def look(step: int, rate: float, rows: Any) -> Any:
        looks.append(step)
        return measured(step, rate, rows)

    engine.train_step, watches.trends.judge_look = train_step, look
    assert trainer.train() in (0, 75)
    return watches.trends.state_dict(), watches.signs.state_dict(), looks


def trends_of(run: Path) -> list[dict[str, Any]]:
    """All that was told of trends, without the time."""
    return [
        {k: v for k, v in e.fields.items() if k != "time"}
        for e in RunDirectory(run).iterate_events(TrendEvent)
    ]


def signs_of(run: Path) -> tuple[list[str], list[str]]:
    """Signs that were measured, and keys of the recipe that were warned of before the first step."""
    events = [e for e in RunDirectory(run).iterate_events(Warned) if "sign" in e]
    hints = [e["text"].partition("=")[0] for e in events if e["sign"] == "recipe"]
    return [e["sign"] for e in events if e["sign"] != "recipe"], hints


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_warnings_are_told_on_every_rank_alike(name: str, corpus: Path, tmp_path: Path) -> None:
    world, parts = LAYOUTS[name]
    ends = run_ranks(world, train, bad_start(corpus, tmp_path / "bad", **parts))
    assert all(end == ends[0] for end in ends)
    told, hints = signs_of(tmp_path / "bad")
    assert {"schedule.warmup_steps", "train.eval_samples"} <= set(hints)
    assert {"update", "activations"} <= set(told) and told == ends[0][1]["told"]
    if name == "fp16":
        return
    ends = run_ranks(world, train, recipe(corpus, tmp_path / "run", **parts), 1.2)
    assert all(end == ends[0] for end in ends)
    found, standing = trends_of(tmp_path / "run"), ends[0][0]["standing"]
    assert all(event["what"] == "warned" and event["step"] > FAULT for event in found)
    assert {"entropy", "weights"} <= {event["signal"] for event in found} == set(standing)
    assert {"blocks.0", "blocks.1"} == {place["where"] for place in standing["entropy"]}


def test_warnings_are_silent_in_a_healthy_run_and_measure_nothing_where_they_are_off(
    corpus: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    config = recipe(corpus, run, optimizer={"lr": 3e-3}, train={"steps": 21})
    ((trends, signs, looks),) = run_ranks(1, train, config)
    assert trends_of(run) == [] == signs_of(run)[0] and trends["series"] and min(looks) > 5
    assert signs["activation"] and signs["entropy"]
    steps = records.read_newest_records(run / "steps").to_pylist()
    measured = [row["step"] for row in steps if row["update_ratio"] is not None]
    assert measured == [1, 2, 5, 10, 15, 20]  # 5, 10, 15 and 20 in any case
    assert [row["step"] for row in steps if row["attention_entropy"] is not None] == [1, 20]
    off = {"trends": {**TRENDS, "enabled": False}, "signs": {"enabled": False}}
    ((trends, signs, looks),) = run_ranks(1, train, bad_start(corpus, tmp_path / "off", stability=off), 1.2)
    assert not trends["series"] and not looks and trends_of(tmp_path / "off") == []
    assert signs_of(tmp_path / "off") == ([], [])


@pytest.mark.slow
def test_warnings_go_on_over_a_resume_bit_for_bit(corpus: Path, tmp_path: Path) -> None:
    """Stopped right after the fault began: the warnings, and what is remembered, are those of the whole run."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    ((*expected, _),) = run_ranks(1, train, bad_start(corpus, whole, optimizer={"lr": 1e-2}), 1.2)
    for steps in (20, STEPS):
        config = bad_start(corpus, run, optimizer={"lr": 1e-2}, train={"steps": steps})
        ((*found, _),) = run_ranks(1, train, config, 1.2)
    assert found == expected and trends_of(run) == trends_of(whole) != []
    assert signs_of(run) == signs_of(whole)


@pytest.mark.slow
@pytest.mark.parametrize(("lr", "slow"), [(1e-5, True), (2e-2, False)])
def test_signs_tell_a_rate_that_is_too_low(lr: float, slow: bool, tmp_path: Path) -> None:
    """Of 20 tokens of a larger vocabulary: their frequencies are to be learnt first."""
    write_corpus(tmp_path / "corpus", ids=20)
    config = recipe(
        tmp_path / "corpus", tmp_path / "run", optimizer={"lr": lr}, stability={"signs": {"slow_updates": 40}},
        schedule={"warmup_steps": 20, "kind": "constant", "total_steps": STEPS},
    )  # fmt: skip
    (_, state, _), other = run_ranks(2, train, config)
    assert state == other[1]
    assert ("slow" in state["told"]) == slow == ("slow" in signs_of(tmp_path / "run")[0])
    assert set(state["losses"]) == {"begin", "half", "end"}
    assert set(state["ratios"]) == {18, 19, 20, 28, 29, 30}


@pytest.mark.slow
def test_warnings_forget_what_a_rewind_has_undone(tmp_path: Path) -> None:
    """What was looked at and then undone is not in the history, and nothing of the time until the incident is over;
    what stands warned is in the incident, and in its report."""
    write_corpus(tmp_path / "corpus", ids=20)
    # A limit that every run is beyond, so that something stands.
    trends = {**TRENDS, "interval": 1, "layer_gradient": 0.01, "update_change": 1e-6}
    stability = {"trends": trends, "signs": {**SIGNS, "growth": 12.0, "looks": [1, 20, 33]}}
    parts = {"model": {"layers": 2}, "optimizer": {"lr": 1e-3}, "stability": stability}
    (end,) = run_ranks(1, spoil, faulty(tmp_path / "corpus", tmp_path / "run", **parts), "weights", [32])
    run = RunDirectory(tmp_path / "run")
    incidents = list(run.iterate_events(IncidentEvent))
    (back,) = [event["to_step"] for event in incidents if event["what"] == "rewound"]
    assert end["code"] == 0 and back == 30
    # Step 33 is a look of the configuration, and the second refused update: the residual stream has grown a lot there.
    assert "activations" not in signs_of(tmp_path / "run")[0]
    (warned, *_) = trends_of(tmp_path / "run")
    assert (warned["signal"], warned["step"]) == ("updates", 12)
    (sentence,) = incidents[0]["summary"]["warnings"]
    assert sentence == f"step 12: {warned['text']}"
    write_incidents(tmp_path / "run")
    pages = list((tmp_path / "run").rglob("postmortem.md"))
    assert pages and all(f"Warned before, and not over: {sentence}" in page.read_text() for page in pages)


@pytest.mark.slow
def test_trends_begin_again_with_another_sequence_length(corpus: Path, tmp_path: Path) -> None:
    """Samples of 16 tokens in the first half, of 32 in the second."""
    warmup = {"sequence_warmup": {"start": 16, "tokens": 20 * 8 * 32}, "eval_interval": 5, "eval_samples": 8}
    ((state, _, looks),) = run_ranks(1, train, recipe(corpus, tmp_path / "run", train=warmup))
    changed = max(e.step for e in RunDirectory(tmp_path / "run").iterate_events(LengthChanged))
    assert 10 < changed < 30
    assert state["series"]["entropy blocks.0"]["steps"] == [step for step in looks if step >= changed][-16:]
    assert min(state["series"]["added blocks.0"]["steps"]) < changed
    assert {e["step"] for e in state["evaluations"]} == {s for s in range(5, 41, 5) if s >= changed}
