"""Hosts made of namespaces: apart where real ones are, and gone with the process that made them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from drills.hosts import Host, Hosts
from drills.namespaces import find_missing
from megastable.base.errors import ConfigError
from tests.patience import PATIENCE, until

ROOT = Path(__file__).resolve().parents[2]
SMALL = 64 << 20  # bytes of the shared file system
SSH = ["ssh", "-o", "ConnectTimeout=60"]
IN_VAIN = ["ssh", "-o", "ConnectTimeout=1"]

pytestmark = pytest.mark.skipif(find_missing() is not None, reason=str(find_missing()))


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(tmp_path_factory.mktemp("hosts"), 3, SMALL) as made:
        yield made


@pytest.fixture
def first(hosts: Hosts) -> Host:
    return hosts["first"]


def said(host: Host, *words: str | Path) -> str:
    done = host.run_process(words, PATIENCE)
    assert done.returncode == 0, done
    return done.stdout.strip()


def sleepers(host: Host, seconds: str) -> list[psutil.Process]:
    """Not the shells that start them."""
    found = []
    for process in host.find_processes("sleep", seconds):
        with suppress(psutil.NoSuchProcess):
            found += [process] if process.name() == "sleep" else []
    return found


@pytest.mark.slow
def test_power_off_leaves_a_silent_host(hosts: Hosts, first: Host) -> None:
    third = hosts["third"]
    working = third.start_process(["sleep", "777"])
    said(third, "touch", "/dev/shm/mine")
    # A peer that would be told at once if the connection were closed, and that keeps asking.
    asking = "-o ServerAliveInterval=1 -o ServerAliveCountMax=1000".split()
    peer = first.start_process([*SSH, *asking, "third", "sleep 777"])
    until(lambda: len(sleepers(third, "777")) == 2)
    assert working.send(signal.SIGSTOP)  # which nothing but power_off ends
    third.power_off()
    third.power_off()
    assert working.wait(PATIENCE) == -signal.SIGKILL and not third.on
    with pytest.raises(ConfigError, match="host third is off"):
        third.run_process(["true"])
    assert first.run_process([*IN_VAIN, "third", "true"], PATIENCE).returncode == 255
    assert peer.poll() is None
    third.power_on()
    assert said(first, *SSH, "third", "hostname") == "third"
    assert third.run_process(["test", "-e", "/dev/shm/mine"]).returncode == 1
    assert sleepers(third, "777") == []
    assert peer.wait(PATIENCE) == 255  # now it hears that nobody knows its connection


OWNER = """
import json, signal, sys, time
from pathlib import Path
from drills.hosts import Hosts
with Hosts(Path(sys.argv[1]), 2, 64 << 20) as hosts:
    started = [host.start_process(["bash", "-c", "(setsid sleep 888 &); sleep 888; true"]) for host in hosts]
    while any(len(host.find_processes("sleep 888")) < 3 for host in hosts):
        time.sleep(0.02)
    started[0].send(signal.SIGSTOP)
    processes = [p.pid for host in hosts for p in [*host.processes()]] + [host.pid for host in hosts] + [hosts.room]
    if hosts.shared.cannot_freeze is None:
        hosts.shared.freeze_disk()
        writer = hosts["first"].start_process(["touch", hosts.shared.folder / "late"])
        while writer.process.status() != "disk-sleep":
            time.sleep(0.02)
        processes.append(writer.process.pid)
    print(json.dumps(processes), flush=True)
    if sys.argv[2] == "killed":
        time.sleep(600)
    if sys.argv[2] == "fails":
        raise RuntimeError("of the owner")
"""


@pytest.mark.quick("ends")
@pytest.mark.parametrize("how", ["killed", "fails", "ends"])
def test_hosts_leave_nothing_however_they_end(how: str, tmp_path: Path) -> None:
    """However their owner ends, and with a writer that stalls on the frozen disk."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, tmp_path, how], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        assert owner.stdout is not None
        processes = json.loads(owner.stdout.readline())
        assert len(processes) > 10 and (how != "killed" or all(alive(pid) for pid in processes))
        if how == "killed":
            owner.kill()
        _, complaint = owner.communicate(timeout=PATIENCE)
    finally:
        owner.kill()
    assert owner.returncode == {"killed": -signal.SIGKILL, "fails": 1, "ends": 0}[how], complaint
    until(lambda: not any(alive(pid) for pid in processes))
    until(lambda: not loop_devices(tmp_path))
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    assert not (tmp_path / "shared.ext4").exists() and list((tmp_path / "shared").iterdir()) == []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def loop_devices(folder: Path) -> list[str]:
    """Loop devices whose images lie in `folder`."""
    found = []
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            if backing.read_text().startswith(str(folder)):
                found.append(backing.parts[3])
        except OSError:  # freed meanwhile
            continue
    return found
