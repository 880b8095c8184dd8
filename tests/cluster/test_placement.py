"""Where a run takes place, from the arguments for the launcher."""

from __future__ import annotations

import mmap
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from megastable.base.errors import ConfigError
from megastable.cluster import placement as module
from megastable.cluster.hostfile import HostSlots
from megastable.cluster.hosts import collect_exported_variables
from megastable.cluster.placement import HostChoice, interface, placed
from megastable.cluster.reach import Local, Ssh
from tests.patience import PATIENCE


@pytest.fixture
def hostfile(tmp_path: Path) -> str:
    (tmp_path / "hostfile").write_text("node-1 slots=8\nnode-2 slots=8\nnode-3 slots=8\n")
    return str(tmp_path / "hostfile")


def test_one_host_is_left_to_the_launcher(hostfile: str) -> None:
    for given in ([], ["--num_gpus", "2"], ["--hostfile", hostfile, "--num_nodes", "1"]):
        place = placed(given, {})
        assert not place.hosts and place.given == given


def test_several_hosts_by_ssh(hostfile: str) -> None:
    place = placed(
        ["--hostfile", hostfile, "--exclude", "node-2", "--ssh_port", "23", "--bind_cores_to_rank"], {}
    )
    assert [(host.name, len(host.slots)) for host in place.hosts] == [("node-1", 8), ("node-3", 8)]
    assert place.reach == Ssh(23) and place.given == ["--bind_cores_to_rank"]
    words = place.reach.words("node-3", ["echo", "a b"])
    assert words[-2] == "node-3" and words[-1].endswith("echo 'a b'") and "-p 23" in " ".join(words)


# The fourth is a name that resolves without a name server, and is none of the first three.
@pytest.mark.parametrize("other", ["127.0.0.1", "::1", socket.gethostname(), "127.1"])
def test_two_names_of_this_host_are_refused_with_both(tmp_path: Path, other: str) -> None:
    """It can have one agent: the run would wait for the other for ever."""
    (tmp_path / "twice").write_text(f"localhost slots=1\n{other} slots=1\n")
    with pytest.raises(ConfigError, match=rf"localhost and {other} are both this host"):
        placed(["--hostfile", str(tmp_path / "twice")], {})


def test_names_that_nobody_resolves_are_those_of_other_hosts(
    hostfile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the name server hangs, too; the run goes on without its answer."""
    given = ["--hostfile", hostfile]
    asked = mmap.mmap(-1, 1)  # shared with the process that waits

    def hang(*_: object, flags: int) -> None:
        if flags:  # an address: nobody is asked
            raise socket.gaierror(socket.EAI_NONAME, "no address")
        asked[0] = 1
        time.sleep(PATIENCE)

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    monkeypatch.setattr(module, "RESOLVED", 1.0)
    assert len(placed(given, {}).hosts) == 3 and asked[0]
    monkeypatch.setattr(
        socket, "getaddrinfo", Mock(side_effect=socket.gaierror(socket.EAI_NONAME, "unknown"))
    )
    assert len(placed(given, {}).hosts) == 3


def test_hosts_that_start_their_own() -> None:
    place = placed(["--no_ssh", "--num_nodes", "3", "--num_gpus", "8", "--node_rank", "2"], {})
    assert [host.name for host in place.hosts] == ["host-0", "host-1", "host-2"] and place.node == 2
    assert place.reach == Local("host-0") and place.by_themselves
    with pytest.raises(ConfigError, match="host-1 cannot be reached"):
        place.reach.words("host-1", ["true"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--hostfile", "nowhere"], "nowhere: there is no such file"),
        (["--num_nodes", "2"], "without --hostfile"),
        (["--no_ssh", "--num_nodes", "2", "--num_gpus", "8"], "0 to 1"),
        (["--no_ssh", "--num_nodes", "2", "--node_rank", "0"], "Say --num_gpus N"),
        (["--launcher", "slurm", "--num_gpus", "8"], "no allocation"),
        (["--num_gpus", "many"], "invalid int value"),
    ],
)
def test_bad_arguments_are_refused(given: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        placed(given, {})


def test_the_address_to_listen_on() -> None:
    here = HostChoice([], Local(), [])
    assert interface(None, here) == interface("lo", here) == interface("127.0.0.1", here) == "127.0.0.1"
    for unknown in ("eth77", "10.1.2.3", "fd00::77", "::"):
        with pytest.raises(ConfigError, match=r"no such interface or address here; there are .*\blo\b"):
            interface(unknown, here)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "no-such.invalid",
            r"host no-such.invalid: its name leads to no address .*correct it in the hostfile",
        ),
        ("127.0.0.2", "no network interface leads to another host"),
    ],
)
def test_a_wrong_name_of_a_host_is_blamed_before_the_interface(name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        interface(None, HostChoice([HostSlots(name, (0,))], Ssh(None), []))


def test_ipv6_addresses_to_listen_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def address(family: socket.AddressFamily, text: str) -> SimpleNamespace:
        return SimpleNamespace(family=family, address=text)

    local = address(socket.AF_INET6, "fe80::1%eth0")
    both = [local, address(socket.AF_INET6, "fd00::1"), address(socket.AF_INET, "10.0.0.1")]
    one = [address(socket.AF_PACKET, "02:00:00:00:00:01"), local, address(socket.AF_INET6, "fd00::2")]
    there = {"eth0": both, "ib0": one, "eth1": [local]}
    monkeypatch.setattr("psutil.net_if_addrs", lambda: there)
    here = HostChoice([], Local(), [])
    assert interface("eth0", here) == "10.0.0.1"
    assert interface("ib0", here) == interface("fd00:0::0002", here) == "fd00::2"
    assert interface("fd00::1", here) == "fd00::1"
    for wanted in ("eth1", "fe80::1", "fe80::1%eth0"):
        with pytest.raises(ConfigError, match="link-local"):
            interface(wanted, here)
    with pytest.raises(ConfigError, match=r"there are eth0, ib0$"):
        interface("fd00::3", here)


def test_variables_for_other_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
