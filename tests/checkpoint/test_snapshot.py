"""The ring: which points are kept, whose memory is used again, and that what comes back is what went in."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megastable.base.errors import ConfigError
from megastable.base.free_memory import (
    GIB,
    Demand,
    group_limits,
    measure_demand,
)
from megastable.checkpoint.snapshot import Ring
from megastable.checkpoint.snapshot_budget import plan_snapshots
from megastable.config.stability import SnapshotConfig
from megastable.engine import hostcopy
from megastable.engine.hostcopy import HostCopy, receive_slices
from megastable_guard.step_judge import thin_snapshots
from tests.distributed import run_ranks
from tests.engine.engines import are_same, build_engine, copy_state, take_batch
from tests.parallel import test_layouts as layouts


@given(st.integers(1, 8), st.integers(1, 50), st.integers(1, 300))
def test_thin_keeps_the_newest_and_reaches_far_back(size: int, interval: int, count: int) -> None:
    kept: list[int] = []
    for number in range(count):
        before = kept
        kept = thin_snapshots([*kept, number * interval], size, interval)
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

    def read_counters(self) -> dict[str, Any]:
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
        if ring.is_due(step):
            ring.take_snapshot(step, extra=f"step {step}")
    assert ring.steps[-1] == 18 and len(ring.steps) == 3
    snapshot = ring.find_before(18)
    assert snapshot is not None and snapshot.step == 16 and snapshot.extra == "step 16"
    ring.restore_snapshot(snapshot)
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
        if ring.is_due(step):
            ring.take_snapshot(step, None)
    now = {name: t.clone() for name, t in engine.tensors.items()}
    present, old = ring.copy_aside(5), ring.find_before(4)
    assert ring.steps == [2, 4] and old is not None
    ring.restore_snapshot(old)
    assert engine.steps == 2
    ring.restore_snapshot(present)
    assert engine.steps == 5 and ring.steps == [2, 4]
    assert all(torch.equal(engine.tensors[name], tensor) for name, tensor in now.items())


def test_a_dropped_point_gives_its_memory_to_the_next() -> None:
    engine = Counter()
    engine.advance()
    ring = Ring(engine, capacity=2, interval=1)
    places: list[set[int]] = []
    for step in range(1, 9):
        ring.take_snapshot(step, None)
        places.append({t.data_ptr() for s in ring._kept for t in s.tensors.values()})
    assert len(set().union(*places[2:])) <= 6  # two points and the one being written, of two tensors each


@pytest.mark.parametrize("capacity", [1, 2, 4])
def test_a_lent_point_is_not_overwritten(capacity: int) -> None:
    """A reader that takes as long as it likes: either it is asked to stop first, or its point stays as it is."""
    engine = Counter()
    ring = Ring(engine, capacity=capacity, interval=1)
    for step in range(1, 4):
        engine.advance()
        ring.take_snapshot(step, None)
    assert ring.lend_newest(2) is None  # only the newest
    loan = ring.lend_newest(3)
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
        ring.take_snapshot(step, None)
    if not recalled:
        ring.recall_loan()
    thread.join()
    assert not wrong and recalled == [True]


# A copy that goes on behind the steps


class Gate(ThreadPoolExecutor):
    """A thread whose work begins when it is opened."""

    def __init__(self) -> None:
        super().__init__(1)
        self.opened = threading.Event()

    def submit(self, call: Any, *args: Any, **options: Any) -> Any:
        def wait_and_call() -> None:
            assert self.opened.wait(20)
            call()

        return super().submit(wait_and_call)


class Broken(ThreadPoolExecutor):
    """A thread whose work fails."""

    def submit(self, call: Any, *args: Any, **options: Any) -> Any:
        def fail() -> None:
            raise MemoryError

        return super().submit(fail)


@pytest.mark.parametrize("size", [0, 1, 3, 4, 17, 40])
@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_slices_arrive_whole_though_each_is_sent_as_late_as_can_be(size: int, buffers: int) -> None:
    """No buffer is filled again before it has been emptied, nor emptied before it is full."""
    source, target = torch.arange(size, dtype=torch.uint8), torch.full((size,), 255, dtype=torch.uint8)
    sending = list[Tensor]()

    def send(part: Tensor, original: Tensor) -> Any:
        assert all(part.data_ptr() != other.data_ptr() for other in sending)
        sending.append(part)

        def wait_until_sent() -> None:
            part.copy_(original)
            sending.remove(next(other for other in sending if other is part))

        return wait_until_sent

    memory = [torch.empty(4, dtype=torch.uint8) for _ in range(buffers)]
    receive_slices(zip(target.split(4), source.split(4), strict=True), memory, send)
    assert torch.equal(target, source) and not sending


@pytest.mark.parametrize(
    "tensor", [torch.tensor(3.0), torch.randn(7, 3), torch.empty(0), torch.randn(9).bfloat16()]
)
def test_slices_are_all_bytes_of_a_tensor(tensor: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostcopy, "SLICE", 8)
    slices = hostcopy.slice_bytes(tensor)
    assert all(len(part) <= 8 for part in slices)
    copy = torch.empty_like(tensor)
    for mine, other in zip(hostcopy.slice_bytes(copy), slices, strict=True):
        mine.copy_(other)
    assert torch.equal(copy, tensor)


def test_half_a_snapshot_is_no_point_to_go_back_to() -> None:
    """Whoever asks for it while it is being copied gets all of it; the update waits, and a copy that failed is none."""
    engine, gate, held = Counter(), Gate(), list[Any]()
    engine.hold_updates = held.append  # type: ignore[method-assign]
    ring = Ring(engine, capacity=3, interval=1)
    engine.advance()
    ring.take_snapshot(1, None)
    engine.advance()
    ring._host = HostCopy(engine.hold_updates, gate)
    ring.take_snapshot(2, None)
    wanted = {name: t.clone() for name, t in engine.tensors.items()}
    snapshot = ring.find_before(3)
    assert snapshot is not None and snapshot.step == 2 and len(held) == 1
    asked = ThreadPoolExecutor(3)
    answers = [asked.submit(ring.is_intact, snapshot), asked.submit(ring.restore_snapshot, snapshot)]
    update = asked.submit(held[0].synchronize)
    time.sleep(0.05)
    assert not any(answer.done() for answer in (*answers, update))
    gate.opened.set()
    assert answers[0].result(20) and answers[1].result(20) is None and update.result(20) is None
    assert engine.tensors.keys() == wanted.keys() and engine.steps == 2
    assert all(torch.equal(engine.tensors[name], tensor) for name, tensor in wanted.items())
    ring._host = HostCopy(engine.hold_updates, Broken())
    ring.take_snapshot(3, None)
    broken = ring.find_before(4)
    assert broken is not None and broken.step == 3
    held[-1].synchronize()  # no update fails for it
    assert not ring.is_intact(broken)
    with pytest.raises(MemoryError):
        ring.restore_snapshot(broken)
    assert engine.steps == 2
    first = ring.find_before(2)
    assert first is not None and ring.is_intact(first) and ring.is_intact(snapshot)


class Stream:
    """In place of a GPU's: what it was told."""

    def __init__(self) -> None:
        self.told = list[str]()

    def wait_stream(self, other: Any) -> None:
        self.told.append("waits for the update")

    def record_event(self) -> Any:
        self.told.append("sends")
        return SimpleNamespace(synchronize=lambda: None)


