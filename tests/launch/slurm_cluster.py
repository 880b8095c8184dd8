"""A private Slurm cluster on one machine, for tests and drills: real daemons, and nodes that can be lost.

    python -m tests.launch.slurm_cluster [--nodes N] -- COMMAND ...      # runs COMMAND beside slurmctld

Every node has its own network, PID, mount and IPC namespaces and its own host name, joined by a bridge to the
controller, on which slurmctld and munged run. Nodes claim more cores and GPUs than the machine has. The partition
`urgent` preempts `train`, whose jobs are requeued. Everything ends with the process that made the cluster, however it
ends: the kernel kills what is left in the namespaces. Needs root, iproute2, util-linux, munge and Slurm 22.05.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from megastable.base.errors import MegastableError, user_errors
from megastable.cluster.slurm import parse_job_facts

ROOT = Path(__file__).resolve().parents[2]
TOOLS = "setpriv unshare nsenter ip munged slurmctld slurmd sinfo sbatch srun scontrol scancel squeue".split()
UNSHARE = "setpriv --pdeathsig KILL unshare --mount --net --pid --ipc --uts --fork --kill-child --mount-proc".split()
# What the cluster does with namespaces, the network in them and mounts, and nothing else.
TRIAL = (
    "ip link add try0 type bridge && ip link add try1 type veth peer name try2 && mount -t tmpfs tmpfs /run"
)
SOCKET = "/run/munge.socket"  # /run is private; in the cluster's folder, its path could be too long
GRACE_SECONDS = 4  # between the notice of a preemption and the requeue
KILL_SECONDS = 5
LOST_SECONDS = 3  # without an answer, until slurmctld takes a node for down
PATIENCE = 120.0  # seconds for what Slurm does by itself; measured here: below 30

CONFIGURATION = """\
ClusterName=drill
SlurmctldHost=controller(10.78.0.254)
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={socket},cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
Epilog={folder}/epilog
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout={lost}
MessageTimeout=2
KillWait={kill}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
{nodes}
PartitionName=train Nodes=ALL Default=YES PriorityTier=1 GraceTime={grace} State=UP
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF State=UP
"""
NODE = "NodeName={name} NodeAddr={address} CPUs=8 RealMemory=4000 Gres=gpu:{gpus}"
# Of a job, what left its session and lost its parent: cgroups, which most clusters have, would end it.
EPILOG = """\
#!/usr/bin/env bash
for process in $(grep -lz "^SLURM_JOB_ID=$SLURM_JOB_ID$" /proc/[0-9]*/environ); do
  process=${process//[^0-9]/}
  [ "$process" = $$ ] || kill -KILL "$process"
done
exit 0
"""
# slurmd looks for cgroups and then does without them: proctrack/linuxproc.
BOOT = (
    'hostname "$0" && mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs /sys/fs/cgroup && { "$@"; exit; }'
)


class SlurmError(MegastableError):
    """The cluster cannot be made here, or does not do what was expected of it."""


def checkout(folder: Path) -> Path:
    """A repository for jobs: this one, with this interpreter in .venv."""
    python = folder / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    for name in ("launch", "megastable", "ds_configs"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def missing() -> str | None:
    """Why a cluster cannot be made here, if so."""
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    if absent := [tool for tool in TOOLS if not shutil.which(tool)]:
        return f"not installed: {', '.join(absent)} (Debian: apt-get install slurmctld slurmd munge iproute2)"
    trial = subprocess.run([*UNSHARE, "sh", "-c", TRIAL], capture_output=True, text=True, timeout=PATIENCE)
    return f"namespaces may not be made here: {trial.stderr.strip()}" if trial.returncode else None


class SlurmCluster:
    """`with SlurmCluster(folder) as cluster`: nodes n1, n2, ..., all idle. Logs and state are below `folder`.

    gpus: that each node claims, at most 2. Raises SlurmError if it does not come up.
    """

    def __init__(self, folder: Path, nodes: int = 2, gpus: int = 2) -> None:
        self.folder, self.gpus = folder, gpus
        self.nodes = {f"n{i}": f"10.78.0.{i}" for i in range(1, nodes + 1)}
        self._holder: subprocess.Popen[bytes]
        self._inside: list[str]
        self._booted: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        self._configure()
        self._holder = subprocess.Popen([*UNSHARE, "sleep", "infinity"], stdin=subprocess.DEVNULL)
        try:
            self._enter_namespaces()
            self._connect()
            self._daemon("munged", "--foreground", "--force", f"--socket={SOCKET}", *self._munge_files())
            self._daemon("slurmctld", "-D")
            for name in self.nodes:
                self.boot(name)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def run(self, *words: str | Path, cwd: Path | None = None, **environment: str) -> str:
        """What the command printed, run beside slurmctld. Raises SlurmError if it fails."""
        done = subprocess.run(
            self.command(*words, cwd=cwd), env=self.environment(**environment), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=PATIENCE,
        )  # fmt: skip
        if done.returncode:
            raise SlurmError(
                f"{shlex.join(map(str, words))} ended with {done.returncode}: {done.stderr.strip()}"
            )
        return done.stdout

    def command(self, *words: str | Path, cwd: Path | None = None) -> list[str]:
        """The command line that runs `words` beside slurmctld."""
        return [*self._inside, "sh", "-c", 'cd "$0" && exec "$@"', str(cwd or Path.cwd()), *map(str, words)]

    def submit(self, *words: str | Path, cwd: Path | None = None, **environment: str) -> int:
        """The job's number. words: options of sbatch, the script and its arguments."""
        return int(self.run("sbatch", "--parsable", *words, cwd=cwd, **environment))

    def job(self, number: int) -> dict[str, str]:
        """What `scontrol show job` knows, by its names."""
        return parse_job_facts(self.run("scontrol", "show", "job", "--oneliner", str(number)))

    def until(self, what: str, holds: Callable[[], bool]) -> None:
        """Waits for it. Raises SlurmError if it does not come."""
        end = time.monotonic() + PATIENCE
        while not holds():
            if time.monotonic() > end:
                raise SlurmError(f"waited {PATIENCE:.0f} s for: {what}\n{self._logs()}")
            time.sleep(0.1)

    def until_job(self, number: int, **wanted: str) -> dict[str, str]:
        """Waits until the job has these facts, as JobState="RUNNING"; the facts that it has then."""
        seen: dict[str, str] = {}

        def holds() -> bool:
            seen.clear()
            seen.update(self.job(number))
            return wanted.items() <= seen.items()

        self.until(f"job {number} with {wanted}", holds)
        return seen

    def state(self, name: str) -> str:
        """A node's state in the words of sinfo, as idle, allocated, down*."""
        return self.run(
            "sinfo", "--noheader", "--nodes", name, "--partition", "train", "--format", "%T"
        ).strip()

    def boot(self, name: str) -> None:
        """Starts the node, and waits until it is idle."""
        self._run("ip", "link", "set", f"port-{name}", "up")
        spaces = "unshare --mount --uts --ipc --pid --fork --kill-child --mount-proc".split()
        words = ["ip", "netns", "exec", name, *spaces, "sh", "-c", BOOT, name, "slurmd", "-D", "-N", name]
        self._booted[name] = self._daemon(*words)
        self.until(f"node {name} idle", lambda: self.state(name) == "idle")

    def lose(self, name: str) -> None:
        """Cuts its network and kills all its processes, as a power failure does."""
        self._run("ip", "link", "set", f"port-{name}", "down")
        daemon = self._booted.pop(name)
        for process in psutil.Process(daemon.pid).children():  # unshare: the node's init ends with it
            process.kill()
        daemon.wait(PATIENCE)

    def _configure(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        nodes = "\n".join(
            NODE.format(name=name, address=address, gpus=self.gpus) for name, address in self.nodes.items()
        )
        text = CONFIGURATION.format(
            folder=self.folder, socket=SOCKET, nodes=nodes, grace=GRACE_SECONDS, kill=KILL_SECONDS, lost=LOST_SECONDS
        )  # fmt: skip
        for name, content in {
            "slurm.conf": text,
            "epilog": EPILOG,
            "cgroup.conf": "CgroupPlugin=cgroup/v1\n",
            "gres.conf": f"Name=gpu Count={self.gpus} File=/dev/tty[0-{self.gpus - 1}]\n",  # any devices
            "hosts": "".join(
                f"{address} {name}\n"
                for name, address in {
                    "localhost": "127.0.0.1",
                    "controller": "10.78.0.254",
                    **self.nodes,
                }.items()
            ),
        }.items():
            (self.folder / name).write_text(content)
        (self.folder / "epilog").chmod(0o755)
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        for name in ("state", *(f"spool-{node}" for node in self.nodes)):
            (self.folder / name).mkdir(exist_ok=True)

    def _munge_files(self) -> list[str]:
        return [f"--key-file={self.folder / 'munge.key'}"] + [
            f"--{name}-file=/run/munge.{name}" for name in ("pid", "log", "seed")
        ]

    def _enter_namespaces(self) -> None:
        holder = psutil.Process(self._holder.pid)
        end = time.monotonic() + PATIENCE
        # unshare's child is in the namespaces, and `sleep` once /proc is mounted.
        while not (inits := [c for c in holder.children() if c.name() == "sleep"]):
            if self._holder.poll() is not None or time.monotonic() > end:
                raise SlurmError(f"namespaces may not be made here: {missing()}")
            time.sleep(0.01)
        spaces = "--mount --net --pid --ipc --uts".split()
        self._inside = ["nsenter", "--target", str(inits[0].pid), *spaces]

    def _connect(self) -> None:
        self._run("mount", "-t", "tmpfs", "tmpfs", "/run")
        self._run("mount", "--bind", self.folder / "hosts", "/etc/hosts")
        self._run("hostname", "controller")
        for line in (
            "link set lo up",
            "link add switch type bridge",
            "link set switch up",
            "address add 10.78.0.254/24 dev switch",
        ):
            self._run("ip", *line.split())
        for name, address in self.nodes.items():
            for line in (
                f"netns add {name}",
                f"link add port-{name} master switch type veth peer name eth0 netns {name}",
                f"-n {name} address add {address}/24 dev eth0",
                f"-n {name} link set lo up",
                f"-n {name} link set eth0 up",
            ):
                self._run("ip", *line.split())

    def _run(self, *words: str | Path) -> None:
        self.run(*words, cwd=Path("/"))

    def environment(self, **more: str) -> dict[str, str]:
        """Of a job around this process, nothing."""
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        return {**ours, "SLURM_CONF": str(self.folder / "slurm.conf"), **more}

    def _daemon(self, *words: str | Path) -> subprocess.Popen[bytes]:
        with (self.folder / "daemons.log").open("ab") as log:
            return subprocess.Popen(
                self.command(*words, cwd=Path("/")), env=self.environment(), stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def _logs(self) -> str:
        return "\n".join(f"{log}:\n{log.read_text()[-2000:]}" for log in sorted(self.folder.glob("*.log")))

    def _end(self) -> None:
        self._holder.kill()
        self._holder.wait(PATIENCE)
        for daemon in self._booted.values():
            daemon.wait(PATIENCE)


def main(arguments: list[str]) -> int:
    """Runs a command beside the controller; its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.launch.slurm_cluster", description="A private Slurm cluster"
    )
    parser.add_argument("--nodes", type=int, default=2, help="how many (default: %(default)s)")
    parser.add_argument("command", nargs="+", help="what to run beside slurmctld, after --")
    options = parser.parse_args(arguments)
    with user_errors():
        if reason := missing():
            raise SlurmError(f"no cluster can be made here: {reason}")
        with (
            tempfile.TemporaryDirectory(prefix="slurm-") as folder,
            SlurmCluster(Path(folder), options.nodes) as cluster,
        ):
            return subprocess.run(cluster.command(*options.command), env=cluster.environment()).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
