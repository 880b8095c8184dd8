"""Hosts made of namespaces: apart where real ones are, and gone with the process that made them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from drills.hosts import Host, Hosts
from drills.namespaces import missing
from megastable.base.errors import ConfigError
from tests.patience import PATIENCE, until

ROOT = Path(__file__).resolve().parents[2]
SMALL = 64 << 20  # bytes of the shared file system
SSH = ["ssh", "-o", "ConnectTimeout=60"]
IN_VAIN = ["ssh", "-o", "ConnectTimeout=1"]

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(tmp_path_factory.mktemp("hosts"), 3, SMALL) as made:
        yield made


@pytest.fixture
def first(hosts: Hosts) -> Host:
    return hosts["first"]


@pytest.fixture
def second(hosts: Hosts) -> Host:
    return hosts["second"]


def said(host: Host, *words: str | Path) -> str:
    done = host.run(words, PATIENCE)
    assert done.returncode == 0, done
    return done.stdout.strip()


def sleepers(host: Host, seconds: str) -> list[psutil.Process]:
    """Not the shells that start them."""
    found = []
    for process in host.find("sleep", seconds):
        with suppress(psutil.NoSuchProcess):
            found += [process] if process.name() == "sleep" else []
    return found


def test_each_has_a_name_an_address_and_the_same_checkout(hosts: Hosts) -> None:
    assert [host.name for host in hosts] == ["first", "second", "third"]
    here = os.uname().nodename
    for host in hosts:
        assert said(host, "hostname") == host.name
        assert said(host, "hostname", "-I") == host.address
        assert said(host, "ls", "/sys/class/net").split() == ["eth0", "lo"]
        assert said(host, "head", "-1", ROOT / "pyproject.toml") == "[build-system]"
    assert os.uname().nodename == here
    assert (hosts.folder / "hostfile").read_text() == "first slots=1\nsecond slots=1\nthird slots=1\n"


@pytest.mark.slow
def test_every_host_reaches_every_host_by_ssh_and_none_a_stranger(hosts: Hosts) -> None:
    for one, other in (("first", "first"), ("first", "second"), ("second", "third"), ("third", "first")):
        assert said(hosts[one], *SSH, other, "hostname") == other
    # Only the ssh on PATH has the key.
    options = "-o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null".split()
    refused = hosts["first"].run(["/usr/bin/ssh", "-F", "none", *options, "second", "true"], PATIENCE)
    assert refused.returncode == 255 and "Permission denied" in refused.stderr


def test_processes_are_not_shared(first: Host, second: Host) -> None:
    started = first.start(["sleep", "1234"])
    assert started.process is not None
    until(lambda: started.process is not None and started.process.cmdline() == ["sleep", "1234"])
    numbers = Path(f"/proc/{started.process.pid}/status").read_text().partition("NSpid:")[2].splitlines()[0]
    inside = numbers.split()[-1]
    assert inside != str(started.process.pid)
    assert said(first, "cat", f"/proc/{inside}/cmdline").split("\0")[:2] == ["sleep", "1234"]
    look = ["bash", "-c", "cat /proc/[0-9]*/cmdline 2> /dev/null | tr '\\0' ' '; true"]
    assert "sleep 1234" in said(first, *look) and "sleep 1234" not in said(second, *look)
    assert [p.pid for p in first.find("sleep", "1234")] == [started.process.pid]
    assert second.find("sleep", "1234") == []
    assert started.send(signal.SIGTERM) and started.wait(PATIENCE) == -signal.SIGTERM
    assert not started.send(signal.SIGTERM)
    assert first.find("sleep", "1234") == []


def test_the_first_process_collects_orphans(first: Host) -> None:
    # Its parent ends before it does.
    said(first, "bash", "-c", "(setsid bash -c 'sleep 0.1; echo > /dev/shm/over' > /dev/null 2>&1 &)")
    until(lambda: first.run(["test", "-e", "/dev/shm/over"]).returncode == 0)
    until(lambda: ") Z " not in said(first, "bash", "-c", "cat /proc/[0-9]*/stat 2> /dev/null; true"))


def test_memory_and_run_are_not_shared_and_the_disk_is(hosts: Hosts, first: Host, second: Host) -> None:
    shared = hosts.shared.folder
    for folder in ("/dev/shm", "/run"):
        said(first, "touch", f"{folder}/mine")
        assert second.run(["test", "-e", f"{folder}/mine"]).returncode == 1
        assert not Path(f"{folder}/mine").exists()
    said(first, "bash", "-c", f"echo hello > {shared}/greeting")
    assert said(second, "cat", shared / "greeting") == "hello"
    assert (hosts.shared.outside / "greeting").read_text() == "hello\n"
    assert not (shared / "greeting").exists()  # the machine itself does not see the mount


def test_output_environment_and_folder_of_a_process(
    first: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LATE", "not theirs")
    log = tmp_path / "log"
    for word in ("one", "two"):
        started = first.start(
            ["bash", "-c", 'echo "$WORD $RANK $LATE"; pwd; exit 3'], log, {"WORD": word}, tmp_path
        )
        assert started.wait(PATIENCE) == 3
    assert log.read_text() == f"one  \n{tmp_path}\ntwo  \n{tmp_path}\n"
    with pytest.raises(subprocess.TimeoutExpired):
        first.run(["sleep", "4321"], 0.2)
    until(lambda: not sleepers(first, "4321"))


def test_ranks_are_found_by_their_number(first: Host, second: Host) -> None:
    for host, rank in ((first, 1), (first, 0), (second, 2)):
        host.start(["bash", "-c", "sleep 999 & wait"], environment={"RANK": str(rank)})
    until(lambda: [len(sleepers(first, "999")), len(sleepers(second, "999"))] == [2, 1])
    assert list(first.ranks()) == [0, 1] and list(second.ranks()) == [2]
    assert all(process.cmdline()[0] == "bash" for process in first.ranks().values())  # not its child
    for process in [*sleepers(first, "999"), *sleepers(second, "999")]:
        process.kill()


@pytest.mark.slow
def test_a_cut_link_loses_everything_and_a_joined_one_nothing_more(first: Host, second: Host) -> None:
    # One connection over all of it: what it sends meanwhile arrives afterwards.
    slow = first.start([*SSH, "second", "for i in 1 2 3 4; do echo $i; sleep 0.2; done > /dev/shm/count"])
    until(lambda: sleepers(second, "0.2"))
    second.cut()
    refused = first.run([*IN_VAIN, "second", "true"], PATIENCE)
    assert refused.returncode == 255, refused
    assert said(first, *SSH, "third", "hostname") == "third"
    second.join()
    assert said(first, *SSH, "second", "hostname") == "second"
    assert slow.wait(PATIENCE) == 0
    assert said(second, "cat", "/dev/shm/count").split() == list("1234")


@pytest.mark.slow
def test_a_host_without_power_is_silent_and_comes_back_empty(hosts: Hosts, first: Host) -> None:
    third = hosts["third"]
    working = third.start(["sleep", "777"])
    said(third, "touch", "/dev/shm/mine")
    # A peer that would be told at once if the connection were closed, and that keeps asking.
    asking = "-o ServerAliveInterval=1 -o ServerAliveCountMax=1000".split()
    peer = first.start([*SSH, *asking, "third", "sleep 777"])
    until(lambda: len(sleepers(third, "777")) == 2)
    assert working.send(signal.SIGSTOP)  # which nothing but power_off ends
    third.power_off()
    third.power_off()
    assert working.wait(PATIENCE) == -signal.SIGKILL and not third.on
    with pytest.raises(ConfigError, match="host third is off"):
        third.run(["true"])
    assert first.run([*IN_VAIN, "third", "true"], PATIENCE).returncode == 255
    assert peer.poll() is None
    third.power_on()
    assert said(first, *SSH, "third", "hostname") == "third"
    assert third.run(["test", "-e", "/dev/shm/mine"]).returncode == 1
    assert sleepers(third, "777") == []
    assert peer.wait(PATIENCE) == 255  # now it hears that nobody knows its connection


def test_sshd_dies_and_is_started_again(first: Host, second: Host) -> None:
    peer = first.start([*SSH, "second", "exec sleep 555"])
    until(lambda: sleepers(second, "555"))
    assert second.kill_sshd()
    assert peer.wait(PATIENCE) == 255
    refused = first.run([*SSH, "second", "true"], PATIENCE)
    assert refused.returncode == 255 and "refused" in refused.stderr
    assert len(sleepers(second, "555")) == 1  # what it ran lives on
    sleepers(second, "555")[0].kill()
    second.start_sshd()
    assert said(first, *SSH, "second", "hostname") == "second"


@pytest.mark.slow
def test_a_slow_link_is_slow(first: Host, second: Host) -> None:
    if reason := second.cannot_slow():
        pytest.skip(reason)

    def seconds() -> float:
        began = time.monotonic()
        assert said(first, *SSH, "second", "head -c 100000 /dev/zero").count("\0") == 100_000
        return time.monotonic() - began

    second.slow(800_000)
    slow = seconds()
    second.fast()
    assert slow > 0.8  # 100 kB at 100 kB/s, but for the first packets
    assert "tbf" not in said(second, "tc", "qdisc", "show", "dev", "eth0")
    seconds()


def test_a_frozen_disk_stalls_writers_until_it_thaws(hosts: Hosts, first: Host) -> None:
    disk = hosts.shared
    if disk.cannot_freeze is not None:
        with pytest.raises(ConfigError, match="cannot be stalled"):
            disk.freeze()
        pytest.skip(disk.cannot_freeze)
    disk.freeze()
    disk.freeze()
    writer = first.start(["bash", "-c", f"echo written > {disk.folder}/late"])
    assert writer.process is not None
    until(lambda: writer.process is not None and writer.process.status() == "disk-sleep")
    assert writer.send(signal.SIGKILL)
    time.sleep(0.1)
    assert writer.poll() is None  # uninterruptible
    disk.thaw()
    disk.thaw()
    assert writer.wait(PATIENCE) in (0, -signal.SIGKILL)
    said(first, "bash", "-c", f"echo written > {disk.folder}/later")


def test_a_disk_that_somebody_else_froze_is_an_error(hosts: Hosts) -> None:
    disk = hosts.shared
    if disk.cannot_freeze is not None:
        pytest.skip(disk.cannot_freeze)
    freezer = ["nsenter", f"--target={hosts.room}", "--mount", "--", "fsfreeze"]
    subprocess.run([*freezer, "-f", disk.folder], check=True)
    try:
        with pytest.raises(ConfigError, match=r"cannot be stalled here: .*busy"):
            disk.freeze()
        disk.thaw()
    finally:
        subprocess.run([*freezer, "-u", disk.folder], check=True)


def test_a_freeze_ends_though_its_folder_has_moved(tmp_path: Path) -> None:
    with Hosts(tmp_path, 1, SMALL) as hosts:
        if hosts.shared.cannot_freeze is not None:
            pytest.skip(hosts.shared.cannot_freeze)
        hosts.shared.freeze()
        hosts.shared.folder.rename(tmp_path / "moved")
    until(lambda: not loop_devices(tmp_path))


def test_a_full_disk_takes_nothing_until_it_is_freed(hosts: Hosts, first: Host) -> None:
    disk = hosts.shared
    free = disk.room()
    assert SMALL / 2 < free < SMALL
    disk.fill()
    assert disk.room() == 0
    write = ["dd", "if=/dev/zero", f"of={disk.folder}/more", "bs=64k", "count=1", "conv=fsync"]
    refused = first.run(write, PATIENCE)
    assert refused.returncode == 1 and "No space left" in refused.stderr
    disk.free()
    said(first, *write)
    assert disk.room() > free - (1 << 20)


OWNER = """
import json, signal, sys, time
from pathlib import Path
from drills.hosts import Hosts
with Hosts(Path(sys.argv[1]), 2, 64 << 20) as hosts:
    started = [host.start(["bash", "-c", "(setsid sleep 888 &); sleep 888; true"]) for host in hosts]
    while any(len(host.find("sleep 888")) < 3 for host in hosts):
        time.sleep(0.02)
    started[0].send(signal.SIGSTOP)
    processes = [p.pid for host in hosts for p in [*host.processes()]] + [host.pid for host in hosts] + [hosts.room]
    if hosts.shared.cannot_freeze is None:
        hosts.shared.freeze()
        writer = hosts["first"].start(["touch", hosts.shared.folder / "late"])
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
def test_nothing_is_left_of_them(how: str, tmp_path: Path) -> None:
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


def test_a_host_that_cannot_boot_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drills.hosts.SSHD", "NoSuchOption\n")
    with pytest.raises(ConfigError, match=r"sshd on host first: .*NoSuchOption"), Hosts(tmp_path):
        raise AssertionError("made")
    until(lambda: not loop_devices(tmp_path))
    until(
        lambda: (
            not any(
                str(tmp_path) in " ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])
            )
        )
    )


def test_without_a_loop_device_the_shared_disk_can_fill_up_but_not_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drills.hosts.MAKE", ["mkfs.none"])
    with Hosts(tmp_path, 1, SMALL) as hosts:
        disk = hosts.shared
        assert "tmpfs" in said(hosts["first"], "stat", "-fc", "%T", disk.folder)
        with pytest.raises(ConfigError, match=r"cannot be stalled here: .*mkfs\.none"):
            disk.freeze()
        assert SMALL / 2 < disk.room() <= SMALL
        disk.fill()
        refused = hosts["first"].run(["cp", ROOT / "LICENSE", disk.folder], PATIENCE)
        assert disk.room() == 0 and "No space left" in refused.stderr
        disk.free()
        said(hosts["first"], "cp", ROOT / "LICENSE", disk.folder)
