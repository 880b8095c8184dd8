"""Run many drills, in sequence or in parallel; finished ones are reused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from threading import Event
from typing import NamedTuple, Protocol

from drills import scenarios
from drills.plan import Policy
from drills.runner import drill
from drills.scenario import Scenario
from drills.score import Score, compare
from drills.stage import Stage


class Task(NamedTuple):
    """A run to do."""

    stage: Stage
    scenario: Scenario
    policy: Policy

    def __str__(self) -> str:
        return f"{self.scenario.name}, {self.policy}, seed {self.stage.seed}"


class Watcher(Protocol):
    """Receives the progress of the runs, from several threads."""

    def begins(self, task: Task) -> None: ...
    def step(self, task: Task, step: int) -> None: ...
    def ends(self, task: Task, score: Score | None) -> None: ...


class Interrupted(Exception):
    """Another run failed, or the user wants to stop."""


def tasks(stages: Sequence[Stage], chosen: Sequence[Scenario], policies: Sequence[Policy]) -> list[Task]:
    """The clean runs first, then every scenario under every policy, with every seed."""
    every = (*scenarios.references(chosen), *chosen)
    return [Task(stage, s, p) for s in every for p in policies for stage in stages]


def run(todo: Sequence[Task], jobs: int, watcher: Watcher, one: Callable[..., Score] = drill) -> list[Score]:
    """Do `todo`, `jobs` at a time; returns the scores, in its order. An exception in one ends all; no process is
    left."""
    stop = Event()

    def work(task: Task) -> Score:
        def watch(step: int) -> None:
            if stop.is_set():
                raise Interrupted
            watcher.step(task, step)

        watch(0)
        watcher.begins(task)
        found = None
        try:
            found = one(task.stage, task.scenario, task.policy, watch, jobs)
        finally:
            watcher.ends(task, found)
        return found

    with ThreadPoolExecutor(jobs) as pool:
        futures: list[Future[Score]] = [pool.submit(work, task) for task in todo]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return compare([future.result() for future in futures])
