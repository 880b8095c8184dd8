"""Many runs: in their order, some at the same time, ended together when one of them fails."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from drills import batch
from drills.batch import Interrupted, Task
from drills.plan import Policy
from drills.scenario import CLEAN, Scenario
from drills.scenarios import choose
from drills.score import Score
from drills.stage import Stage

STAGES = [Stage(Path("nowhere"), seed) for seed in (1, 2)]
TODO = batch.tasks(STAGES, choose(["trickle", "random-tokens"]), [Policy.CLIPPING, Policy.OURS])


class Watcher:
    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.lock = threading.Lock()

    def begins(self, task: Task) -> None:
        with self.lock:
            self.told.append(("begins", task))

    def step(self, task: Task, step: int) -> None:
        pass

    def ends(self, task: Task, score: Score | None) -> None:
        with self.lock:
            self.told.append(("ends", task, score))


def scored(stage: Stage, scenario: Scenario, policy: Policy, watch: Any, jobs: int) -> Score:
    return Score(
        scenario=scenario.name, policy=policy, seed=stage.seed, ended="finished", step=160,
        val_loss=3.0 + stage.seed + (scenario is not CLEAN) * 0.25, steps_lost=0, discarded=0, seconds_to_recover=None,
        false_alarms=0, kinds=[], causes=[], kind_right=None, cause_right=None, wall_seconds=1.0,
    )  # fmt: skip


def test_the_clean_runs_first_then_every_scenario_policy_and_seed() -> None:
    assert [(t.scenario.name, t.policy, t.stage.seed) for t in TODO] == [
        (name, policy, seed)
        for name in ("clean", "random-tokens", "trickle")
        for policy in (Policy.CLIPPING, Policy.OURS)
        for seed in (1, 2)
    ]


@pytest.mark.parametrize("jobs", [1, 3])
def test_scores_come_in_the_order_of_the_tasks_and_compared(jobs: int) -> None:
    active, most, lock = 0, 0, threading.Lock()

    def slow(*args: Any) -> Score:
        nonlocal active, most
        assert args[-1] == jobs
        with lock:
            active += 1
            most = max(most, active)
        time.sleep(0.02 if args[1] is CLEAN else 0.005)
        with lock:
            active -= 1
        return scored(*args)

    watcher = Watcher()
    scores = batch.run(TODO, jobs, watcher, slow)
    assert most == jobs
    assert [(s.scenario, s.policy, s.seed) for s in scores] == [
        (t.scenario.name, t.policy, t.stage.seed) for t in TODO
    ]
    assert [s.excess for s in scores] == [0.0] * 4 + [0.25] * 8
    for task in TODO:
        assert [told[0] for told in watcher.told if told[1] is task] == ["begins", "ends"]


def test_what_one_raises_ends_all_others() -> None:
    seen = list[str]()

    def one(stage: Stage, scenario: Scenario, policy: Policy, watch: Any, jobs: int) -> Score:
        if scenario is CLEAN and policy is Policy.OURS and stage.seed == 1:
            raise ValueError("the first of them")
        try:
            while True:
                watch(1)
                time.sleep(0.005)
        except Interrupted:
            seen.append(f"{scenario.name}-{policy}-{stage.seed}")
            raise

    watcher = Watcher()
    with pytest.raises(ValueError, match="the first of them"):
        batch.run(TODO, 3, watcher, one)
    assert sorted(seen)[0] == "clean-clipping-1" and len(seen) <= 4
    begun = [told[1] for told in watcher.told if told[0] == "begins"]
    assert [told[2] for told in watcher.told if told[0] == "ends"] == [None] * len(begun)
