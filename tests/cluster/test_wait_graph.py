"""Who holds up a run, in the groups of a real layout."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megastable.cluster.wait_graph import culprits, waits


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
def test_the_rank_that_stands_still_is_found(
    tensor: int, data: int, seed: st.DataObject, program: list[str]
) -> None:
    groups = layout(tensor, data)
    stuck = seed.draw(st.integers(0, tensor * data - 1))
    at = seed.draw(st.integers(0, len(program) - 1))
    entered, waiting = played(groups, program, stuck, at)
    assert culprits(entered) == ([stuck] if waiting else []), waits(entered)


def test_all_in_the_same_collective_is_nobodys_fault() -> None:
    assert culprits({0: {"world": 5}, 1: {"world": 5}}) == []
    assert culprits({}) == []
