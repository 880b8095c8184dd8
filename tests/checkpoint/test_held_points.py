"""The partner of every rank, and the newest point that the hosts hold together."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from megastable.checkpoint.files import FileRecord
from megastable.checkpoint.held_points import (
    HISTORY,
    TRIES,
    HeldPart,
    PointKey,
    explain_bad_ancestor,
    explain_outdated,
    names_of,
    newest_complete,
)
from megastable.checkpoint.memory_hosts import assign_partners
from megastable.run.events.event import Event
from megastable.run.events.reading import event_of

LINEAGES = ("0" * 16, "a" * 16)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40))
def test_every_rank_has_a_partner_on_another_host(hosts: list[int]) -> None:
    found, ranks = assign_partners(hosts), Counter(hosts)
    if len(ranks) == 1:
        assert found == [None] * len(hosts)
        return
    senders: dict[int, set[int]] = {}
    for rank, partner in enumerate(found):
        assert partner is not None and hosts[partner] != hosts[rank]
        senders.setdefault(hosts[partner], set()).add(hosts[rank])
    # A host keeps the copies of one other, and its ranks share them evenly.
    assert set(senders) == set(ranks) and all(len(of) == 1 for of in senders.values())
    for host in ranks:
        load = Counter(p for p in found if p is not None and hosts[p] == host)
        each = [load[rank] for rank in range(len(hosts)) if hosts[rank] == host]
        assert max(each) - min(each) <= 1
    if len(set(ranks.values())) == 1:
        assert set(Counter(found).values()) == {1}


def part(key: PointKey, rank: int, world: int, hash: str = "a") -> HeldPart:
    files = {name: FileRecord(size=1, xxh3=hash * 32) for name in names_of(rank)}
    return HeldPart(key=key, rank=rank, world=world, files=files)


KEYS = st.builds(PointKey, step=st.integers(0, 3), epoch=st.integers(0, 1), lineage=st.sampled_from(LINEAGES))
PARTS = st.builds(
    part, KEYS, st.integers(0, 2), st.sampled_from([1, 2, 3, 3]), st.sampled_from(["a", "a", "a", "b"])
)


@given(st.lists(st.lists(PARTS, max_size=8), max_size=4), st.sets(KEYS))
def test_the_newest_complete_point(held: list[list[HeldPart]], outdated: set[PointKey]) -> None:
    found, passed = newest_complete(held, lambda key: "outdated" if key in outdated else "")
    whole = []
    for key in {p.key for parts in held for p in parts} - outdated:
        different = {p.model_dump_json(): p for parts in held for p in parts if p.key == key}.values()
        worlds = {p.world for p in different}
        # Each rank's part in one version, though on many hosts, and all are of as many ranks.
        if len(worlds) == 1 and sorted(p.rank for p in different) == list(range(*worlds)):
            whole.append(key)

    def age(key: PointKey) -> tuple[int, int, str]:
        return key.step, key.epoch, key.lineage

    assert (found.key if found else None) == max(whole, key=age, default=None)
    assert all(passed.values()) and not set(passed) & set(whole)
    assert found is None or all(age(key) > age(found.key) for key in passed)
    if found is not None:
        for rank, p in found.parts.items():
            assert all(p in held[host] for host in found.hosts[rank])
            assert [h for h, parts in enumerate(held) if p in parts] == list(found.hosts[rank])
            assert all(found.hosts_with(name) == found.hosts[rank] for name in p.files)
        assert len(found.files) == 3 * len(found.parts) + 2


@pytest.mark.parametrize(
    "names", [[], ["state.json"], [*names_of(0), "../../x"], [*names_of(1), "state.json"]]
)
def test_a_part_has_the_files_of_its_rank_and_no_others(names: list[str]) -> None:
    files: dict[str, Any] = {name: {"size": 1, "xxh3": "a"} for name in names}
    rank = 1 if "rank-00001.json" in names else 0
    tree = {"key": {"step": 1, "epoch": 0, "lineage": LINEAGES[0]}, "rank": rank, "world": 2, "files": files}
    with pytest.raises(ValidationError):
        HeldPart.model_validate(tree)


A, B = "a" * 16, "b" * 16


def history(*lines: dict[str, Any]) -> list[Event]:
    events = [event_of(line) for line in lines]
    assert all(isinstance(event, HISTORY) for event in events)
    return events


def training(step: int, lineage: str | None = None) -> dict[str, Any]:
    return {"event": "training", "step": step, **({"lineage": lineage} if lineage else {})}


def dropped(step: int) -> dict[str, Any]:
    return {"event": "memory_dropped", "step": step}


def tried(step: int) -> dict[str, Any]:
    return {"event": "memory_resume", "step": step, "lineage": A, "epoch": 0}


def point_of(step: int = 100, epoch: int = 0) -> PointKey:
    return PointKey(step=step, epoch=epoch, lineage=A)


BEGAN = training(0, A)


@pytest.mark.parametrize(
    ("lines", "key", "why"),
    [
        ([BEGAN], point_of(), ""),
        ([], point_of(), "earlier run"),
        ([training(0), training(0, B)], point_of(), "earlier run"),
        ([BEGAN, training(100, B)], point_of(), ""),  # which was resumed from it, and died
        ([BEGAN, training(90, B)], point_of(), "gone on from step 90"),
        ([training(50, B), BEGAN], point_of(), ""),
        ([BEGAN, dropped(80)], point_of(), "rewound to step 80"),
        ([BEGAN, dropped(80)], point_of(80), ""),
        ([BEGAN, dropped(80)], point_of(100, 1), ""),  # taken after it
        ([BEGAN, dropped(80), dropped(99)], point_of(100, 1), "rewound to step 99"),
        ([BEGAN, training(100, B), dropped(99)], point_of(100, 1), "rewound to step 99"),
        ([dropped(80), BEGAN], point_of(), ""),
        ([BEGAN, {"event": "handover", "step": 104, "before": 103}], point_of(), "handed over"),
        ([BEGAN, {"event": "unstable", "step": 104}], point_of(), "unstable"),
        ([{"event": "unstable", "step": 104}, BEGAN], point_of(), ""),
        (
            [BEGAN, {"event": "incident", "what": "opened", "onset": 95, "policy": {}}],
            point_of(),
            "undid step 95",
        ),
        ([BEGAN, {"event": "incident", "what": "opened", "onset": 101, "policy": {}}], point_of(), ""),
        (
            [BEGAN, {"event": "incident", "what": "rewound", "to_step": 90, "policy": {}}],
            point_of(),
            "undid step 91",
        ),
        ([BEGAN, {"event": "rolled_back", "step": 60}], point_of(), "rolled the run back to step 60"),
        ([BEGAN, {"event": "rolled_back", "step": 100}], point_of(), ""),
        ([{"event": "rolled_back", "step": 60}, BEGAN], point_of(), ""),
        ([BEGAN, *[tried(100)] * (TRIES - 1)], point_of(), ""),
        ([BEGAN, *[tried(100)] * TRIES], point_of(), f"{TRIES} times"),
        ([BEGAN, *[tried(90)] * TRIES], point_of(), ""),
    ],
)
def test_what_happened_since_decides(lines: list[dict[str, Any]], key: PointKey, why: str) -> None:
    found = explain_outdated(history(*lines), key)
    assert (why in found) if why else not found


@given(
    st.lists(
        st.builds(training, st.integers(0, 9), st.sampled_from([A, B, None]))
        | st.builds(dropped, st.integers(0, 9)),
        max_size=8,
    ),
    st.integers(0, 9),
    st.integers(0, 2),
)
def test_what_came_before_does_not_matter_and_undone_steps_never_return(
    lines: list[dict[str, Any]], step: int, epoch: int
) -> None:
    """Against a model: which steps of the current state are of lineage A."""
    key, known, mine, drops = point_of(step, epoch), False, False, 0
    valid = False
    for line in lines:
        if line["event"] == "training":
            begins = line.get("lineage") == A and not known
            if begins:
                known = mine = valid = True
            else:
                mine, valid = False, valid and line["step"] >= step
        elif known:
            drops += mine
            if line["step"] < step and (not mine or epoch < drops):
                valid = False
    assert (explain_outdated(history(*lines), key) == "") == valid


@pytest.mark.parametrize(
    ("quarantined", "bad"),
    [
        ([], False),
        ([50], False),
        ([80], False),
        ([90], True),
        ([100], True),
        ([110], False),
        ([50, 90], True),
    ],
)
def test_a_point_after_a_quarantined_checkpoint_is_tainted(quarantined: list[int], bad: bool) -> None:
    assert bool(explain_bad_ancestor(point_of(100), 80, quarantined)) == bad
