"""Ranks tell each other what one of them knows, agree, and fail together."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from megastable.base.collectives import (
    combine_answers,
    find_difference,
    gather_objects,
    run_on_all,
    run_on_first,
)
from megastable.base.errors import DataError, MegastableError
from tests.distributed import run_ranks


def count_messages(action: Any) -> tuple[Any, int]:
    """What `action` returns, and how many collectives of objects it took."""
    real, called = (dist.broadcast_object_list, dist.all_gather_object), []

    def count(function: Any) -> Any:
        return lambda *arguments, **named: (called.append(1), function(*arguments, **named))[1]

    dist.broadcast_object_list, dist.all_gather_object = map(count, real)
    try:
        return action(), len(called)
    finally:
        dist.broadcast_object_list, dist.all_gather_object = real


def answer_three() -> Any:
    """The second answer changes after it was given, and the third is asked for after a gathering."""
    with combine_answers():
        first, second = run_on_first(lambda: 1), run_on_first(lambda: [2])
        if dist.get_rank() == 0:
            second.append("later")
        gathered = gather_objects(dist.get_rank())
        return first, second[:1], len(second), gathered, run_on_first(lambda: dist.get_rank())


def refuse(at: int) -> Any:
    raise DataError(f"rank {at}")


def fail_inside(how: str) -> str:
    """An error of rank 0, and one that every rank finds in an answer; a rank that goes on would wait for ever."""
    try:
        with combine_answers():
            run_on_first(lambda: 1)
            problem = run_on_first(lambda: refuse(0) if how == "raised" else "found")
            raise DataError(problem)
    except MegastableError as error:
        return f"{error} {error.collective}"


def fail_on(ranks: list[int]) -> tuple[str, bool]:
    try:
        run_on_all(lambda: refuse(dist.get_rank()) if dist.get_rank() in ranks else None)
    except MegastableError as error:
        return str(error), error.collective
    return "", False


def tell_all() -> list[Any]:
    rank = dist.get_rank()
    return [
        count_messages(answer_three), fail_inside("raised"), fail_inside("found"), fail_on([]), fail_on([1, 2]),
        count_messages(lambda: run_on_all(lambda: rank)), count_messages(lambda: find_difference({"a": 1, "b": "x"})),
        find_difference({"a": 1, "b": rank == 1}), find_difference({"a": -rank}),
        count_messages(lambda: run_on_first(lambda: 7)),
    ]  # fmt: skip


@pytest.mark.quick
def test_answers_agreement_and_errors() -> None:
    found = run_ranks(3, tell_all)
    for rank, (answers, raised, common, fine, failed, alone, same, other, all_other, one) in enumerate(found):
        assert answers == ((1, [2], 1 + (rank == 0), [0, 1, 2], 0), 3)  # two messages and what is gathered
        assert (raised, common) == ("rank 0 True", "found False")
        assert fine == ("", False) and failed == ("rank 1", True)
        assert alone == (rank, 0) and same == (None, 0) and one == (7, 1)
        assert other == ("b", [1]) and all_other == ("a", [1, 2])
