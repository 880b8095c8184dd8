"""Items in order, from several processes, with bounded haste."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator
from contextlib import closing

import psutil
import pytest

from megastable.base.errors import MegastableError
from megastable_tools.prepare.pool import ordered_map


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_order(workers: int) -> None:
    assert list(ordered_map(operator.neg, range(50), workers)) == [-number for number in range(50)]


def test_a_slow_consumer_stops_the_reading_and_closing_ends_the_workers() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for number in range(1, 1001):
            taken.append(number)
            yield number

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with closing(ordered_map(operator.neg, items(), 2)) as results:
        assert [next(results), next(results)] == [-1, -2]
        assert len(taken) <= 2 + 3 * 2
        workers = [child for child in psutil.Process().children() if child.pid not in before]
        assert len([child for child in workers if "spawn_main" in " ".join(child.cmdline())]) == 2
    assert not [child for child in workers if "spawn_main" in _command(child)]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def test_errors_of_the_function_and_of_the_items_are_raised_here() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        list(ordered_map(int, ["1", "x", "2"], 2))

    def items() -> Iterator[str]:
        yield "1"
        raise KeyError("source")

    with pytest.raises(KeyError, match="source"):
        list(ordered_map(int, items(), 2))


def test_a_killed_worker_is_an_error_with_advice() -> None:
    with pytest.raises(MegastableError, match="fewer --workers"):
        list(ordered_map(os._exit, [9, 9], 2))
