"""Measurements of this host's devices, and what is said where there are none."""

from __future__ import annotations

import pytest
import torch

from megastable.base.hardware import has_gpu
from megastable.cluster.host_bench import all_reduce, measured_matmul


def test_a_matrix_product_is_measured_in_the_precision_that_trains() -> None:
    rate, dtype = measured_matmul(torch.device("cpu"), seconds=0.01)
    assert rate > 0 and dtype in ("bfloat16", "float32")


@pytest.mark.slow
@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_ranks_that_fail_say_why() -> None:
    with pytest.raises(RuntimeError, match=r"(?i)cuda|nvidia"):
        all_reduce("cuda", 2)


def test_ranks_that_hang_are_ended() -> None:
    with pytest.raises(RuntimeError, match="no all-reduce of 2 ranks within 0 s"):
        all_reduce("cpu", 2, seconds=0.1)
