"""Collectives of Python objects: gather a value, share a result, raise an error on all ranks together so that none
hangs.

With 10,000 ranks a gathered object is 10,000 objects on every rank, and every message waits for the slowest of them. So
ranks that are to agree compare numbers in one sum, and speak of details only where they differ; and what rank 0 finds
out alone, one thing after the other, is sent once (`combine_answers`).
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import xxhash

from megastable.base.errors import MegastableError

T = TypeVar("T")

# Inside `combine_answers`: on rank 0 what was not sent yet, on the others what was received and not asked for yet;
# pickled, since what rank 0 goes on with may change.
_answers: deque[bytes] | None = None


def gather_objects(value: Any, group: Any = None) -> list[Any]:
    """The `value` of every rank of `group` (default: the world), in rank order, on every rank."""
    if dist.get_world_size(group) == 1:
        return [value]  # even a collective of one rank takes a millisecond
    send_answers()
    values_by_rank: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values_by_rank, value, group=group)
    return values_by_rank


def run_on_all(action: Callable[[], T]) -> T:
    """Run `action` on every rank. If it raises a MegastableError on any rank, all ranks raise the lowest rank's
    error."""
    own_result: Any = None
    error: MegastableError | None = None
    try:
        own_result = action()
    except MegastableError as own_error:
        error = own_error
    raise_first(error)
    return own_result


def raise_first(error: MegastableError | None) -> None:
    """Raise the error of the lowest rank that has one, on all ranks. Nothing is sent but a number where none has."""
    rank, world = dist.get_rank(), dist.get_world_size()
    (failed_rank,) = find_least([world if error is None else rank])
    if failed_rank < world:
        shared_error = [error]
        if world > 1:
            dist.broadcast_object_list(shared_error, src=failed_rank)
        assert shared_error[0] is not None
        raise mark_collective(shared_error[0])


def run_on_first(action: Callable[[], T]) -> T:
    """Run `action` on rank 0 only; every rank returns its result or raises its MegastableError."""
    result_or_error: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            result_or_error[0] = action()
        except MegastableError as raised:
            result_or_error[1] = raised
    if dist.get_world_size() > 1:
        _share_answer(result_or_error)
    if result_or_error[1] is not None:
        raise mark_collective(result_or_error[1])
    return result_or_error[0]


@contextmanager
def combine_answers() -> Iterator[None]:
    """What `run_on_first` returns inside goes to the other ranks in one message, when all of it is known: rank 0 does
    not wait for it. The functions of this module send first what is waiting. No other collective may be begun inside
    without `send_answers`: the other ranks would still wait for the message."""
    global _answers
    assert _answers is None, "answers are combined already"
    _answers = deque()
    try:
        yield
    except MegastableError:
        send_answers()  # the others raise it, too, or wait for an answer that was given before
        raise
    else:
        send_answers()
        assert not _answers, "rank 0 was asked for more than this rank was"
    finally:
        _answers = None


def mark_collective(error: MegastableError) -> MegastableError:
    """Mark `error` as one that every rank raises at the same place."""
    error.collective = True
    return error


def find_difference(views: Mapping[str, Any]) -> tuple[str, list[int]] | None:
    """The first name whose value differs between ranks, by its `repr`, and the ranks that differ from rank 0; None when
    all agree. The same names on every rank."""
    digests = [xxhash.xxh3_64_intdigest(repr(view).encode()) >> 1 for view in views.values()]
    least_digests = find_least([*digests, *(-digest for digest in digests)])
    for place, name in enumerate(views):
        if least_digests[place] != -least_digests[len(views) + place]:
            digests_by_rank = gather_objects(digests[place])
            return name, [rank for rank, digest in enumerate(digests_by_rank) if digest != digests_by_rank[0]]
    return None


def find_least(numbers: Sequence[int]) -> list[int]:
    """The least of every number over all ranks. numbers: of 63 bits and a sign."""
    if dist.get_world_size() == 1:
        return list(numbers)
    send_answers()
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    least_numbers = torch.tensor(numbers, dtype=torch.int64, device=device)
    dist.all_reduce(least_numbers, op=dist.ReduceOp.MIN)
    return [int(number) for number in least_numbers.tolist()]


def _share_answer(answer: list[Any]) -> None:
    """Send an answer from rank 0, or keep it for later; on the other ranks, fill in the next one."""
    if dist.get_rank() == 0:
        if _answers is None:
            dist.broadcast_object_list([[pickle.dumps(answer)]], src=0)
        else:
            _answers.append(pickle.dumps(answer))
        return
    received_answers = deque[bytes]() if _answers is None else _answers
    if not received_answers:
        message: list[Any] = [None]
        dist.broadcast_object_list(message, src=0)
        received_answers.extend(message[0])
    answer[:] = pickle.loads(received_answers.popleft())


def send_answers() -> None:
    """Send what rank 0 has kept; all ranks call this at the same place, and the others have asked for it before."""
    if _answers and dist.get_rank() == 0:
        dist.broadcast_object_list([list(_answers)], src=0)
        _answers.clear()
