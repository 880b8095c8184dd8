"""Host memory for snapshots: what is free, what a snapshot takes, how many every rank keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megastable.base import free_memory
from megastable.base.errors import ConfigError
from megastable.base.free_memory import (
    GIB,
    Demand,
    GroupMemory,
    count_taken_bytes,
    demand,
    free,
    group_limits,
    total,
)
from megastable.checkpoint.snapshot_budget import plan
from megastable.config.stability import SnapshotConfig

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


def test_version_1_and_a_group_that_is_over_its_limit(tmp_path: Path) -> None:
    root, own = tmp_path / "cgroup", tmp_path / "own"
    own.write_text("9:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n0::/docker/x\n")
    # In a container the group of its own is the root, whatever its name outside.
    group(
        root / "memory", memory__limit_in_bytes=1000, memory__usage_in_bytes=1200,
        memory__stat="cache 9\ninactive_file 1\ntotal_inactive_file 100",
    )  # fmt: skip
    assert list(group_limits(root, own)) == [(1000, 0)]


def test_the_smallest_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory, "group_limits", lambda: [GroupMemory(1000, 400), GroupMemory(2000, 300)])
    assert (total(), free()) == (1000, 300)
    monkeypatch.setattr(
        free_memory, "group_limits", lambda: [GroupMemory(1 << 62, 1 << 62)]
    )  # none, in version 1
    assert 0 < free() < total() < 1 << 60


@pytest.mark.parametrize("content", ["", "0::/\n", "0::/none\n", "4:memory:/none\n"])
def test_without_groups_the_machine_is_the_limit(content: str, tmp_path: Path) -> None:
    (tmp_path / "own").write_text(content)
    assert list(group_limits(tmp_path / "cgroup", tmp_path / "own")) == []
    assert list(group_limits(tmp_path / "cgroup", tmp_path / "missing")) == []


# What a snapshot takes


@given(st.integers(0, 2**45))
def test_pinned_memory_is_rounded_up_to_a_power_of_two(size: int) -> None:
    held = count_taken_bytes(size, pinned=True)
    assert count_taken_bytes(size, pinned=False) == size
    assert (held & (held - 1)) == 0 and (size <= held < 2 * size or held == size == 0)


def test_the_moments_that_are_not_there_yet_count() -> None:
    masters = [torch.zeros(300), torch.zeros(5)]
    state = {"0/weight": masters[0], "1/weight": masters[1]}
    later = [4 * m.numel() for m in masters for _ in range(3)]
    assert demand(state.values(), later, pinned=False).snapshot == 3 * 4 * 305
    assert demand(state.values(), later, pinned=True).snapshot == 3 * (2048 + 32)
    state |= {f"{i}/{key}": torch.zeros_like(m) for i, m in enumerate(masters) for key in ("m", "v", "more")}
    assert demand(state.values(), later, pinned=False).snapshot == 4 * 4 * 305


# How many


@given(DEMANDS, st.integers(1, 6), st.permutations(range(8)))
def test_all_ranks_of_a_host_share_a_quarter_of_it(
    demands: list[Demand], keep: int, order: list[int]
) -> None:
    found = plan(demands, SnapshotConfig(keep=keep))
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
    with_one_more = plan(demands, SnapshotConfig(keep=keep + 1))
    assert found.aside == (with_one_more.points == keep + 1)
    assert plan([demands[i] for i in order if i < len(demands)], SnapshotConfig(keep=keep)) == found


def test_it_is_said_with_the_numbers() -> None:
    found = plan([Demand("a", GIB, 100 * GIB)] * 2, SnapshotConfig(interval=10, keep=4))
    assert found.points == 4 and found.text == "snapshots: every 10 steps, 4 of 1.000 GiB a rank"
    short = plan([Demand("a", GIB, 100 * GIB), Demand("b", GIB, 16 * GIB)], SnapshotConfig(keep=4))
    assert short.points == 4 and not short.aside and "no room for one more" in short.text
    found = plan([Demand("a", GIB, 6 * GIB)] * 2, SnapshotConfig())
    assert found.points == 0 and found.text.startswith(
        "WARNING: a snapshot takes 1.000 GiB a rank, and there"
    )
    assert "room for 0.750: a spike cannot be rewound" in found.text


def test_a_given_budget_counts_for_every_rank_whatever_is_free() -> None:
    few = SnapshotConfig(memory_gib=0.5)
    with pytest.raises(ConfigError, match=r"memory_gib=0\.5: a snapshot takes 1\.000 .* at least 1\.000"):
        plan([Demand("a", 100, GIB), Demand("b", GIB, GIB)], few)
    given = plan([Demand("a", GIB, 4 * GIB)] * 2, SnapshotConfig(memory_gib=3.0, keep=4))
    assert given.points == 3 and "WARNING: that is more than the 4.000 GiB that are free on a" in given.text
    assert "WARNING" in plan([Demand("a", GIB, 2 * GIB)], SnapshotConfig(memory_gib=3.0, keep=2)).text
    assert "WARNING" not in plan([Demand("a", GIB, 4 * GIB)] * 2, SnapshotConfig(memory_gib=2.0)).text
