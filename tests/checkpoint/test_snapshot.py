"""The ring: which points are kept, whose memory is used again, and that what comes back is what went in."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megastable.checkpoint.snapshot import Ring
from megastable_guard.spacing import thin


@given(st.integers(1, 8), st.integers(1, 50), st.integers(1, 300))
def test_thin_keeps_the_newest_and_reaches_far_back(size: int, interval: int, count: int) -> None:
    kept: list[int] = []
    for number in range(count):
        before = kept
        kept = thin([*kept, number * interval], size, interval)
        assert len(kept) == min(size, number + 1) and kept[-1] == number * interval
        assert kept == sorted(set(kept)) and set(kept) <= {*before, number * interval}
        if size > 2 and len(kept) > 1:
            assert kept[-1] - kept[-2] <= 2 * interval  # a fresh spike never loses much more than an interval
    age = kept[-1] - kept[0]
    assert age <= interval * 2 ** (size - 1)
    if size >= 4 and count > 3 * 2**size:
        assert age >= interval * 2 ** (size - 3)  # and a slow divergence finds an old one


class Counter:
    """Something with a state, as the engine has."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {"0/weight": torch.zeros(5)}
        self.steps = 0

    def advance(self) -> None:
        self.steps += 1
        self.tensors["0/weight"] += self.steps
        self.tensors.setdefault("0/exp_avg", torch.zeros(5)).add_(1)

    def optimizer_state(self) -> dict[str, Tensor]:
        return self.tensors

    def restore_optimizer_state(self, saved: dict[str, Tensor]) -> None:
        self.tensors = {name: tensor.clone() for name, tensor in saved.items()}

    def counters(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def restore_counters(self, saved: dict[str, Any]) -> None:
        self.steps = saved["steps"]

    def hold_updates(self, until: Any) -> None: ...


def test_what_comes_back_is_what_went_in() -> None:
    engine, history = Counter(), {}
    ring = Ring(engine, capacity=3, interval=2)
    for step in range(1, 20):
        engine.advance()
        history[step] = {name: t.clone() for name, t in engine.tensors.items()}
        if ring.due(step):
            ring.take(step, extra=f"step {step}")
    assert ring.steps[-1] == 18 and len(ring.steps) == 3
    snapshot = ring.before(18)
    assert snapshot is not None and snapshot.step == 16 and snapshot.extra == "step 16"
    ring.restore(snapshot)
    assert engine.steps == 16 and ring.steps[-1] == 18
    ring.forget_from(17)
    assert ring.steps[-1] == 16
    assert all(torch.equal(engine.tensors[name], tensor) for name, tensor in history[16].items())
    engine.advance()
    assert all(torch.equal(engine.tensors[name], tensor) for name, tensor in history[17].items())


def test_what_is_kept_aside_costs_no_point_and_is_the_present() -> None:
    engine = Counter()
    ring = Ring(engine, capacity=2, interval=2)
    for step in range(1, 6):
        engine.advance()
        if ring.due(step):
            ring.take(step, None)
    now = {name: t.clone() for name, t in engine.tensors.items()}
    present, old = ring.aside(5), ring.before(4)
    assert ring.steps == [2, 4] and old is not None
    ring.restore(old)
    assert engine.steps == 2
    ring.restore(present)
    assert engine.steps == 5 and ring.steps == [2, 4]
    assert all(torch.equal(engine.tensors[name], tensor) for name, tensor in now.items())


def test_before_passes_over_newer_points_but_not_beyond_the_oldest() -> None:
    engine = Counter()
    ring = Ring(engine, capacity=3, interval=1)
    assert ring.before(10) is None
    for step in (1, 2, 3):
        engine.advance()
        ring.take(step, None)
    assert ring.before(1) is None
    found = [ring.before(9, older) for older in range(5)]
    assert [s.step for s in found if s is not None] == [3, 2, 1, 1, 1]


def test_a_dropped_point_gives_its_memory_to_the_next() -> None:
    engine = Counter()
    engine.advance()
    ring = Ring(engine, capacity=2, interval=1)
    places: list[set[int]] = []
    for step in range(1, 9):
        ring.take(step, None)
        places.append({t.data_ptr() for s in ring._kept for t in s.tensors.values()})
    assert len(set().union(*places[2:])) <= 6  # two points and the one being written, of two tensors each


def test_no_room_no_points() -> None:
    ring = Ring(Counter(), capacity=0, interval=1)
    ring.take(1, None)
    assert ring.steps == [] and not ring.due(1)


@pytest.mark.parametrize("capacity", [1, 2, 4])
def test_a_lent_point_is_not_overwritten(capacity: int) -> None:
    """A reader that takes as long as it likes: either it is asked to stop first, or its point stays as it is."""
    engine = Counter()
    ring = Ring(engine, capacity=capacity, interval=1)
    for step in range(1, 4):
        engine.advance()
        ring.take(step, None)
    assert ring.lend(2) is None  # only the newest
    loan = ring.lend(3)
    assert loan is not None
    content = {name: t.clone() for name, t in loan.snapshot.tensors.items()}
    wrong, recalled = list[str](), list[bool]()

    def read() -> None:
        while not loan.recalled.wait(0.001):
            if not all(torch.equal(content[name], t) for name, t in loan.snapshot.tensors.items()):
                wrong.append("overwritten")
        time.sleep(0.02)  # it looks only so often
        wrong.extend(
            "early" for name, t in loan.snapshot.tensors.items() if not torch.equal(content[name], t)
        )
        recalled.append(True)
        loan.returned.set()

    thread = threading.Thread(target=read)
    thread.start()
    for step in range(4, 20):
        engine.advance()
        if step == 10:
            ring.forget_from(5)
        ring.take(step, None)
    if not recalled:
        ring.recall()
    thread.join()
    assert not wrong and recalled == [True]
