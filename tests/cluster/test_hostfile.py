"""Hosts by hostfile and arguments, as DeepSpeed's own launcher has them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
from deepspeed.launcher import runner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megastable.base.errors import ConfigError
from megastable.cluster.hostfile import HostSlots, filter_hosts, parse_hostfile, placement

HOSTS = "a slots=2\nb slots=4 # the big one\n\n# c slots=8\n  d\tslots=1\n"
NAMES = st.sampled_from(["a", "b", "node-01", "#c", "10.0.0.7", "c:1", "-o", "ü"])
SLOTS = st.integers(1, 9)
LINES = st.one_of(
    st.builds("{} slots={}".format, NAMES, st.integers(0, 9)),
    st.builds("{}{}slots={} {}".format, NAMES, st.sampled_from([" ", "\t ", "\x0b", "\u2003"]), SLOTS, NAMES),
    st.sampled_from(["", "  ", "# a", "a", "slots=3", "a slots=x", "a  slots=3,4", "a slots=\u0663", "a slot=3"]),
)  # fmt: skip
SPECS = st.one_of(
    st.sampled_from(["a", "b", "e", "", "a:", ":0", "a:0:1", "a:x"]),
    st.builds(
        "{}:{}".format, st.sampled_from(["a", "b", "c"]),
        st.lists(st.integers(-1, 4), min_size=1).map(lambda s: ",".join(map(str, s))),
    ),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("DeepSpeed").setLevel(logging.CRITICAL)


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    path = tmp_path / "hostfile"
    path.write_text(HOSTS)
    return path


def hosts(*words: object, environment: Mapping[str, str] | None = None) -> list[tuple[str, tuple[int, ...]]]:
    found = placement([str(word) for word in words], environment or {})
    return [(host.name, host.slots) for host in found.hosts]


def by_deepspeed(file: Path, *words: str) -> list[tuple[str, tuple[int, ...]]]:
    """As runner.main does it, up to the start of the launcher."""
    args = runner.parse_args(["-H", str(file), *words, "script"])
    pool = runner.fetch_hostfile(args.hostfile)
    if (args.num_nodes >= 0 or args.num_gpus >= 0) and (args.include or args.exclude):
        raise ValueError
    active = runner.parse_inclusion_exclusion(pool, args.include, args.exclude)
    active = runner.apply_num_nodes_and_gpus(active, args.num_nodes, args.num_gpus)
    return [(name, tuple(slots)) for name, slots in active.items()]


@given(st.lists(LINES, max_size=5))
def test_the_hostfile_is_read_as_deepspeed_does(lines: list[str]) -> None:
    text = "\n".join(lines)
    try:
        theirs: dict[str, int] | None = dict(runner._parse_hostfile(text.split("\n")))
    except ValueError:
        theirs = None
    if theirs is None or 0 in theirs.values():
        with pytest.raises(ConfigError, match="hostfile"):
            parse_hostfile(text, "hostfile")
    else:
        assert list(parse_hostfile(text, "hostfile").items()) == list(theirs.items())


@given(st.lists(SPECS, min_size=1, max_size=3).map("@".join), st.booleans())
def test_filters_are_those_of_deepspeed(text: str, include: bool) -> None:
    pool = {"a": 2, "b": 4, "c": 1}
    both = (text, "") if include else ("", text)
    try:
        theirs = runner.parse_inclusion_exclusion(pool, *both)
    except ValueError:
        with pytest.raises(ConfigError):
            filter_hosts({name: tuple(range(n)) for name, n in pool.items()}, *both)
        return
    if text:
        ours = filter_hosts({name: tuple(range(n)) for name, n in pool.items()}, *both)
        assert list(ours.items()) == [(name, tuple(slots)) for name, slots in theirs.items()]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "--include": SPECS, "-e": SPECS, "--num_nodes": st.integers(-1, 4).map(str),
            "--num_gpus": st.integers(-1, 5).map(str), "--num_acc": st.just("3"), "--ssh_p": st.just("22"),
        },
    )
)  # fmt: skip
def test_arguments_mean_what_they_mean_to_deepspeed(hostfile: Path, options: dict[str, str]) -> None:
    words = [word for pair in options.items() for word in pair]
    try:
        theirs = by_deepspeed(hostfile, *words)
    except ValueError:
        theirs = []
    if theirs:
        assert hosts("-H", hostfile, *words) == theirs
    else:
        with pytest.raises(ConfigError):
            hosts("-H", hostfile, *words)


def test_all_arguments_of_the_launcher_are_known() -> None:
    """With their values: none is taken for something else."""
    given = runner.parse_args(["script"])
    rest = vars(given).keys() - {"user_script", "user_args", "node_rank", "no_ssh", "hostfile", "autotuning"}
    switches = [f"--{name}" for name in rest if getattr(given, name) is False]
    values = [f"--{name}=1" for name in rest if getattr(given, name) is not False]
    values = [value for value in values if not value.startswith(("--include", "--exclude", "--num_"))]
    found = placement([*switches, *values, "--log_level", "info", "--num_gpus", "2"], {})
    assert found.hosts == (HostSlots("localhost", (0, 1)),) and found.ssh_port == 1


def test_without_a_hostfile() -> None:
    assert hosts() == [("localhost", ())]
    assert hosts("--num_gpus", 2) == [("localhost", (0, 1))]
    assert hosts("--include", "localhost:3,1") == [("localhost", (1, 3))]
    assert hosts(environment={"CUDA_VISIBLE_DEVICES": "3,1"}) == [("localhost", (1, 3))]
    assert hosts(environment={"CUDA_VISIBLE_DEVICES": "GPU-8f2c"}) == [("localhost", ())]
    assert hosts("--num_gpus=1", environment={"CUDA_VISIBLE_DEVICES": "3,1"}) == [("localhost", (0,))]
    pods = ["--no_ssh", "--num_nodes", "3", "--num_gpus", "1", "--node_rank", "2"]
    assert hosts(*pods) == [("host-0", (0,)), ("host-1", (0,)), ("host-2", (0,))]
    found = placement(
        ["--launcher", "SLURM", "--num_gpus", "2", "--num_nodes", "1"], {}, allocated=["n1", "n2"]
    )
    assert found.launcher == "slurm" and found.several and found.hosts == (HostSlots("n1", (0, 1)),)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a slots=2\nb\n", "hostfile, line 2: 'b' is not `HOST slots=NUMBER`"),
        ("a slots=2\n\na slots=2\n", "hostfile, line 3: a is listed twice"),
        ("a slots=0\n", "hostfile, line 1: slots=0"),
        ("a slots=99999\n", "line 1: slots=99999"),
        ("# nothing\n", "lists no host"),
        ("\x1b[31m slots\n", r"\x1b[31m slots"),
    ],
)
def test_a_bad_hostfile_is_told_by_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "hostfile"
    path.write_text(text)
    with pytest.raises(ConfigError) as told:
        hosts("--hostfile", path)
    assert said in str(told.value) and str(path) in str(told.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--hostfile none", "there is no such file"),
        ("--num_nodes 2", "there is this host only"),
        ("--num_nodes x", "invalid int value"),
        ("--no_such 1", "--no_such"),
        ("--h", "ambiguous"),
        ("script.py", "script.py"),
        ("--no_ssh --num_nodes 2 --node_rank 2", "index of one of 2 hosts"),
        ("--include localhost --exclude localhost", "not with --exclude"),
        ("--exclude localhost", "no host"),
        ("--exclude localhost:0", "unknown"),
        ("--num_gpus 5000", "from 1 to 4096"),
    ],
)
def test_bad_arguments_are_refused(words: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        hosts(*words.split())


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_bytes(b"\xff\xfe slots=2")
    with pytest.raises(ConfigError, match="cannot be read"):
        hosts("-H", tmp_path / "hostfile")
    with pytest.raises(ConfigError, match="no such file"):
        hosts("-H", tmp_path)
