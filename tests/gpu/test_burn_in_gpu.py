"""A burn-in of a GPU, in processes of its own: a sound one passes, whatever kernels it has."""

from __future__ import annotations

import pytest
import torch

from megastable.cluster.burn_in import rank_processes
from megastable.cluster.burn_in.device_rounds import TESTS


def test_a_sound_gpu_passes() -> None:
    torch.cuda.empty_cache()
    (found,) = rank_processes.phase("rounds", "cuda", 1, seconds=20.0, seed=1)
    assert (found.ended, found.failed, found.faults) == ("", {}, []), found
    assert found.rounds >= 1 and found.memory > 0 and found.runs.keys() == {"memory", *TESTS}


@pytest.mark.parametrize("first", [3, 7])
def test_other_rounds(first: int) -> None:
    (found,) = rank_processes.phase("rounds", "cuda", 1, seconds=0.0, seed=2, first=first)
    assert (found.ended, found.failed, found.faults) == ("", {}, []), found


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_sound_all_reduces() -> None:
    ranks = torch.cuda.device_count()
    for found in rank_processes.phase("exchange", "cuda", ranks, seconds=10.0, seed=1):
        assert (found.ended, found.failed) == ("", {}) and found.runs["all_reduce"] >= 4, found
