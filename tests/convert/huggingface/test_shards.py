"""Tensors are shared out over files by size, and the index says where they are."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megastable.base.errors import ConfigError
from megastable.convert.huggingface.weight_files import SINGLE, bytes_of, index, plan, read_size


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 200))
def test_every_tensor_is_in_one_file_in_order_and_no_file_is_too_large(sizes: list[int], limit: int) -> None:
    entries = [(f"t{i}", torch.bfloat16, (n,)) for i, n in enumerate(sizes)]
    planned = plan(entries, limit)
    assert [entry for held in planned.values() for entry in held] == entries
    for held in planned.values():
        assert sum(map(bytes_of, held)) <= limit or len(held) == 1
    whole = sum(2 * n for n in sizes) <= limit or len(sizes) == 1
    assert (list(planned) == [SINGLE]) == whole
    content = json.loads(index(planned))
    assert content["metadata"] == {"total_parameters": sum(sizes), "total_size": 2 * sum(sizes)}
    assert {n: f for f, held in planned.items() for n, *_ in held} == content["weight_map"]


def test_sizes_are_read_as_people_write_them() -> None:
    given = {
        "5GB": 5 * 10**9,
        "500MB": 5 * 10**8,
        "1.5 GiB": 3 * 2**29,
        "100": 100,
        "2g": 2 * 10**9,
        "7kb": 7000,
    }
    assert {text: read_size(text) for text in given} == given
    for text in ("", "GB", "5TB", "-1GB", "0", "1e9", "five"):
        with pytest.raises(ConfigError, match=r"write a size such as 5GB"):
            read_size(text)
