"""The harness of the distributed tests: a rank that dies or fails is noticed, and nobody is left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest
import torch.distributed as dist

from tests.distributed import run_ranks


def end(rank: int, how: str) -> int:
    """One rank ends; the other one waits for longer than the test may take."""
    if dist.get_rank() != rank:
        time.sleep(200)
    elif how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("on purpose")


@pytest.mark.quick("failed-rank 1 of 2.[*] on purpose")
@pytest.mark.parametrize(
    ("how", "message"),
    [("killed", r"ended without an answer .*\{1: -9\}"), ("failed", "rank 1 of 2.* on purpose")],
)
def test_run_ranks_notices_a_rank_that_ends(how: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        run_ranks(2, end, 1, how)
    assert not multiprocessing.active_children()
