"""Jobs on a real Slurm: what launch/slurm.sbatch and its decisions rely on, and what they do."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megastable.base import errors
from megastable.base.errors import HOST_GONE
from tests.launch.slurm_cluster import SlurmCluster, missing

ROOT = Path(__file__).resolve().parents[2]
JOB = f"PYTHONPATH={ROOT} {sys.executable} -m megastable.cluster.slurm"
ONCE = '[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || exit 0\n'  # a requeued job is complete at once
# Starts two agents a host, the second beside the first; each prints what it sees, and what it leaves to the launcher.
AGENT = """
import os, time
from pathlib import Path
from megastable.cluster.slurm import strip_step_variables
left = strip_step_variables(os.environ)
step = {name: value for name, value in os.environ.items() if name not in left}
names = "SLURM_JOB_ID", "CUDA_VISIBLE_DEVICES", "SLURMD_NODENAME"
print("agent", *(left[name] for name in names), step["SLURM_CPUS_PER_TASK"], step["SLURM_STEP_NUM_TASKS"], flush=True)
assert not any(name.startswith(("SLURM_STEP", "SLURM_PROCID", "SLURM_SRUN", "PMI")) for name in left)
Path(f"agent-{step['SLURM_STEP_ID']}").touch()
until = time.monotonic() + 60
while len(list(Path().glob("agent-*"))) < 4:  # all live at once
    assert time.monotonic() < until
    time.sleep(0.05)
"""
HEAD = f"""
import os, subprocess, sys
from megastable.cluster.slurm import build_agent_command
agents = [
    subprocess.Popen([*build_agent_command(host, os.environ), sys.executable, "-c", {AGENT!r}])
    for host in ("n1", "n2", "n1", "n2")
]
sys.exit(max(agent.wait() for agent in agents))
"""
# Writes down which signals reach it, as `as NAME`; ends 60 seconds later at the latest.
LISTEN = """
listen() { for name in TERM CONT; do trap "echo $1 $name" $name; done; for i in $(seq 600); do sleep 0.1; done; }
export -f listen
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    if reason := missing():
        pytest.skip(reason)
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), nodes=3) as cluster:
        yield cluster


class Job:
    """A batch script in the cluster, and what it printed."""

    def __init__(self, cluster: SlurmCluster, folder: Path, script: str, *options: str) -> None:
        file = folder / "job.sh"
        file.write_text(f"#!/usr/bin/env bash\n{script}\n")
        self.log = folder / "log"
        self.cluster = cluster
        self.number = cluster.submit(
            f"--output={self.log}", "--open-mode=append", "--requeue", *options, file, cwd=folder
        )

    def until(self, **facts: str) -> dict[str, str]:
        return self.cluster.until_job(self.number, **facts)

    def until_said(self, words: str) -> None:
        self.cluster.until(words, lambda: self.log.exists() and words in self.log.read_text())

    def said(self) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if "slurmstepd" not in line]


def test_slurm_job_and_its_exit_codes(cluster: SlurmCluster, tmp_path: Path) -> None:
    """All at once: each takes seconds, in which Slurm lets a requeued job wait."""
    codes = [
        errors.OK, errors.FAILED, errors.BAD_INPUT, errors.STOPPED, errors.UNSTABLE, errors.NO_SPACE, HOST_GONE,
        128 + signal.SIGKILL,
    ]  # fmt: skip
    jobs = {}
    for code in codes:
        (folder := tmp_path / str(code)).mkdir()
        gone = "$SLURMD_NODENAME" if code == HOST_GONE else ""
        script = f"echo on $SLURMD_NODENAME\n{ONCE}{JOB} ended {code} {gone}"
        jobs[code] = Job(cluster, folder, script, "--time=10")
    for code, job in jobs.items():
        requeued = code in (errors.STOPPED, HOST_GONE)
        state = "COMPLETED" if requeued or code == errors.OK else "FAILED"
        facts = job.until(JobState=state)
        assert facts["Restarts"] == str(int(requeued)), job.said()
        assert facts["ExitCode"] == f"{0 if requeued else code}:0"
        assert f"exit code {code}: " in job.said()[1]
    (first, _, _, second) = jobs[HOST_GONE].said()
    assert jobs[HOST_GONE].until()["ExcNodeList"] == first.removeprefix("on ")
    assert first != second


def test_scancel_ends_a_job_for_good(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Slurm signals the script and all that it started; the exit code of a stopped run then requeues nothing."""
    wait = "trap 'stopped=1' TERM\necho ready\nuntil [ ${stopped-} ]; do sleep 0.1; done"
    job = Job(cluster, tmp_path, f"{LISTEN}listen child &\n{wait}\n{JOB} ended 75")
    job.until_said("ready")
    cluster.run("scancel", str(job.number))
    facts = job.until(JobState="CANCELLED")
    assert facts["Restarts"] == "0"
    assert "child TERM" in job.said()
    assert any("Slurm is ending this job already (COMPLETING)" in line for line in job.said())


def test_agent_command_shows_agents_all_of_their_node(cluster: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "head.py").write_text(HEAD)
    script = f"PYTHONPATH={ROOT} {sys.executable} head.py"
    options = "--nodes=2 --nodelist=n[1-2] --ntasks-per-node=1 --gpus-per-node=2 --exclusive --mem=0".split()
    job = Job(cluster, tmp_path, script, *options)
    cluster.until("its end", lambda: job.until()["JobState"] in ("COMPLETED", "FAILED"))
    assert job.until()["ExitCode"] == "0:0", job.said()
    said = sorted(line for line in job.said() if line.startswith("agent "))
    assert said == [f"agent {job.number} 0,1 {node} 8 1" for node in ("n1", "n1", "n2", "n2")], job.said()


@pytest.mark.slow
def test_preemption_tells_the_steps_first(cluster: SlurmCluster, tmp_path: Path) -> None:
    """That is the agents. The script hears of it when the time is over, and Slurm has requeued the job."""
    step = "srun --overlap --nodes=1 --ntasks=1 --nodelist=n1 bash -c 'echo ready; listen step'"
    script = f"{ONCE}{LISTEN}{step} &\nlisten script"
    (folder := tmp_path / "low").mkdir()
    job = Job(cluster, folder, script, "--nodes=3", "--exclusive")
    job.until_said("ready")
    (folder := tmp_path / "high").mkdir()
    urgent = Job(cluster, folder, "hostname", "--partition=urgent", "--nodes=3", "--exclusive")
    job.until_said("step TERM")
    assert (job.until()["JobState"], "script TERM" in job.said()) == ("RUNNING", False)
    assert job.until(JobState="COMPLETED")["Restarts"] == "1"
    assert "script TERM" in job.said()
    assert urgent.until()["JobState"] == "COMPLETED"


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["n1", "n3"])
def test_lost_node_requeues_the_job(cluster: SlurmCluster, tmp_path: Path, lost: str) -> None:
    """The first one, where the script runs, and others. It asks for as many nodes as before."""
    script = f"echo on $SLURM_JOB_NODELIST\n{ONCE}{LISTEN}listen script"
    job = Job(cluster, tmp_path, script, "--nodes=3", "--exclusive")
    job.until_said("on n[1-3]")
    cluster.lose(lost)
    facts = job.until(JobState="PENDING")
    assert (facts["Restarts"], facts["ExcNodeList"]) == ("1", "(null)")
    cluster.boot(lost)
    job.until(JobState="COMPLETED")
    assert [line for line in job.said() if line.startswith("on ")] == ["on n[1-3]"] * 2
    assert ("script TERM" in job.said()) == (lost != "n1")