def test_a_gpu_sends_slices_after_what_its_usual_stream_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a GPU, on tensors of this machine: bf16 moments and counts of steps, more than fit into a slice."""
    stream, empty, held = Stream(), torch.empty, list[Any]()

    def empty_unpinned(*size: int, pin_memory: bool = False, **options: Any) -> Tensor:
        assert not pin_memory or size == (hostcopy.SLICE,), "only the buffers are pinned"
        return empty(*size, **options)

    monkeypatch.setattr(hostcopy, "SLICE", 16)
    monkeypatch.setattr(torch, "empty", empty_unpinned)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    source = {"weight": torch.randn(9), "exp_avg": torch.randn(9).bfloat16(), "step": torch.tensor(7.0)}
    copied = HostCopy(held.append).copy_tensors(source, {})
    copied.wait_until_complete()
    assert len(held) == 1 and stream.told == ["waits for the update", *["sends"] * (3 + 2 + 1)]
    assert are_same(copied.tensors, source)


def test_a_thread_prepares_the_memory_of_the_next_point_and_of_no_more() -> None:
    engine = Counter()
    engine.advance()
    ring, gate = Ring(engine, capacity=3, interval=1), Gate()
    gate.opened.set()
    ring._host = HostCopy(engine.hold_updates, gate)
    for step, spare in ((1, 1), (2, 1), (3, 0), (4, 0)):
        before = {t.data_ptr() for tensors in ring._spare for t in tensors.values()}
        ring.take_snapshot(step, None)
        assert len(ring._kept) == min(step, 3) and len(ring._spare) == spare
        taken = {t.data_ptr() for t in ring._kept[-1].tensors.values()}
        assert taken == before if step in (2, 3) else taken.isdisjoint(before)
        assert ring.is_intact(ring._kept[-1])
        engine.advance()
    ring.forget_from(ring.steps[1])
    ring.take_snapshot(5, None)
    assert (len(ring._kept), len(ring._spare)) == (2, 1), "what is given back is enough"


def train_behind_a_copy(c: Any) -> list[bool]:
    """A refused update, an applied one, and a rewind, while a snapshot is being copied."""
    engine, found = build_engine(c), list[bool]()
    steps = [take_batch(engine, one) for one in layouts.batches()]
    engine.train_step(steps[0], 1e-2, lambda _: True)
    ring, gate = Ring(engine, capacity=3, interval=1), Gate()
    ring._host = HostCopy(engine.hold_updates, gate)
    then = copy_state(engine)
    ring.take_snapshot(1, None)
    # The gate opens only while an update, or its refusal, waits for the copy.
    waiting = engine._wait_for_copies

    def open_and_wait() -> None:
        gate.opened.set()
        waiting()

    engine._wait_for_copies = open_and_wait
    engine.train_step(steps[1], 1e-2, lambda _: False)
    found.append(are_same(then, copy_state(engine)))
    gate.opened.clear()
    ring.take_snapshot(2, None)
    second = copy_state(engine)
    engine.train_step(steps[1], 1e-2, lambda _: True)
    found.append(not are_same(second, copy_state(engine)))
    ahead = engine.train_step(steps[2], 1e-2, lambda _: True)[0].loss
    snapshot = ring.find_before(3)
    assert snapshot is not None and ring.is_intact(snapshot)
    ring.restore_snapshot(snapshot)
    engine.refresh_weights()
    found.append(are_same(second, copy_state(engine)))
    engine.train_step(steps[1], 1e-2, lambda _: True)
    # Rewound right behind the beginning of a copy.
    gate.opened.clear()
    ring.take_snapshot(3, None)
    third = copy_state(engine)
    ring.restore_snapshot(snapshot)
    engine.refresh_weights()
    found.append(are_same(second, copy_state(engine)))
    newest = ring.find_before(4)
    assert newest is not None and ring.is_intact(newest)
    ring.restore_snapshot(newest)
    engine.refresh_weights()
    found += [
        are_same(third, copy_state(engine)),
        engine.train_step(steps[2], 1e-2, lambda _: True)[0].loss == ahead,
    ]
    return found


@pytest.mark.quick("1")
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_copy_behind_the_steps_brings_back_every_bit(zero: int) -> None:
    c = layouts.config(precision="bf16", zero=zero)
    for found in run_ranks(2 if zero == 3 else 1, train_behind_a_copy, c):
        assert found == [True] * 6


DEMANDS = st.lists(
    st.builds(
        Demand, st.sampled_from(["a", "b"]), snapshot=st.integers(1, 8 * GIB), free=st.integers(0, 99 * GIB)
    ),
    min_size=1, max_size=8,
)  # fmt: skip


# What is free


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_the_limits_of_all_groups_above_count(tmp_path: Path) -> None:
    """Version 2. What the kernel can drop is free; `max` is no limit; the root has no files."""
    root, own = tmp_path / "cgroup", tmp_path / "own"
    own.write_text("0::/slurm/job_7/step_0\n")
    group(root / "slurm", memory__max=1000, memory__current=900, memory__stat="anon 100\ninactive_file 300")
    group(root / "slurm/job_7", memory__max=500, memory__current=200, memory__stat="inactive_file 0")
    group(root / "slurm/job_7/step_0", memory__max="max", memory__current=200, memory__stat="anon 5")
    assert sorted(group_limits(root, own)) == [(500, 300), (1000, 400)]


# What a snapshot takes


def test_the_moments_that_are_not_there_yet_count() -> None:
    masters = [torch.zeros(300), torch.zeros(5)]
    state = {"0/weight": masters[0], "1/weight": masters[1]}
    later = [4 * m.numel() for m in masters for _ in range(3)]
    assert measure_demand(state.values(), later).snapshot == 3 * 4 * 305
    state |= {f"{i}/{key}": torch.zeros_like(m) for i, m in enumerate(masters) for key in ("m", "v", "more")}
    assert measure_demand(state.values(), later).snapshot == 4 * 4 * 305


# How many


@given(DEMANDS, st.integers(1, 6), st.permutations(range(8)))
def test_all_ranks_of_a_host_share_a_quarter_of_it(
    demands: list[Demand], keep: int, order: list[int]
) -> None:
    found = plan_snapshots(demands, SnapshotConfig(keep=keep))
    assert 0 <= found.points <= keep
    for host in {d.host for d in demands}:
        here = [d for d in demands if d.host == host]
        assert found.points * max(d.snapshot for d in here) * len(here) <= min(d.free for d in here) / 4
    if found.points < keep:  # one more would not fit somewhere
        assert any(
            (found.points + 1) * d.snapshot
            > min(o.free for o in demands if o.host == d.host) / 4 / sum(o.host == d.host for o in demands)
            for d in demands
        )
    # A look back puts the present state aside for as long, on every rank at once.
    with_one_more = plan_snapshots(demands, SnapshotConfig(keep=keep + 1))
    assert found.aside == (with_one_more.points == keep + 1)
    assert plan_snapshots([demands[i] for i in order if i < len(demands)], SnapshotConfig(keep=keep)) == found


def test_a_given_budget_counts_for_every_rank_whatever_is_free() -> None:
    few = SnapshotConfig(memory_gib=0.5)
    with pytest.raises(ConfigError, match=r"memory_gib=0\.5: a snapshot takes 1\.000 .* at least 1\.000"):
        plan_snapshots([Demand("a", 100, GIB), Demand("b", GIB, GIB)], few)
    given = plan_snapshots([Demand("a", GIB, 4 * GIB)] * 2, SnapshotConfig(memory_gib=3.0, keep=4))
    assert given.points == 3 and "WARNING: that is more than the 4.000 GiB that are free on a" in given.text
    assert (
        "WARNING" in plan_snapshots([Demand("a", GIB, 2 * GIB)], SnapshotConfig(memory_gib=3.0, keep=2)).text
    )
    assert (
        "WARNING" not in plan_snapshots([Demand("a", GIB, 4 * GIB)] * 2, SnapshotConfig(memory_gib=2.0)).text
    )
