"""Many exercises: in their order, some at the same time, ended together when one fails; and their table."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from drills.exercise import Column, Exercise, Interrupted, Outcome, Watch, make_table, run_exercises


class Number(Outcome):
    value: int

    def describe(self) -> str:
        return f"number {self.value}"


def plan(run: Callable[[int, Watch], Sequence[Number]], count: int = 12) -> list[Exercise[Number]]:
    return [Exercise(f"run {i}", 160, partial(run, i)) for i in range(count)]


@pytest.mark.parametrize("jobs", [1, 3])
def test_outcomes_come_in_the_order_of_the_exercises(jobs: int, capsys: pytest.CaptureFixture[str]) -> None:
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

    outcomes = run_exercises(plan(run), jobs)
    assert most == jobs
    assert [o.value for o in outcomes] == [0, 1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10, 11]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 13 and lines[-1].startswith("12/12 run ") and "run 5: number 5" in "\n".join(lines)
    assert run_exercises(plan(run), jobs, quiet=True) == outcomes and capsys.readouterr().out == ""


def test_what_one_raises_ends_all_others() -> None:
    seen = list[int]()

    def run(number: int, watch: Watch) -> list[Number]:
        if number == 2:
            raise ValueError("the first of them")
        try:
            while True:
                watch(1)
                time.sleep(0.005)
        except Interrupted:
            seen.append(number)
            raise

    with pytest.raises(ValueError, match="the first of them"):
        run_exercises(plan(run), 3)
    assert sorted(seen)[0] == 0 and len(seen) <= 4


def test_a_table() -> None:
    columns = (
        Column[int]("name", lambda row: "even" if row[0] % 2 == 0 else "odd", left=True),
        Column[int]("sum", lambda row: str(sum(row)), lambda row: sum(row) > 5),
        Column[int]("kept", lambda row: ""),
        Column[int]("zeros", lambda row: "0" if row[0] else ""),
        Column[int]("last", lambda row: str(row[-1])),
    )
    table = make_table([[[2, 4], [0]], [[1]]], columns, lambda row: 0 in row)
    assert [str(column.header) for column in table.columns] == ["name", "sum", "kept", "last"]
    cells = [list(column.cells) for column in table.columns[:2]]
    assert [str(cell) for cell in cells[0]] == ["even", "", "odd"]
    assert [str(getattr(cell, "style", "")) for cell in cells[1]] == ["bold red", "bold", ""]
    assert [row.end_section for row in table.rows] == [False, True, True]
