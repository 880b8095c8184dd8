"""When a finished run stands for another one: only if all that decides how it goes is the same."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from drills import runner
from drills.learning import choose
from drills.plan import Fault, Plan, Policy
from drills.runner import Done, Family, conditions, environment, finished
from drills.stage import Stage
from megastable.run.directory import RunDirectory
from tests.conftest import write_corpus

(POISONED,) = choose(["poisoned-weight"])


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    for name in ("one", "two"):
        write_corpus(tmp_path / name, seed=len(name) + ord(name[0]))
    stage = Stage(tmp_path, 1)
    stage.recipe.write_text("model: {}\n")
    return stage


def test_whatever_decides_how_a_run_goes_makes_it_another(stage: Stage) -> None:
    plan = Plan(policy=Policy.OURS, run=stage.folder / "run", seed=1, fault=Fault(kind="bit_flip", step=3))
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
        told(plan=plan.model_copy(update={"policy": Policy.CLIPPING})),
        told(plan=plan.model_copy(update={"fault": Fault(kind="bit_flip", step=4)})),
        told(overrides=["a=2"]),
        told(corpus="two"),
    }
    stage.recipe.write_text("model: {layers: 3}\n")
    assert len(others | {usual, told()}) == 10


def test_other_code_makes_another_run_but_not_the_code_that_judges(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "train.py").write_text("x = 1\n")
    (package / "score.py").write_text("y = 1\n")
    monkeypatch.setattr(runner, "CODE", (package,))
    monkeypatch.setattr(runner, "JUDGING", {package / "score.py"})
    plan = Plan(policy=Policy.OURS, run=tmp_path / "run")
    usual = conditions(stage, POISONED, plan, [], tmp_path / "one")
    (package / "score.py").write_text("y = 2\n")
    assert conditions(stage, POISONED, plan, [], tmp_path / "one") == usual
    (package / "train.py").write_text("x = 2\n")
    assert conditions(stage, POISONED, plan, [], tmp_path / "one") != usual


def test_the_code_that_judges_is_there() -> None:
    assert all(path.is_file() for path in runner.JUDGING)


def test_what_was_not_written_down_whole_is_not_finished(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "a.b-ours-1")
    note = tmp_path / "a.b-ours-1.done"
    assert finished(run) is None
    done = Done(conditions="x", planted=None, struck=1.5, exit=76, wall_seconds=3.0)
    note.write_text(done.model_dump_json())
    assert finished(run) == done
    note.write_text(done.model_dump_json()[:-5])
    assert finished(run) is None


def test_runs_at_the_same_time_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)))
    assert [environment(n)["OMP_NUM_THREADS"] for n in (1, 2, 4, 12, 24)] == ["8", "6", "3", "1", "1"]


def test_a_fault_hits_a_rank_that_is_there() -> None:
    fault = Fault(kind="bit_flip", step=3)
    assert (fault.among(1).rank, fault.among(2), fault.among(4)) == (0, fault, fault)


def test_a_rank_that_starts_a_drill_is_none_of_the_drills(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "0")
    asleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    with Family(tmp_path / "plan", asleep, tmp_path / "log", {}) as family:
        assert [p.pid for p in family.members()] == [family.parent.pid]
        assert family.rank(0) is None
