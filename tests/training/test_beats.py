"""What a heartbeat counts, while torch makes and ends process groups in another thread."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.distributed import distributed_c10d

from megastable.training import beats
from megastable.training.beats import Beats, entered
from tests.patience import PATIENCE


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_a_group_that_has_no_name_yet_is_not_counted(alone: None) -> None:
    """Torch enters a new group into one table, then its name into another; a beat may come between the two."""
    group = distributed.new_group([0])
    distributed.all_reduce(torch.ones(1), group=group)
    names = distributed_c10d._world.pg_names
    before = entered()
    name = names.pop(group)
    try:
        assert entered() == {other: count for other, count in before.items() if other != name}
    finally:
        names[group] = name
    assert entered() == before and before[name] == 1


def test_many_ranks_do_not_all_read_the_address_again_at_once(tmp_path: Path) -> None:
    few, many = (Beats(tmp_path, 1, 0, "here", world)._pause for world in (8, 10_000))
    assert few == 2.0 and many == 20.0


def test_to_look_for_a_supervisor_changes_no_random_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose supervisor was replaced ends with the random states of one that was left alone."""
    slept, before = threading.Event(), random.getstate()
    monkeypatch.setattr(beats, "pause_of", lambda world: 1e-3)
    looks = iter([None] * 3)

    def read(path: Path) -> None:
        if next(looks, path) is path:
            slept.set()
            threading.Event().wait()  # this thread ends with the process

    monkeypatch.setattr(beats.Address, "read", read)
    Beats(tmp_path, 1, 0, "here", 1)
    assert slept.wait(PATIENCE) and random.getstate() == before
