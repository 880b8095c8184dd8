"""Where a run takes place: hosts by hostfile and arguments, as DeepSpeed's own launcher has them; addresses."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from deepspeed.launcher import runner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megastable.base.errors import ConfigError
from megastable.cluster.hosts import collect_exported_variables
from megastable.cluster.launcher import (
    HostChoice,
    HostSlots,
    choose_hosts,
    choose_interface,
    filter_hosts,
    parse_hostfile,
    read_launch_placement,
)
from megastable.cluster.reach import Local, Ssh


def test_placed_reaches_several_hosts_by_ssh_and_leaves_one_to_the_launcher(tmp_path: Path) -> None:
    file = tmp_path / "hostfile"
    file.write_text("node-1 slots=8\nnode-2 slots=8\nnode-3 slots=8\n")
    for words in ([], ["--num_gpus", "2"], ["--hostfile", str(file), "--num_nodes", "1"]):
        place = choose_hosts(words, {})
        assert not place.hosts and place.given == words
    asked = ["--hostfile", str(file), "--exclude", "node-2", "--ssh_port", "23", "--bind_cores_to_rank"]
    place = choose_hosts(asked, {})
    assert [(host.name, len(host.slots)) for host in place.hosts] == [("node-1", 8), ("node-3", 8)]
    assert place.reach == Ssh(23) and place.given == ["--bind_cores_to_rank"]
    words = place.reach.build_command("node-3", ["echo", "a b"])
    assert words[-2] == "node-3" and words[-1].endswith("echo 'a b'") and "-p 23" in " ".join(words)


# The fourth is a name that resolves without a name server, and is none of the first three.
@pytest.mark.parametrize("other", ["127.0.0.1", "::1", socket.gethostname(), "127.1"])
def test_placed_refuses_two_names_of_this_host(tmp_path: Path, other: str) -> None:
    """It can have one agent: the run would wait for the other for ever."""
    (tmp_path / "twice").write_text(f"localhost slots=1\n{other} slots=1\n")
    with pytest.raises(ConfigError, match=rf"localhost and {other} are both this host"):
        choose_hosts(["--hostfile", str(tmp_path / "twice")], {})


def test_placed_knows_hosts_that_start_their_own() -> None:
    place = choose_hosts(["--no_ssh", "--num_nodes", "3", "--num_gpus", "8", "--node_rank", "2"], {})
    assert [host.name for host in place.hosts] == ["host-0", "host-1", "host-2"] and place.node == 2
    assert place.reach == Local("host-0") and place.by_themselves
    with pytest.raises(ConfigError, match="host-1 cannot be reached"):
        place.reach.build_command("host-1", ["true"])


def test_interface_is_the_address_to_listen_on() -> None:
    here = HostChoice([], Local(), [])
    assert (
        choose_interface(None, here)
        == choose_interface("lo", here)
        == choose_interface("127.0.0.1", here)
        == "127.0.0.1"
    )
    for unknown in ("eth77", "10.1.2.3", "fd00::77", "::"):
        with pytest.raises(ConfigError, match=r"no such interface or address here; there are .*\blo\b"):
            choose_interface(unknown, here)


@pytest.mark.parametrize(
    ("name", "told"),
    [("no-such.invalid", "its name leads to no address .*correct it in the hostfile"),
     ("127.0.0.2", "no network interface leads to another host")],
)  # fmt: skip
def test_interface_blames_a_wrong_name_of_a_host_first(name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        choose_interface(None, HostChoice([HostSlots(name, (0,))], Ssh(None), []))


def test_interface_has_ipv6_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def address(family: socket.AddressFamily, text: str) -> SimpleNamespace:
        return SimpleNamespace(family=family, address=text)

    local = address(socket.AF_INET6, "fe80::1%eth0")
    both = [local, address(socket.AF_INET6, "fd00::1"), address(socket.AF_INET, "10.0.0.1")]
    one = [address(socket.AF_PACKET, "02:00:00:00:00:01"), local, address(socket.AF_INET6, "fd00::2")]
    there = {"eth0": both, "ib0": one, "eth1": [local]}
    monkeypatch.setattr("psutil.net_if_addrs", lambda: there)
    here = HostChoice([], Local(), [])
    assert choose_interface("eth0", here) == "10.0.0.1"
    assert choose_interface("ib0", here) == choose_interface("fd00:0::0002", here) == "fd00::2"
    assert choose_interface("fd00::1", here) == "fd00::1"
    for wanted in ("eth1", "fe80::1", "fe80::1%eth0"):
        with pytest.raises(ConfigError, match="link-local"):
            choose_interface(wanted, here)
    with pytest.raises(ConfigError, match=r"there are eth0, ib0$"):
        choose_interface("fd00::3", here)


def test_collect_exported_variables_for_other_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / ".deepspeed_env").write_text("# fast\n\nNCCL_IB_HCA=mlx5\nMINE=a=b\n")
    environment = {"NCCL_IB_HCA": "mlx4", "NCCL_DEBUG": "INFO", "SECRET": "x", "PYTHONPATH": "/lib"}
    found = collect_exported_variables(environment, tmp_path)
    assert found == {
        "NCCL_IB_HCA": "mlx5", "NCCL_DEBUG": "INFO", "MINE": "a=b", "PYTHONPATH": f"{tmp_path}:/lib",
    }  # fmt: skip
    (tmp_path / "bad").write_text("A=1\nexport\n")
    with pytest.raises(ConfigError, match="line 2 is not NAME=VALUE"):
        collect_exported_variables({"DS_ENV_FILE": str(tmp_path / "bad")}, tmp_path)


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
    found = read_launch_placement([str(word) for word in words], environment or {})
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
def test_parse_hostfile_is_deepspeeds(lines: list[str]) -> None:
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
def test_filter_hosts_is_deepspeeds(text: str, include: bool) -> None:
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
def test_placement_is_deepspeeds(hostfile: Path, options: dict[str, str]) -> None:
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


def test_placement_knows_all_arguments_of_the_launcher() -> None:
    """With their values: none is taken for something else."""
    given = runner.parse_args(["script"])
    rest = vars(given).keys() - {"user_script", "user_args", "node_rank", "no_ssh", "hostfile", "autotuning"}
    switches = [f"--{name}" for name in rest if getattr(given, name) is False]
    values = [f"--{name}=1" for name in rest if getattr(given, name) is not False]
    values = [value for value in values if not value.startswith(("--include", "--exclude", "--num_"))]
    found = read_launch_placement([*switches, *values, "--log_level", "info", "--num_gpus", "2"], {})
    assert found.hosts == (HostSlots("localhost", (0, 1)),) and found.ssh_port == 1


def test_placement_without_a_hostfile() -> None:
    assert hosts() == [("localhost", ())]
    assert hosts("--num_gpus", 2) == [("localhost", (0, 1))]
    assert hosts("--include", "localhost:3,1") == [("localhost", (1, 3))]
    assert hosts(environment={"CUDA_VISIBLE_DEVICES": "3,1"}) == [("localhost", (1, 3))]
    assert hosts(environment={"CUDA_VISIBLE_DEVICES": "GPU-8f2c"}) == [("localhost", ())]
    assert hosts("--num_gpus=1", environment={"CUDA_VISIBLE_DEVICES": "3,1"}) == [("localhost", (0,))]
    pods = ["--no_ssh", "--num_nodes", "3", "--num_gpus", "1", "--node_rank", "2"]
    assert hosts(*pods) == [("host-0", (0,)), ("host-1", (0,)), ("host-2", (0,))]
    found = read_launch_placement(
        ["--launcher", "SLURM", "--num_gpus", "2", "--num_nodes", "1"], {}, allocated=["n1", "n2"]
    )
    assert found.launcher == "slurm" and found.several and found.hosts == (HostSlots("n1", (0, 1)),)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a slots=2\nb\n", "hostfile, line 2: 'b' is not `HOST slots=NUMBER`"), ("# nothing\n", "lists no host"),
        ("a slots=2\n\na slots=2\n", "hostfile, line 3: a is listed twice"), ("a slots=99999\n", "line 1: slots=99999"),
        ("a slots=0\n", "hostfile, line 1: slots=0"), ("\x1b[31m slots\n", r"\x1b[31m slots"),
    ],
)  # fmt: skip
def test_parse_hostfile_refuses_a_bad_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "hostfile"
    path.write_text(text)
    with pytest.raises(ConfigError) as told:
        hosts("--hostfile", path)
    assert said in str(told.value) and str(path) in str(told.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--hostfile none", "there is no such file"), ("--hostfile .", "no such file"),
        ("--num_nodes 2", "there is this host only"), ("--num_nodes x", "invalid int value"),
        ("--no_such 1", "--no_such"), ("--h", "ambiguous"), ("script.py", "script.py"),
        ("--no_ssh --num_nodes 2 --node_rank 2", "index of one of 2 hosts"), ("--exclude localhost", "no host"),
        ("--no_ssh --num_nodes 2 --node_rank 0", "Say --num_gpus N"),
        ("--include localhost --exclude localhost", "not with --exclude"), ("--exclude localhost:0", "unknown"),
        ("--num_gpus 5000", "from 1 to 4096"), ("--launcher slurm --num_gpus 8", "no allocation"),
    ],
)  # fmt: skip
def test_placed_refuses_bad_arguments(words: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        choose_hosts(words.split(), {})
