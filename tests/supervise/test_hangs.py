"""When a run counts as hung, learnt from itself; and whom that is due to."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.config.supervise import SuperviseConfig
from megastable.run.rank_ipc import Progress
from megastable.supervise.hangs import (
    LEARNT,
    LEAST,
    TICK,
    HangDetector,
    RankView,
    build_wait_graph,
    find_awaited_ranks,
    find_suspects,
    find_waiting_for_store,
)

CONFIG = SuperviseConfig(hang_factor=10, hang_floor=5, hang_unknown=100)


def progress(step: int, phase: str = "step", seconds: float | None = 2.0, **more: Any) -> Progress:
    known = {"pid": 1, "host": "a", "time": 0.0, "world": 2, "steps": 99, "cursor": 8 * step}
    return Progress.model_validate(known | {"phase": phase, "step": step, "seconds": seconds} | more)


def looks(patience: HangDetector, seen: Progress | None, seconds: float) -> bool:
    """Look for `seconds`, half a second at a time."""
    return sum(patience.detect_hang(seen, 0.5) for _ in range(max(1, int(2 * seconds)))) > 0


def trained(config: SuperviseConfig = CONFIG, seconds: float = 2.0) -> HangDetector:
    patience = HangDetector(config)
    for step in range(1, 6):
        looks(patience, progress(step, seconds=seconds), seconds)
    return patience


def test_hang_detector_allows_a_step_ten_times_the_usual() -> None:
    patience = trained()
    assert patience.limit == 20 and trained(seconds=0.01).limit == CONFIG.hang_floor
    assert not looks(patience, progress(5), 18) and looks(patience, progress(5), 4)


@pytest.mark.parametrize("phase", ["checkpoint", "evaluate", "rewind"])
def test_hang_detector_learns_other_phases_from_the_longest(phase: str) -> None:
    patience = trained()
    assert not looks(patience, progress(5, phase), 30) and patience.limit == 100
    looks(patience, progress(6), 1)
    looks(patience, progress(6, phase), 1)
    assert patience.limit == pytest.approx(10 * 30, rel=0.1)


def test_hang_detector_waits_less_in_a_phase_that_is_known_well() -> None:
    config = CONFIG.model_copy(update={"hang_unknown": 1800.0})
    patience = trained(config)
    for number in range(LEARNT):
        assert not looks(patience, progress(5 + number, "checkpoint"), 2) and patience.limit == 1800
        looks(patience, progress(6 + number), 1)
    looks(patience, progress(20, "checkpoint"), 1)
    assert patience.limit == LEAST
    assert not looks(patience, progress(20, "checkpoint"), 298) and looks(
        patience, progress(20, "checkpoint"), 3
    )


@given(st.floats(0, 1e9), st.floats(-1e9, 1e9))
def test_hang_detector_sees_no_hang_in_a_jump_of_the_clock_or_a_stopped_supervisor(
    slept: float, clock: float
) -> None:
    patience = trained()
    assert not patience.detect_hang(progress(6, time=clock), slept)
    assert not patience.detect_hang(progress(6, time=-clock), slept) and patience.waited <= TICK


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


def test_suspects_are_the_one_that_all_wait_for_though_it_speaks() -> None:
    ranks = {rank: view(rank, behind=3, lasted=31.0) for rank in range(4)}
    found = find_suspects(ranks)
    assert (found.rank, found.host) == (3, "second")
    assert found.told == ["rank 3 on second: the others wait for it, in 'forward' for 31 s"]


def test_suspects_are_a_stopped_rank_and_the_kernel_says_why() -> None:
    ranks = {rank: view(rank, behind=3) for rank in range(3)}
    ranks[3] = view(3, silent=30.0, kernel="process 7, stopped by a signal")
    found = find_suspects(ranks)
    assert (found.rank, found.host) == (3, "second")
    assert found.told[0].endswith("in 'forward' for 30 s, silent for 30 s, process 7, stopped by a signal")


def test_suspects_without_evidence_are_nobody_and_a_silent_host_is_one() -> None:
    found = find_suspects({rank: view(rank) for rank in range(4)})
    assert (found.rank, found.host) == (None, None) and "could be told apart" in found.told[0]
    assert list(find_suspects({}).told) == []
    found = find_suspects({rank: view(rank, silent=0.0 if rank < 2 else 33.0) for rank in range(4)})
    assert (found.rank, found.host) == (None, "second") and len(found.told) == 2
    found = find_suspects(
        {0: RankView("here", kernel="process 7, stopped by a signal")}
    )  # the store never heard it
    assert (found.rank, found.host) == (0, "here")


@pytest.mark.parametrize(
    ("activities", "entered", "mute", "rank"),
    [
        ("exchange forward exchange exchange", (7, 7, 7, 7), None, 1),
        # Stage 0 of the first copy stands still: its next stage is behind its own copy, too, as it waits.
        ("forward exchange reduce reduce", (7, 7, 8, 8), None, 0),
        ("exchange exchange exchange exchange", (7, 7, 7, 7), None, None),
        ("exchange exchange exchange exchange", (7, 7, 7, 7), 2, 2),
    ],
)
def test_suspects_are_no_stages_that_wait_for_another(
    activities: str, entered: tuple[int, ...], mute: int | None, rank: int | None
) -> None:
    """In two copies of a pipeline of two stages."""
    groups = ("data0", "data1", "data0", "data1")
    ranks = {
        n: RankView("first", activity, silent=9.0 if n == mute else 0.0, entered={groups[n]: entered[n]})
        for n, activity in enumerate(activities.split())
    }
    assert find_suspects(ranks).rank == rank


def layout(tensor: int, data: int) -> dict[str, list[int]]:
    """Groups of ranks numbered data-major, as the topology does."""
    world = tensor * data
    groups = {"world": list(range(world))}
    groups |= {f"tensor{d}": [d * tensor + t for t in range(tensor)] for d in range(data)}
    groups |= {f"data{t}": [d * tensor + t for d in range(data)] for t in range(tensor)}
    return groups


def played(
    groups: dict[str, list[int]], program: list[str], stuck: int, at: int
) -> tuple[dict[int, dict[str, int]], bool]:
    """Run `program` (kinds of groups, one collective each) on all ranks until nothing moves; `stuck` does `at` of it.
    What each has entered, and whether anybody waits."""
    members = {name: set(ranks) for name, ranks in groups.items()}
    ranks = sorted(members["world"])
    mine = {
        r: {kind: next(g for g in groups if g.startswith(kind) and r in members[g]) for kind in set(program)}
        for r in ranks
    }
    entered = {r: {g: 0 for g in groups if r in members[g]} for r in ranks}
    done = dict.fromkeys(ranks, 0)  # collectives finished
    inside: dict[int, str] = {}
    moved = True
    while moved:
        moved = False
        for r in ranks:
            if r not in inside and done[r] < len(program) and not (r == stuck and done[r] >= at):
                inside[r] = mine[r][program[done[r]]]
                entered[r][inside[r]] += 1
                moved = True
        for group, of in members.items():
            if all(inside.get(r) == group for r in of) and len({entered[r][group] for r in of}) == 1:
                for r in of:
                    del inside[r]
                    done[r] += 1
                moved = True
    return entered, bool(inside)


@given(
    tensor=st.integers(1, 4), data=st.integers(1, 4), seed=st.data(),
    program=st.lists(st.sampled_from(["tensor", "data", "world"]), min_size=1, max_size=12),
)  # fmt: skip
def test_culprits_are_the_rank_that_stands_still(
    tensor: int, data: int, seed: st.DataObject, program: list[str]
) -> None:
    groups = layout(tensor, data)
    stuck = seed.draw(st.integers(0, tensor * data - 1))
    at = seed.draw(st.integers(0, len(program) - 1))
    entered, waiting = played(groups, program, stuck, at)
    assert find_awaited_ranks(entered) == ([stuck] if waiting else []), build_wait_graph(entered)


def test_culprits_are_nobody_if_all_are_in_the_same_collective() -> None:
    assert find_awaited_ranks({0: {"world": 5}, 1: {"world": 5}}) == []
    assert find_awaited_ranks({}) == []


def test_a_wait_for_an_object_store_is_known_while_its_rank_says_so() -> None:
    waiting, others = RankView("a", activity="object store"), RankView("b", activity="reduce")
    assert find_waiting_for_store({0: others, 1: waiting, 2: waiting}) == 1
    assert find_waiting_for_store({0: others}) is None
    assert find_waiting_for_store({0: RankView("a", activity="object store", silent=60.0)}) is None
    assert find_waiting_for_store({0: RankView("a", activity="object store", closed=True)}) is None
