"""When a finished run stands for another one: only if all that decides how it goes is the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from drills.exercise import Exercise, Outcome, Watch, run_exercises
from drills.learning import choose_scenarios
from drills.runner import conditions
from drills.scenario import GLOBAL_BATCH, Fault, Plan
from drills.stage import RECIPE, SHORT, Stage
from megastable.data.manifest import Manifest
from tests.conftest import write_corpus

(POISONED,) = choose_scenarios(["poisoned-weight"])


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    for name in ("one", "two"):
        write_corpus(tmp_path / name, seed=len(name) + ord(name[0]))
    stage = Stage(tmp_path, 1)
    stage.recipe.write_text("model: {}\n")
    return stage


def test_conditions_change_with_all_that_decides_a_run(stage: Stage) -> None:
    plan = Plan(run=stage.folder / "run", seed=1, fault=Fault(kind="bit_flip", step=3))
    folder = stage.folder

    def told(stage: Stage = stage, scenario=POISONED, plan=plan, overrides=("a=1",), corpus="one") -> str:  # type: ignore[no-untyped-def]
        return conditions(stage, scenario, plan, list(overrides), folder / corpus)

    usual = told()
    assert told() == usual == told(scenario=replace(POISONED, title="poison", reason="other words"))
    others = {
        told(scenario=replace(POISONED, outside="kill_rank")),
        told(scenario=replace(POISONED, step=90)),
        told(replace(stage, ranks=1)),
        told(plan=plan.model_copy(update={"seed": 2})),
        told(plan=plan.model_copy(update={"fault": Fault(kind="bit_flip", step=4)})),
        told(overrides=["a=2"]),
        told(corpus="two"),
    }
    stage.recipe.write_text("model: {layers: 3}\n")
    assert len(others | {usual, told()}) == 9


PER_STEP = GLOBAL_BATCH * RECIPE["model"]["sequence_length"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "stdlib", tokens=40 * PER_STEP)
    return tmp_path


def train_tokens(part: Path) -> int:
    return sum(segment.tokens for segment in Manifest.load_manifest(part).splits["train"])


def test_stage_part_has_the_tokens_of_an_epoch(folder: Path) -> None:
    for steps, epochs in ((60, 3), (30, 3), (60, 2)):
        wanted = steps * PER_STEP // epochs
        assert wanted - SHORT <= train_tokens(Stage(folder, 1, steps)._part(epochs)) <= wanted


class Number(Outcome):
    value: int

    def describe(self) -> str:
        return f"number {self.value}"


def plan_runs(run: Callable[[int, Watch], Sequence[Number]], count: int = 12) -> list[Exercise[Number]]:
    return [Exercise(f"run {i}", 160, partial(run, i)) for i in range(count)]


@pytest.mark.parametrize("jobs", [1, 3])
def test_run_exercises_keeps_their_order(jobs: int, capsys: pytest.CaptureFixture[str]) -> None:
    active, most, lock = 0, 0, threading.Lock()

    def run(number: int, watch: Watch) -> list[Number]:
        nonlocal active, most
        with lock:
            active += 1
            most = max(most, active)
        time.sleep(0.02 if number < 3 else 0.005)
        watch(7)
        with lock:
            active -= 1
        return [Number(value=number)] * (1 + (number == 5))

    outcomes = run_exercises(plan_runs(run), jobs)
    assert most == jobs
    assert [o.value for o in outcomes] == [0, 1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10, 11]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 13 and lines[-1].startswith("12/12 run ") and "run 5: number 5" in "\n".join(lines)
    assert run_exercises(plan_runs(run), jobs, quiet=True) == outcomes and capsys.readouterr().out == ""
