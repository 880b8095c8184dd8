"""Host files and the launcher's choice among hosts, against the deepspeed launcher's own runner."""

from __future__ import annotations

from pathlib import Path

import pytest
from deepspeed.launcher import runner
from hypothesis import given
from hypothesis import strategies as st

from megastable.base.errors import ConfigError
from megastable.cluster.hostfile import HostSlots, chosen, include, lines, read, trimmed

NAMES = ["node-1", "node-2", "10.0.0.3", "node-4"]


@st.composite
def pools(draw: st.DrawFn) -> dict[str, int]:
    return {name: draw(st.integers(1, 4)) for name in NAMES[: draw(st.integers(1, 4))]}


@st.composite
def filters(draw: st.DrawFn) -> str:
    parts = []
    for name in draw(st.lists(st.sampled_from([*NAMES, "other"]), min_size=1, max_size=3)):
        slots = draw(st.lists(st.integers(0, 4), max_size=3))
        parts.append(f"{name}:{','.join(map(str, slots))}" if slots else name)
    return "@".join(parts)


@given(
    pools(), st.sampled_from(["", "include", "exclude"]), filters(), st.integers(-1, 3), st.integers(-1, 5)
)
def test_the_same_hosts_and_slots_as_the_launcher(
    pool: dict[str, int], flag: str, text: str, nodes: int, gpus: int
) -> None:
    hosts = [HostSlots(name, tuple(range(count))) for name, count in pool.items()]
    texts = {"include": "", "exclude": ""} | ({flag: text} if flag else {})
    try:
        active = runner.parse_inclusion_exclusion(pool, texts["include"], texts["exclude"])
        wanted = runner.apply_num_nodes_and_gpus(active, nodes, gpus)
    except ValueError:
        wanted = None
    try:
        found = trimmed(chosen(hosts, **texts), nodes, gpus)
    except ConfigError:
        assert not wanted
        return
    assert wanted is not None
    assert {host.name: sorted(host.slots) for host in found} == {n: sorted(s) for n, s in wanted.items()}
    assert [host.name for host in found] == list(wanted)


@given(pools(), st.data())
def test_what_is_written_is_read_back(pool: dict[str, int], data: st.DataObject) -> None:
    hosts = [
        HostSlots(name, tuple(sorted(data.draw(st.sets(st.integers(0, 7), min_size=1))))) for name in pool
    ]
    whole = runner._parse_hostfile(lines(hosts).splitlines())
    arguments = include(hosts)
    found = runner.parse_inclusion_exclusion(whole, arguments[1] if arguments else "", "")
    assert {name: tuple(slots) for name, slots in found.items()} == {host.name: host.slots for host in hosts}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node-1 slots=2\nnode-1 slots=2\n", "line 2 names node-1 again"),
        ("# all\nnode-1\n", "line 2 is not NAME slots=N: node-1"),
        ("node-1 slots=0\n", "line 1 is not"),
        ("\n", "names no hosts"),
    ],
)
def test_bad_files_are_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "hostfile").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / "hostfile")
