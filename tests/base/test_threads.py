"""Items shared among threads: each once, by torch operations on one thread, and no thread too many afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator

import pytest
import torch

from megastable.base.threads import share_items


@pytest.fixture(params=[1, 2, 3])
def thread_count(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_every_item_is_taken_once_and_by_all_threads(thread_count: int) -> None:
    taken: list[tuple[int, int, int]] = []

    def work_off(items: Iterable[int]) -> None:
        for item in items:
            time.sleep(0.01)  # so that one thread does not take all
            taken.append((item, threading.get_ident(), torch.get_num_threads()))

    share_items(work_off, range(20))
    assert sorted(item for item, _, _ in taken) == list(range(20))
    assert len({thread for _, thread, _ in taken}) == thread_count
    assert {count for _, _, count in taken} == {1}
    assert torch.get_num_threads() == thread_count


def test_an_error_of_any_thread_is_raised(thread_count: int) -> None:
    def work_off(items: Iterable[int]) -> None:
        for item in items:
            time.sleep(0.01)
            if item == 7:
                raise ValueError("seven")

    with pytest.raises(ValueError, match="seven"):
        share_items(work_off, range(20))
    assert torch.get_num_threads() == thread_count
