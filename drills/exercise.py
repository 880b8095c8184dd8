"""The one way to do a drill: its exercises are run, and what became of them is shown and judged.

A drill says what its exercises are (a run, and the fault in it), what an outcome is and whether it is the right one,
and which columns its table has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict
from rich.table import Table
from rich.text import Text

from megastable.base.progress_bar import count_columns, make_progress
from megastable.report.text_output import TextOutput

ALWAYS = 3  # columns that are shown even if they are empty
Item = TypeVar("Item")
Watch = Callable[[int], None]  # to be called with the step, again and again; what it raises ends the run


class Outcome(BaseModel):
    """What became of a run: the facts by which it is judged."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    def describe(self) -> str:
        """In a few words."""
        raise NotImplementedError


Result = TypeVar("Result", bound=Outcome)
Result_co = TypeVar("Result_co", bound=Outcome, covariant=True)


@dataclass(frozen=True, eq=False)
class Exercise(Generic[Result_co]):
    """A run to do, and how many steps it has."""

    name: str
    steps: int
    run: Callable[[Watch], Sequence[Result_co]]


@dataclass(frozen=True)
class Column(Generic[Item]):
    """A column. describe: the cell of a row, from its outcomes; is_missed: whether it misses a target there."""

    header: str
    describe: Callable[[Sequence[Item]], str]
    is_missed: Callable[[Sequence[Item]], bool] = lambda row: False
    left: bool = False
    wrap: bool = False


def describe_only(describe: Callable[[Item], object]) -> Callable[[Sequence[Item]], str]:
    """The cell of a row that has one outcome."""
    return lambda row: str(describe(row[0]))


class Drill(ABC, Generic[Result]):
    """Exercises, and what they are for. Bad input is refused where one is made, before anything else is."""

    columns: ClassVar[Sequence[Column[Any]]]
    jobs = 1  # exercises at the same time

    @abstractmethod
    def plan_exercises(self, folder: Path) -> Sequence[Exercise[Result]]:
        """All exercises in their order. folder: of corpora and runs; what is finished there is not done again."""

    @abstractmethod
    def row_of(self, outcome: Result) -> tuple[Hashable, Hashable]:
        """The section and the row of the table that an outcome belongs to."""

    @abstractmethod
    def describe_verdict(self, outcomes: Sequence[Result]) -> str:
        """What it comes to, in a sentence."""

    @abstractmethod
    def is_met(self, outcomes: Sequence[Result]) -> bool:
        """Whether the targets are."""

    def compare_outcomes(self, outcomes: Sequence[Result]) -> list[Result]:
        """The outcomes, with what only shows beside others."""
        return list(outcomes)

    def report_outcomes(self, outcomes: Sequence[Result]) -> Any:
        """All facts, for JSON."""
        return [one_outcome.model_dump(mode="json") for one_outcome in outcomes]

    def conduct_drill(self, folder: Path, quiet: bool) -> list[Result]:
        """Run all exercises, and print the table and the verdict.

        Args:
            folder: of corpora and runs.
            quiet: nothing is printed.
        """
        all_outcomes = self.compare_outcomes(run_exercises(self.plan_exercises(folder), self.jobs, quiet))
        if not quiet:
            text_output = TextOutput(quiet)
            text_output.show_table(self.show_table(all_outcomes))
            text_output.say_lines(self.describe_verdict(all_outcomes))
        return all_outcomes

    def show_table(self, outcomes: Sequence[Result]) -> Table:
        """What misses a target is red. Columns in which every cell is empty or zero are left out; the first cell of a
        section's rows is shown once, and sections of several rows are kept apart."""
        sections: dict[Hashable, dict[Hashable, list[Result]]] = {}
        for outcome in outcomes:
            section, row_key = self.row_of(outcome)
            sections.setdefault(section, {}).setdefault(row_key, []).append(outcome)
        texts = [
            [c.describe(row) for c in self.columns] for rows in sections.values() for row in rows.values()
        ]
        filled = [
            i for i in range(len(self.columns)) if i < ALWAYS or {cells[i] for cells in texts} - {"", "0"}
        ]
        shown = Table(header_style="bold")
        for column in (self.columns[i] for i in filled):
            shown.add_column(
                column.header, justify="left" if column.left else "right", no_wrap=not column.wrap
            )
        cells_of = iter(texts)
        apart = any(len(rows) > 1 for rows in sections.values())
        for rows in sections.values():
            for number, row in enumerate(rows.values()):
                cells = next(cells_of)
                if number:
                    cells[0] = ""
                styles = ["bold red" if column.is_missed(row) else "" for column in self.columns]
                shown.add_row(*(Text(cells[i], styles[i]) for i in filled))
            if apart:
                shown.add_section()
        return shown


class Interrupted(Exception):
    """Another run failed, or the user wants to stop."""


def run_exercises(todo: Sequence[Exercise[Result]], jobs: int = 1, quiet: bool = False) -> list[Result]:
    """Do `todo`, with a bar for all, one for each that runs, and a line for each that is done.

    Args:
        todo: what to do; each leaves no process behind, however it ends.
        jobs: how many at the same time.
        quiet: without bars and lines.

    Returns:
        The outcomes, in the order of `todo`. What one raises ends all others, and is raised.
    """
    stop, lock, done = Event(), Lock(), list[str]()
    with make_progress(*count_columns("steps"), silent=quiet) as shown:
        total = shown.add_task("all runs", total=len(todo))

        def work(exercise: Exercise[Result]) -> Sequence[Result]:
            exercise_bar = shown.add_task(exercise.name, total=exercise.steps)

            def watch(step: int) -> None:
                if stop.is_set():
                    raise Interrupted
                shown.update(exercise_bar, completed=step)

            try:
                watch(0)
                own_outcomes = exercise.run(watch)
            finally:
                shown.remove_task(exercise_bar)
            with lock:
                done.append(exercise.name)
                shown.update(total, completed=len(done))
                for outcome in own_outcomes if not quiet else ():
                    outcome_line = f"{len(done)}/{len(todo)} {exercise.name}: {outcome.describe()}"
                    TextOutput(quiet).say_lines(outcome_line)
            return own_outcomes

        if jobs == 1:  # in this thread, where an interrupt is raised
            return [outcome for exercise in todo for outcome in work(exercise)]
        with ThreadPoolExecutor(jobs) as pool:
            futures = [pool.submit(work, exercise) for exercise in todo]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [outcome for future in futures for outcome in future.result()]
