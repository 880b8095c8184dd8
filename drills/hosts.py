"""Several hosts on one machine: each with its own processes, network, name, /dev/shm and sshd.

    with Hosts(folder, 3) as hosts:
        hosts["first"].run(["ssh", "second", "hostname"])
        hosts["third"].power_off()

They meet on a switch, a bridge that belongs to no host and whose ports can be cut, and share one file system,
`hosts.shared`, for run directories. The checkout, the environment and /tmp are those of the machine, at the same paths.
Needs root; everything ends with the process that made them, however that ends (namespaces.py).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from drills.namespaces import (
    GROUP,
    HOST,
    READY,
    ROOM,
    SECONDS,
    First,
    Started,
    enter_command,
    find_missing,
    run_command,
)
from megastable.base.errors import ConfigError

SIZE = 1 << 30  # bytes
LONGEST = 900  # seconds that a freeze lasts when nobody ends it
BLOCK = 1 << 20  # bytes of the last writes that fill the disk
BALLAST, FILES = "ballast", 8
MAKE = "mkfs.ext4 -q -F -m 0 -E lazy_itable_init=1,lazy_journal_init=1".split()
# Thaws when its input ends, too, so also when the process that has frozen it is killed: before everything else that
# ends with that process, whose writers nothing can kill while they are frozen.
# By the folder that it stands in: the path may be renamed or removed meanwhile, outside.
FREEZE = f'cd "$0" && fsfreeze -f . && {{ echo {READY}; read -rt {LONGEST} _; fsfreeze -u .; }}'
NAMES = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
NETWORK = "10.77.0"  # exists only in the namespaces
SWITCH = """
mount -t tmpfs tmpfs /run
mount --bind "$1" /etc/hosts
ip link add switch type bridge
ip link set switch up
ip link set lo up
"""
# PID 1 of a host. As an init it also collects the orphans: what died must not stay as a zombie.
BOOT = """
hostname "$1"
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir /run/sshd
ip link set lo up
"""
SSHD = """HostKey {ssh}/host
AuthorizedKeysFile {ssh}/user.pub
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PidFile none
MaxStartups 100
"""
# A program, as pdsh and the deepspeed launcher start `ssh` without asking us.
SSH = """#!/bin/sh
exec {program} -F none -i {ssh}/user -o IdentitiesOnly=yes -o BatchMode=yes -o LogLevel=ERROR \\
  -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null "$@"
