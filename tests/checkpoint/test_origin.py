"""Trouble right after a resume, from a state that was bad when it was saved, or whose checkpoint remembers nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drills.poison import poison_checkpoint
from megastable.base import errors
from megastable.checkpoint import markers
from megastable.checkpoint.held_points import find_tried_steps
from megastable.config.tree import RunConfig
from megastable.run.directory import RunDirectory
from megastable.run.events.event import Event
from megastable.run.events.reading import event_of
from megastable.run.events.stability_events import AlertEvent, Handover, IncidentEvent, RateCut
from megastable.run.events.training_events import Resumed
from tests.conftest import write_corpus
from tests.distributed import run_ranks
from tests.recovery.test_recovery import incidents, recipe, train
from tests.training.test_resume import identical


@pytest.fixture(scope="module")
def easy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("easy") / "corpus"
    write_corpus(folder, ids=20)
    return folder


def at(corpus: Path, run: Path, steps: int, interval: int = 10, **parts: Any) -> RunConfig:
    batch = {"steps": steps, "global_batch": 8, "micro_batch": 4, "eval_samples": 8, "eval_interval": 0}
    checkpoint = {"interval": interval, "keep": 9, "healthy_after": 5}
    return recipe(corpus, run, train=batch, checkpoint=checkpoint, **parts)


def resumed(run: Path) -> list[int]:
    return [e["step"] for e in RunDirectory(run).iterate_events(Resumed)]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2], ids=["one", "zero1-dp2"])
def test_an_old_checkpoint_that_is_bad_is_quarantined_by_the_steps_after_it(
    world: int, easy: Path, tmp_path: Path
) -> None:
    run, straight, folder = tmp_path / "run", tmp_path / "straight", tmp_path / "run/checkpoints"
    assert run_ranks(world, train, at(easy, run, 40))[0] == (0, "")
    for step in (40, 30):
        poison_checkpoint(folder, "weight", forget=True, step=step)
    for step in (40, 30):
        code, message = run_ranks(world, train, at(easy, run, 50))[0]
        assert code == errors.HANDOVER and "is quarantined" in message, message
        assert markers.read_bad_ruling(folder / f"step-{step}") is not None
    assert run_ranks(world, train, at(easy, run, 50))[0] == (0, "")
    assert resumed(run) == [40, 30, 20]
    assert [e["before"] for e in RunDirectory(run).iterate_events(Handover)] == [40, 30]
    assert {e["summary"]["cause"] for e in incidents(run, "handed over")} == {"storage"}
    # No sample is lost, and no rate is cut: the run ends as if nothing had been.
    assert not (run / "skips.jsonl").exists()
    assert not [e for e in RunDirectory(run).iterate_events(IncidentEvent) if e.get("action") == "cut_lr"]
    run_ranks(world, train, at(easy, straight, 50))
    assert identical(*(r / "checkpoints/step-50" for r in (run, straight))) == 3 * world


@pytest.mark.slow
@pytest.mark.parametrize("last_resort", ["train_on", "stop"])
def test_where_all_are_bad_it_trains_on_and_tells_a_person(
    last_resort: str, easy: Path, tmp_path: Path
) -> None:
    """The state is finite: what becomes of it is for a person to say."""
    run, wanted = tmp_path / "run", {"policy": {"last_resort": last_resort}}
    assert run_ranks(1, train, at(easy, run, 30, 30))[0] == (0, "")
    poison_checkpoint(run / "checkpoints", "weight", forget=True)
    ((code, message),) = run_ranks(1, train, at(easy, run, 50, 30, stability=wanted))
    alerts = [e["reason"] for e in RunDirectory(run).iterate_events(AlertEvent) if e["what"] == "begun"]
    if last_resort == "stop":
        assert code == errors.UNSTABLE and "is quarantined" in message and not alerts
        return
    assert (
        code == 0
        and len(alerts) == 1
        and "is quarantined" in alerts[0]
        and "is from before step" in alerts[0]
    )
    assert not (run / "skips.jsonl").exists() and not list(RunDirectory(run).iterate_events(RateCut))


def test_each_handover_without_new_ground_takes_an_older_one() -> None:
    def handover(clock: int) -> Event:
        return event_of({"event": "handover", "policy": {"clock": clock}})

    def training(step: int) -> Event:
        return event_of({"event": "training", "step": step})

    assert find_tried_steps([], 50, 30) == []
    assert find_tried_steps([training(0), training(20)], 50, 30) == []  # no handover
    assert find_tried_steps([training(0), handover(45), training(40)], 50, 30) == [40]
    assert find_tried_steps([handover(45), training(40), training(42)], 50, 30) == [
        40,
        42,
    ]  # a crash between them
    assert find_tried_steps([handover(45), training(40), handover(46), training(30)], 50, 30) == [40, 30]
    assert find_tried_steps([handover(45), training(40)], 80, 30) == []  # new ground
    assert find_tried_steps([handover(10), training(0), handover(45), training(40)], 50, 30) == [40]
    assert find_tried_steps([handover(45), training(0)], 50, 30) == []  # there was none: it began again
    assert (
        find_tried_steps([event_of({"event": "handover"}), training(40)], 50, 30) == []
    )  # of an older version
