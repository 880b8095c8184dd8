"""Whom a hang is due to."""

from __future__ import annotations

from dataclasses import replace

from megastable.supervise.hang_suspects import RankView, suspects

# tensor x data = 2 x 2, ranks 0 and 1 on the first host
MEMBERS = {"tensor0": (0, 1), "tensor1": (2, 3), "data0": (0, 2), "data1": (1, 3)}


def view(rank: int, behind: int | None = None, **more: object) -> RankView:
    """Rank 3 stands still: those of its tensor group wait for it, the others for their data group."""
    entered = {group: 7 for group, ranks in MEMBERS.items() if rank in ranks}
    waits_in = {0: "data0", 1: "data1", 2: "tensor1"}.get(rank)
    if behind == 3 and waits_in:
        entered[waits_in] += 1
    fields = {"host": "first" if rank < 2 else "second", "activity": "forward", "entered": entered} | more
    return RankView(**fields)  # type: ignore[arg-type]


def test_the_one_that_all_wait_for_is_named_though_it_speaks() -> None:
    ranks = {rank: view(rank, behind=3, lasted=31.0) for rank in range(4)}
    found = suspects(ranks)
    assert (found.rank, found.host) == (3, "second")
    assert found.told == ["rank 3 on second: the others wait for it, in 'forward' for 31 s"]


def test_a_stopped_rank_is_silent_and_the_kernel_says_why() -> None:
    ranks = {rank: view(rank, behind=3) for rank in range(3)}
    ranks[3] = view(3, silent=30.0, kernel="process 7, stopped by a signal")
    found = suspects(ranks)
    assert (found.rank, found.host) == (3, "second")
    assert found.told[0].endswith("in 'forward' for 30 s, silent for 30 s, process 7, stopped by a signal")


def test_a_silent_host_is_named_as_one() -> None:
    ranks = {rank: view(rank, silent=0.0 if rank < 2 else 33.0) for rank in range(4)}
    found = suspects(ranks)
    assert (found.rank, found.host) == (None, "second") and len(found.told) == 2


def test_without_evidence_nobody_is_blamed() -> None:
    found = suspects({rank: view(rank) for rank in range(4)})
    assert (found.rank, found.host) == (None, None) and "could be told apart" in found.told[0]
    assert list(suspects({}).told) == []


def test_ranks_that_the_store_never_heard_are_known_by_the_kernel_alone() -> None:
    found = suspects({0: RankView("here", kernel="process 7, stopped by a signal")})
    assert (found.rank, found.host) == (0, "here")


def stage(activity: str, entered: int = 7, **more: object) -> RankView:
    """Of a pipeline of one rank a stage: no group but the world."""
    return RankView(host="first", activity=activity, entered={"0": entered}, **more)  # type: ignore[arg-type]


def test_a_stage_that_waits_for_another_one_is_a_witness() -> None:
    ranks = {rank: stage("forward" if rank == 1 else "exchange", lasted=31.0) for rank in range(4)}
    found = suspects(ranks)
    assert found.rank == 1 and found.told == [
        "rank 1 on first: the others wait for it, in 'forward' for 31 s"
    ]


def test_of_a_pipeline_with_copies_only_the_stage_at_work_is_behind() -> None:
    """Stage 0 of the first copy stands still: its next stage is behind its own copy, too, as it waits."""
    ranks = {
        0: stage("forward") , 1: stage("exchange"), 2: stage("reduce"), 3: stage("reduce"),
    }  # fmt: skip
    for rank, group in enumerate(("data0", "data1", "data0", "data1")):
        ranks[rank] = replace(ranks[rank], entered={group: 8 if rank > 1 else 7})
    assert suspects(ranks).rank == 0


def test_stages_that_all_wait_for_each_other_are_not_told_apart() -> None:
    assert suspects({rank: stage("exchange") for rank in range(4)}).rank is None
    mute = {rank: stage("exchange", silent=9.0 if rank == 2 else 0.0) for rank in range(4)}
    assert suspects(mute).rank == 2