"""
# Of a rank or a task: a launcher on a host of ours would take itself for one.
FOREIGN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
QUEUE = "burst 32kbit latency 400ms".split()  # of a slow link


class SharedDisk:
    """The file system that hosts share for their run directories: it can stall and fill up without a disk failing.

    An image with ext4 on a loop device, where that is allowed: a frozen file system stalls every writer,
    uninterruptibly, as a network file system without its server does. Elsewhere a tmpfs, which can only fill up. It is
    mounted at `folder` in the mount namespace of process `room`, which alone sees it. size: bytes.
    cannot_freeze: why not, if so.
    """

    def __init__(self, room: int, folder: Path, size: int = SIZE) -> None:
        self._mount, self.folder = enter_command(room, "mount"), folder
        self.outside = Path(f"/proc/{room}/root") / folder.relative_to("/")  # for a process outside
        self._frozen: subprocess.Popen[str] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self.cannot_freeze = self._mount_image(size)
        if self.cannot_freeze is not None:
            run_command([*self._mount, "mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder])

    def _mount_image(self, size: int) -> str | None:
        """Why it cannot be done, if so."""
        image_path = self.folder.with_suffix(".ext4")
        try:
            with image_path.open("wb") as image_file:
                image_file.truncate(size)
            run_command([*MAKE, image_path])
            # The kernel frees the loop device with the last mount, and then the image, which has no name any more.
            run_command([*self._mount, "mount", "-o", "loop", image_path, self.folder])
        except (ConfigError, OSError) as error:
            return str(error)
        finally:
            image_path.unlink(missing_ok=True)
        return None

    def freeze_disk(self) -> None:
        """Stall every writer until `thaw_disk`. Raises ConfigError where that is not possible."""
        if self.cannot_freeze is not None:
            raise ConfigError(f"the shared directory cannot be stalled here: {self.cannot_freeze}")
        if self._frozen is not None:
            return
        freeze_process = subprocess.Popen(
            [*self._mount, "bash", "-c", FREEZE, self.folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert freeze_process.stdout is not None
        self._frozen = freeze_process
        if freeze_process.stdout.readline().strip() != READY:
            _, complaint = freeze_process.communicate()
            self._frozen = None
            raise ConfigError(f"the shared directory cannot be stalled here: {complaint.strip()}")

    def thaw_disk(self) -> None:
        """Let writers go on; nothing if it is not frozen."""
        if self._frozen is not None:
            self._frozen.communicate()
            self._frozen = None

    def fill_disk(self) -> None:
        """Leave no byte free, until `empty_disk`."""
        ballast_folder = self.outside / BALLAST
        ballast_folder.mkdir()
        # The last blocks need several files: a file that takes one may need another one to remember where.
        for number in range(FILES):
            with (ballast_folder / str(number)).open("wb", buffering=0) as ballast_file, suppress(OSError):
                os.posix_fallocate(ballast_file.fileno(), 0, max(1, self.free_bytes() - BLOCK))
            with (ballast_folder / str(number)).open("ab", buffering=0) as ballast_file, suppress(OSError):
                while self.free_bytes():
                    ballast_file.write(bytes(BLOCK))

    def empty_disk(self) -> None:
        """Give back what `fill_disk` took."""
        shutil.rmtree(self.outside / BALLAST, ignore_errors=True)

    def free_bytes(self) -> int:
        """Free bytes."""
        disk_status = os.statvfs(self.outside)
        return disk_status.f_bavail * disk_status.f_frsize


class Host:
    """One host, on from the start. name: also its host name. address: of its eth0."""

    def __init__(self, hosts: Hosts, number: int) -> None:
        self._hosts, self.name = hosts, NAMES[number]
        self.address, self._port = f"{NETWORK}.{number + 1}", f"port{number}"
        self._card = f"02:00:00:00:00:{number + 1:02x}"
        self._first: First | None = None
        self._started: list[Started] = []
        self.power_on()

    def __str__(self) -> str:
        return self.name

    @property
    def on(self) -> bool:
        return self._first is not None and self._first.alive

    @property
    def pid(self) -> int:
        """Its process 1, as this process numbers it. Raises ConfigError while it is off."""
        if self._first is None or not self._first.alive:
            raise ConfigError(f"host {self.name} is off")
        return self._first.pid

    # Processes

    def start_process(
        self,
        words: Sequence[str | Path],
        output: Path | None = None,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> Started:
        """Start a process. output: a file that its output is added to; environment: beside the hosts' own; folder: to
        work in, this process's own if None."""
        command, variables = self._call(words, environment, folder)
        with (output or Path(os.devnull)).open("ab") as log_file:
            started_process = Started(command, variables, log_file.fileno())
        self._started.append(started_process)
        return started_process

    def run_process(
        self, words: Sequence[str | Path], seconds: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a process to its end, within `seconds`. Raises subprocess.TimeoutExpired; the process is killed then."""
        command, variables = self._call(words, None, None)
        return subprocess.run(
            command, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds,
            process_group=GROUP,
        )  # fmt: skip

    def _call(
        self, words: Sequence[str | Path], environment: Mapping[str, str] | None, folder: Path | None
    ) -> tuple[list[str | Path], dict[str, str]]:
        enter_words = enter_command(self.pid, "mount", "net", "pid", "uts", "ipc")
        work_option = f"--chdir={folder or Path.cwd()}"
        inside_words: list[str | Path] = ["env", work_option, "setpriv", "--pdeathsig", "KILL", "--"]
        return [*enter_words, *inside_words, *words], {**self._hosts.environment, **(environment or {})}

    def processes(self) -> Iterator[psutil.Process]:
        """All its living processes but the first, as this process numbers them."""
        own_namespace = os.readlink(f"/proc/{self.pid}/ns/pid")
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                if process.pid != self.pid and os.readlink(f"/proc/{process.pid}/ns/pid") == own_namespace:
                    yield process

    def find_processes(self, *words: str) -> list[psutil.Process]:
        """Its processes with all of `words` in their command line, oldest first; shells that start it too."""
        found_processes = []
        for process in self.processes():
            with suppress(psutil.Error):
                if all(word in " ".join(process.cmdline()) for word in words):
                    found_processes.append((process.create_time(), process.pid, process))
        return [process for *_, process in sorted(found_processes, key=lambda of: of[:2])]

    def ranks(self) -> dict[int, psutil.Process]:
        """Its ranks, by number: of the processes with a RANK the oldest, as children inherit it."""
        found_ranks: dict[int, tuple[float, psutil.Process]] = {}
        for process in self.processes():
            with suppress(psutil.Error):
                rank_text = process.environ().get("RANK", "")
                time_born = process.create_time()
                if rank_text.isdecimal() and time_born < found_ranks.get(int(rank_text), (float("inf"),))[0]:
                    found_ranks[int(rank_text)] = time_born, process
        return {rank_text: process for rank_text, (_, process) in sorted(found_ranks.items())}

    # Power, sshd and link

    def power_on(self) -> None:
        """Boot: the same name and address; /dev/shm, /run and the process table are empty."""
        if self.on:
            return
        self.power_off()  # what is left of it, if its first process was killed
        try:
            self._boot()
        except BaseException:
            self.power_off()
            raise

    def _boot(self) -> None:
        self._first = First([*enter_command(self._hosts.room, "mount", "net"), *HOST], BOOT, self.name)
        with suppress(ConfigError):  # of a host whose first process was killed
            self._switch("delete", self._port)
        # Its network card stays the same: others still know where the old one was.
        peer_words = f"name eth0 address {self._card} netns {self.pid}".split()
        self._switch("add", self._port, "master", "switch", "type", "veth", "peer", *peer_words)
        self._switch("set", self._port, "up")
        network_words = enter_command(self.pid, "net")
        run_command([*network_words, "ip", "address", "add", f"{self.address}/24", "dev", "eth0"])
        run_command([*network_words, "ip", "link", "set", "eth0", "up"])
        self.start_sshd()

    def power_off(self) -> None:
        """As by its power switch: its peers hear no more of it, not even that connections end."""
        if self._first is None:
            return
        if self.on:
            with suppress(ConfigError):  # it has no cable yet
                self.cut_link()
        self._first.kill()
        # The `nsenter` of a process that has just been stopped may stop a little later.
        while self._first.alive:
            for started_process in self._started:
                started_process.resume()
            time.sleep(0.01)
        self._first.end()
        self._first, self._started = None, []

    def start_sshd(self) -> None:
        """Start sshd, as the service manager of a host would."""
        sshd_path = shutil.which("sshd") or "sshd"  # it wants an absolute path
        hosts_folder = self._hosts.folder
        log_path = hosts_folder / f"sshd-{self}.log"
        if self.run_process(
            [sshd_path, "-f", hosts_folder / "ssh/sshd_config", "-E", log_path], SECONDS
        ).returncode:
            raise ConfigError(f"sshd on host {self}: {log_path.read_text().strip()}")

    def kill_sshd(self) -> bool:
        """Kill sshd and the processes of its sessions, which what they run may outlive; whether there was one."""
        sshd_processes = [process for process in self.processes() if _name(process) == "sshd"]
        for process in sshd_processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(sshd_processes, SECONDS)  # until then the kernel takes connections for it
        return bool(sshd_processes)

    def cut_link(self) -> None:
        """Pull its cable at the switch: packets in both directions are lost."""
        self._switch("set", self._port, "down")

    def join_link(self) -> None:
        """Plug the cable in again."""
        self._switch("set", self._port, "up")

    def slow_link(self, bits: int) -> None:
        """Let only so many bits a second pass in each direction, until `restore_link`."""
        for queue_words in self._queues("replace"):
            run_command([*queue_words, "tbf", "rate", f"{bits}bit", *QUEUE])

    def restore_link(self) -> None:
        """The full speed again."""
        for queue_words in self._queues("delete"):
            with suppress(ConfigError):  # it was not slow
                run_command(queue_words)

    def cannot_slow(self) -> str | None:
        """Why `slow_link` does not work here, if so: not every kernel has the queue that it needs."""
        try:
            self.slow_link(1_000_000_000)
        except ConfigError as error:
            return str(error)
        self.restore_link()
        return None

    def _switch(self, *words: str) -> None:
        run_command([*enter_command(self._hosts.room, "net"), "ip", "link", *words])

    def _queues(self, what: str) -> Iterator[list[str]]:
        for pid, device in ((self._hosts.room, self._port), (self.pid, "eth0")):
            yield [*enter_command(pid, "net"), "tc", "qdisc", what, "dev", device, "root"]


class Hosts:
    """`with Hosts(folder) as hosts`: so many hosts, by name, until its end. size: bytes of the shared file system.

    folder: absolute, for keys, logs, and the mount point of `shared`; gets `hostfile`. environment: of all processes
    on them; its PATH begins with a `bin` whose ssh knows the key. Raises ConfigError where they cannot be made.
    """

    def __init__(self, folder: Path, number: int = 2, size: int = SIZE) -> None:
        self.folder, self._number, self._size = folder.resolve(), number, size
        self._hosts: dict[str, Host] = {}
        self._room: First
        self._ending: ExitStack
        self.shared: SharedDisk
        self.environment: dict[str, str] = {}

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts.values())

    def __len__(self) -> int:
        return len(self._hosts)

    @property
    def room(self) -> int:
        """A process in the room where switch and shared disk stand, and no host: its namespaces."""
        return self._room.pid

    def __enter__(self) -> Self:
        if missing_reason := find_missing():
            raise ConfigError(missing_reason)
        self._write_files()
        with ExitStack() as exit_stack:
            self._room = First(ROOM, SWITCH, self.folder / "hosts")
            exit_stack.callback(self._room.end)
            self.shared = SharedDisk(self.room, self.folder / "shared", self._size)
            for host_number in range(self._number):
                host = Host(self, host_number)
                exit_stack.callback(host.power_off)
                self._hosts[host.name] = host
            # Before all others: nothing can end a process that writes to a frozen file system.
            exit_stack.callback(self.shared.thaw_disk)
            self._ending = exit_stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Switch everything off. What lies on the shared file system is gone."""
        self._ending.close()

    def _write_files(self) -> None:
        ssh, binary_folder = self.folder / "ssh", self.folder / "bin"
        ssh.mkdir(mode=0o700, parents=True)
        binary_folder.mkdir()
        for name in ("user", "host"):
            run_command(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", ssh / name])
        (ssh / "sshd_config").write_text(SSHD.format(ssh=ssh))
        (binary_folder / "ssh").write_text(SSH.format(ssh=ssh, program=shutil.which("ssh")))
        (binary_folder / "ssh").chmod(0o755)
        address_by_name = {NAMES[i]: f"{NETWORK}.{i + 1}" for i in range(self._number)}
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in address_by_name.items())]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        (self.folder / "hostfile").write_text("".join(f"{name} slots=1\n" for name in address_by_name))
        ours = {name: value for name, value in os.environ.items() if name not in FOREIGN}
        self.environment = {**ours, "PATH": f"{binary_folder}:{os.environ.get('PATH', os.defpath)}"}


def _name(process: psutil.Process) -> str:
    """Empty if it is gone."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""
