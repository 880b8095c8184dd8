"""The partner of every rank, and the newest point that the hosts hold together."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from megastable.checkpoint.files import FileRecord
from megastable.checkpoint.held_points import HeldPart, PointKey, names_of, newest_complete
from megastable.checkpoint.memory_hosts import partners

LINEAGES = ("0" * 16, "a" * 16)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40))
def test_every_rank_has_a_partner_on_another_host(hosts: list[int]) -> None:
    found, ranks = partners(hosts), Counter(hosts)
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
            assert all(found.holders(name) == found.hosts[rank] for name in p.files)
        assert len(found.files) == 3 * len(found.parts) + 2


@given(KEYS)
def test_a_key_is_its_folders_name(key: PointKey) -> None:
    assert PointKey.of(key.name) == key
    assert PointKey.of(key.name + "x") is None and PointKey.of("step-1") is None


@pytest.mark.parametrize(
    "names", [[], ["state.json"], [*names_of(0), "../../x"], [*names_of(1), "state.json"]]
)
def test_a_part_has_the_files_of_its_rank_and_no_others(names: list[str]) -> None:
    files: dict[str, Any] = {name: {"size": 1, "xxh3": "a"} for name in names}
    rank = 1 if "rank-00001.json" in names else 0
    tree = {"key": {"step": 1, "epoch": 0, "lineage": LINEAGES[0]}, "rank": rank, "world": 2, "files": files}
    with pytest.raises(ValidationError):
        HeldPart.model_validate(tree)
