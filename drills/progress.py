"""A bar for all drills, one for every run at work, and a line for every finished one."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.progress import TaskID

from drills.batch import Task
from drills.score import Score
from drills.table import console, outcome
from megastable.base.progress_bar import counted, progress


class Bars:
    """A context manager. quiet: no lines either."""

    def __init__(self, runs: int, quiet: bool = False) -> None:
        self.runs, self.done, self.quiet = runs, 0, quiet
        self.shown = progress(*counted("steps"), silent=quiet)
        self.total = self.shown.add_task("preparing the corpus", total=runs)
        self.bars: dict[Task, TaskID] = {}

    def __enter__(self) -> Self:
        self.shown.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shown.stop()

    def begins(self, task: Task) -> None:
        self.shown.update(self.total, description="all runs")
        self.bars[task] = self.shown.add_task(str(task), total=task.stage.steps)

    def step(self, task: Task, step: int) -> None:
        if task in self.bars:
            self.shown.update(self.bars[task], completed=step)

    def ends(self, task: Task, score: Score | None) -> None:
        self.shown.remove_task(self.bars.pop(task))
        if score is None:
            return
        self.done += 1
        self.shown.advance(self.total)
        if not self.quiet:
            console().print(f"{self.done}/{self.runs} {task}: {outcome([score])}, {score.wall_seconds:.0f} s")
